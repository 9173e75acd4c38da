"""What a communicator has been called for, in numbers: what its calls are counted into, and what
``Communicator.stats`` returns.

The core counts each call as it enqueues it, which takes a few nanoseconds; see ``Counter`` of ``llm_comm._core``.
"""

from __future__ import annotations

import functools
import re
import threading
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from llm_comm import _core

#: Reasons that are told apart. They hold no sizes, so that there are few.
MAX_REASONS = 200
#: In place of the reasons beyond these.
OTHER_REASONS = "other reasons"


class Tallies:
    """All tallies of one communicator, and what it has declined. For any thread; nothing that reads waits, so a handler
    of a signal may read too."""

    def __init__(self) -> None:
        self._by_kind: dict[tuple[str, str, str, int], _core.Tally] = {}
        self._declined: dict[tuple[str, str], int] = {}
        self._declines = threading.Lock()

    def counter(self, operation: str, message_bytes: int, algorithm: str, protocol: str) -> _core.Counter:
        """What counts calls of an algorithm for messages of one size.

        Args:
            operation, message_bytes, algorithm, protocol: As of ``Plan``.
        """
        nbytes = int(message_bytes)  # while torch.jit traces, sizes are tensors
        kind = (operation, algorithm, protocol, size_class(nbytes))
        return _core.Counter(self._by_kind.setdefault(kind, _core.Tally()), nbytes)

    def decline(self, operation: str, reason: str) -> None:
        """Counts an input that was not served."""
        key = (operation, without_sizes(reason))
        with self._declines:
            if key not in self._declined and len(self._declined) >= MAX_REASONS:
                key = (operation, OTHER_REASONS)
            self._declined[key] = self._declined.get(key, 0) + 1

    def calls(self) -> tuple[Calls, ...]:
        """What has been counted, by operation, algorithm, protocol and size."""
        # Copied in one step: other threads may add to it.
        return tuple(
            Calls(*kind, tally.calls, tally.bytes, tally.captured_calls, tally.captured_bytes)
            for kind, tally in sorted(self._by_kind.copy().items(), key=lambda item: item[0])
            if tally.calls or tally.captured_calls
        )

    def declined(self) -> tuple[Declined, ...]:
        """What was not served, by operation and reason."""
        return tuple(Declined(*key, count) for key, count in sorted(self._declined.copy().items()))


@dataclass(frozen=True)
class Calls:
    """Calls of one operation by one algorithm, of messages of about one size.

    Attributes:
        operation, algorithm, protocol: As of ``Plan``. A call that an algorithm for symmetric memory serves
            (``Plan.symmetric``) is counted under that one.
        up_to_bytes: Size class: the smallest power of two that is no less than a message of these calls; 0 for empty
            ones.
        calls, bytes: Eager calls, and the sum of their messages' sizes (``Plan.message_bytes``).
        captured_calls, captured_bytes: The same of calls that CUDA graphs have captured, however often these are
            replayed.
    """

    operation: str
    algorithm: str
    protocol: str
    up_to_bytes: int
    calls: int
    bytes: int
    captured_calls: int
    captured_bytes: int


@dataclass(frozen=True)
class Declined:
    """Inputs of an operation that were not served.

    Attributes:
        operation: What was asked for.
        reason: As of ``Plan.reason``, with N in place of numbers.
        count: How often a call was declined, or a question of ``accepts`` and its kin was answered with no.
    """

    operation: str
    reason: str
    count: int


@dataclass(frozen=True)
class Progress:
    """How far a communicator is.

    Attributes:
        launches: Collective kernels that the host has enqueued or captured; a large message takes several. Those of
            linear layers are not among them.
        operations_ended: How often one of these kernels has ended on the device, in replays of CUDA graphs too. None
            if the device does not answer soon.
        idle_s: Seconds since the last launch was enqueued or captured, to about 0.05 s. A replay is none. None if there
            was none, or where there is one rank.
        error: Class of the error that has ended the communicator, or "".
    """

    launches: int = 0
    operations_ended: int | None = None
    idle_s: float | None = None
    error: str = ""


class Sums(NamedTuple):
    """All calls of one operation; the numbers as of ``Calls``."""

    calls: int = 0
    bytes: int = 0
    captured_calls: int = 0
    captured_bytes: int = 0


@dataclass(frozen=True)
class Stats:
    """What a communicator has done so far, on this rank.

    Attributes:
        calls: By operation, algorithm, protocol and size.
        declined: By operation and reason.
        progress: Of kernels; after ``close``, as it was then.
    """

    calls: tuple[Calls, ...] = ()
    declined: tuple[Declined, ...] = ()
    progress: Progress = field(default_factory=Progress)

    def as_dict(self) -> dict[str, Any]:
        """The same of dicts, lists and numbers, as JSON takes it."""
        return {
            "calls": [asdict(calls) for calls in self.calls],
            "declined": [asdict(declined) for declined in self.declined],
            "progress": asdict(self.progress),
        }

    def by_operation(self) -> dict[str, Sums]:
        """The sums over algorithms, protocols and sizes, by operation."""
        sums: dict[str, Sums] = {}
        for each in self.calls:
            numbers = each.calls, each.bytes, each.captured_calls, each.captured_bytes
            so_far = sums.get(each.operation, Sums())
            sums[each.operation] = Sums(*map(sum, zip(so_far, numbers, strict=True)))
        return sums


def size_class(nbytes: int) -> int:
    """The smallest power of two that is no less; 0 of 0."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


@functools.lru_cache(maxsize=1024)
def without_sizes(reason: str) -> str:
    """A reason with N in place of each number that stands alone, so that reasons of other sizes are the same one.
    Digits within a word, such as bfloat16, stay."""
    return re.sub(r"(?<![\w.])\d+(\.\d+)?(?!\w)", "N", reason)
