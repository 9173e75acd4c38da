"""Every error that llm_comm raises on purpose."""

from __future__ import annotations


class LlmCommError(RuntimeError):
    """Base class of the errors of this package."""


class ConfigError(LlmCommError):
    """An option has a value that is not allowed, or a configuration file cannot be used."""


class RendezvousError(LlmCommError):
    """The ranks could not set up a communicator together. Raised on all ranks alike."""


class UnsupportedInputError(LlmCommError):
    """An input that ``Communicator.accepts`` declines was passed to an operation."""


class PeerTimeout(LlmCommError):
    """A rank waited for a peer longer than ``Config.timeout_s``.

    The communicator cannot be used any more; others of the same process can.
    """

    def __init__(self, message: str, *, rank: int, peer: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
