"""Where tensors lie in a symmetric heap: arithmetic that comes out the same on every rank."""

from __future__ import annotations

import copy
from typing import NamedTuple

from llm_comm import _core
from llm_comm.errors import UnsupportedInputError
from llm_comm.options import MIB

#: Of a segment: device memory for peers comes in pieces of so many bytes.
SEGMENT_MULTIPLE = 2 * MIB
#: The heap grows by as much as it has, but by no more than this, or what is asked for.
MAX_GROWTH = 64 * MIB
#: Of a tensor: what torch's own allocator does.
ALIGNMENT = 512
#: No machine has more, and a place in a segment is a number of 48 bits.
MAX_BYTES = 1 << 47


class Allocation(NamedTuple):
    """Memory of one tensor.

    Attributes:
        number: Of the allocation. None has that of another one.
        segment: In which it lies.
        offset: Bytes from where the segment begins.
        nbytes: That it takes, a multiple of ``ALIGNMENT``.
    """

    number: int
    segment: int
    offset: int
    nbytes: int


class HeapLayout:
    """The segments of a heap and what they hold. Nothing here touches memory."""

    def __init__(self) -> None:
        self._segments: dict[int, int] = {}
        self._allocations: dict[int, Allocation] = {}
        self._numbers = 0

    def copy(self) -> HeapLayout:
        """One to be changed in place of this."""
        other = copy.copy(self)
        other._segments, other._allocations = dict(self._segments), dict(self._allocations)
        return other

    def allocations(self) -> list[Allocation]:
        """What is allocated, the oldest first."""
        return list(self._allocations.values())

    def segments(self) -> dict[int, int]:
        """Bytes of the segments, by number."""
        return dict(self._segments)

    def place(self, nbytes: int) -> Allocation | None:
        """Memory for a tensor in the first gap that has room for it; None where there is none."""
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
        """Gives the memory of an allocation back."""
        del self._allocations[number]

    def add_segment(self, nbytes: int) -> int:
        """Makes room for a tensor of so many bytes. Returns the number of the new segment.

        Raises:
            UnsupportedInputError: There are too many segments.
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
        """Forgets a segment that holds nothing."""
        del self._segments[number]

    def empty_segments(self) -> list[int]:
        """Those that hold nothing."""
        used = {allocation.segment for allocation in self._allocations.values()}
        return [number for number in self._segments if number not in used]
