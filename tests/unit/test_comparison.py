"""Ranks that differ in anything that they must have in common do not come together, whichever of them it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import unnamed

from llm_comm import _core
from llm_comm.config import EngineOptions
from llm_comm.errors import RendezvousError
from llm_comm.options import OPTIONS, Alike
from llm_comm.runtime import comparison, devices
from llm_comm.runtime.devices import make_limits
from llm_comm.runtime.rank_names import RankName, RankNames

WORLD = 3
NAMES = RankNames("tp:1", tuple(RankName(rank, 4 + rank) for rank in range(WORLD)), WORLD)
CONFIG = EngineOptions.load({})
DEVICE = {"sm_count": 132, "max_cluster": 16, "compute_capability": 90}


@pytest.fixture(autouse=True)
def device_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "limits_of", lambda _, workspace_bytes: make_limits(workspace_bytes, *DEVICE.values()))


def compare(odd_rank: int = 0, *path: str, other: object = None) -> None:
    """Compares ranks of which ``odd_rank`` says ``other`` of what lies at ``path`` of its hello."""

    def collect(_: str, introduction: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        hello = introduction()
        everyone = [copy.deepcopy(hello) for _ in range(WORLD)]
        if path:
            *outer, name = path
            fields = everyone[odd_rank]
            for key in outer:
                fields = fields[key]
            assert name in fields, f"ranks do not compare {name}"
            assert fields[name] != other
            fields[name] = other
        return everyone

    rendezvous: Any = SimpleNamespace(world_size=WORLD, rank=0, collect=collect, names=NAMES)
    comparison.compare_ranks(rendezvous, torch.device("cpu"), CONFIG)


def test_ranks_that_are_alike() -> None:
    compare()


def test_what_ranks_may_differ_in() -> None:
    """An option that is not in here has to be the same on all ranks."""
    assert {name for name, option in OPTIONS.items() if not option.alike.is_error} == {
        "enable",
        "multicast",
        "log",
        "stats",
        "stats_host",
        "nvtx",
        "multi_node",
    }


@pytest.mark.parametrize("odd_rank", range(WORLD))
@pytest.mark.parametrize(
    ("path", "other", "words"),
    [
        (("version",), "0.0.9", "have different versions of llm_comm"),
        (("algorithms",), "0123456789ab", "have builds of llm_comm with different algorithms"),
        (("device",), "cuda", "have different device types"),
        (("limits", "sm_count"), 78, "have GPUs with different limits"),
        (("limits", "max_cluster"), 8, "have GPUs with different limits"),
        (("limits", "compute_capability"), 80, "have GPUs with different limits"),
        *(
            (("config", name), "another", "have different options")
            for name, option in OPTIONS.items()
            if option.alike is Alike.YES
        ),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_a_rank_that_differs_is_named(odd_rank: int, path: tuple[str, ...], other: object, words: str) -> None:
    with pytest.raises(RendezvousError) as caught:
        compare(odd_rank, *path, other=other)
    text = str(caught.value)
    assert text.startswith(f"the ranks of group tp:1 {words}: ")
    difference = text.partition(": ")[2]
    if path[1:]:
        assert difference.startswith(f"{path[1]} is ")
        assert difference.count(" is ") == 1
    others = ", ".join(str(rank) for rank in range(WORLD) if rank != odd_rank)
    of_odd_one, _, of_others = difference.partition(f" on rank {odd_rank} (global rank {4 + odd_rank}), ")
    assert of_odd_one.endswith(repr(other) if path[1:] else str(other))
    assert f" on ranks {others} (global ranks " in of_others


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (("a", "b", "a"), "ranks 0, 2 use a"),
        (("a", "a", "a"), "ranks 0, 1, 2 use a"),
        (("b", "a", "a"), "ranks 1, 2 use a"),
        (("a", "b", "c"), ""),
        ((None, None, None), ""),
    ],
)
def test_gpus_that_are_shared(gpus: tuple[str | None, ...], words: str) -> None:
    def collect(_: str, introduction: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**introduction(), "gpu": gpu} for gpu in gpus]

    rendezvous: Any = SimpleNamespace(world_size=WORLD, rank=0, collect=collect, names=NAMES)
    if not words:
        comparison.compare_ranks(rendezvous, torch.device("cpu"), CONFIG)
        return
    with pytest.raises(RendezvousError, match="share a GPU") as caught:
        comparison.compare_ranks(rendezvous, torch.device("cpu"), CONFIG)
    assert words in unnamed(str(caught.value))


def test_a_rank_says_what_it_has() -> None:
    """What is compared are this build's version and this rank's device, limits and options."""
    said: dict[str, Any] = {}

    def collect(_: str, introduction: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        said.update(introduction())
        return [said] * WORLD

    rendezvous: Any = SimpleNamespace(world_size=WORLD, rank=0, collect=collect, names=NAMES)
    comparison.compare_ranks(rendezvous, torch.device("cpu"), CONFIG)
    assert (said["version"], said["device"], said["gpu"]) == (_core.version, "cpu", None)
    assert said["limits"] == DEVICE
    assert said["config"] == {name: getattr(CONFIG, name) for name in said["config"]}
