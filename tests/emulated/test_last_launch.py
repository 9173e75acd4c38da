"""Messages of several launches: each has its own part of every tensor, and the last one the grid that it needs.

A grid with blocks that have nothing to do would count an operation that has not ended, or end one twice: what comes
next meets lines of another one.
"""

from __future__ import annotations

import pytest
import torch
from cores import connected, number_of, problem_of, run_on_all, tiling_of
from fused_reference import EPS, FP8, GROUP_SIZE, GROUPS, operands_of, rows_of
from reference import ALGORITHMS, assert_is_sum, contributions

from llm_comm import _core
from llm_comm.operations.fp8 import CODES
from llm_comm.planning.tables import ALL_REDUCE, FUSED

#: So long that both blocks of a cluster have a share in every world; of groups, a whole number.
HIDDEN, HIDDEN_OF_GROUPS = 1000, 2176
#: Rows of a launch.
ROWS = 5
#: Stands behind every output.
GUARD = 77.0

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
some_worlds = pytest.mark.parametrize("world", [2, 3, 8])
#: Grids in which blocks walk over several tiles, and with a block for every tile.
some_grids = pytest.mark.parametrize("blocks", [8, 4096])


def check_counts(cores: list[_core.Core], launches: int, last_elements: int) -> None:
    for core in cores:
        assert core.operations_ended() == launches
        assert core.last_call().count == last_elements
        assert core.last_call().number == launches


@every_algorithm
@some_worlds
@some_grids
@pytest.mark.parametrize("last", [1, 8, 61])
def test_sums(algorithm: str, world: int, blocks: int, last: int) -> None:
    """With another message behind them, which meets what they have left."""
    launch, launches = 1000, 3
    cores = connected(world)
    inputs = contributions(world, (launches - 1) * launch + last, torch.bfloat16)
    count = inputs[0].numel()
    for turn in (1, 2):
        outs = [torch.full([count + 16], GUARD, dtype=torch.bfloat16) for _ in inputs]
        run_on_all(
            cores,
            number_of(ALL_REDUCE, algorithm),
            problem_of(inputs[0], world),
            tiling_of(launch, blocks=blocks, depth=0 if blocks > 8 else 1),
            list(zip(inputs, outs, strict=True)),
        )
        for out in outs:
            assert_is_sum(out[:count], inputs, f"turn {turn}")
            assert bool(out[count:].eq(GUARD).all()), "wrote behind the output"
        check_counts(cores, turn * launches, last)


def fused(
    algorithm: str, world: int, blocks: int, launch_rows: int, quantize: str | None
) -> tuple[list[tuple[torch.Tensor, ...]], list[_core.Core]]:
    """What each rank has of a fused call, twice: the normed rows, the new residual and the scales, guarded."""
    rows = 2 * ROWS + 1
    hidden = HIDDEN_OF_GROUPS if quantize in GROUPS else HIDDEN
    inputs = rows_of(world, rows, hidden, torch.bfloat16)
    residual, weight = operands_of(rows, hidden, torch.bfloat16)
    scales = {"dynamic": rows + 2, "group": (rows + 2) * (hidden // GROUP_SIZE)}
    # By columns, what is behind one is the next.
    scales |= {"group_column_major_tma": -(-rows // 4) * 4 * (hidden // GROUP_SIZE) + 2}
    cores = connected(world)
    for _ in range(2):
        results = [
            (
                torch.full([rows + 2, hidden], GUARD).to(torch.bfloat16 if quantize is None else FP8),
                torch.full([rows + 2, hidden], GUARD, dtype=torch.bfloat16),
                torch.full([scales.get(quantize or "", 1)], 0.125),
            )
            for _ in inputs
        ]
        run_on_all(
            cores,
            number_of(FUSED, algorithm),
            problem_of(inputs[0], world, EPS, CODES[quantize]),
            tiling_of(
                launch_rows,
                blocks=blocks,
                cluster=2,
                depth=0 if blocks > 8 else 1,
                tile_lines=16 if quantize in GROUPS else 8,
            ),
            [(x, residual, weight, *outputs, None) for x, outputs in zip(inputs, results, strict=True)],
        )
    return results, cores


@every_algorithm
@some_worlds
@some_grids
@pytest.mark.parametrize("quantize", [None, "static", "dynamic", "group", "group_column_major_tma"])
def test_norms(algorithm: str, world: int, blocks: int, quantize: str | None) -> None:
    """As in one launch, to the bit, and nothing behind it."""
    found, cores = fused(algorithm, world, blocks, ROWS, quantize)
    expected, _ = fused(algorithm, world, 4096, 1000, quantize)
    check_counts(cores, 2 * 3, HIDDEN_OF_GROUPS if quantize in GROUPS else HIDDEN)
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for name, one, other in zip(("normed", "residual", "scale"), ours, theirs, strict=True):
            assert torch.equal(one.float(), other.float()), f"rank {rank}: {name}"
    assert not bool(expected[0][0][-3].float().eq(GUARD).all())
