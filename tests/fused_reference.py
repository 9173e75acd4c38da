"""What an all-reduce + residual add + RMSNorm must return."""

from __future__ import annotations

import torch
from reference import WORLDS, assert_bitwise_equal, bits, contributions, from_bits, rank_order_sum, special_patterns

from llm_comm import Communicator

FUSED_DTYPES = (torch.bfloat16, torch.float16)
#: One type in every world. The other differs in how elements are read and rounded, for which it is all one how many
#: ranks there are.
TYPES_AND_WORLDS = [*((torch.bfloat16, world) for world in WORLDS), (torch.float16, 3), (torch.float16, 8)]
FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
GROUP_SIZE = 128
#: FP8 with a scale for each group of a row, by where scales lie; and the same with powers of two.
LAYOUTS = ("group", "group_column_major", "group_column_major_tma")
GROUPS = (*LAYOUTS, *(f"{layout}_ue8m0" for layout in LAYOUTS))
#: NVFP4 and MXFP8: elements of a row with a scale of one byte. "_linear": scales lie by rows.
BLOCKS = {"nvfp4": 16, "nvfp4_linear": 16, "mxfp8": 32, "mxfp8_linear": 32}
#: Magnitudes of FP4, by their codes.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST_E8M0 = 254
EPS = 1e-5


def canonical(values: torch.Tensor) -> torch.Tensor:
    """``values`` with one NaN, 0x7FFF, which is what GPU arithmetic returns."""
    patterns = bits(values.clone())
    patterns[values.isnan()] = torch.iinfo(patterns.dtype).max
    return patterns.view(values.dtype)


def new_residual_of(inputs: list[torch.Tensor], residual: torch.Tensor | None) -> torch.Tensor:
    """The promised sum, and torch's addition of the residual to it."""
    total = rank_order_sum(inputs)
    return total if residual is None else canonical(total + residual)


def exact_norm(new_residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_bias: float = 0.0) -> torch.Tensor:
    """In float64. Rows whose squares sum up to more than fp32 holds are zeros, as they are in the engines."""
    x = new_residual.double()
    squares = x.square().sum(-1, keepdim=True)
    factor = (squares / x.shape[-1] + eps).rsqrt()
    return x * torch.where(squares > torch.finfo(torch.float32).max, 0.0, factor) * (weight.double() + weight_bias)


def places(values: torch.Tensor) -> torch.Tensor:
    """The place of each value among all values of its dtype, as an integer: neighbours are one ulp apart."""
    patterns = bits(values).int()
    return torch.where(patterns < 0, -(patterns & 0x7FFF), patterns)


def assert_normed(found: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    """Within one ulp of the float64 norm, rounded; NaN where that is NaN."""
    expected = exact.to(found.dtype)
    if not torch.equal(found.isnan(), expected.isnan()):
        raise AssertionError(f"{what}: NaNs are at {found.isnan().nonzero()[:3]}, not {expected.isnan().nonzero()[:3]}")
    off = torch.where(expected.isnan(), 0, (places(found) - places(expected)).abs())
    if off.max() > 1:
        worst = int(off.argmax())
        values = float(found.flatten()[worst]), float(exact.flatten()[worst])
        raise AssertionError(f"{what}: element {worst} is {values[0]}, not {values[1]}: {int(off.max())} ulp off")


def quantized(normed: torch.Tensor, quantize: str, scale: torch.Tensor) -> torch.Tensor:
    """What vLLM's kernels make of the normed rows, except that a NaN stays one."""
    x = normed.float()
    if quantize in GROUPS:
        scale = scale.repeat_interleave(GROUP_SIZE, -1)
    scaled = x * (1 / scale.float()) if quantize == "static" else x / scale.float()
    return scaled.clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)


def magnitudes(values: torch.Tensor) -> torch.Tensor:
    """NaN has none."""
    return values.float().nan_to_num(0.0, torch.inf, -torch.inf).abs()


def row_scales(normed: torch.Tensor) -> torch.Tensor:
    """[..., 1]"""
    largest = magnitudes(normed).amax(-1, keepdim=True)
    return (largest / LARGEST_FP8).clamp(min=torch.tensor(1.0) / torch.tensor(LARGEST_FP8 * 512))


def group_scales(normed: torch.Tensor, ue8m0: bool) -> torch.Tensor:
    """[..., hidden / 128]: as vLLM's ``per_token_group_quant_fp8``."""
    scales = magnitudes(normed).unflatten(-1, (-1, GROUP_SIZE)).amax(-1).clamp(min=1e-10) / LARGEST_FP8
    # In double precision, where the logarithm of a power of two is a whole number, and of nothing else here.
    return scales.clamp(min=1e-10).double().log2().ceil().exp2().float() if ue8m0 else scales


def scales_of(normed: torch.Tensor, quantize: str) -> torch.Tensor:
    """That a call is to make of normed rows."""
    return group_scales(normed, quantize.endswith("_ue8m0")) if quantize in GROUPS else row_scales(normed)


def in_tiles(scales: torch.Tensor) -> torch.Tensor:
    """Scales by rows as the engines' matrix products take them: vLLM's ``swizzle_blockscale``."""
    rows, blocks = -(-len(scales) // 128) * 128, -(-scales.shape[1] // 4) * 4
    padded = torch.zeros(rows, blocks, dtype=torch.uint8)
    padded[: len(scales), : scales.shape[1]] = scales
    return padded.view(rows // 128, 4, 32, blocks // 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, blocks)


def fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest FP4 values, of two equally near ones the even code; 7 for NaN. uint8."""
    grid = torch.tensor(E2M1, dtype=torch.float64)
    magnitude = values.double().abs().clamp(max=E2M1[-1])
    lower = torch.searchsorted(grid, magnitude, right=True).clamp(max=7) - 1
    twice, between = 2 * magnitude, grid[lower] + grid[lower + 1]
    codes = lower + ((twice > between) | ((twice == between) & (lower % 2 == 1)))
    codes = codes + 8 * values.signbit()
    return torch.where(values.isnan(), 7, codes).to(torch.uint8)


def in_blocks(
    normed: torch.Tensor, quantize: str, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales by rows that FlashInfer's kernels make of normed rows [rows, hidden], as bytes."""
    blocks = normed.float().unflatten(-1, (-1, BLOCKS[quantize]))
    largest = blocks.nan_to_num(0.0, torch.inf, -torch.inf).abs().amax(-1)
    largest[blocks.isnan().all(-1)] = torch.nan
    if global_scale is None:
        mantissa, exponent = torch.frexp((largest / LARGEST_FP8).double())
        codes = (exponent - (mantissa == 0.5).int() + 127).clamp(0, LARGEST_E8M0)
        codes[largest == 0] = 0
        codes[largest.isinf()] = LARGEST_E8M0
        scale = (codes.double() - 127).exp2()
        codes[largest.isnan()] = 255
        values = (blocks.double() / scale[..., None]).clamp(-LARGEST_FP8, LARGEST_FP8).float().to(FP8)
        return values.view(torch.uint8).flatten(1), codes.to(torch.uint8)
    wanted = global_scale * (largest * torch.tensor(1 / 6))
    scales = wanted.clamp(max=LARGEST_FP8).to(FP8)
    factor = torch.where(scales.float() == 0, 0.0, global_scale / scales.float())
    low, high = fp4_codes(blocks * factor[..., None]).flatten(1).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4, scales.view(torch.uint8)


def rows_of(world: int, rows: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """What each rank puts in, [rows, hidden]."""
    return [row.view(rows, hidden) for row in contributions(world, rows * hidden, dtype, seed)]


def operands_of(rows: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual [rows, hidden] and a weight [hidden], the same in every process."""
    generator = torch.Generator().manual_seed(seed + 77)
    residual = torch.randn(rows, hidden, generator=generator) * 4
    weight = torch.randn(hidden, generator=generator)
    return residual.to(dtype), weight.to(dtype)


def special_rows(world: int, dtype: torch.dtype, hidden: int) -> list[torch.Tensor]:
    """Rows each of which holds one pair of special patterns on ranks 0 and 1, besides ordinary values."""
    patterns = special_patterns(dtype)
    pairs = torch.cartesian_prod(patterns, patterns)
    inputs = rows_of(world, len(pairs), hidden, dtype)
    for rank in (0, 1):
        column = torch.arange(len(pairs)) * 7 % hidden
        inputs[rank][torch.arange(len(pairs)), column] = from_bits(pairs[:, rank], dtype)
    return inputs


def check_call(
    comm: Communicator,
    inputs: list[torch.Tensor],
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    what: str,
    eps: float = EPS,
    weight_bias: float = 0.0,
) -> torch.Tensor:
    """One call without options; returns the normed rows."""
    expected = new_residual_of(inputs, residual)
    x = inputs[comm.rank].clone()
    before = None if residual is None else residual.clone()
    normed, new_residual = comm.all_reduce_add_rms_norm(x, residual, weight, eps, weight_bias=weight_bias)
    assert_bitwise_equal(canonical(new_residual), expected, f"{what}: the new residual")
    assert_normed(normed, exact_norm(new_residual, weight, eps, weight_bias), what)
    assert_bitwise_equal(x, inputs[comm.rank], f"{what}: the input")
    if residual is not None and before is not None:
        assert_bitwise_equal(residual, before, f"{what}: the residual")
    return normed
