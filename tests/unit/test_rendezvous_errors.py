"""What all ranks raise when a step has failed on some of them."""

from __future__ import annotations

import pytest

from llm_comm.errors import ConfigError, LlmCommError, RendezvousError, UnsupportedInputError
from llm_comm.runtime.messages import Failure
from llm_comm.runtime.rendezvous import _error_of_all

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
    error = _error_of_all("step", failures, 2)
    assert (type(error), str(error)) == (kind, text)
