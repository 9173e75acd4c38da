"""Steps of the rendezvous as one rank takes them: how long it waits at most, and what it says of errors."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llm_comm.errors import RendezvousError
from llm_comm.runtime.rendezvous import Rendezvous

LIMIT_S = 5.0


class Group:
    """Stands in for torch.distributed with one rank, which is rank 0 of its group."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.waits: list[timedelta] = []
        patch.setattr(dist, "get_process_group_ranks", lambda _group: [3])
        self.group_name = "7"
        for name, answer in (("rank", 0), ("world_size", 1), ("backend", "gloo"), ("backend_config", "cpu:gloo")):
            patch.setattr(dist, f"get_{name}", lambda _group, answer=answer: answer)
        patch.setattr(dist, "all_gather", self._all_gather)

    def _all_gather(self, everyone: list[torch.Tensor], mine: torch.Tensor, **_: object) -> Any:
        everyone[0].copy_(mine)
        return SimpleNamespace(wait=self.waits.append)

    def rendezvous(self, timeout_s: float = LIMIT_S) -> Rendezvous:
        return Rendezvous(self, timeout_s)  # type: ignore[arg-type]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(monkeypatch)


@pytest.mark.parametrize(("timeout_s", "milliseconds"), [(LIMIT_S, 5000), (0.001, 1), (0.0009, 1), (1e-300, 1)])
def test_no_limit_becomes_none(group: Group, timeout_s: float, milliseconds: int) -> None:
    """torch counts in whole milliseconds, and 0 of them are no limit."""
    assert group.rendezvous(timeout_s).gather("a step", 1) == [1]
    assert group.waits == [timedelta(milliseconds=milliseconds)]


class MuteError(Exception):
    """An error that fails when it is to say what has failed."""

    def __str__(self) -> str:
        raise ValueError


def test_an_error_without_words_is_voted_on(group: Group) -> None:
    def fail() -> None:
        raise MuteError

    with pytest.raises(
        RendezvousError,
        match=r"^a step failed on 1 of 1 ranks of group 7: rank 0 \(global rank 3\): MuteError: it has no text",
    ):
        group.rendezvous().attempt("a step", fail)
