"""All-reduce on emulated GPUs: the promised bits for any size, type, world and pointer.

Every rank compares with the same reference, so results that pass are bitwise equal on all ranks and between algorithms.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator
from reference import (
    ALGORITHMS,
    DTYPES,
    WORLDS,
    assert_bitwise_equal,
    assert_is_sum,
    contributions,
    from_bits,
    rank_order_sum,
    special_patterns,
)

from llm_comm import Communicator

PROT_NONE = 0  # of <sys/mman.h>; not in the mmap module
ODD_BYTES = (1026, 20004, 20036)
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
some_worlds = pytest.mark.parametrize("world", [2, 3, 8])


def counts(world: int, dtype: torch.dtype) -> list[int]:
    """Elements: around a line and a few, the sizes of old bugs, around multiples of 64 bytes x ranks, and large ones in
    one type, as how large messages are split is a matter of bytes."""
    small = [0, 1, 2, 7, 8, 9, 63, 64, 65, 513]
    odd = [-(-size // dtype.itemsize) for size in ODD_BYTES]
    per_rank = 64 // dtype.itemsize
    uneven = [per_rank * world * k + d for k, d in itertools.product((1, 5), (-1, 1, per_rank))]
    return [*small, *odd, *uneven, *([131_073, 300_007] if dtype is torch.bfloat16 else [])]


def communicators(**options: object) -> Iterator[tuple[int, int, Communicator, str]]:
    """On a rank: (rank, world, communicator, algorithm) for every algorithm."""
    for algorithm in ALGORITHMS:
        with make_communicator(algorithm=algorithm, **options) as comm:
            yield dist.get_rank(), dist.get_world_size(), comm, algorithm


def check_sizes(dtype: torch.dtype) -> None:
    for rank, world, comm, algorithm in communicators():
        for count in counts(world, dtype):
            what = f"{algorithm}, {count} elements"
            inputs = contributions(world, count, dtype)
            x = inputs[rank].clone()
            out = comm.all_reduce(x)
            assert_is_sum(out, inputs, what)
            assert_bitwise_equal(x, inputs[rank], f"{what}: the input")
            assert comm.plan(x).algorithm == (algorithm if count else "none")


@every_dtype
@pytest.mark.parametrize("world", WORLDS)
def test_sum_is_bitwise_right(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, check_sizes, dtype)


def check_chunks(dtype: torch.dtype) -> None:
    """Messages that take several launches, the last one of a few elements."""
    for rank, world, comm, algorithm in communicators(workspace_bytes=1 << 20):
        chunk = comm.plan(torch.empty(1, dtype=dtype)).chunk_elements
        for count in (chunk, chunk + 1, 2 * chunk + 13):
            inputs = contributions(world, count, dtype)
            assert comm.plan(inputs[rank]).chunks == -(-count // chunk)
            assert_is_sum(comm.all_reduce(inputs[rank]), inputs, f"{algorithm}, chunks of {chunk}, {count} elements")


@some_worlds
@every_dtype
def test_message_larger_than_a_slot(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, check_chunks, dtype)


def check_large(count: int) -> None:
    with make_communicator() as comm:
        inputs = contributions(comm.world_size, count, torch.bfloat16)
        assert_is_sum(comm.all_reduce(inputs[comm.rank], out=inputs[comm.rank].clone()), inputs, f"{count} elements")


def test_message_of_more_than_8_mib(ranks: RankPool) -> None:
    ranks.run(3, check_large, (5 << 20) + 3)


# ---- Values --------------------------------------------------------------------------------------------------------


def special_inputs(world: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every pair of special patterns on ranks 0 and 1, at every place of a line; drawn ones on the others."""
    patterns = special_patterns(dtype)
    pairs = torch.cartesian_prod(patterns, patterns)
    odd_period = torch.cat([pairs, pairs[:1]])  # so that repeating it moves it through the line
    first, second = odd_period.repeat(16 // dtype.itemsize, 1).unbind(1)
    generator = torch.Generator().manual_seed(world)
    drawn = patterns[torch.randint(len(patterns), (world - 2, len(first)), generator=generator)]
    return [from_bits(chosen, dtype) for chosen in (first, second, *drawn)]


def check_special_values(dtype: torch.dtype) -> None:
    for rank, world, comm, algorithm in communicators():
        inputs = special_inputs(world, dtype)
        for _ in range(3):  # both slots are used again
            assert_bitwise_equal(comm.all_reduce(inputs[rank]), rank_order_sum(inputs), f"{algorithm}, special values")


@every_dtype
@some_worlds
def test_special_values(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    """Signed zeros, subnormals, infinities and NaNs of all kinds, the pattern of an empty line among them."""
    ranks.run(world, check_special_values, dtype)


def check_sentinel_of_one_rank(dtype: torch.dtype) -> None:
    everywhere = torch.full((100 * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)
    for rank, world, comm, algorithm in communicators():
        for sender in range(world):
            inputs = contributions(world, 100, dtype)
            inputs[sender] = everywhere
            for what in (f"{algorithm}, only sentinels from rank {sender}", "the same again"):
                out = comm.all_reduce(inputs[rank])
                assert_bitwise_equal(out, rank_order_sum(inputs), what)
                assert out.isnan().all()


@some_worlds
@every_dtype
def test_message_that_looks_like_an_empty_slot(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, check_sentinel_of_one_rank, dtype)


def check_negative_zero(dtype: torch.dtype) -> None:
    minus_zero = torch.full((67,), -0.0, dtype=dtype)
    for rank, world, comm, algorithm in communicators():
        assert_bitwise_equal(comm.all_reduce(minus_zero), minus_zero, f"{algorithm}, -0.0 on all ranks")
        for positive in range(world):
            x = minus_zero.abs() if rank == positive else minus_zero
            what = f"{algorithm}, +0.0 on rank {positive} alone"
            assert_bitwise_equal(comm.all_reduce(x), minus_zero.abs(), what)


@some_worlds
@every_dtype
def test_negative_zero(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    ranks.run(world, check_negative_zero, dtype)


# ---- Pointers ------------------------------------------------------------------------------------------------------


def guarded(values: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of ``values`` that starts ``offset`` elements into a buffer, and the buffer."""
    buffer = torch.full((offset + values.numel() + 16,), 77.0, dtype=values.dtype)
    inside = buffer[offset : offset + values.numel()]
    inside.copy_(values)
    return inside, buffer


def assert_untouched_outside(buffer: torch.Tensor, offset: int, count: int, what: str) -> None:
    outside = torch.cat([buffer[:offset], buffer[offset + count :]])
    if not outside.eq(77.0).all():
        raise AssertionError(f"{what}: wrote outside of the output")


def check_alignment(dtype: torch.dtype, count: int) -> None:
    for rank, world, comm, algorithm in communicators():
        inputs = contributions(world, count, dtype)
        total = rank_order_sum(inputs)
        for step in range(8):
            in_offset, out_offset = (step + 3 * rank) % 8, (3 * step + rank) % 8
            what = f"{algorithm}, {count} elements, input at {in_offset}, output at {out_offset}"
            x, _ = guarded(inputs[rank], in_offset)
            out, buffer = guarded(torch.zeros_like(x), out_offset)
            assert comm.all_reduce(x, out=out) is out
            assert_bitwise_equal(out, total, what)
            assert_bitwise_equal(x, inputs[rank], f"{what}: the input")
            assert_untouched_outside(buffer, out_offset, count, what)

            in_place, buffer = guarded(inputs[rank], in_offset)
            assert comm.all_reduce(in_place, out=in_place) is in_place
            assert_bitwise_equal(in_place, total, f"{what}, in place")
            assert_untouched_outside(buffer, in_offset, count, f"{what}, in place")


#: Each with every count, and each count in every world.
UNALIGNED = [
    (world, dtype, count)
    for i, count in enumerate([1, 9, 513, 5009])
    for world, dtype in zip([2, 3, 8], [*DTYPES[i % 3 :], *DTYPES[: i % 3]], strict=True)
]


@pytest.mark.parametrize(("world", "dtype", "count"), UNALIGNED, ids=lambda value: str(value).removeprefix("torch."))
def test_pointers_unaligned_differently_on_every_rank(
    ranks: RankPool, world: int, dtype: torch.dtype, count: int
) -> None:
    ranks.run(world, check_alignment, dtype, count)


class FencedPage:
    """A page of memory between two that a process dies of touching."""

    def __init__(self) -> None:
        size = mmap.PAGESIZE
        self._memory = mmap.mmap(-1, 3 * size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        libc = ctypes.CDLL(None, use_errno=True)
        for fence in (address, address + 2 * size):
            if libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(size), PROT_NONE) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        self._page = torch.frombuffer(self._memory, dtype=torch.uint8)[size : 2 * size]

    def at_start(self, values: torch.Tensor) -> torch.Tensor:
        return self._page[: values.nbytes].view(values.dtype).copy_(values)

    def at_end(self, values: torch.Tensor) -> torch.Tensor:
        return self._page[mmap.PAGESIZE - values.nbytes :].view(values.dtype).copy_(values)


def check_bounds(dtype: torch.dtype) -> None:
    pages = FencedPage(), FencedPage()
    for rank, world, comm, algorithm in communicators():
        for count in (1, 7, 9, 64, 513):
            inputs = contributions(world, count, dtype)
            for place in (FencedPage.at_start, FencedPage.at_end):
                x, out = (place(page, inputs[rank]) for page in pages)
                what = f"{algorithm}, {count} elements, {place.__name__} of a page"
                assert_is_sum(comm.all_reduce(x, out=out), inputs, what)


@every_dtype
def test_nothing_beside_the_message_is_touched(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(3, check_bounds, dtype)


def check_shapes() -> None:
    for rank, world, comm, algorithm in communicators():
        for shape in ((), (1,), (3, 5, 7), (2, 0, 4)):
            count = torch.Size(shape).numel()
            inputs = [t.view(shape) for t in contributions(world, count, torch.bfloat16)]
            assert_is_sum(comm.all_reduce(inputs[rank]), inputs, f"{algorithm}, shape {shape}")


def test_shape_is_kept(ranks: RankPool) -> None:
    ranks.run(2, check_shapes)


def check_world_of_one(dtype: torch.dtype) -> None:
    with make_communicator() as comm:
        x = from_bits(special_patterns(dtype), dtype)
        assert comm.plan(x).algorithm == "none"
        out = comm.all_reduce(x)
        assert out.data_ptr() != x.data_ptr()
        assert_bitwise_equal(out, x, "a copy")
        out.zero_()
        assert comm.all_reduce(x, out=out) is out
        assert_bitwise_equal(out, x, "a copy into out")
        assert comm.all_reduce(x, out=x) is x
        assert_bitwise_equal(out, x, "in place")


@every_dtype
def test_world_of_one_copies(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(1, check_world_of_one, dtype)


def python_calls(call: Callable[[], object]) -> list[str]:
    """The Python functions that a call enters, by name, itself left out."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names[1:]


def count_python_calls() -> None:
    with make_communicator() as comm:
        x = torch.ones(64)
        comm.all_reduce(x)
        is_compiling = ["is_compiling", *python_calls(torch.compiler.is_compiling)]
        for name in ("all_reduce", "try_all_reduce"):
            bound = getattr(comm, name)
            assert python_calls(lambda bound=bound: bound(x)) == [
                name,
                *is_compiling,
                "is_watched",
                "run",
                "_no_stream",
            ]
        rows, weight = x.view(1, 64).bfloat16(), torch.ones(64, dtype=torch.bfloat16)
        residual = rows.clone()
        comm.all_reduce_add_rms_norm(rows, residual, weight, 1e-5)
        with torch.no_grad():
            found = python_calls(lambda: comm.all_reduce_add_rms_norm(rows, residual, weight, 1e-5))
        checks = ["_fits", "_check_like", "_check_memory", "why_not_plain", *is_compiling]
        assert found == [
            "all_reduce_add_rms_norm",
            *is_compiling,
            "is_watched",
            "run",
            "_enqueue",
            *checks,
            "_no_stream",
        ]


def test_a_call_is_short_on_the_host(ranks: RankPool) -> None:
    """Host time is a bar: what is prepared takes no more Python calls than these (on a GPU, none for the stream)."""
    ranks.run(2, count_python_calls)
