"""How the ranks of an engine agree to use llm_comm, and when a rank ends its process: without an engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import names_of_world, unnamed

from llm_comm.config import EngineOptions
from llm_comm.errors import CommunicatorError, ConfigError, LlmCommError, MissingRankError
from llm_comm.integrations import joining, members
from llm_comm.integrations.joining import AbsentRanksError, NotJoinedError, SwitchedOffError
from llm_comm.nodes.topology import Topology
from llm_comm.planning.tables import Origin


@pytest.mark.parametrize(
    ("value", "is_off"), [(None, False), ("0", True), ("off", True), ("1", False), ("", False), ("perhaps", False)]
)
def test_what_switches_llm_comm_off(value: str | None, is_off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is wrong does not: it is an error of all ranks when they join."""
    monkeypatch.delenv("LLM_COMM_ENABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("LLM_COMM_ENABLE", value)
    assert joining.switched_off() == is_off


class Vote:
    """A rendezvous of three ranks, of which this one is the first."""

    names = names_of_world(3)
    world_size = 3

    def __init__(self, *others: tuple[int, str] | LlmCommError | None) -> None:
        self._others = others
        self.said: Any = None

    def gather(self, what: str, value: Any) -> list[Any]:
        self.said = value
        for other in self._others:
            if isinstance(other, LlmCommError):
                raise other
        return [value, *self._others]


def vote(own: Exception | None, *others: Any) -> tuple[Any, Exception | None]:
    """What this rank says, and what comes of it."""
    rendezvous = Vote(*others)
    try:
        joining._vote(rendezvous, own)  # type: ignore[arg-type]
    except LlmCommError as error:
        return rendezvous.said, error
    return rendezvous.said, None


CONFIG, OFF, NOT_JOINED = range(3)


def test_nobody_objects() -> None:
    assert vote(None, None, None) == (None, None)


@pytest.mark.parametrize(
    ("own", "others", "kind", "text"),
    [
        (None, (None, (OFF, "no")), SwitchedOffError, "rank 2: no"),
        (SwitchedOffError("no"), ((OFF, "no"), (OFF, "no")), SwitchedOffError, "no"),
        (SwitchedOffError("no"), ((CONFIG, "wrong"), (NOT_JOINED, "old")), ConfigError, "rank 1: wrong"),
        (NotJoinedError("old"), ((OFF, "no"), None), SwitchedOffError, "rank 1: no"),
        (NotJoinedError("old"), (None, (NOT_JOINED, "new")), NotJoinedError, "rank 0: old; rank 2: new"),
        (ValueError("why"), (None, None), NotJoinedError, "rank 0: ValueError: why"),
    ],
)
def test_the_most_important_objection_is_told(
    own: Exception | None, others: tuple[Any, ...], kind: type[LlmCommError], text: str
) -> None:
    _, error = vote(own, *others)
    assert (type(error), unnamed(str(error))) == (kind, text)


def test_an_objection_fits_a_message() -> None:
    said, error = vote(NotJoinedError("漢" * 5000), None, None)
    assert said[0] == NOT_JOINED
    assert len(said[1]) == 600
    assert said[1].isascii()
    assert isinstance(error, NotJoinedError)


def test_a_rank_that_does_not_come() -> None:
    """The engine cannot go on. ``LLM_COMM_TIMEOUT_S`` does not bound that wait, so it is not named."""
    _, error = vote(None, MissingRankError("not all ranks came within 120 s (LLM_COMM_TIMEOUT_S): gone"), None)
    assert isinstance(error, AbsentRanksError)
    assert "came within 120 s: gone" in str(error)
    assert "LLM_COMM_TIMEOUT_S" not in str(error)


def objection_to_links(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    is_tuned: bool,
    *others: Any,
    topology: Topology | None = None,
) -> tuple[Any, Exception | None]:
    """What this rank says of its GPU, and its objection where the GPUs have no NVLink."""
    table = SimpleNamespace(origin=Origin(is_tuned=is_tuned))
    worlds: list[int] = []
    monkeypatch.setattr(joining, "find_table", lambda _, world, __: worlds.append(world) or table)
    monkeypatch.setattr(joining, "gpu_name", lambda _: "GPU-0")
    monkeypatch.setattr(joining, "why_too_slow", lambda gpus: f"PCIe: {gpus}")
    rendezvous = Vote(*others)
    config = EngineOptions.load(options)
    device = torch.device("cuda", 0)
    objection = joining._objection_to_links(rendezvous, config, device, topology)  # type: ignore[arg-type]
    assert worlds == [3 if topology is None else len(topology.ranks_here)]
    return rendezvous.said, objection


def test_gpus_without_nvlink_need_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    _, objection = objection_to_links(monkeypatch, {}, False, "GPU-1", "GPU-2")
    assert isinstance(objection, NotJoinedError)
    assert str(objection) == "PCIe: {0: 'GPU-0', 1: 'GPU-1', 2: 'GPU-2'}"


@pytest.mark.parametrize(
    ("options", "is_tuned", "others"),
    [
        ({}, True, ("GPU-1", "GPU-2")),
        ({"LLM_COMM_TABLE": "mine.yaml"}, False, ("GPU-1", "GPU-2")),
        ({"LLM_COMM_ALGORITHM": "one_shot"}, False, ("GPU-1", "GPU-2")),
        ({}, False, ("GPU-1", None)),
    ],
    ids=["tuned", "option table", "forced algorithm", "on one rank alone"],
)
def test_links_that_are_no_objection(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], is_tuned: bool, others: tuple[Any, ...]
) -> None:
    assert objection_to_links(monkeypatch, options, is_tuned, *others)[1] is None


def test_only_the_gpus_of_a_node_are_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(ranks_here=(0, 2))
    _, objection = objection_to_links(monkeypatch, {}, False, "GPU-1", "GPU-2", topology=here)  # type: ignore[arg-type]
    assert str(objection) == "PCIe: {0: 'GPU-0', 2: 'GPU-2'}"


def test_a_rank_that_is_lost_before_it_names_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AbsentRanksError, match="a rank of the engine was lost"):
        objection_to_links(monkeypatch, {}, False, MissingRankError("gone"), None)


def test_a_rank_whose_gpu_does_not_answer_leaves_it_to_the_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the driver is gone")

    rendezvous = Vote("GPU-1", "GPU-2")
    monkeypatch.setattr(joining, "find_table", fail)
    device = torch.device("cuda", 0)
    assert joining._objection_to_links(rendezvous, EngineOptions.load({}), device, None) is None  # type: ignore[arg-type]
    assert rendezvous.said is None


class Failing:
    """A communicator that fails when it is told to."""

    def __init__(self) -> None:
        self.fail: Callable[[CommunicatorError], None]
        self.exits = False
        self.is_closed = False
        self.config = EngineOptions.load({})

    def on_error(self, callback: Callable[[CommunicatorError], None], *, exits: bool = False) -> None:
        self.fail, self.exits = callback, exits

    def close(self) -> None:
        self.is_closed = True
        raise RuntimeError("the device is broken")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """With which status the process would have ended, each time."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


LOG = logging.getLogger("test_integration_join")
ERROR = CommunicatorError("rank 1 is gone", rank=0, peer=1)


def test_an_error_ends_the_process(ended: list[int], caplog: pytest.LogCaptureFixture) -> None:
    communicator = Failing()
    members.Member(communicator, "tp", LOG)  # type: ignore[arg-type]
    assert communicator.exits, "exits of other ranks are errors too"
    communicator.fail(ERROR)
    assert ended == [1]
    assert [text.splitlines()[0] for text in caplog.messages] == ["llm_comm: rank 1 is gone"]


def test_an_error_after_the_end_does_not(ended: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """Also where the communicator could not be closed."""
    communicator = Failing()
    member = members.Member(communicator, "tp", LOG)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="the device is broken"):
        member.close()
    assert communicator.is_closed
    communicator.fail(ERROR)
    assert ended == []
    assert caplog.messages == []
