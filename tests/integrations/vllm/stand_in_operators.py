"""Stands in for vLLM's compiled operators: registers those that its compiler passes name.

The schemas are those of vLLM 0.26. What llm_comm calls computes, on CPU tensors; the rest only has its name.
"""

import torch

SCHEMAS = (
    "cutlass_group_gemm_supported(int cuda_device_capability) -> bool",
    "cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()",
    "cutlass_scaled_mm_supports_block_fp8(int cuda_device_capability) -> bool",
    "cutlass_scaled_mm_supports_fp8(int cuda_device_capability) -> bool",
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
    "dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()",
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
    "fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, Tensor weight, Tensor scale, "
    "float epsilon) -> ()",
    "fused_qk_norm_rope(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, float eps, "
    "Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, Tensor position_ids, "
    "int forced_token_heads_per_warp=-1) -> ()",
    "gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()",
    "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
    "float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()",
    "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
    "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, "
    "Tensor? scale_ub, Tensor!? residual) -> ()",
    "rms_norm_per_block_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, "
    "Tensor? scale_ub, Tensor!? residual, int group_size, bool is_scale_transposed) -> ()",
    "rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()",
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, "
    "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
    "scaled_fp4_quant(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout) -> (Tensor, Tensor)",
    "scaled_fp4_quant.out(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout, *, Tensor(a!) output, "
    "Tensor(b!) output_scale) -> ()",
    "silu_and_mul(Tensor! result, Tensor input) -> ()",
    "silu_and_mul_per_block_quant(Tensor! out, Tensor input, Tensor! scales, int group_size, Tensor? scale_ub=None, "
    "bool is_scale_transposed=False) -> ()",
    "silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale) -> ()",
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
)


def rms_norm(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    values = x.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon)
    result.copy_(values if weight is None else values * weight.float())


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)


def static_scaled_fp8_quant(
    result: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, group_shape: list[int] | None = None
) -> None:
    largest = torch.finfo(result.dtype).max
    result.copy_((x.float() / scale).clamp(-largest, largest).to(result.dtype))


def per_token_group_fp8_quant(
    x: torch.Tensor,
    output_q: torch.Tensor,
    output_s: torch.Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool,
    dummy_is_scale_transposed: bool,
    dummy_is_tma_aligned: bool,
) -> None:
    groups = x.float().unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1).clamp(min=eps) / fp8_max
    if scale_ue8m0:
        scales = scales.log2().ceil().exp2()
    output_s.copy_(scales)
    output_q.copy_((groups / scales.unsqueeze(-1)).clamp(fp8_min, fp8_max).flatten(-2).to(output_q.dtype))


def scaled_fp4_quant(
    x: torch.Tensor,
    input_scale: torch.Tensor,
    is_sf_swizzled_layout: bool,
    *,
    output: torch.Tensor,
    output_scale: torch.Tensor,
) -> None:
    """Rounds halves to even codes. Scales lie as in ``swizzle_blockscale``; padding is zero."""
    assert is_sf_swizzled_layout
    blocks = x.float().unflatten(-1, (-1, 16))
    scales = (input_scale * blocks.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    scaled = blocks * (input_scale / scales.float()).nan_to_num(0, 0, 0).unsqueeze(-1)
    magnitudes = scaled.abs()
    codes = sum((magnitudes > half).int() for half in (0.25, 1.25, 2.5, 5.0))
    codes = codes + sum((magnitudes >= half).int() for half in (0.75, 1.75, 3.5))
    low, high = (codes + 8 * scaled.signbit()).to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
    output.zero_()[:, : low.shape[1]] = low | high << 4
    rows, columns = len(output_scale), 4 * output_scale.shape[1]
    padded = torch.zeros(rows, columns, dtype=torch.uint8)
    padded[: len(x), : scales.shape[1]] = scales.view(torch.uint8)
    tiles = padded.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    output_scale.copy_(tiles.reshape(rows, columns).view(torch.int32))


def rms_norm_static_fp8_quant(
    result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, epsilon: float
) -> None:
    normed = torch.empty_like(x)
    rms_norm(normed, x, weight, epsilon)
    static_scaled_fp8_quant(result, normed, scale)


def silu_and_mul(result: torch.Tensor, x: torch.Tensor) -> None:
    """Rounds silu before it multiplies, as vLLM's kernel does."""
    gate, up = x.chunk(2, -1)
    result.copy_(torch.nn.functional.silu(gate) * up)


def gelu_tanh_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = x.chunk(2, -1)
    out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


def cutlass_scaled_mm(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    y = a.float() @ b.float() * b_scales.view(1, -1) * a_scales.view(-1, 1)
    out.copy_(y if bias is None else y + bias.float())


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    assert (rope_dim_offset, inverse) == (0, False)
    cos, sin = cos_sin_cache[positions].unsqueeze(-2).chunk(2, -1)
    for x in (query, key):
        if x is None:
            continue
        rotated = x.view(len(positions), -1, head_size)[..., : cos_sin_cache.shape[1]]
        one, other = rotated.chunk(2, -1) if is_neox else (rotated[..., ::2], rotated[..., 1::2])
        first, second = one * cos - other * sin, other * cos + one * sin
        one.copy_(first)
        other.copy_(second)


def no(cuda_device_capability: int) -> bool:
    return False


library = torch.library.Library("_C", "DEF")
for schema in SCHEMAS:
    library.define(schema)
KERNELS = (
    cutlass_scaled_mm,
    gelu_tanh_and_mul,
    rms_norm,
    fused_add_rms_norm,
    per_token_group_fp8_quant,
    static_scaled_fp8_quant,
    rms_norm_static_fp8_quant,
    rotary_embedding,
    silu_and_mul,
)
for kernel in KERNELS:
    library.impl(kernel.__name__, kernel, "CPU")
library.impl("scaled_fp4_quant.out", scaled_fp4_quant, "CPU")
for schema in SCHEMAS:
    if schema.endswith("-> bool"):
        library.impl(schema.partition("(")[0], no, "CompositeExplicitAutograd")
