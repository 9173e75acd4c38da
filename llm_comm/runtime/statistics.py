"""What a communicator has been called for, in numbers: what operations count into, and what ``Communicator.stats``
returns.

Counting costs two additions a call. Several threads that call one communicator may lose a count where Python runs
without its global lock.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from llm_comm.planning.plan import Plan

#: Reasons that are told apart. A reason holds no sizes, so that there are few.
MAX_REASONS = 200
#: In place of the reasons beyond these.
OTHER_REASONS = "other reasons"


@dataclass(frozen=True)
class Kind:
    """Calls that are counted together.

    Attributes:
        operation: What is computed.
        algorithm, protocol: As of ``Plan``.
        up_to_bytes: Size class: the smallest power of two that is no less than a message of these calls; 0 for empty
            ones.
    """

    operation: str
    algorithm: str
    protocol: str
    up_to_bytes: int


class Tally:
    """The calls of one kind so far."""

    # Slots are the quickest to count up.
    __slots__ = ("bytes", "calls", "captured_bytes", "captured_calls")

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0
        self.captured_calls = 0
        self.captured_bytes = 0

    def add(self, nbytes: int) -> None:
        """Counts an eager call. Where host time is a bar, the same stands in place of this call."""
        self.calls += 1
        self.bytes += nbytes

    def add_captured(self, nbytes: int) -> None:
        """Counts a call that a CUDA graph has captured."""
        self.captured_calls += 1
        self.captured_bytes += nbytes


class Tallies:
    """All tallies of one communicator, and what it has declined."""

    def __init__(self) -> None:
        self._by_kind: dict[Kind, Tally] = {}
        self._declined: dict[tuple[str, str], int] = {}

    def of(self, plan: Plan) -> Tally:
        """Where calls of a plan are counted. It stays the same one."""
        kind = Kind(plan.operation, plan.algorithm, plan.protocol, size_class(plan.message_bytes))
        return self._by_kind.setdefault(kind, Tally())

    def decline(self, operation: str, reason: str) -> None:
        """Counts an input that was not served."""
        key = (operation, without_sizes(reason))
        if key not in self._declined and len(self._declined) >= MAX_REASONS:
            key = (operation, OTHER_REASONS)
        self._declined[key] = self._declined.get(key, 0) + 1

    def calls(self) -> tuple[Calls, ...]:
        """What has been counted, by operation, algorithm, protocol and size."""
        # Copied in one step: other threads may count on.
        return tuple(
            Calls(
                *(kind.operation, kind.algorithm, kind.protocol, kind.up_to_bytes),
                *(tally.calls, tally.bytes, tally.captured_calls, tally.captured_bytes),
            )
            for kind, tally in sorted(self._by_kind.copy().items(), key=lambda item: tuple(vars(item[0]).values()))
            if tally.calls or tally.captured_calls
        )

    def declined(self) -> tuple[Declined, ...]:
        """What was not served, by operation and reason."""
        return tuple(
            Declined(operation, reason, count) for (operation, reason), count in sorted(self._declined.copy().items())
        )


@dataclass(frozen=True)
class Calls(Kind):
    """The calls of one kind.

    Attributes:
        calls, bytes: Eager calls, and the sum of their messages' sizes (``Plan.message_bytes``).
        captured_calls, captured_bytes: The same of calls that CUDA graphs have captured, however often these are
            replayed.
    """

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
    """How far a core is.

    Attributes:
        launches: Collective kernels that the host has enqueued or captured; a large message takes several. Those of
            linear layers are not among them.
        operations_ended: Of these kernels, how often one has ended on the device, in replays of CUDA graphs too. None
            if the device does not answer soon.
        idle_s: Seconds since the last launch was enqueued or captured, to about 0.05 s. A replay is none. None if there
            was none, or where there is one rank.
        error: Class of the error that has ended the communicator, or "".
    """

    launches: int = 0
    operations_ended: int | None = None
    idle_s: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Stats:
    """What a communicator has done so far, on this rank.

    Attributes:
        calls: By operation, algorithm, protocol and size.
        declined: By operation and reason.
        progress: Of the core; after ``close``, as it was then.
    """

    calls: tuple[Calls, ...] = ()
    declined: tuple[Declined, ...] = ()
    progress: Progress = field(default_factory=Progress)

    def as_dict(self) -> dict[str, Any]:
        """The same of dicts, lists and numbers, as JSON takes it."""
        return {
            "calls": [asdict(calls) for calls in self.calls],
            "declined": [asdict(declined) for declined in self.declined],
            **asdict(self.progress),
        }

    def by_operation(self) -> Mapping[str, tuple[int, int, int]]:
        """Eager calls, their bytes, and captured calls of each operation."""
        sums: dict[str, tuple[int, int, int]] = {}
        for each in self.calls:
            calls, nbytes, captured = sums.get(each.operation, (0, 0, 0))
            sums[each.operation] = calls + each.calls, nbytes + each.bytes, captured + each.captured_calls
        return sums


def size_class(nbytes: int) -> int:
    """The smallest power of two that is no less; 0 of 0."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


@functools.lru_cache(maxsize=1024)
def without_sizes(reason: str) -> str:
    """A reason with N in place of each number that stands alone, so that reasons of other sizes are the same one.
    Digits within a word, such as bfloat16, stay."""
    return re.sub(r"(?<![\w.])\d+(\.\d+)?(?!\w)", "N", reason)
