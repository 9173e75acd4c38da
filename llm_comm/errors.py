"""Errors that llm_comm raises on purpose, and the words that they take from values and names of others."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LlmCommError(RuntimeError):
    """Base class of the errors of this package."""


class ConfigError(LlmCommError):
    """An option has a value that is not allowed, or a configuration file cannot be used."""


class RendezvousError(LlmCommError):
    """The ranks could not set up a communicator together. Raised on all ranks alike."""


class MissingRankError(RendezvousError):
    """A rank did not come to a step of the set-up in time. Others may know more: what they raise can differ."""


class UnsupportedInputError(LlmCommError, ValueError):
    """An input that ``Communicator.accepts`` declines was passed to an operation."""


class CommunicatorError(LlmCommError):
    """A communicator has failed, and cannot be used any more; others of the same process can.

    The text names ranks by group, global rank, process and host, and ends with what the ranks were doing.

    Attributes:
        rank: Number in the group of the rank that noticed it.
        peer: Number in the group of the rank that it blames.
    """

    def __init__(self, message: str, *, rank: int, peer: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer


class PeerTimeout(CommunicatorError, TimeoutError):
    """A rank waited in vain for a peer: longer than ``Config.timeout_s``, or one whose process has exited."""


class MismatchError(CommunicatorError):
    """Ranks made different calls, or passed different kinds of tensors. Noticed on emulated devices, and with
    ``Config.debug`` on GPUs."""


class LaunchError(CommunicatorError):
    """An operation could not be launched on a rank, though it may have been on others: the next ones would not meet."""


class ConcurrentUseError(CommunicatorError):
    """Two operations of one communicator ran at once on a rank. Noticed with ``Config.debug``."""


MOST_OF_A_VALUE = 120
MOST_OF_A_TEXT = 400


def quoted(value: object) -> str:
    """``repr`` of a value, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to write very long ones
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception as error:  # whatever its class says of itself
        return f"{type(value).__name__} ({type(error).__name__})"
    return shortened(text, MOST_OF_A_VALUE)


def shortened(text: str, most: int = MOST_OF_A_TEXT) -> str:
    """A text of at most about ``most`` characters: where it is longer, its begin and how long it was."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


#: Nobody means a name of ours by a longer one.
_LONGEST = 80


def guess(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """`` (did you mean ...?)`` with ``prefix`` and the name that is closest, for an error; empty if none is close."""
    close = difflib.get_close_matches(name, list(valid), n=1) if len(name) <= _LONGEST else []
    return f" (did you mean {prefix}{close[0]}?)" if close else ""
