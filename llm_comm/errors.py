"""Every error that llm_comm raises on purpose."""

from __future__ import annotations


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
