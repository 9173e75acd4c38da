"""Patterns of ``fusion_pass.py``: nodes in vLLM's graphs, and the operators that replace them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import vllm.ir.ops
from torch._higher_order_ops import auto_functionalized
from vllm.compilation.passes.fusion.matcher_utils import MatcherQuantFP8
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

from llm_comm.integrations.vllm.operators import (
    EPS,
    LARGEST,
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_group_fp8,
    all_reduce_add_rms_norm_nvfp4,
    name_of,
)
from llm_comm.operations.fp8 import FP8, GROUP_SIZE

_VLLM_QUANTIZATION = torch.ops._C.per_token_group_fp8_quant.default


class Pattern(NamedTuple):
    """Pattern for torch's matcher: function to search for, replacement, and example arguments of both.

    The last argument of both functions is epsilon, which the examples leave out.
    """

    search: Callable[..., Any]
    replacement: Callable[..., Any]
    examples: list[torch.Tensor]
    #: Whether argument ``scale`` is the output buffer for scales of groups. Otherwise it is the scale of a static
    #: quantization, or the global scale of NVFP4.
    has_groups: bool = False
    #: Whether arguments ``output`` and ``output_scale`` are the output buffers of NVFP4.
    is_nvfp4: bool = False


def patterns(group: str, device: str | None) -> Iterator[Pattern]:
    """Yield all patterns, the larger ones first: the matcher takes the first that fits."""
    for weight_bias in (0.0, 1.0):
        yield from _patterns(group, device, weight_bias)


def _patterns(group: str, device: str | None, weight_bias: float) -> Iterator[Pattern]:
    """Yield the patterns of norms with one ``weight_bias``: 1 for norms of Gemma, 0 for others."""
    x, residual = (torch.empty(5, 16, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight = torch.empty(16, dtype=torch.bfloat16, device=device)
    quantize = MatcherQuantFP8(kFp8StaticTensorSym)
    scale = torch.empty(1, 1, device=device)

    def add_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        total = tensor_model_parallel_all_reduce(x)
        return vllm.ir.ops.fused_add_rms_norm(total, residual, _biased(weight, weight_bias), epsilon)

    def fused_add_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        return all_reduce_add_rms_norm(x, residual, weight, epsilon, weight_bias, None, group)

    def norm(x: Any, weight: Any, epsilon: float) -> Any:
        total = tensor_model_parallel_all_reduce(x)
        return vllm.ir.ops.rms_norm(total, _biased(weight, weight_bias), epsilon), total

    def fused_norm(x: Any, weight: Any, epsilon: float) -> Any:
        return all_reduce_add_rms_norm(x, None, weight, epsilon, weight_bias, None, group)

    def add_norm_quant(x: Any, residual: Any, weight: Any, scale: Any, epsilon: float) -> Any:
        normed, new_residual = add_norm(x, residual, weight, epsilon)
        return quantize(normed, scale)[0], new_residual

    def fused_add_norm_quant(x: Any, residual: Any, weight: Any, scale: Any, epsilon: float) -> Any:
        return all_reduce_add_rms_norm(x, residual, weight, epsilon, weight_bias, scale, group)

    def norm_quant(x: Any, weight: Any, scale: Any, epsilon: float) -> Any:
        normed, total = norm(x, weight, epsilon)
        return quantize(normed, scale)[0], total

    def fused_norm_quant(x: Any, weight: Any, scale: Any, epsilon: float) -> Any:
        return all_reduce_add_rms_norm(x, None, weight, epsilon, weight_bias, scale, group)

    yield from _group_patterns(group, weight_bias, x, residual, weight)
    if hasattr(torch.ops._C, "scaled_fp4_quant") and hasattr(torch.ops._C.scaled_fp4_quant, "out"):
        yield from _nvfp4_patterns(group, weight_bias, [x, residual, weight, scale])
    # Patterns with ``_first_of`` match graphs in which the new residual is not used, as after the last layer.
    yield Pattern(add_norm_quant, fused_add_norm_quant, [x, residual, weight, scale])
    yield Pattern(_first_of(add_norm_quant), _first_of(fused_add_norm_quant), [x, residual, weight, scale])
    yield Pattern(norm_quant, fused_norm_quant, [x, weight, scale])
    yield Pattern(add_norm, fused_add_norm, [x, residual, weight])
    yield Pattern(_first_of(add_norm), _first_of(fused_add_norm), [x, residual, weight])
    yield Pattern(norm, fused_norm, [x, weight])


def _biased(weight: Any, weight_bias: float) -> Any:
    """Return the weights as vLLM passes them to its norm: unchanged, or with GemmaRMSNorm's addend."""
    return weight if weight_bias == 0 else weight.float() + weight_bias


def _group_patterns(
    group: str, weight_bias: float, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> Iterator[Pattern]:
    """Yield the patterns with FP8 quantization by groups, for each layout of scales that vLLM's layers use.

    The buffer for scales is an argument, as in vLLM's own patterns (``rms_quant_fusion.py``). So a pattern matches
    however the buffer was allocated; the operator returns a new tensor of scales in its place.
    """
    scale = torch.empty(1, 1, device=x.device)
    for by_columns, for_tma in ((False, False), (True, False), (True, True)):
        for ue8m0 in (False, True):
            name = name_of(by_columns, for_tma, ue8m0)
            switches = {
                "scale_ue8m0": ue8m0,
                "dummy_is_scale_transposed": by_columns,
                "dummy_is_tma_aligned": for_tma,
            }
            yield from _patterns_of_groups(group, weight_bias, name, switches, [x, residual, weight, scale])


def _patterns_of_groups(
    group: str, weight_bias: float, name: str, switches: dict[str, bool], examples: list[torch.Tensor]
) -> Iterator[Pattern]:
    def quantize(normed: Any, scale: Any) -> tuple[Any, Any]:
        _, fp8, scales = auto_functionalized(  # type: ignore[misc]
            _VLLM_QUANTIZATION,
            input=normed,
            output_q=torch.empty(normed.shape, device=normed.device, dtype=FP8),
            output_s=scale,
            group_size=GROUP_SIZE,
            eps=EPS,
            fp8_min=-LARGEST,
            fp8_max=LARGEST,
            **switches,
        )
        return fp8, scales

    def add_norm(x: Any, residual: Any, weight: Any, scale: Any, epsilon: float) -> Any:
        total = tensor_model_parallel_all_reduce(x)
        normed, new_residual = vllm.ir.ops.fused_add_rms_norm(total, residual, _biased(weight, weight_bias), epsilon)
        return *quantize(normed, scale), new_residual

    def fused_add_norm(x: Any, residual: Any, weight: Any, scale: Any, epsilon: float) -> Any:
        fp8, new_residual, scales = all_reduce_add_rms_norm_group_fp8(
            x, residual, weight, epsilon, weight_bias, name, group
        )
        return fp8, scales, new_residual

    def norm(x: Any, weight: Any, scale: Any, epsilon: float) -> Any:
        total = tensor_model_parallel_all_reduce(x)
        return *quantize(vllm.ir.ops.rms_norm(total, _biased(weight, weight_bias), epsilon), scale), total

    def fused_norm(x: Any, weight: Any, scale: Any, epsilon: float) -> Any:
        fp8, total, scales = all_reduce_add_rms_norm_group_fp8(x, None, weight, epsilon, weight_bias, name, group)
        return fp8, scales, total

    x, _, weight, scale = examples
    yield Pattern(add_norm, fused_add_norm, examples, has_groups=True)
    yield Pattern(_but_last_of(add_norm), _but_last_of(fused_add_norm), examples, has_groups=True)
    yield Pattern(norm, fused_norm, [x, weight, scale], has_groups=True)


def _nvfp4_patterns(group: str, weight_bias: float, examples: list[torch.Tensor]) -> Iterator[Pattern]:
    """Yield the patterns with NVFP4 quantization, those of vLLM's ``AllReduceFusedAddRMSNormStaticQuantNVFP4Pattern``.

    Both buffers are arguments, so a pattern matches however they were allocated. The operator returns new tensors.
    """

    def quantize(normed: Any, scale: Any, output: Any, output_scale: Any) -> tuple[Any, Any]:
        _, packed, scales = auto_functionalized(  # type: ignore[misc]
            torch.ops._C.scaled_fp4_quant.out,
            input=normed,
            input_scale=scale,
            is_sf_swizzled_layout=True,
            output=output,
            output_scale=output_scale,
        )
        return packed, scales

    def add_norm(x: Any, residual: Any, weight: Any, scale: Any, output: Any, output_scale: Any, epsilon: float) -> Any:
        total = tensor_model_parallel_all_reduce(x)
        normed, new_residual = vllm.ir.ops.fused_add_rms_norm(total, residual, _biased(weight, weight_bias), epsilon)
        return *quantize(normed, scale, output, output_scale), new_residual

    def fused_add_norm(
        x: Any, residual: Any, weight: Any, scale: Any, output: Any, output_scale: Any, epsilon: float
    ) -> Any:
        packed, new_residual, scales = all_reduce_add_rms_norm_nvfp4(
            x, residual, weight, epsilon, weight_bias, scale, group
        )
        return packed, scales, new_residual

    def norm(x: Any, weight: Any, scale: Any, output: Any, output_scale: Any, epsilon: float) -> Any:
        total = tensor_model_parallel_all_reduce(x)
        normed = vllm.ir.ops.rms_norm(total, _biased(weight, weight_bias), epsilon)
        return *quantize(normed, scale, output, output_scale), total

    def fused_norm(x: Any, weight: Any, scale: Any, output: Any, output_scale: Any, epsilon: float) -> Any:
        packed, total, scales = all_reduce_add_rms_norm_nvfp4(x, None, weight, epsilon, weight_bias, scale, group)
        return packed, scales, total

    x, residual, weight, scale = examples
    buffers = [
        torch.empty(5, 8, dtype=torch.uint8, device=x.device),
        torch.empty(128, 1, dtype=torch.int32, device=x.device),
    ]
    whole, without = [x, residual, weight, scale, *buffers], [x, weight, scale, *buffers]
    yield Pattern(add_norm, fused_add_norm, whole, is_nvfp4=True)
    yield Pattern(_but_last_of(add_norm), _but_last_of(fused_add_norm), whole, is_nvfp4=True)
    yield Pattern(norm, fused_norm, without, is_nvfp4=True)


def _but_last_of(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # the matcher reads the names of the arguments
    def but_last(*arguments: Any) -> Any:
        return function(*arguments)[:-1]

    return but_last


def _first_of(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # the matcher reads the names of the arguments
    def first(*arguments: Any) -> Any:
        return function(*arguments)[0]

    return first
