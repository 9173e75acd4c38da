"""Layout of a symmetric heap: segments, and the tensors in them. The arithmetic has the same result on every rank."""

from __future__ import annotations

import copy
from typing import NamedTuple

from llm_comm import _core
from llm_comm.errors import UnsupportedInputError
from llm_comm.options import MIB

#: Granularity of segments in bytes. VMM allocates shareable device memory in multiples of 2 MiB.
SEGMENT_MULTIPLE = 2 * MIB
#: Largest automatic growth in bytes. A new segment doubles the heap up to this bound, or fits the requested tensor.
MAX_GROWTH = 64 * MIB
#: Alignment of tensors in bytes, as in torch's caching allocator.
ALIGNMENT = 512
#: Upper bound of a request in bytes. Offsets in a segment are 48-bit numbers.
MAX_BYTES = 1 << 47


class Allocation(NamedTuple):
    """Memory of one tensor.

    Attributes:
        number: Identifier of the allocation, never reused.
        segment: Number of the segment that holds it.
        offset: Bytes from the begin of the segment.
        nbytes: Size in bytes, a multiple of ``ALIGNMENT``.
    """

    number: int
    segment: int
    offset: int
    nbytes: int


class HeapLayout:
    """Segments of a heap and the allocations in them. This class only computes: it allocates no memory."""

    def __init__(self) -> None:
        self._segments: dict[int, int] = {}
        self._allocations: dict[int, Allocation] = {}
        self._numbers = 0

    def copy(self) -> HeapLayout:
        """Return an independent copy, so that a failed collective can discard its changes."""
        other = copy.copy(self)
        other._segments, other._allocations = dict(self._segments), dict(self._allocations)
        return other

    def allocations(self) -> list[Allocation]:
        """Return the allocations, oldest first."""
        return list(self._allocations.values())

    def segments(self) -> dict[int, int]:
        """Return the size in bytes of each segment, by its number."""
        return dict(self._segments)

    def place(self, nbytes: int) -> Allocation | None:
        """Allocate ``nbytes`` in the first gap that is large enough (first fit). Return None if no gap is."""
        taken = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for segment in sorted(self._segments):
            begin = 0
            of_segment = sorted(a.offset for a in self._allocations.values() if a.segment == segment)
            ends = {a.offset: a.offset + a.nbytes for a in self._allocations.values() if a.segment == segment}
            for offset in (*of_segment, self._segments[segment]):
                if offset - begin >= taken:
                    self._numbers += 1
                    found = Allocation(self._numbers, segment, begin, taken)
                    self._allocations[found.number] = found
                    return found
                begin = ends.get(offset, offset)
        return None

    def free(self, number: int) -> None:
        """Free the allocation ``number``."""
        del self._allocations[number]

    def add_segment(self, nbytes: int) -> int:
        """Add a segment that has room for a tensor of ``nbytes``. Return the number of the segment.

        Raises:
            UnsupportedInputError: The heap has ``_core.max_segments`` segments already.
        """
        number = next((n for n in range(_core.max_segments) if n not in self._segments), None)
        if number is None:
            raise UnsupportedInputError(
                f"symmetric memory is in {_core.max_segments} pieces already: ask for fewer, larger tensors, and take "
                "views of them"
            )
        wanted = max(nbytes, min(sum(self._segments.values()), MAX_GROWTH))
        self._segments[number] = -(-wanted // SEGMENT_MULTIPLE) * SEGMENT_MULTIPLE
        return number

    def remove_segment(self, number: int) -> None:
        """Remove an empty segment."""
        del self._segments[number]

    def empty_segments(self) -> list[int]:
        """Return the numbers of the segments without an allocation."""
        used = {allocation.segment for allocation in self._allocations.values()}
        return [number for number in self._segments if number not in used]
