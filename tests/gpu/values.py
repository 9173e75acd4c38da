"""Inputs that every rank can make for all ranks, and what their sum must be.

A row is one rank's input; rows are tensors [world, count]. They come from the device's random generator, which gives
the same numbers on all devices of one kind, so a rank needs nothing from its peers to know the right sum.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
# Powers of two by which inputs are scaled: from sums that are subnormal to sums that overflow.
_EXPONENTS = {
    torch.bfloat16: (-134, -126, -20, 0, 0, 0, 0, 20, 100, 124),
    torch.float16: (-24, -14, -6, 0, 0, 0, 0, 6, 13),
    torch.float32: (-144, -126, -20, 0, 0, 0, 0, 20, 100, 124),
}
_LOWEST_POWER = -150
# Elements in a row that get the same special value: words, lines and lines and a bit of nothing but all-ones bits.
_RUNS = (1, 1, 2, 4, 8, 16, 19)


@dataclass(frozen=True)
class Values:
    """How the values of one message are drawn.

    Attributes:
        style: ``"normal"``; ``"sparse"`` with 1 of 64 runs special; ``"columns"`` with half of the runs special and
            the same on all ranks, so that sums of only -0.0, say, occur; ``"tiny"``, nothing but zeros and
            subnormals of both signs, which no NaN hides.
        exponent: the power of two that scales the normal values; each rank's differs from it by up to 3.
        run: elements that are special together.
    """

    style: str
    exponent: int
    run: int


def draw_values(rng: random.Random, dtype: torch.dtype) -> Values:
    return Values(
        style=rng.choices(("normal", "sparse", "columns", "tiny"), (55, 20, 15, 10))[0],
        exponent=rng.choice(_EXPONENTS[dtype]),
        run=rng.choice(_RUNS),
    )


class Inputs:
    """Makes rows on one device."""

    def __init__(self, device: torch.device, world: int) -> None:
        self._device = device
        self._world = world
        self._generator = torch.Generator(device)
        # On the device, so that no drawn number has to travel there.
        self._powers = torch.tensor([2.0**e for e in range(_LOWEST_POWER, 128)], device=device)
        self._specials = {
            dtype: torch.tensor(_special_bits(dtype), dtype=_BITS[dtype], device=device) for dtype in DTYPES
        }

    def rows(self, values: Values, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        """Rows [world, count] of ``dtype``: on all ranks the same for the same arguments."""
        generator = self._generator.manual_seed(seed)
        shape = (self._world, count)
        power = values.exponent - _LOWEST_POWER
        chosen = torch.randint(power - 3, power + 4, (self._world, 1), generator=generator, device=self._device)
        normal = torch.randn(shape, generator=generator, device=self._device)
        rows = (normal * self._powers[chosen]).to(dtype)
        if values.style == "normal" or count == 0:
            return rows
        specials = self._specials[dtype]
        if values.style == "tiny":
            specials = specials[:_TINY]
        one_in = {"sparse": 64, "columns": 2, "tiny": 1}[values.style] * len(specials)
        drawn_rows = 1 if values.style == "columns" else self._world
        drawn = torch.randint(one_in, (drawn_rows, -(-count // values.run)), generator=generator, device=self._device)
        choice = drawn.repeat_interleave(values.run, dim=1)[:, :count].expand(shape)
        special = specials[choice.clamp(max=len(specials) - 1)]
        return torch.where(choice < len(specials), special, bits(rows)).view(dtype)


_TINY = 6  # special values that are zero or subnormal; they come first


def _special_bits(dtype: torch.dtype) -> list[int]:
    info = torch.finfo(dtype)
    mantissa = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[dtype]
    sign, quiet = 1 << (info.bits - 1), 1 << (mantissa - 1)
    infinity = (sign - 1) >> mantissa << mantissa
    patterns = [
        sign,  # -0.0
        0,
        1,  # smallest subnormal
        sign | 1,
        (1 << mantissa) - 1,  # largest subnormal
        sign | quiet,
        1 << mantissa,  # smallest normal
        infinity - 1,  # largest finite
        sign | (infinity - 1),
        infinity,
        sign | infinity,
        infinity | quiet,
        infinity | 1,  # signalling NaN
        sign | infinity | quiet | 1,
        sign - 1,  # NaN, all bits but the sign
        2 * sign - 2,  # the NaN beside all ones
        2 * sign - 1,  # all ones
        2 * sign - 1,
    ]
    return [p - 2 * sign if p & sign else p for p in patterns]  # as signed integers


def bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return values.view(_BITS[values.dtype])


def rank_order_sum(rows: torch.Tensor) -> torch.Tensor:
    """The one right sum [count]: accumulated in fp32 in rank order, rounded once to the rows' dtype."""
    total = rows[0].to(torch.float32, copy=True)
    for row in rows[1:]:
        total += row
    return total.to(rows.dtype)


def differs(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """By element, whether the bits differ; NaNs are alike, since a GPU's and a CPU's differ."""
    return (bits(got) != bits(expected)) & ~(got.isnan() & expected.isnan())


def beyond_bound(got: torch.Tensor, rows: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
    """By element, whether a sum is further from the float64 sum than fp32 accumulation in any order and one rounding
    can bring it; with ``addend``, which is added to the rounded sum, and another rounding.

    Where magnitudes reach the largest finite value, sums in another precision may differ in kind (infinite or not):
    there only a missing NaN is wrong.
    """
    total = rows.double().sum(0)
    finite = magnitudes(rows)
    info = torch.finfo(got.dtype)
    bound = finite * (len(rows) * 2.0**-23) + total.abs() * (info.eps / 2) + info.smallest_normal * info.eps
    if addend is not None:
        total = total + addend.double()
        finite = finite + magnitudes(addend.unsqueeze(0))
        bound = bound * (1 + info.eps / 2) + total.abs() * (info.eps / 2) + info.smallest_normal * info.eps
    value = got.double()
    no_overflow = finite < 0.99 * info.max
    wrong_number = total.isfinite() & ~((value - total).abs() <= bound)
    wrong_infinity = total.isinf() & (value != total)
    return (total.isnan() & ~value.isnan()) | (no_overflow & (wrong_number | wrong_infinity))


def magnitudes(rows: torch.Tensor) -> torch.Tensor:
    """By element, the sum of the magnitudes of what is finite, in float64."""
    magnitude = rows.double().abs()
    return torch.where(magnitude.isinf(), 0.0, magnitude).sum(0)


def expect_sum(got: torch.Tensor, rows: torch.Tensor, what: str) -> None:
    """Synchronizes, and raises AssertionError unless ``got`` is the right sum."""
    expected = rank_order_sum(rows)
    wrong = differs(got, expected).nonzero().flatten().tolist()
    if wrong:
        raise AssertionError(
            f"{what}: {len(wrong)} of {got.numel()} elements are wrong, first at {describe(got, expected, wrong[:4])}"
        )


class Sums:
    """As ``expect_sum`` of many results, which follow each other closely: nothing synchronizes until `check`."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, torch.Tensor]] = []

    def expect(self, got: torch.Tensor, rows: torch.Tensor, what: str) -> None:
        self._pending.append((what, differs(got, rank_order_sum(rows)).sum()))

    def check(self) -> None:
        """Raises AssertionError unless all were right."""
        names = [what for what, _ in self._pending]
        wrong = torch.stack([number for _, number in self._pending]).tolist() if names else []
        self._pending.clear()
        found = [f"{what}: {number} elements are wrong" for what, number in zip(names, wrong, strict=True) if number]
        if found:
            raise AssertionError("; ".join(found))


def describe(got: torch.Tensor, expected: torch.Tensor, places: list[int]) -> str:
    """``[place] got bits, expected bits`` for people."""
    width = got.element_size() * 2
    mask = (1 << (got.element_size() * 8)) - 1

    def show(tensor: torch.Tensor, place: int) -> str:
        return f"{tensor[place].item()} (0x{int(bits(tensor)[place]) & mask:0{width}x})"

    return ", ".join(f"[{p}] {show(got, p)} instead of {show(expected, p)}" for p in places)
