"""Tensors of which each rank has a part along a dimension: what all-gather and reduce-scatter must return."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

#: Of every size, and kinds that have no sum.
ANY_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
SHARD_ALGORITHMS = ("one_shot", "push_hb")


class Division(NamedTuple):
    """A whole tensor, and the lengths of the ranks' parts along a dimension, which may count from the last."""

    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]

    @property
    def is_even(self) -> bool:
        return len(set(self.sizes)) == 1

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        return with_length(self.shape, self.dim, self.sizes[rank])

    def part_of(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        return whole.narrow(self.dim, sum(self.sizes[:rank]), self.sizes[rank])


def with_length(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    changed = list(shape)
    changed[dim] = length
    return tuple(changed)


def divisions(world: int) -> list[Division]:
    """Along each dimension; alike, uneven, empty for some, for all but one and for all; around lines and tiles."""
    uneven = [
        tuple((5 * rank + step) % 7 * scale for rank in range(world)) for step, scale in ((1, 1), (0, 16), (3, 37))
    ]
    only_one = tuple(40 * (rank == world - 1) for rank in range(world))
    lengths = [(n,) * world for n in (0, 1, 3, 16, 130)] + uneven + [only_one]
    found = [Division((sum(sizes),), dim, sizes) for sizes in lengths for dim in (0, -1)]
    for sizes in lengths[1:]:
        whole = sum(sizes)
        found += [
            Division((whole, 5), 0, sizes),
            Division((3, whole), 1, sizes),
            Division((2, 3, whole), -1, sizes),
            Division((3, whole, 16), 1, sizes),
            Division((16, whole, 1), -2, sizes),
        ]
    found.append(Division((0, 2 * world), 1, (2,) * world))
    return found


def drawn_division(draw: random.Random, world: int, most: int) -> Division:
    """Of up to about ``most`` elements."""
    shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 4))]
    dim = draw.randrange(-len(shape), len(shape))
    others = torch.Size(with_length(shape, dim, 1)).numel()
    longest = max(1, most // others // world)
    if draw.random() < 0.5:
        sizes = (draw.randint(0, longest),) * world
    else:
        sizes = tuple(draw.choice([0, 1, draw.randint(0, longest)]) for _ in range(world))
    return Division(with_length(shape, dim, sum(sizes)), dim, sizes)


def drawn_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same in every process: any bits, of which some are NaNs; of bool, which torch copies as values, 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    drawn = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        drawn &= 1
    return drawn.view(dtype).view(tuple(shape))


def raw(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().flatten().view(torch.uint8)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise AssertionError(f"{what}: {found.dtype} {found.shape}, expected {expected.dtype} {expected.shape}")
    wrong = (raw(found) != raw(expected)).nonzero().flatten()
    if len(wrong):
        raise AssertionError(f"{what}: {len(wrong)} of {found.nbytes} bytes are wrong, first that at {int(wrong[0])}")


def placed(values: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy that begins so many elements into a buffer, and the buffer's bytes, which are 0x5A outside of it."""
    itemsize = values.element_size()
    buffer = torch.full(((offset + 16) * itemsize + values.nbytes,), 0x5A, dtype=torch.uint8)
    inside = buffer[offset * itemsize : offset * itemsize + values.nbytes]
    inside.copy_(raw(values))
    return inside.view(values.dtype).view(values.shape), buffer


def assert_untouched_outside(buffer: torch.Tensor, inside: torch.Tensor, what: str) -> None:
    begin = inside.data_ptr() - buffer.data_ptr()
    outside = torch.cat([buffer[:begin], buffer[begin + inside.nbytes :]])
    if not outside.eq(0x5A).all():
        raise AssertionError(f"{what}: wrote outside of the output")
