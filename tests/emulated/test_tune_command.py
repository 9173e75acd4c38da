"""`llm-comm tune` and `bench table` as ranks run them: what they write is then what a communicator goes by.

The ranks say that they are on GPUs, and times are by a formula: of emulated GPUs they would say nothing.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator

from llm_comm import _core
from llm_comm.bench.measuring import Bench, Budget
from llm_comm.bench.tune_record import Record
from llm_comm.cli import commands, launch
from llm_comm.dsl import programs
from llm_comm.planning.catalogue import load_table
from llm_comm.planning.plan import Plan
from llm_comm.planning.tables import ALL_REDUCE, of_programs

OPTIONS = ("--min", "16K", "--max", "64K", "--hidden", "512", "--reps", "4")
COUNT = 24 << 10
PERMITTED = not _core.multicast_switched_off({n: os.environ[n] for n in _core.multicast_switches if n in os.environ})
needs_multicast = pytest.mark.skipif(not PERMITTED, reason="this machine forbids NVLink multicast")
FAVOURITES = "two_shot", "push_hb", "two_shot_pull_hb", "direct_port"


#: What algorithms by the switch take more or less, by the ends of their names.
US: dict[str, float] = {}


class Placed(launch.Placement):
    device = torch.device("cpu")


class KilledError(Exception):
    """The run ends here."""


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    def us_of(bench: Bench, _: object) -> Any:
        plan = bench.bound.plan()
        name = plan.symmetric if bench._subject.is_symmetric else plan.algorithm
        us = 20.0 - 5 * (name in FAVOURITES) + sum(us for ending, us in US.items() if name.endswith(ending))
        return SimpleNamespace(us=us, min_us=us)

    size = dist.get_world_size()
    with (
        mock.patch.object(launch, "place", return_value=Placed(size, on_gpu=True)),
        mock.patch.object(launch, "in_rank", return_value=True),
        mock.patch.object(launch, "rank", dist.get_rank),
        mock.patch.object(launch, "local_rank", return_value=0),
        mock.patch.object(launch, "process_group", return_value=contextlib.nullcontext(dist.group.WORLD)),
        mock.patch.object(torch.cuda, "get_device_name", return_value="emulated"),
        mock.patch.object(Bench, "_timed", us_of),
        mock.patch("llm_comm.bench.timing.time_graph", return_value=SimpleNamespace(us=30.0)),
    ):
        yield


def tune(folder: Path, *options: str) -> int:
    files = "--out", str(folder / "table.yaml"), "--json", str(folder / "found.json")
    with as_on_gpus():
        return commands.main(["tune", *OPTIONS, *files, *options])


def bench(folder: Path) -> int:
    with as_on_gpus(), mock.patch.dict("os.environ", {"LLM_COMM_TABLE": str(folder / "table.yaml")}):
        return commands.main(["bench", "table", *OPTIONS, "--json", str(folder / "compared.json")])


def plans(folder: Path) -> list[Plan]:
    """What a communicator with the table plans, which also computes what it should."""
    dtype, rank = torch.bfloat16, dist.get_rank()
    with make_communicator(table=str(folder / "table.yaml"), workspace_bytes=64 << 20) as comm:
        x, half = torch.ones(COUNT, dtype=dtype), torch.ones(COUNT // 2, dtype=dtype)
        rows = x.view(-1, 512)
        symmetric, gathered = comm.empty((COUNT,), dtype), comm.empty((COUNT,), dtype)
        symmetric.fill_(rank + 1)
        assert bool((comm.all_reduce(symmetric) == 3).all())
        assert bool((comm.all_gather(half * rank, out=gathered) == torch.arange(2).repeat_interleave(len(half))).all())
        assert bool((comm.reduce_scatter(x) == 2).all())
        fused = comm.plan_all_reduce_add_rms_norm(rows, rows[0])
        return [comm.plan(x), fused, comm.plan_all_gather(half), comm.plan_reduce_scatter(x)]


def test_the_table_that_was_tuned_is_used(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, tune, tmp_path) == [0, 0]
    ours, theirs = ranks.run(2, plans, tmp_path)
    assert ours == theirs
    assert all(plan.reason.startswith("table.yaml, up to ") for plan in ours)
    assert [plan.algorithm for plan in ours] == ["two_shot", "two_shot", "one_shot", "one_shot"]
    table = load_table(tmp_path / "table.yaml").table
    assert {row.algorithm for key in table.rows if "symmetric" in key for row in table.rows[key]} == {
        "two_shot_pull_hb",
        "direct_push_hb",
    }
    assert all(row.us is not None for rows in table.rows.values() for row in rows)


def tune_and_install(folder: Path) -> int:
    with mock.patch.dict(os.environ, {"LLM_COMM_TABLE_DIR": str(folder / "tables")}), as_on_gpus():
        return commands.main(["tune", *OPTIONS, "--operations", "all-reduce", "--install"])


def plan_by_what_is_installed(folder: Path) -> tuple[Plan, str]:
    x = torch.ones(COUNT, dtype=torch.bfloat16)
    with mock.patch.dict(os.environ, {"LLM_COMM_TABLE_DIR": str(folder / "tables")}), make_communicator() as comm:
        assert bool((comm.all_reduce(x) == 2).all())
        return comm.plan(x), comm.table.describe()


def test_a_table_that_was_installed_is_found_without_an_option(ranks: RankPool, tmp_path: Path) -> None:
    before = ranks.run(2, plan_by_what_is_installed, tmp_path)
    assert [told for _, told in before] == ["emulated"] * 2
    assert ranks.run(2, tune_and_install, tmp_path) == [0, 0]
    name = "emulated_2.format1.yaml"
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == [".lock", name]
    ours, theirs = ranks.run(2, plan_by_what_is_installed, tmp_path)
    assert ours == theirs
    plan, told = ours
    assert told == f"{name}, user's directory"
    assert plan.reason.startswith(f"{name}, up to ")
    assert ranks.run(2, tune_and_install, tmp_path) == [0, 0], "a later run replaces it"


def plans_with_multicast(folder: Path) -> dict[str, list[tuple[str, ...]]]:
    """What communicators with the table plan, by what may be used. Each runs it too."""
    x = torch.ones(COUNT, dtype=torch.bfloat16)
    rows = x.view(-1, 512)
    found = {}
    for how in ({"sum": "any"}, {}, {"sum": "any", "multicast": "0"}):
        with make_communicator(table=str(folder / "table.yaml"), workspace_bytes=64 << 20, **how) as comm:
            assert comm.multicast.is_up == ("multicast" not in how), comm.multicast
            assert bool((comm.all_reduce(x) == 2).all())
            assert bool((comm.reduce_scatter(x) == 2).all())
            kinds = [
                comm.plan(x),
                comm.plan_all_reduce_add_rms_norm(rows, rows[0]),
                comm.plan_all_gather(x),
                comm.plan_reduce_scatter(x),
            ]
            found[str(how)] = [(plan.algorithm, plan.reason.partition(",")[0]) for plan in kinds]
    return found


def tune_with_multicast(folder: Path) -> int:
    with mock.patch.dict(US, {"_switch": -7.0, "ld_reduce": -9.0}):
        # Smaller messages have no candidates that sum in the switch.
        return tune(folder, "--multicast", "--min", "1M", "--max", "1M")


@needs_multicast
def test_a_table_with_multicast_has_what_runs_with_less(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, tune_with_multicast, tmp_path, time_limit_s=400.0) == [0, 0]
    device, world, table, _ = load_table(tmp_path / "table.yaml")
    assert table.multicast is not None
    assert table.multicast[:3] == ("emulated", "emulated", 2)
    assert (device, world) == ("emulated", 2)
    for operation in ("all_reduce", "all_reduce_add_rms_norm"):
        sizes = [row.up_to for row in table.rows[operation]]
        assert sizes == sorted(sizes)
        assert [row.algorithm for row in table.rows[operation]] == [
            name for _ in sorted(set(sizes)) for name in ("two_shot_ld_reduce", "two_shot_switch", "two_shot")
        ]
    ours, theirs = ranks.run(2, plans_with_multicast, tmp_path)
    assert ours == theirs
    any_order, rank_order, without = ([name for name, _ in plans] for plans in ours.values())
    assert any_order == ["two_shot_ld_reduce", "two_shot_ld_reduce", "push_switch", "ld_reduce"]
    assert rank_order == ["two_shot_switch", "two_shot_switch", "push_switch", "push_hb"]
    assert without == ["two_shot", "two_shot", "push_hb", "push_hb"]


def refused(folder: Path, name: str, off: str) -> str:
    """Of every rank, before it has asked a core for anything."""
    asked = mock.Mock(side_effect=AssertionError("a communicator was made"))
    with (
        mock.patch.dict("os.environ", {name: off}),
        mock.patch("llm_comm.bench.tune.Communicator", asked),
        mock.patch("sys.stderr", io.StringIO()) as said,
    ):
        assert tune(folder, "--multicast") == 2
    return said.getvalue()


@pytest.mark.parametrize(("name", "off"), _core.multicast_switches.items())
def test_multicast_is_not_tuned_where_it_is_forbidden(ranks: RankPool, tmp_path: Path, name: str, off: str) -> None:
    for said in ranks.run(2, refused, tmp_path, name, off):
        assert f"--multicast: {name}={off} forbids NVLink multicast on this machine; nothing of it was tried" in said
    assert not list(tmp_path.iterdir())


def test_wrong_rows_are_marked(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, tune, tmp_path)
    ranks.run(2, bench, tmp_path)
    assert not marked(tmp_path)
    path = tmp_path / "table.yaml"
    lines = path.read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines) if "operation: all_reduce_add_rms_norm" in line)
    lines[number] = lines[number].replace("algorithm: two_shot", "algorithm: one_shot", 1)
    path.write_text("\n".join(lines))
    ranks.run(2, bench, tmp_path)
    assert marked(tmp_path) == {"all_reduce_add_rms_norm"}


def marked(folder: Path) -> set[str]:
    return {row["operation"] for row in json.loads((folder / "compared.json").read_text())["rows"] if row["marked"]}


TWO_SHOT = "llm_comm.dsl.library:two_shot_ll"


def tune_with_program(folder: Path) -> int:
    programs._registered.clear()  # what an earlier test has registered in this process
    environment = {"LLM_COMM_CACHE_DIR": str(folder), "LLM_COMM_DSL_MAX_BYTES": "32K"}
    with (
        # Faster than two_shot, which is a favourite, by 2 us.
        mock.patch.dict(US, {"dsl:two_shot_ll": -7.0}),
        mock.patch.dict("os.environ", environment),
    ):
        return tune(folder, "--operations", "all-reduce", "--dsl", TWO_SHOT)


def plans_of_programs(folder: Path) -> list[tuple[str, int, int]]:
    """What a communicator with the table runs: sums of a few sizes, which are right."""
    os.environ["LLM_COMM_CACHE_DIR"] = str(folder)
    found = []
    with make_communicator(table=str(folder / "table.yaml"), dsl=TWO_SHOT, dsl_max_bytes=32 << 10) as comm:
        for nbytes in (16 << 10, 24 << 10, 32 << 10, (32 << 10) + 2, 64 << 10):
            x = torch.full((nbytes // 2,), float(comm.rank + 1), dtype=torch.bfloat16)
            assert bool((comm.all_reduce(x) == 3).all())
            plan = comm.plan(x)
            found.append((plan.algorithm, plan.blocks, plan.threads))
    return found


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_program_that_won_is_in_the_table(ranks: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ranks.run(2, tune_with_program, tmp_path, time_limit_s=400.0) == [0, 0]
    table = load_table(tmp_path / "table.yaml").table
    (row,) = table.rows[of_programs(ALL_REDUCE)]
    assert (row.up_to, row.algorithm, row.us) == (32 << 10, "dsl:two_shot_ll", 13.0)
    assert row.runner_up == ("two_shot", "LL", 15.0)
    assert [of_size.algorithm for of_size in table.rows[ALL_REDUCE]] == ["two_shot"] * len(table.rows[ALL_REDUCE])
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["options"]["dsl"][0].startswith("dsl:two_shot_ll (")
    measured = {entry["bytes"]: entry["candidates"] for entry in content["operations"][ALL_REDUCE]}
    grids = [(c.get("blocks"), c.get("threads")) for c in measured[32 << 10] if c["algorithm"] == "dsl:two_shot_ll"]
    assert grids == [(None, None), (2, 16), (1, 16)]
    assert not any(c["algorithm"] == "dsl:two_shot_ll" for c in measured[48 << 10])
    assert f"dsl: {TWO_SHOT}" in (tmp_path / "table.yaml").read_text()
    ours, theirs = ranks.run(2, plans_of_programs, tmp_path)
    assert ours == theirs
    assert [name for name, *_ in ours] == ["dsl:two_shot_ll"] * 3 + ["two_shot"] * 2
    assert ranks.run(2, tune_with_program, tmp_path) == [0, 0], "nothing is left to measure"


def cut_off(folder: Path) -> None:
    add, sizes = Record.add, itertools.count(1)

    def add_up_to_seven(record: Record, *arguments: Any, **options: Any) -> None:
        add(record, *arguments, **options)
        if next(sizes) == 7:
            raise KilledError

    with mock.patch.object(Record, "add", add_up_to_seven), pytest.raises(KilledError):
        tune(folder)


def out_of_time(folder: Path) -> None:
    with mock.patch.object(Budget, "_is_spent", side_effect=[False] * 5 + [True]):
        assert tune(folder, "--seconds", "9") == 0


def test_a_run_that_was_cut_off_or_out_of_time_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    cut.mkdir()
    whole.mkdir()
    ranks.run(2, tune, whole)
    ranks.run(2, cut_off, cut)
    assert not (cut / "table.yaml").exists()
    ranks.run(2, out_of_time, cut)
    found = json.loads((cut / "found.json").read_text())
    assert not found["complete"]
    assert sum(map(len, found["operations"].values())) == 7 + 5
    assert "complete: false" in (cut / "table.yaml").read_text()
    ranks.run(2, tune, cut)
    assert "complete: true" in (cut / "table.yaml").read_text()
    assert content(cut, "found.json") == content(whole, "found.json")
    assert load_table(cut / "table.yaml")[:3] == load_table(whole / "table.yaml")[:3]


def content(folder: Path, name: str) -> dict[str, Any]:
    return {**json.loads((folder / name).read_text()), "date": ""}
