"""How a collective is timed: which runs count, and what becomes of their times."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llm_comm.bench import timing
from llm_comm.bench.timing import Schedule, Timing
from llm_comm.cli import launch

GROUP: Any = None


class CountingClock:
    """One in which every run takes a second longer than the one before."""

    def __init__(self) -> None:
        self._seconds = itertools.count(1.0)
        self.events: list[str] = []

    def settle(self) -> None:
        self.events.append("settle")

    def start(self) -> None:
        self.events.append("start")

    def stop(self) -> float:
        self.events.append("stop")
        return next(self._seconds)


def test_runs_that_warm_up_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = CountingClock()
    monkeypatch.setattr(launch, "barrier", lambda _: clock.events.append("barrier"))

    def told(what: str) -> Any:
        return lambda: clock.events.append(what)

    seconds, host_seconds = timing._timed_runs(
        told("run"),
        told("align"),
        told("reset"),
        Schedule(1, 2, aligned=True),
        clock,  # type: ignore[arg-type]
        GROUP,
    )
    assert seconds == [4.0, 5.0]
    assert len(host_seconds) == 2
    assert clock.events == ["reset", "settle", "barrier", "align", "start", "run", "stop"] * 5


def test_the_slowest_rank_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In microseconds a call. The other rank has a faster median, and a slower fastest run."""

    def all_reduce(mine: torch.Tensor, op: dist.ReduceOp, group: Any) -> None:
        assert op == dist.ReduceOp.MAX
        mine.copy_(torch.maximum(mine, torch.tensor([1e5, 1e5, 3e5], dtype=mine.dtype)))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert timing._slowest_rank([5.0, 0.1, 4.0], [2.0, 1.0], 10, GROUP) == Timing(4e5, 1e5, 3e5)
    assert timing._slowest_rank([5.0, 0.1, 4.0], None, 10, GROUP).host_us is None


def test_the_spacer_is_taken_off() -> None:
    assert Timing(9.0, 7.0, 5.0).less(Timing(4.0, 3.0, 1.0)) == Timing(5.0, 4.0, 4.0)
    assert Timing(9.0, 7.0, None).less(Timing(4.0, 3.0, 1.0)).host_us is None


@pytest.mark.parametrize(
    ("method", "aligned", "spaced"), [("aligned", True, False), ("plain", False, False), ("spaced", True, True)]
)
def test_methods(method: str, aligned: bool, spaced: bool) -> None:
    assert Schedule.by(method, 20, 7) == Schedule(20, 7, aligned, spaced)
