"""Schedules of the programs that a communicator is to run: on one rank, once, and refused on all ranks alike."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, error_of_setup, make_communicator

from llm_comm.dsl import programs
from llm_comm.dsl.schedules import plan, setup

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

PROGRAM = "llm_comm.dsl.library:one_shot_ll"
SELECTED: dict[str, Any] = {"dsl": PROGRAM, "algorithm": "dsl:one_shot_ll", "dsl_max_bytes": 4096}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the kernels are that the tests of this file compile."""
    return str(tmp_path_factory.mktemp("kernels"))


def use_cache(directory: str) -> None:
    os.environ["LLM_COMM_CACHE_DIR"] = directory
    programs._registered.clear()  # what an earlier test has registered in this process


@contextmanager
def told() -> Iterator[list[str]]:
    """What is logged, at level info."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("llm_comm")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def sums(**options: Any) -> list[str]:
    """Makes a communicator, sums by the program, and returns what is logged of schedules."""
    with told() as records, make_communicator(**{**SELECTED, "log": "info", **options}) as comm:
        x = torch.full((9,), comm.rank + 1.0)
        assert comm.plan(x).algorithm == "dsl:one_shot_ll"
        assert comm.all_reduce(x).eq(sum(range(1, comm.world_size + 1))).all()
        dist.barrier()
    return [text for text in records if "schedules" in text]


# ---- Once ------------------------------------------------------------------------------------------------------------


def run_them_once(directory: str) -> list[list[str]]:
    use_cache(directory)
    return [sums(dsl_schedules=5), sums(dsl_schedules=5), sums(dsl_schedules=6)]


def test_they_are_run_once_on_one_rank(ranks: RankPool, cache: str) -> None:
    runner, other = ranks.run(2, run_them_once, cache)
    assert other == [[], [], []]
    first, second, third = runner
    assert len(first) == len(second) == len(third) == 1
    assert first[0].startswith("dsl:one_shot_ll has passed 5 schedules, in ")
    assert second == ["dsl:one_shot_ll has passed 5 schedules before"]
    assert third[0].startswith("dsl:one_shot_ll has passed 6 schedules, in ")


def run_none(directory: str) -> list[str]:
    use_cache(directory)
    with mock.patch.object(setup, "plan_of", side_effect=AssertionError("schedules are run")):
        return sums(dsl_schedules=0)


def test_they_can_be_switched_off(ranks: RankPool, cache: str) -> None:
    assert ranks.run(2, run_none, cache) == [[], []]


def run_without_a_compiler(directory: str) -> list[str]:
    use_cache(directory)
    why = "there is no C++ compiler '/nowhere/g++'; CXX names another"
    with mock.patch.object(setup, "why_no_compiler", return_value=why):
        return sums()


def test_without_a_compiler_they_are_not_run(ranks: RankPool, cache: str) -> None:
    said = "schedules of programs were not run: there is no C++ compiler '/nowhere/g++'; CXX names another"
    assert ranks.run(2, run_without_a_compiler, cache) == [[said], []]


def take_longer_than_a_step_may(directory: str) -> float:
    use_cache(directory)
    run = setup.explore_plan

    def slowly(*arguments: Any) -> Any:
        time.sleep(6)
        return run(*arguments)

    with mock.patch.object(setup, "explore_plan", slowly):
        begin = time.monotonic()
        sums(timeout_s=4.0, dsl_schedules=7)
        return time.monotonic() - begin


def test_no_rank_waits_in_vain(ranks: RankPool, cache: str) -> None:
    """They take longer than the time limit of a step of the rendezvous."""
    assert all(seconds >= 6 for seconds in ranks.run(2, take_longer_than_a_step_may, cache))


# ---- Refused ---------------------------------------------------------------------------------------------------------


def not_armed_again(generate: Callable[..., str]) -> Callable[..., str]:
    def broken(*arguments: Any) -> str:
        return generate(*arguments).replace("re_arm_line(", "(void)(")

    return broken


def break_the_compiler(directory: str) -> tuple[str, str]:
    """Packets are not armed again, by all kernels."""
    use_cache(directory)
    with mock.patch.object(plan, "generate", not_armed_again(plan.generate)):
        return error_of_setup(**SELECTED), error_of_setup(**SELECTED)


def test_what_fails_is_refused_on_all_ranks_alike(ranks: RankPool, cache: str) -> None:
    """And again: it has not passed."""
    (text, again), *others = ranks.run(2, break_the_compiler, cache)
    assert text == again
    assert others == [(text, again)]
    assert text.startswith("ConfigError: option algorithm (Python): dsl:one_shot_ll for 2 ranks: ")
    assert "library.py:" in text
    assert "fails under schedule 0 of the deterministic emulator, at step " in text
    assert "dsl.explore(program, schedules=1, seed=0) runs it again" in text


def fail_otherwise(directory: str) -> str:
    use_cache(directory)
    with mock.patch.object(setup, "explore_plan", side_effect=ZeroDivisionError("of its own")):
        return error_of_setup(**SELECTED, dsl_schedules=9)


def test_what_goes_wrong_otherwise_is_said_on_all_ranks(ranks: RankPool, cache: str) -> None:
    said = ranks.run(2, fail_otherwise, cache)
    assert set(said) == {
        "RendezvousError: schedules of programs failed on 1 of 2 ranks: rank 0: ZeroDivisionError: of its own"
    }


def write_to_no_cache(directory: str) -> list[str]:
    use_cache(directory)
    with mock.patch.object(setup, "remember", side_effect=PermissionError("no")):
        return sums(dsl_schedules=4)


def test_a_cache_that_cannot_be_written(ranks: RankPool, cache: str) -> None:
    (_, warning), other = ranks.run(2, write_to_no_cache, cache)
    assert warning == "schedules of dsl:one_shot_ll are not remembered: no"
    assert other == []
