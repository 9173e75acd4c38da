"""Setting NVLink multicast up on emulated GPUs: on all ranks or on none, tested before it is used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from harness import unnamed
from toy_build import TOY, built_core, needs_compiler, run_ranks

from llm_comm import _core

SWITCHED_OFF = _core.multicast_switched_off(
    {name: os.environ[name] for name in _core.multicast_switches if name in os.environ}
)
pytestmark = [
    needs_compiler,
    # A machine that forbids multicast stays as it is: these ranks would have to be started without its variables.
    pytest.mark.skipif(bool(SWITCHED_OFF), reason=f"this machine forbids NVLink multicast: {SWITCHED_OFF}"),
]
WORLD = 3


@pytest.fixture(scope="module")
def core() -> Path:
    return built_core()


def ranks_of(core: Path, folder: Path, scenario: str) -> list[dict[str, Any]]:
    said = run_ranks(TOY / "multicast.py", core, folder / "meeting", WORLD, scenario)
    return [json.loads(output.splitlines()[-1]) for output in said]


def test_all_ranks_have_it(core: Path, tmp_path: Path) -> None:
    found = ranks_of(core, tmp_path, "in rank order")
    assert found[0]["calls"] == ["create_multicast", "add_multicast_device", "bind_multicast"]
    for other in found[1:]:
        assert other["calls"] == ["join_multicast", "add_multicast_device", "bind_multicast"]
    for rank in found:
        assert (rank["is_up"], rank["ran"], rank["warnings"]) == (True, "by_switch", [])


def test_a_switch_that_sums_wrongly_is_not_used(core: Path, tmp_path: Path) -> None:
    found = ranks_of(core, tmp_path, "wrong sums")
    why = (
        "self-test of NVLink multicast failed on 1 of 3 ranks: rank 0: RuntimeError: not what LL gives: broadcast/wrong"
    )
    for rank in found:
        assert not rank["is_up"]
        assert unnamed(rank["why"]).startswith(why)
        assert rank["ran"] == "direct"
    assert [len(rank["warnings"]) for rank in found] == [1, 0, 0]
    assert "all ranks go on without" in found[0]["warnings"][0]


def test_what_may_not_be_used_is_not_tested(core: Path, tmp_path: Path) -> None:
    """Sums in rank order use nothing of an algorithm that sums in the switch, so that it does no harm either."""
    for rank, found in enumerate(ranks_of(core, tmp_path, "wrong sums in rank order")):
        assert found["is_up"]
        assert found["ran"] == "direct"
        why = "algorithm wrong cannot be used: its sums are made in the switch, and sum is 'rank_order' (default)"
        assert why in found["reason"]
        assert found["warnings"] == ([f"llm_comm: group WORLD: {why}"] if rank == 0 else [])


def test_a_self_test_that_ends_on_one_rank(core: Path, tmp_path: Path) -> None:
    """The others' calls of it run out of time, which ends their cores: all ranks make new ones."""
    for found in ranks_of(core, tmp_path, "test fails on one rank"):
        assert not found["is_up"]
        assert "rank 1: RuntimeError: as the test wants" in unnamed(found["why"])


@pytest.mark.parametrize("step", ["create_multicast", "join_multicast", "add_multicast_device", "bind_multicast"])
def test_a_step_that_fails_on_one_rank_drops_it_on_all(core: Path, tmp_path: Path, step: str) -> None:
    order = ["share", "add_multicast_device", "bind_multicast"]
    done = order.index(step) if step in order else 0
    for number, found in enumerate(ranks_of(core, tmp_path, f"fails: {step}")):
        assert not found["is_up"]
        assert "RuntimeError: as the test wants it" in found["why"]
        assert found["ran"] == "direct"
        shared = "create_multicast" if number == 0 else "join_multicast"
        steps = [shared, *order[1:]][: done + 1]
        if step == "create_multicast" and number > 0:
            steps = []  # there was nothing to join
        assert found["calls"] == [*steps, "drop_multicast"]
        assert len(found["warnings"]) == (number == 0)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("multicast=0", "multicast is '0' (Python)"),
        *((f"{name}={off}", f"{name}={off}") for name, off in _core.multicast_switches.items()),
    ],
)
def test_one_rank_that_forbids_it_forbids_it_to_all(core: Path, tmp_path: Path, said: str, why: str) -> None:
    """Nothing of it is asked of any core."""
    for number, found in enumerate(ranks_of(core, tmp_path, f"one rank: {said}")):
        assert (found["is_up"], found["calls"]) == (False, [])
        assert unnamed(found["why"]) == f"not on all ranks: rank 1: {why}"
        assert len(found["warnings"]) == (number == 0)


def test_it_is_not_used_unasked(core: Path, tmp_path: Path) -> None:
    for found in ranks_of(core, tmp_path, "not wanted"):
        assert (found["is_up"], found["calls"], found["ran"]) == (False, [], "direct")
        assert "`llm-comm tune --multicast`" in found["why"]
        assert f"algorithm by_switch cannot be used: NVLink multicast is off: {found['why']}" in found["reason"]


def test_the_core_refuses_whatever_python_says(core: Path, tmp_path: Path) -> None:
    for found in ranks_of(core, tmp_path, "core refuses"):
        assert not found["is_up"]
        assert "NVLink multicast is switched off by NCCL_NVLS_ENABLE=0" in found["why"]
        assert "bind_multicast" not in found["calls"]
