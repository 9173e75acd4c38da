"""The benchmark and the tuning of the fused operation: what they call wrong, and what they try."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from tables import limits_of, write_table

from llm_comm.bench import choosing, comparison, fused
from llm_comm.bench.choosing import Measured
from llm_comm.bench.fused import add_rms_norm
from llm_comm.bench.reference import FusedReference
from llm_comm.bench.tune_subjects import LARGEST_FUSED, CollectiveSubject, FusedSubject, candidates
from llm_comm.config import Config
from llm_comm.errors import ConfigError
from llm_comm.planning.catalogue import load_table
from llm_comm.planning.tables import ALL_REDUCE

CPU = torch.device("cpu")
WORLD = 4


def outputs(reference: FusedReference, salt: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """What a right library returns: a sum in fp32, rounded once, and torch's add and norm."""
    total = sum(reference.operands(rank, salt).x.float() for rank in range(WORLD))
    assert isinstance(total, torch.Tensor)
    operands = reference.operands(0, salt)
    return add_rms_norm(total.to(operands.x.dtype), operands.residual, operands.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reference_accepts_right_results(dtype: torch.dtype) -> None:
    reference = FusedReference(5, 1000, WORLD, dtype, CPU)
    assert reference.error(outputs(reference), salt=1, rounds_once=True) <= 1.0
    assert reference.error(outputs(reference), salt=1, rounds_once=False) <= 1.0


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("place", [(0, 0), (4, 999)])
def test_reference_finds_one_wrong_element(which: int, place: tuple[int, int]) -> None:
    reference = FusedReference(5, 1000, WORLD, torch.bfloat16, CPU)
    results = outputs(reference)
    results[which][place] += 0.25
    assert reference.error(results, salt=1, rounds_once=False) > 1.0


def test_reference_finds_stale_results_and_rows_normed_by_others() -> None:
    reference = FusedReference(5, 1000, WORLD, torch.bfloat16, CPU)
    assert reference.error(outputs(reference, salt=0), salt=1, rounds_once=False) > 1.0
    normed, new_residual = outputs(reference)
    assert reference.error((normed.roll(1, 0), new_residual), salt=1, rounds_once=False) > 1.0
    normed[2, 3] = torch.nan
    assert reference.error((normed, new_residual), salt=1, rounds_once=False) > 1.0


@pytest.mark.parametrize(
    "given",
    [
        {"mode": ("graph",)},
        {"min": 4096, "max": 1024},
        {"min": 1024, "hidden": 8192},
        {"hidden": 100},
        {"hidden": 32768, "min": 65536},
        {"json": Path("/no/such/directory/x.json")},
        {"plot": Path("/no/such/directory/x.png")},
    ],
)
def test_options_that_cannot_work_are_refused_before_any_rank_starts(
    given: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(comparison.launch, "spawn", lambda *_: pytest.fail("started ranks"))
    defaults = {"world": 2, "device": "emulated", "min": 1024, "max": None, "mode": None, "calls": None, "reps": None}
    options = argparse.Namespace(**{**defaults, "hidden": 64, "json": None, "plot": None, "argv": [], **given})
    with pytest.raises(ConfigError):
        fused.run(options)


def sizes(smallest: int, largest: int, hidden: int) -> list[int]:
    """In rows."""
    return [size // (2 * hidden) for size in FusedSubject(hidden).sizes(smallest, largest)]


def test_row_counts_lie_within_the_bounds() -> None:
    assert sizes(16 << 10, 128 << 10, 8192) == [1, 2, 3, 4, 6, 8]
    assert sizes(1 << 10, 8 << 10, 4096) == [1]
    assert max(FusedSubject(8192).sizes(1 << 10, 1 << 30)) == LARGEST_FUSED


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("hidden", [64, 2880, 8192])
def test_candidates_are_rows_of_a_table(world: int, hidden: int, tmp_path: Path) -> None:
    for rows in (1, 16, 64, 500):
        for subject in (FusedSubject(hidden), CollectiveSubject(ALL_REDUCE)):
            tried = list(candidates(subject.problem(rows * hidden * 2, world), limits_of(Config.load({}))))
            assert tried
            assert len(set(tried)) == len(tried)
            numbered = tuple(row._replace(up_to=n) for n, row in enumerate(tried, start=1))
            path = write_table(tmp_path / "table.yaml", list(numbered))
            assert load_table(path).table.rows == {subject.operation: numbered}


@pytest.mark.parametrize(("world", "largest"), [(2, 4 << 20), (5, 1 << 20), (8, (4 << 20) // 7)])
def test_one_shot_is_not_tried_far_above_where_it_can_win(world: int, largest: int) -> None:
    limits = limits_of(Config.load({}))
    for size, algorithms in ((largest, {"one_shot", "two_shot"}), (largest + 2, {"two_shot"})):
        problem = CollectiveSubject(ALL_REDUCE).problem(size // 2 * 2, world)
        found = candidates(problem, limits)
        assert {row.algorithm for row in found if row.protocol == "LL"} == algorithms


def test_neighbours_that_run_alike_are_one_row() -> None:
    first, *_, last = candidates(FusedSubject(8192).problem(16384, 8), limits_of(Config.load({})))
    best = [first, first._replace(up_to=2 * first.up_to), last._replace(up_to=3 * first.up_to)]
    assert choosing.merge([[Measured(row, 1.0)] for row in best]) == best[1:]
