"""What all ranks raise when a step has failed on some of them."""

from __future__ import annotations

from typing import Any

import pytest
from harness import names_of_world, unnamed

from llm_comm.errors import ConfigError, LlmCommError, RendezvousError, UnsupportedInputError
from llm_comm.runtime.rendezvous import Failure, Rendezvous, _error_of_all

CONFIG = Failure("ConfigError", "no such option")
DEVICE = Failure("UnsupportedInputError", "no such device")
MEMORY = Failure("OSError", "no memory")
VOTE = Failure("", "not here")


@pytest.mark.parametrize(
    ("failures", "kind", "text"),
    [
        ({0: CONFIG, 1: CONFIG}, ConfigError, "no such option"),
        ({0: DEVICE, 1: DEVICE}, UnsupportedInputError, "no such device"),
        ({1: CONFIG}, ConfigError, "step failed on 1 of 2 ranks: rank 1: no such option"),
        (
            {0: CONFIG, 1: CONFIG._replace(text="no such value")},
            ConfigError,
            "step failed on 2 of 2 ranks: rank 0: no such option; rank 1: no such value",
        ),
        (
            {0: CONFIG, 1: DEVICE},
            RendezvousError,
            "step failed on 2 of 2 ranks: rank 0: ConfigError: no such option; "
            "rank 1: UnsupportedInputError: no such device",
        ),
        ({0: MEMORY}, RendezvousError, "step failed on 1 of 2 ranks: rank 0: OSError: no memory"),
        (
            {0: MEMORY, 1: MEMORY},
            RendezvousError,
            "step failed on 2 of 2 ranks: rank 0: OSError: no memory; rank 1: OSError: no memory",
        ),
        ({1: VOTE}, RendezvousError, "step failed on 1 of 2 ranks: rank 1: not here"),
    ],
)
def test_the_error_of_all(failures: dict[int, Failure], kind: type[LlmCommError], text: str) -> None:
    error = _error_of_all("step", failures, names_of_world(2))
    assert (type(error), unnamed(str(error))) == (kind, text)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [({1, 2}, "TypeError"), ("x" * 5000, "ValueError"), (nested(100_000), "RecursionError")],
    ids=["set", "long", "nested"],
)
def test_a_value_that_fits_no_message(value: object, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are told: they would wait for it in vain."""
    monkeypatch.setattr(Rendezvous, "__init__", lambda *_: None)
    monkeypatch.setattr(Rendezvous, "_gather", lambda _, data: [data])
    rendezvous: Any = Rendezvous(None, 1.0)  # type: ignore[arg-type]
    rendezvous.world_size, rendezvous.names = 1, names_of_world(1)
    with pytest.raises(RendezvousError, match=f"step failed on 1 of 1 ranks of group WORLD: rank 0 .*: {why}: "):
        rendezvous.gather("step", value)
