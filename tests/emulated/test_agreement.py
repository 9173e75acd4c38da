"""What ranks compare before they measure, and how they end together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch.distributed as dist
from harness import RankPool

from llm_comm.bench import OPERATIONS, agreement
from llm_comm.bench.measuring import Budget
from llm_comm.bench.tune_subjects import CollectiveSubject, coarse_first, subjects_of
from llm_comm.errors import ConfigError, LlmCommError
from llm_comm.planning.tables import ALL_REDUCE


def test_what_tells_two_apart_is_named() -> None:
    assert agreement.difference({"a": 1, "b": 2}, {"b": 2, "a": 1}, "here", "there") == ""
    assert agreement.difference({"a": 1}, {"a": 2, "c": "x"}, "here", "there") == (
        "a is 1 here and 2 there, c is None here and 'x' there"
    )


def asked_otherwise() -> tuple[str, str]:
    """What each rank is told where rank 1 was asked otherwise, and where it could not tell."""
    is_odd = dist.get_rank() == 1
    with pytest.raises(ConfigError) as differs:
        agreement.require_alike(lambda: {"--reps": 4 if is_odd else 9}, group())

    def refuse() -> dict[str, Any]:
        if is_odd:
            raise ConfigError("a wrong file")
        return {}

    with pytest.raises(ConfigError) as refused:
        agreement.require_alike(refuse, group())
    agreement.require_alike(lambda: {"--reps": 9}, group())
    return str(differs.value), str(refused.value)


def failing_on_one() -> str:
    is_odd = dist.get_rank() == 1

    def call() -> int:
        if is_odd:
            raise ValueError("planted")
        return 5

    with pytest.raises((LlmCommError, ValueError)) as failed:
        agreement.on_all(call, group())
    assert agreement.on_all(lambda: 7, group()) == 7
    return str(failed.value)


def taken_within(seconds: float | None) -> tuple[int, int]:
    """What is taken of ten items, and left, where the clock of rank 1 is far ahead."""
    budget = Budget(seconds, group())
    if seconds is not None and dist.get_rank() == 1:
        budget._end = 0.0
    taken = len(list(budget.take(range(10))))
    return taken, budget.left


def group() -> Any:
    return dist.group.WORLD


def test_ranks_that_were_asked_differently_all_end(ranks: RankPool) -> None:
    differs = "the ranks were asked different things: --reps is 9 on rank 0 and 4 on rank 1; start all with the same"
    for told, refused in ranks.run(3, asked_otherwise):
        assert told.startswith(differs)
        assert refused == "a wrong file"


def test_a_call_that_fails_on_one_rank_ends_all(ranks: RankPool) -> None:
    assert ranks.run(2, failing_on_one) == ["another rank has failed: its message says why", "planted"]


def test_ranks_end_together_when_the_time_is_up(ranks: RankPool) -> None:
    assert ranks.run(2, taken_within, None) == [(10, 0)] * 2
    assert ranks.run(2, taken_within, 1e6) == [(0, 10)] * 2


def test_a_run_that_ends_early_has_every_operation_over_the_whole_range() -> None:
    subject = CollectiveSubject(ALL_REDUCE)
    assert [size for _, size in coarse_first([subject], 1024, 32768)] == [
        *(2048, 32768),
        8192,
        *(1024, 4096, 16384),
        *(1536, 3072, 6144, 12288, 24576),
    ]
    subjects = subjects_of(OPERATIONS, 8192, 256 << 20, 2)
    order = coarse_first(subjects, 1024, 256 << 20)
    assert sorted(order, key=lambda entry: (subjects.index(entry[0]), entry[1])) == [
        (subject, size) for subject in subjects for size in subject.sizes(1024, 256 << 20)
    ]
    first = order[: len(order) // 5]
    for subject in subjects:
        sizes = sorted(size for s, size in first if s is subject)
        assert sizes[-1] == max(subject.sizes(1024, 256 << 20))
        assert all(large <= 16 * small for small, large in itertools.pairwise(sizes))
