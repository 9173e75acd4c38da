"""Bit-exact reference of the quantized all-reduce ("wire"): formats, blocks, and the sum that every rank returns.

A message is a flat tensor. ``block`` consecutive elements share one fp32 scale. Rank ``k`` owns slice ``k`` of the
message and adds the contributions of all ranks to its slice. Steps of an all-reduce:

1. Each rank quantizes its contribution to the slices of other ranks and sends codes and scales to their owners.
2. The owner dequantizes them, takes its own contribution unquantized, and adds all in fp32 in rank order.
3. The owner quantizes the fp32 sum and sends codes and scales to all ranks.
4. Every rank, the owner included, returns the dequantized sum, rounded to the dtype of the message.

The fused all-reduce + RMSNorm sums each tile of whole rows as a message of its own (``quantized_rows``).

All functions accept tensors of CPUs and GPUs, and give equal bits on both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Elements that share a scale in the kernels (``kQuantizedBlock`` of ``csrc/algorithms/quantized.cuh``).
KERNEL_BLOCK = 64
#: Smallest scale: the smallest normal fp32, so that its inverse is finite.
SMALLEST_SCALE = 2.0**-126


@dataclass(frozen=True)
class WireFormat:
    """Format of a code of 8 bits.

    Args:
        name: Name of the format.
        dtype: Dtype of the codes.
        largest: Largest code value, ``qmax``. In an escape block this value means infinity.
        escape_largest: Largest code value of finite elements in a block that holds an infinity or NaN.
    """

    name: str
    dtype: torch.dtype
    largest: float
    escape_largest: float


FORMATS = {
    "e4m3": WireFormat("e4m3", torch.float8_e4m3fn, 448.0, 416.0),
    "e5m2": WireFormat("e5m2", torch.float8_e5m2, 57344.0, 49152.0),
    "int8": WireFormat("int8", torch.int8, 127.0, 126.0),
}
#: Name of the format, by value of option ``wire``.
FORMAT_OF_WIRE = {"fp8": "e4m3", "int8": "int8"}
#: int8 code of NaN. The other formats use their own NaN.
INT8_NAN = -128


@dataclass(frozen=True)
class Quantized:
    """Codes and scales of one message: what a rank sends.

    Args:
        codes: Codes in the dtype of the format: [count].
        scales: fp32 scale of each block, negative for an escape block: [blocks].
    """

    codes: Tensor
    scales: Tensor


def scale_factor(largest: float) -> float:
    """Return the largest fp32 that is at most ``1 / largest``."""
    factor = torch.tensor(1.0 / largest, dtype=torch.float32)
    # A product of an fp32 and a code value is exact in Python's floats.
    if float(factor) * largest > 1.0:
        factor = torch.nextafter(factor, torch.zeros_like(factor))
    return float(factor)


def quantize(x: Tensor, wire: str, block: int) -> Quantized:
    """Quantize a flat tensor. The last block may be shorter.

    A block that holds an infinity or NaN is an escape block: its scale is negative, the largest code value means
    infinity, and finite elements use the code values below.

    Args:
        x: Values, converted to fp32 first: [count].
        wire: Name of the format: ``e4m3``, ``e5m2`` or ``int8``.
        block: Elements that share a scale.
    """
    wire_format = FORMATS[wire]
    values = _blocks(x.float(), block)
    finite = values.isfinite()
    escape = ~finite.all(dim=1, keepdim=True)
    amax = torch.where(finite, values.abs(), 0.0).amax(dim=1, keepdim=True)
    plain_scale, escape_scale = (
        (amax * scale_factor(largest)).clamp_min(SMALLEST_SCALE)
        for largest in (wire_format.largest, wire_format.escape_largest)
    )
    scale = torch.where(escape, escape_scale, plain_scale)
    limit = torch.where(escape, wire_format.escape_largest, wire_format.largest)
    scaled = torch.minimum(torch.maximum(values * scale.reciprocal(), -limit), limit)
    # The clamps turn infinities into the limit, which is not their code, and keep NaN.
    scaled = torch.where(values.isinf(), values.sign() * wire_format.largest, scaled)
    if wire_format.dtype == torch.int8:
        codes = torch.where(values.isnan(), float(INT8_NAN), scaled.round()).to(torch.int8)
    else:
        codes = scaled.to(wire_format.dtype)
        codes = torch.where(values.isnan(), 0x7F, codes.view(torch.uint8)).to(torch.uint8).view(wire_format.dtype)
    return Quantized(codes.flatten()[: x.numel()], torch.where(escape, -scale, scale).flatten())


def dequantize(quantized: Quantized, wire: str, block: int) -> Tensor:
    """Return the fp32 values of codes: [count]."""
    wire_format = FORMATS[wire]
    count = quantized.codes.numel()
    codes = _blocks(quantized.codes.float(), block)
    scales = quantized.scales.unsqueeze(1)
    values = codes * scales.abs()
    top = (scales < 0) & (codes.abs() == wire_format.largest)
    values = torch.where(top, codes.sign() * math.inf, values)
    if wire_format.dtype == torch.int8:
        values = torch.where(codes == INT8_NAN, math.nan, values)
    return values.flatten()[:count]


def slice_elements(count: int, world: int, block: int) -> int:
    """Return the elements of a slice, whole blocks. The last slices of a message may be shorter, or empty."""
    return -(-count // (world * block)) * block


def quantized_sum(
    contributions: Sequence[Tensor] | Tensor, wire: str, block: int, elements_of_slice: int | None = None
) -> Tensor:
    """Return the fp32 sums that owners compute, before they quantize them: [count].

    Args:
        contributions: Flat or shaped tensors of the ranks in rank order, of one dtype: bf16, fp16 or fp32.
        wire: Name of the format: ``e4m3``, ``e5m2`` or ``int8``.
        block: Elements that share a scale.
        elements_of_slice: Elements that a rank adds, whole blocks. None: ``slice_elements`` of the message.
    """
    world, count = len(contributions), contributions[0].numel()
    if elements_of_slice is None:
        elements_of_slice = slice_elements(count, world, block)
    owner = torch.arange(count, device=contributions[0].device) // max(elements_of_slice, 1)
    return _sum_of_owners(contributions, owner, wire, block)


def quantized_all_reduce(
    contributions: Sequence[Tensor] | Tensor,
    wire: str,
    block: int = KERNEL_BLOCK,
    elements_of_slice: int | None = None,
) -> Tensor:
    """Return what every rank returns, in shape and dtype of a contribution. See ``quantized_sum`` for arguments."""
    total = quantized_sum(contributions, wire, block, elements_of_slice)
    return _quantize_and_back(total, wire, block).to(contributions[0].dtype).view(contributions[0].shape)


def quantized_rows(
    contributions: Sequence[Tensor] | Tensor, wire: str, elements_of_slice: int, block: int = KERNEL_BLOCK
) -> Tensor:
    """Return the sums that the fused all-reduce + RMSNorm norms, in shape and dtype of a contribution.

    A tile has as many whole rows as all ranks add elements of it, at least one. Each tile is summed as a message of its
    own, and the last one may have fewer rows.

    Args:
        contributions: Tensors of the ranks in rank order, of one dtype: [..., hidden].
        wire: Name of the format: ``e4m3``, ``e5m2`` or ``int8``.
        elements_of_slice: Elements of a tile that a rank adds, whole blocks: 8 for each of the plan's ``tile_lines``.
        block: Elements that share a scale.
    """
    world, hidden, count = len(contributions), contributions[0].shape[-1], contributions[0].numel()
    if count == 0:
        return contributions[0].clone()
    of_tile = max(elements_of_slice * world // hidden, 1) * hidden
    # Zeros fill the last block of each tile and do not change its scale.
    of_padded = -(-of_tile // block) * block
    tiles = -(-count // of_tile)

    def in_tiles(x: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(x.flatten(), (0, tiles * of_tile - count)).view(tiles, of_tile)
        return torch.nn.functional.pad(rows, (0, of_padded - of_tile)).flatten()

    owner = (torch.arange(of_padded, device=contributions[0].device) // elements_of_slice).repeat(tiles)
    total = _sum_of_owners([in_tiles(x) for x in contributions], owner, wire, block)
    result = _quantize_and_back(total, wire, block).view(tiles, of_padded)[:, :of_tile].flatten()[:count]
    return result.to(contributions[0].dtype).view(contributions[0].shape)


def quantized_shard(
    contributions: Sequence[Tensor] | Tensor, owner: int, wire: str, block: int = KERNEL_BLOCK
) -> Tensor:
    """Return what a reduce-scatter returns on rank ``owner``, in shape and dtype of a contribution.

    Args:
        contributions: Of each rank, its contribution to the owner's shard. See ``quantized_sum``.
        owner: Rank that adds the shard, its own contribution unquantized.
        wire: Name of the format: ``e4m3``, ``e5m2`` or ``int8``.
        block: Elements that share a scale.
    """
    of_owner = torch.full((contributions[0].numel(),), owner, device=contributions[0].device)
    total = _sum_of_owners(contributions, of_owner, wire, block)
    return total.to(contributions[0].dtype).view(contributions[0].shape)


def _sum_of_owners(contributions: Sequence[Tensor] | Tensor, owner: Tensor, wire: str, block: int) -> Tensor:
    """Return the fp32 sums of each element, whose ``owner`` takes its own contribution unquantized: [count]."""

    def addend(rank: int) -> Tensor:
        own = contributions[rank].flatten().float()
        return torch.where(owner == rank, own, _quantize_and_back(own, wire, block))

    total = addend(0)  # a sum that starts from 0 would turn -0 into +0
    for rank in range(1, len(contributions)):
        total = total + addend(rank)
    return total


def _quantize_and_back(x: Tensor, wire: str, block: int) -> Tensor:
    return dequantize(quantize(x, wire, block), wire, block)


def _blocks(x: Tensor, block: int) -> Tensor:
    """Return ``x`` as rows of ``block`` elements. Zeros fill the last row and do not change its scale."""
    return torch.nn.functional.pad(x.flatten(), (0, -x.numel() % block)).view(-1, block)
