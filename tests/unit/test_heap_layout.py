"""Where tensors lie in a symmetric heap: in gaps of windows, apart from each other, and alike on all ranks."""

from __future__ import annotations

import itertools
import random

import pytest

from llm_comm import _core
from llm_comm.errors import UnsupportedInputError
from llm_comm.options import MIB
from llm_comm.runtime.heap_layout import ALIGNMENT, MAX_GROWTH, WINDOW_MULTIPLE, Allocation, HeapLayout


def placed(layout: HeapLayout, nbytes: int) -> Allocation:
    found = layout.place(nbytes)
    assert found is not None
    return found


def with_windows(*sizes: int) -> HeapLayout:
    layout = HeapLayout()
    for size in sizes:
        layout.add_window(size)
    return layout


def test_an_empty_heap_is_out_of_resources() -> None:
    assert HeapLayout().place(1) is None


def test_allocations_are_aligned_and_take_turns() -> None:
    layout = with_windows(WINDOW_MULTIPLE)
    assert placed(layout, 1) == Allocation(1, 0, 0, ALIGNMENT)
    assert placed(layout, ALIGNMENT + 1) == Allocation(2, 0, ALIGNMENT, 2 * ALIGNMENT)
    assert placed(layout, ALIGNMENT) == Allocation(3, 0, 3 * ALIGNMENT, ALIGNMENT)


def test_a_window_is_filled_to_its_last_byte() -> None:
    layout = with_windows(WINDOW_MULTIPLE)
    assert placed(layout, WINDOW_MULTIPLE).offset == 0
    assert layout.place(1) is None
    layout.free(1)
    placed(layout, WINDOW_MULTIPLE - ALIGNMENT)
    assert placed(layout, ALIGNMENT).offset == WINDOW_MULTIPLE - ALIGNMENT
    assert layout.place(1) is None


def test_gaps_are_used_again_the_first_that_fits() -> None:
    layout = with_windows(WINDOW_MULTIPLE)
    first, second, third, _ = (placed(layout, n * ALIGNMENT) for n in (1, 3, 1, 1))
    layout.free(second.number)
    layout.free(first.number)
    assert placed(layout, 2 * ALIGNMENT).offset == 0, "gaps side by side are one"
    assert placed(layout, 3 * ALIGNMENT).offset == 6 * ALIGNMENT
    assert placed(layout, 2 * ALIGNMENT).offset == 2 * ALIGNMENT
    assert third.number not in {a.number for a in layout.allocations() if a.offset != third.offset}


def test_numbers_are_never_given_twice() -> None:
    layout = with_windows(WINDOW_MULTIPLE)
    first = placed(layout, 1)
    layout.free(first.number)
    assert placed(layout, 1).number != first.number


@pytest.mark.parametrize(
    ("there", "asked", "expected"),
    [
        ([], 1, WINDOW_MULTIPLE),
        ([], WINDOW_MULTIPLE + 1, 2 * WINDOW_MULTIPLE),
        ([6 * MIB], 1, 6 * MIB),
        ([MAX_GROWTH, 2 * MAX_GROWTH], 1, MAX_GROWTH),
        ([WINDOW_MULTIPLE], 3 * MAX_GROWTH, 3 * MAX_GROWTH),
    ],
)
def test_windows_grow_with_the_heap(there: list[int], asked: int, expected: int) -> None:
    layout = with_windows(*there)
    number = layout.add_window(asked)
    assert number == len(there)
    assert layout.windows()[number] == expected


def test_the_number_of_a_window_is_used_again() -> None:
    layout = with_windows(*[MAX_GROWTH] * _core.max_windows)
    with pytest.raises(UnsupportedInputError, match=f"in {_core.max_windows} pieces already"):
        layout.add_window(1)
    layout.remove_window(5)
    assert layout.add_window(1) == 5


def test_a_copy_leaves_the_original_alone() -> None:
    layout = with_windows(WINDOW_MULTIPLE)
    placed(layout, 1)
    other = layout.copy()
    placed(other, 1)
    other.free(1)
    other.add_window(1)
    assert [a.number for a in layout.allocations()] == [1]
    assert list(layout.windows()) == [0]
    assert placed(layout, 1) == other.allocations()[0]


def test_random_allocations_never_overlap() -> None:
    draw = random.Random(1)
    layout = HeapLayout()
    for _ in range(2000):
        allocations = layout.allocations()
        if allocations and draw.random() < 0.45:
            layout.free(draw.choice(allocations).number)
            for number in layout.empty_windows():
                layout.remove_window(number)
        else:
            nbytes = draw.choice([1, 700, 5000, 300_000, 3 * MIB])
            if layout.place(nbytes) is None:
                layout.add_window(nbytes)
                assert layout.place(nbytes) is not None
    for window, size in layout.windows().items():
        end = 0
        for allocation in sorted(a for a in layout.allocations() if a.window == window):
            end = max(end, allocation.offset + allocation.nbytes)
        assert end <= size
        spans = sorted((a.offset, a.offset + a.nbytes) for a in layout.allocations() if a.window == window)
        assert all(this[1] <= following[0] for this, following in itertools.pairwise(spans))
