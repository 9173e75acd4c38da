"""What becomes of a group of which one rank alone has another value of an option, for every option.

Options that all ranks must share end the set-up on all ranks with one error that names option, values and rank; with
any other difference sums are right, with rows of LL and of HB. ``test_options.py`` runs small messages; all sizes:

    PYTHONPATH=tests python tests/emulated/options_on_one_rank.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import RankPool, make_communicator
from tables import write_table

from llm_comm import LlmCommError
from llm_comm.config import EngineOptions
from llm_comm.options import OPTIONS, Alike
from llm_comm.planning.tables import ALL_REDUCE, Row

WORLD = 3
ODD_ONE = 1
SIZES = (1 << 10, 1 << 20, 64 << 20)

#: Another value than the default of each option.
OTHERS: dict[str, Any] = {
    "enable": False,
    "multicast": "0",
    "sum": "any",
    "wire": "fp8",
    "wire_min_bytes": 2 << 20,
    "timeout_s": 59.0,
    "log": "error",
    "workspace_bytes": 8 << 20,
    "max_message_bytes": 128 << 20,
    "max_blocks": 8,
    "algorithm": "one_shot",
    "pdl": False,
    "fuse": False,
    "fuse_linear": True,
    "fuse_experts": True,
    "tune_at_start": 5.0,
    "all_gather": False,
    "reduce_scatter": False,
    "deterministic": True,
    "batch_invariant_norm": "llm_comm",
    "batch_invariant_linear": "llm_comm",
    "debug": True,
    "share_gpu": True,
    "sleep": True,
    "untested": True,
    "stats": True,
    "stats_host": "localhost",
    "nvtx": True,
    "multi_node": True,
    "node": "a",
    "node_transport": "gloo",
    "table": "",  # another file
    "dsl": "module:program",
    "dsl_max_bytes": 1 << 20,
}


def write_tables(directory: Path) -> dict[str, str]:
    """Paths of tables with a row of each protocol for every message."""
    rows = {
        "LL": Row(max(SIZES), ALL_REDUCE, "two_shot", "LL", blocks=16, tile_lines=16, depth=1),
        "HB": Row(max(SIZES), ALL_REDUCE, "two_shot_hb", "HB", blocks=16, tile_lines=32, depth=2),
    }
    for name, row in rows.items():
        write_table(
            directory / f"{name}.yaml", [row], device="emulated", world_size=WORLD, max_message_bytes=max(SIZES)
        )
    return {name: str(directory / f"{name}.yaml") for name in rows}


def differences(tables: dict[str, str], swapped: bool) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """An option, the value of the odd rank, and the value of the others; ``swapped``: also the other way round."""
    usual = EngineOptions.load({})
    for name in OPTIONS:
        pairs = [(getattr(usual, name), OTHERS[name])]
        if name == "timeout_s":
            pairs = [(60.0, OTHERS[name])]  # a busy machine keeps that
        elif name == "workspace_bytes":
            pairs = [(4 << 20, OTHERS[name])]
        elif name == "table":
            pairs = [(tables["LL"], tables["HB"])]
        elif name == "multicast":
            pairs += [("1", "auto")]
        for one, other in pairs:
            yield name, {name: other}, {name: one}
            if swapped:
                yield name, {name: one}, {name: other}


def try_all(tables: dict[str, str], sizes: Sequence[int], swapped: bool = True) -> list[str]:
    """What each difference has led to, one line each; what is not as it should be raises."""
    is_odd = dist.get_rank() == ODD_ONE
    said = []
    for name, of_odd_one, of_others in differences(tables, swapped):
        mine = of_odd_one if is_odd else of_others
        found = _error(mine) if OPTIONS[name].alike.is_error else _sums(mine, tables, sizes)
        said.append(f"{name} {of_odd_one[name]!r} on rank {ODD_ONE}, {of_others[name]!r} on others: {found}")
        if not OPTIONS[name].alike.is_error:
            continue
        assert name.replace("table", "tuning table") in found, said[-1]
        assert f"rank {ODD_ONE} (global rank {ODD_ONE}, pid " in found, said[-1]
        if OPTIONS[name].alike is Alike.YES:
            assert f"{name} is {of_odd_one[name]!r} on rank {ODD_ONE} (" in found, said[-1]
            assert f", {of_others[name]!r} on ranks 0, 2 (" in found, said[-1]
            assert found.count(" is ") == 1, said[-1]
    return said


def _error(options: dict[str, Any]) -> str:
    try:
        make_communicator(**options).close()
    except LlmCommError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"a communicator was made with {options}")


def _sums(options: dict[str, Any], tables: dict[str, str], sizes: Sequence[int]) -> str:
    for protocol, table in tables.items():
        with make_communicator(**{"table": table, **options}) as comm:
            for nbytes in sizes:
                x = torch.arange(nbytes // 4, dtype=torch.float32).remainder_(1000).mul_(comm.rank + 1)
                assert comm.plan(x).protocol == protocol
                factor = sum(range(1, WORLD + 1))
                expected = torch.arange(nbytes // 4, dtype=torch.float32).remainder_(1000).mul_(factor)
                assert torch.equal(comm.all_reduce(x), expected), (options, protocol, nbytes)
            dist.barrier()
    return f"right with {' and '.join(tables)} at {', '.join(map(str, sizes))} bytes"


def main() -> int:
    with tempfile.TemporaryDirectory() as directory, RankPool(WORLD) as pool:
        found = pool.run(WORLD, try_all, write_tables(Path(directory)), SIZES, time_limit_s=3600.0)
    assert all(of_rank == found[0] for of_rank in found)
    print("\n".join(found[0]))
    print(f"{len(found[0])} differences in {len(OPTIONS)} options, alike on all {WORLD} ranks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
