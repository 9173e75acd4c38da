"""Statistics of a communicator: the counters of its calls, and what ``Communicator.stats`` returns.

The core counts each call when it enqueues it, at a cost of a few nanoseconds (``Counter`` of ``llm_comm._core``).
"""

from __future__ import annotations

import functools
import re
import threading
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from llm_comm import _core

#: Number of different reasons that are counted separately. Reasons hold no sizes, so this many are not expected.
MAX_REASONS = 200
#: Reason under which further ones are counted.
OTHER_REASONS = "other reasons"


class StatisticsCollector:
    """Counters of one communicator: calls by kind, and declined inputs by reason. Any thread may use them.

    Readers take no lock, so a signal handler may read.
    """

    def __init__(self) -> None:
        # The last element of a key is the fraction of the message size that quantization saves on the wire.
        self._by_kind: dict[tuple[str, str, str, int, float], _core.CallStatistics] = {}
        self._declined: dict[tuple[str, str], int] = {}
        self._declines = threading.Lock()

    def counter(
        self, operation: str, message_bytes: int, algorithm: str, protocol: str, saved_share: float = 0.0
    ) -> _core.Counter:
        """Return a counter for calls of one algorithm with messages of one size class.

        Args:
            operation, message_bytes, algorithm, protocol: Attributes of ``Plan``.
            saved_share: Attribute of ``Layout``.
        """
        nbytes = int(message_bytes)  # torch.jit.trace passes sizes as tensors
        kind = (operation, algorithm, protocol, size_class(nbytes), saved_share)
        return _core.Counter(self._by_kind.setdefault(kind, _core.CallStatistics()), nbytes)

    def decline(self, operation: str, reason: str) -> None:
        """Count an input that was declined."""
        key = (operation, without_sizes(reason))
        with self._declines:
            if key not in self._declined and len(self._declined) >= MAX_REASONS:
                key = (operation, OTHER_REASONS)
            self._declined[key] = self._declined.get(key, 0) + 1

    def calls(self) -> tuple[Calls, ...]:
        """Return the counted calls by operation, algorithm, protocol and size class."""
        found: dict[tuple[str, str, str, int], OperationTotals] = {}
        # The copy is one step of the interpreter: other threads may add entries meanwhile.
        for (operation, algorithm, protocol, largest, _), statistics in self._by_kind.copy().items():
            kind = operation, algorithm, protocol, largest
            found[kind] = found.get(kind, OperationTotals()).plus(
                statistics.calls, statistics.bytes, statistics.captured_calls, statistics.captured_bytes
            )
        return tuple(
            Calls(*kind, *totals) for kind, totals in sorted(found.items()) if totals.calls or totals.captured_calls
        )

    def bytes_saved(self) -> int:
        """Return ``Stats.bytes_saved``."""
        return round(sum(kind[-1] * statistics.bytes for kind, statistics in self._by_kind.copy().items()))

    def declined(self) -> tuple[Declined, ...]:
        """Return the declined inputs by operation and reason."""
        return tuple(Declined(*key, count) for key, count in sorted(self._declined.copy().items()))


@dataclass(frozen=True)
class Calls:
    """Calls of one operation by one algorithm, with messages of one size class.

    Attributes:
        operation, algorithm, protocol: Attributes of ``Plan``. A call served by an algorithm for symmetric memory
            (``Plan.symmetric``) is counted under that algorithm.
        up_to_bytes: Size class: the smallest power of two that is at least the message size in bytes; 0 for empty
            messages.
        calls, bytes: Number of eager calls, and the sum of their message sizes in bytes (``Plan.message_bytes``).
        captured_calls, captured_bytes: Number and bytes of calls captured in CUDA graphs. Replays are not counted.
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
    """Declined inputs of an operation.

    Attributes:
        operation: Operation that was asked for.
        reason: ``Plan.reason`` with N in place of numbers.
        count: Number of calls declined, plus number of queries (``accepts`` and similar) answered with no.
    """

    operation: str
    reason: str
    count: int


@dataclass(frozen=True)
class Progress:
    """Progress of a communicator.

    Attributes:
        launches: Number of collective kernels that the host has enqueued or captured. A large message takes several.
            Kernels of linear layers are not counted.
        operations_ended: Number of times one of these kernels has ended on the device, replays of CUDA graphs included.
            None if the device does not answer soon.
        idle_s: Seconds since the last launch was enqueued or captured, with a resolution of 0.05 s. Replays do not
            count. None before the first launch, or if the group has one rank.
        error: Class name of the error that has ended the communicator, or "".
    """

    launches: int = 0
    operations_ended: int | None = None
    idle_s: float | None = None
    error: str = ""


class OperationTotals(NamedTuple):
    """Totals of all calls of one operation; the fields are those of ``Calls``."""

    calls: int = 0
    bytes: int = 0
    captured_calls: int = 0
    captured_bytes: int = 0

    def plus(self, *numbers: int) -> OperationTotals:
        """Return the totals with the numbers of other calls added, in the order of the fields."""
        return OperationTotals(*map(sum, zip(self, numbers, strict=True)))


@dataclass(frozen=True)
class Stats:
    """Statistics of a communicator on this rank.

    Attributes:
        calls: Calls by operation, algorithm, protocol and size class.
        declined: Declined inputs by operation and reason.
        progress: Progress of the kernels. After ``close``, the state at the time of closing.
        bytes_saved: Bytes that this rank did not send because option ``wire`` quantized its eager calls. An all-reduce
            is compared with a two-shot all-reduce of the exact values.
    """

    calls: tuple[Calls, ...] = ()
    declined: tuple[Declined, ...] = ()
    progress: Progress = field(default_factory=Progress)
    bytes_saved: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON-able dicts, lists and numbers."""
        return {
            "calls": [asdict(calls) for calls in self.calls],
            "declined": [asdict(declined) for declined in self.declined],
            "progress": asdict(self.progress),
            "bytes_saved": self.bytes_saved,
        }

    def by_operation(self) -> dict[str, OperationTotals]:
        """Return the totals over algorithms, protocols and size classes, by operation."""
        sums: dict[str, OperationTotals] = {}
        for each in self.calls:
            so_far = sums.get(each.operation, OperationTotals())
            sums[each.operation] = so_far.plus(each.calls, each.bytes, each.captured_calls, each.captured_bytes)
        return sums


def size_class(nbytes: int) -> int:
    """Return the smallest power of two that is at least ``nbytes``; 0 for 0."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


@functools.lru_cache(maxsize=1024)
def without_sizes(reason: str) -> str:
    """Replace each number that stands alone in ``reason`` by N, so that equal reasons with other sizes become one.
    Digits within a word, such as bfloat16, stay."""
    return re.sub(r"(?<![\w.])\d+(\.\d+)?(?!\w)", "N", reason)
