"""``llm-comm tune`` over several nodes: the rows that it writes are what a communicator goes by.

As in ``test_tune_command.py``, times are by a formula.
"""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankPool
from nodes_cases import Layout, make
from test_tune_command import as_on_gpus

from llm_comm.bench import timing, tune_nodes
from llm_comm.cli import commands
from llm_comm.communicator import Communicator
from llm_comm.planning.catalogue import load_table
from llm_comm.planning.node_rows import PIECES, WHOLE, NodeRow

KIB = 1 << 10


def us_of(size: int, row: NodeRow | None) -> float:
    """Chunks gain from 1 MiB on, and pieces from 256 KiB; NCCL, where there is no row, wins from 2 MiB on."""
    if row is None:
        return 30 + size / 20_000
    us = 20 + size / 15_000
    us -= 4 * (row.exchange == PIECES) * (1 if size >= 256 * KIB else -1)
    return us - (9 if size >= 1024 * KIB else -3) * (row.chunk_bytes == 512 * KIB)


def variables_of(layout: Layout, folder: Path) -> dict[str, str]:
    """Each node has a home of its own."""
    node = layout.node_of(dist.get_rank())
    return {"LLM_COMM_NODE": f"n{node}", "LLM_COMM_TABLE_DIR": "", "XDG_CONFIG_HOME": str(folder / f"home{node}")}


def tune(layout: Layout, folder: Path, *options: str) -> int:
    """Its status."""
    current: list[NodeRow] = []
    use_table = Communicator.use_table

    def note(self: Communicator, table: Any) -> None:
        current[:] = table.nodes if len(table.nodes) == 1 else []
        use_table(self, table)

    def timed(call: Any, reset: Any, *_: Any) -> Any:
        size = call.args[0].nbytes
        return SimpleNamespace(us=us_of(size, None if call.func is dist.all_reduce else current[0]))

    with (
        as_on_gpus(),
        mock.patch.dict(os.environ, variables_of(layout, folder)),
        mock.patch.object(Communicator, "use_table", note),
        mock.patch.object(timing, "time_graph", timed),
    ):
        return commands.main(["tune", "--min", "64K", "--max", "2M", "--reps", "1", *options])


def reasons(layout: Layout, sizes: list[int], folder: Path) -> list[str]:
    with mock.patch.dict(os.environ, variables_of(layout, folder)), make(layout) as comm:
        x = torch.ones(max(sizes) // 2, dtype=torch.bfloat16)
        assert comm.all_reduce(x[: 1 << 19]).eq(layout.world).all()
        return [comm.plan(x[: size // 2]).reason for size in sizes]


@pytest.mark.parametrize("layout", [Layout(2, 2), Layout(3, 1)], ids=str)
def test_a_table_that_was_tuned_over_nodes_is_used(ranks: RankPool, tmp_path: Path, layout: Layout) -> None:
    files = "--out", str(tmp_path / "table.yaml"), "--json", str(tmp_path / "found.json")
    assert set(ranks.run(layout.world, tune, layout, tmp_path, "--install", *files)) == {0}
    written = load_table(tmp_path / "table.yaml")
    # Of the ranks of a node, and the same on each.
    assert (written.device, written.world_size) == ("emulated", layout.places)
    for node in range(layout.nodes):
        name = f"emulated_{layout.places}.format1.yaml"
        assert load_table(tmp_path / f"home{node}" / "llm_comm" / "tables" / name).table.nodes == written.table.nodes
    rows = [row.without_figures() for row in written.table.nodes if row.nodes == layout.nodes]
    pieces = WHOLE if layout.nodes == 2 else PIECES
    expected = [(128 * KIB, WHOLE, 0, True), (512 * KIB, pieces, 0, True), (1 << 20, pieces, 512 * KIB, True)]
    if layout.nodes == 2:  # the first two run alike
        expected = expected[1:]
    assert rows[: len(expected)] == [NodeRow(layout.nodes, *row) for row in expected], rows
    assert [row.is_faster for row in rows] == [True] * len(expected) + [False] * (len(rows) - len(expected))
    assert all(row.us is not None and row.nccl_us is not None for row in written.table.nodes if row in rows)
    # Rows of other numbers of nodes stay, and so does the bound within a node.
    assert any(row.nodes == 5 for row in written.table.nodes)
    assert written.table.max_message_bytes == 64 << 20
    small, chunked, large = ranks.run(layout.world, reasons, layout, [64 * KIB, 1 << 20, 2 << 20], tmp_path)[0]
    assert small.startswith(f"{layout}".replace("x", " nodes of "))
    assert ("in 2 chunks" in chunked) == (layout.places > 1)
    assert "more than max_message_bytes=1048576" in large


def tune_with_a_table_of_others(layout: Layout, folder: Path, rank: int) -> tuple[int, str]:
    """One rank goes by such a table; the status, and what is printed."""
    use = Communicator.table_of_node.fget

    def table_of_node(self: Communicator) -> Any:
        table = use(self)
        is_tuned = dist.get_rank() != rank
        return table._replace(origin=table.origin._replace(kind="nearest", is_tuned=is_tuned))

    said = io.StringIO()
    with mock.patch.object(Communicator, "table_of_node", property(table_of_node)), redirect_stderr(said):
        return tune(layout, folder, "--install"), said.getvalue()


def test_rows_of_other_machines_are_not_installed_with_those_between_nodes(ranks: RankPool, tmp_path: Path) -> None:
    for status, said in ranks.run(4, tune_with_a_table_of_others, Layout(2, 2), tmp_path, 3):
        assert status != 0
        assert "--install: rank 3 goes by a table of other machines (emulated; not tuned for this machine" in said
    assert not list(tmp_path.rglob("*.yaml"))
    # The phases of a node of one rank go by none of them.
    found = ranks.run(2, tune_with_a_table_of_others, Layout(2, 1), tmp_path, 1)
    assert [status for status, _ in found] == [0, 0]


def refused(*options: str) -> str:
    args: Any = commands.build_parser().parse_args(["tune", *options])
    with pytest.raises(Exception, match="several nodes") as caught:
        tune_nodes.check(args)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_what_is_measured_within_a_machine_alone_is_refused() -> None:
    assert refused("--operations", "fused").startswith("ConfigError: --operations fused: the ranks are on several")
    assert refused("--layers", "64x64", "--multicast").startswith("ConfigError: --layers, --multicast: ")
    tune_nodes.check(commands.build_parser().parse_args(["tune"]))


def test_candidates_and_the_choice_between_them() -> None:
    assert tune_nodes.candidates(2, 64 * KIB) == [NodeRow(2, 64 * KIB, WHOLE, 0, is_faster=True)]
    of_four = tune_nodes.candidates(4, 1 << 20)
    assert {row.exchange for row in of_four} == {WHOLE, PIECES}
    assert {row.chunk_bytes for row in of_four} == {0, 256 * KIB, 512 * KIB}
    measured = [row._replace(us=us) for row, us in zip(of_four, (10.0, 9.98, 12.0, 9.95, 11.0, 10.0), strict=True)]
    # The simplest of those that cannot be told apart from the fastest.
    assert tune_nodes.choose(measured, 20.0) == measured[0]._replace(nccl_us=20.0)
    assert tune_nodes.choose(measured, 9.0) == measured[0]._replace(is_faster=False, nccl_us=9.0)
