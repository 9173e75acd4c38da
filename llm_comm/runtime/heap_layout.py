"""Layout of a symmetric heap: windows, and the tensors in them. The arithmetic has the same result on every rank."""

from __future__ import annotations

import copy
from typing import NamedTuple

from llm_comm import _core
from llm_comm.errors import UnsupportedInputError
from llm_comm.options import MIB

#: Granularity of windows in bytes. VMM allocates shareable device memory in multiples of 2 MiB.
WINDOW_MULTIPLE = 2 * MIB
#: Largest automatic growth in bytes. A new window doubles the heap up to this bound, or fits the requested tensor.
MAX_GROWTH = 64 * MIB
#: Alignment of tensors in bytes, as in torch's caching allocator.
ALIGNMENT = 512
#: Upper bound of a request in bytes. Offsets in a window are 48-bit numbers.
MAX_BYTES = 1 << 47


class Allocation(NamedTuple):
    """Memory of one tensor.

    Attributes:
        number: Identifier of the allocation, never reused.
        window: Number of the window that holds it.
        offset: Bytes from the begin of the window.
        nbytes: Size in bytes, a multiple of ``ALIGNMENT``.
    """

    number: int
    window: int
    offset: int
    nbytes: int


class HeapLayout:
    """Windows of a heap and the allocations in them. This class only computes: it allocates no memory."""

    def __init__(self) -> None:
        self._windows: dict[int, int] = {}
        self._allocations: dict[int, Allocation] = {}
        self._numbers = 0

    def copy(self) -> HeapLayout:
        """Return an independent copy, so that a failed collective can discard its changes."""
        other = copy.copy(self)
        other._windows, other._allocations = dict(self._windows), dict(self._allocations)
        return other

    def allocations(self) -> list[Allocation]:
        """Return the allocations, oldest first."""
        return list(self._allocations.values())

    def windows(self) -> dict[int, int]:
        """Return the size in bytes of each window, by its number."""
        return dict(self._windows)

    def place(self, nbytes: int) -> Allocation | None:
        """Allocate ``nbytes`` in the first gap that is large enough (first fit). Return None if no gap is."""
        taken = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for window in sorted(self._windows):
            begin = 0
            of_window = sorted(a.offset for a in self._allocations.values() if a.window == window)
            ends = {a.offset: a.offset + a.nbytes for a in self._allocations.values() if a.window == window}
            for offset in (*of_window, self._windows[window]):
                if offset - begin >= taken:
                    self._numbers += 1
                    found = Allocation(self._numbers, window, begin, taken)
                    self._allocations[found.number] = found
                    return found
                begin = ends.get(offset, offset)
        return None

    def free(self, number: int) -> None:
        """Free the allocation ``number``."""
        del self._allocations[number]

    def add_window(self, nbytes: int) -> int:
        """Add a window that has room for a tensor of ``nbytes``. Return the number of the window.

        Raises:
            UnsupportedInputError: The heap has ``_core.max_windows`` windows already.
        """
        number = next((n for n in range(_core.max_windows) if n not in self._windows), None)
        if number is None:
            raise UnsupportedInputError(
                f"symmetric memory is in {_core.max_windows} pieces already: ask for fewer, larger tensors, and take "
                "views of them"
            )
        wanted = max(nbytes, min(sum(self._windows.values()), MAX_GROWTH))
        self._windows[number] = -(-wanted // WINDOW_MULTIPLE) * WINDOW_MULTIPLE
        return number

    def remove_window(self, number: int) -> None:
        """Remove an empty window."""
        del self._windows[number]

    def empty_windows(self) -> list[int]:
        """Return the numbers of the windows without an allocation."""
        used = {allocation.window for allocation in self._allocations.values()}
        return [number for number in self._windows if number not in used]
