"""What an all-reduce must return, and data that tells a right sum from a wrong one."""

from __future__ import annotations

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALGORITHMS = ("one_shot", "two_shot")
WORLDS = range(2, 9)

_INTEGER = {2: torch.int16, 4: torch.int32}
_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}


def bits(values: torch.Tensor) -> torch.Tensor:
    """The bit patterns of ``values``, as integers of the same width."""
    return values.view(_INTEGER[values.element_size()])


def from_bits(patterns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of ``dtype`` with the bit patterns ``patterns`` (unsigned, int64)."""
    half = 1 << (8 * dtype.itemsize - 1)
    signed = torch.where(patterns >= half, patterns - 2 * half, patterns)
    return signed.to(_INTEGER[dtype.itemsize]).view(dtype)


def contributions(world_size: int, count: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """What each rank puts in: different in every element of every rank, the same in every process.

    Magnitudes are spread, and in a quarter of the elements the large values of two ranks cancel, so that the sum shows
    in which order and precision it was made.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + count * 8191 + world_size) % 2**32)
    shape = (world_size, count)
    scale = torch.randint(-4, 5, shape, generator=generator)
    values = torch.ldexp(torch.randn(shape, generator=generator), scale)
    if world_size > 2:
        pair = torch.rand(shape, generator=generator).argsort(dim=0)[:2, : count // 4]
        large = torch.ldexp(torch.randn(count // 4, generator=generator).clamp(-3, 3), torch.tensor(13))
        values[:, : count // 4].scatter_(0, pair, torch.stack([large, -large]))
    return list(values.to(dtype).unbind())


def rank_order_sum(inputs: list[torch.Tensor]) -> torch.Tensor:
    """The promised sum: fp32 in rank order, rounded once; NaN is 0x7FFF (fp32: 0x7FFFFFFF), whatever went in."""
    total = inputs[0].float()
    for contribution in inputs[1:]:
        total = total + contribution.float()
    rounded = total.to(inputs[0].dtype)
    patterns = bits(rounded)
    patterns[total.isnan()] = torch.iinfo(patterns.dtype).max
    return rounded


def assert_bitwise_equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise AssertionError(f"{what}: {found.dtype} {found.shape}, expected {expected.dtype} {expected.shape}")
    wrong = (bits(found) != bits(expected)).flatten().nonzero().flatten()
    if len(wrong):
        first = int(wrong[0])
        shown = [f"{int(bits(t).flatten()[first]):#x} ({float(t.flatten()[first])})" for t in (found, expected)]
        raise AssertionError(
            f"{what}: {len(wrong)} of {found.numel()} elements are wrong; element {first} is {shown[0]}, not {shown[1]}"
        )


def assert_close_to_float64(found: torch.Tensor, inputs: list[torch.Tensor], what: str) -> None:
    """Checks the reference too: within the error bound of an fp32 sum that is rounded once."""
    exact = torch.stack([t.double() for t in inputs])
    fp32_error = (len(inputs) - 1) * 2.0**-24 * exact.abs().sum(0)
    rounding = torch.finfo(found.dtype).eps / 2 * exact.sum(0).abs() + torch.finfo(found.dtype).smallest_normal
    excess = (found.double() - exact.sum(0)).abs() - 1.01 * (fp32_error + rounding)
    if (excess > 0).any():
        raise AssertionError(f"{what}: off by {float(excess.max())} more than rounding explains")


def assert_is_sum(found: torch.Tensor, inputs: list[torch.Tensor], what: str) -> None:
    assert_bitwise_equal(found, rank_order_sum(inputs), what)
    assert_close_to_float64(found, inputs, what)


def special_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Bit patterns (unsigned, int64) at the edges of ``dtype``, with both signs.

    Zero, the smallest and the largest subnormal, the smallest normal, 1 and its neighbour, the largest finite,
    infinity, a signalling NaN, a quiet NaN, and the two highest patterns: with the sign, the highest is the sentinel
    and the other what the sender puts in its place.
    """
    mantissa = _MANTISSA_BITS[dtype]
    sign = 1 << (8 * dtype.itemsize - 1)
    infinity = sign - (1 << mantissa)
    one = int(bits(torch.ones(1, dtype=dtype)))
    positive = [0, 1, (1 << mantissa) - 1, 1 << mantissa, one, one + 1]
    positive += [infinity - 1, infinity, infinity + 1, infinity | 1 << (mantissa - 1), sign - 2, sign - 1]
    return torch.tensor(positive + [pattern | sign for pattern in positive])
