"""Exceptions that llm_comm raises, and helpers that quote foreign values and names in their texts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LlmCommError(RuntimeError):
    """Base class of the exceptions of this package."""


class ConfigError(LlmCommError):
    """An option has an invalid value, or a configuration file cannot be used."""


class RendezvousError(LlmCommError):
    """The ranks could not set up a communicator, or a collective set-up step failed. Raised on all ranks alike."""


class MissingRankError(RendezvousError):
    """A rank did not arrive at a set-up step in time. Unlike other RendezvousErrors, ranks may raise different
    errors."""


class UnsupportedInputError(LlmCommError, ValueError):
    """An operation received an input that ``Communicator.accepts`` declines."""


class CommunicatorError(LlmCommError):
    """A communicator has failed and cannot be used again. Other communicators of the process are not affected.

    The text names ranks by group, global rank, process and host. It ends with the state of each rank.

    Attributes:
        rank: Rank in the group that detected the failure.
        peer: Rank in the group that caused it.
    """

    def __init__(self, message: str, *, rank: int, peer: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer


class PeerTimeout(CommunicatorError, TimeoutError):
    """A rank waited for a peer longer than ``Config.timeout_s``, or for a peer whose process has exited."""


class MismatchError(CommunicatorError):
    """Ranks made different calls, or passed different kinds of tensors. Detected on emulated devices, and with
    ``Config.debug`` on GPUs. Sizes of ``Communicator.all_to_all`` that disagree or do not fit are detected always."""


class LaunchError(CommunicatorError):
    """An operation could not be launched on this rank, while other ranks may have launched it. The ranks are then out
    of step."""


class ConcurrentUseError(CommunicatorError):
    """Two operations of one communicator ran at once on a rank. Detected with ``Config.debug``."""


MOST_OF_A_VALUE = 120
MOST_OF_A_TEXT = 400


def quoted(value: object) -> str:
    """Return ``repr(value)``, shortened if it is long."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to print integers of more than 4300 digits
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception as error:  # repr of a foreign class may raise anything
        return f"{type(value).__name__} ({type(error).__name__})"
    return shortened(text, MOST_OF_A_VALUE)


def shortened(text: str, most: int = MOST_OF_A_TEXT) -> str:
    """Return ``text``. If it is longer than ``most`` characters, cut it and add its length."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


#: Longer names get no suggestion: no valid name is similar, and the search is slow.
_LONGEST = 80


def guess(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """Return `` (did you mean ...?)`` with ``prefix`` and the closest valid name, for an error text; "" if none is
    close."""
    close = difflib.get_close_matches(name, list(valid), n=1) if len(name) <= _LONGEST else []
    return f" (did you mean {prefix}{close[0]}?)" if close else ""
