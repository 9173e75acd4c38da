"""Operators in vLLM's compiled graphs that replace all-reduces with the RMSNorms after them (``fusion_pass.py``), and
linear layers (``linear_passes.py``).

Processes load compiled graphs from disk without running the passes. So this module defines the operators, apart from
the passes, and is imported when a communicator is made. The operators are functional and opaque to inductor. A graph
serves many batch sizes, and llm_comm declines the largest. So an operator decides at run time, by the shape of the
batch, between llm_comm and the operations that the graph had before. llm_comm declines no norm in batch-invariant mode
(``Config.batch_invariant_norm``).

Operands of a linear layer, by the vLLM operator that they come from:

- bf16, fp16: ``x`` [..., inputs], ``weight`` [outputs, inputs], no scales.
- ``cutlass_scaled_mm``: FP8. ``weight`` [inputs, outputs] is the transpose of a contiguous tensor. ``x_scale`` has one
  element or is [tokens, 1]. ``weight_scale`` has one element, or one for each output.
- ``fp8_gemm_nt_op``: FP8 with block scales. ``weight`` [outputs, inputs], ``x_scale`` [tokens, inputs / 128],
  ``weight_scale`` [outputs / 128, rounded up, inputs / 128].
- ``dynamic_flashinfer_deepgemm_blockscale_gemm``: as before, but ``x`` is bf16 and ``x_scale`` None.

Scales are fp32. ``bias`` is [outputs], of the dtype of the result, or None. llm_comm reads weight, weight scale and
bias before earlier kernels of the stream have ended, so no kernel of the graph may write them. Other ranks take no part
in a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import vllm.ir.ops
from vllm import _custom_ops
from vllm.distributed import parallel_state
from vllm.utils import deep_gemm

from llm_comm.operations import fp8
from llm_comm.operations.fp8 import FP8

_Tensor = torch.Tensor
_OPTIONAL = "Tensor? bias, Tensor? x_scale, Tensor? weight_scale"

#: Arguments of vLLM's quantization by groups of 128, as its layers pass them. llm_comm computes with the same values.
EPS = 1e-10
LARGEST = 448.0

#: Torch unregisters the operators when this object is freed.
_library = torch.library.Library("llm_comm_vllm", "DEF")


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator of vLLM's graphs.

    Args:
        schema: Torch schema, starting with the name.
        function: Implementation for CPU and CUDA.
        fake: Implementation for fake tensors: returns results of the right shapes and dtypes.

    Returns:
        The operator overload, as nodes of graphs have it.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    for device in ("CPU", "CUDA"):
        _library.impl(name, function, device)
    torch.library.register_fake(f"llm_comm_vllm::{name}", fake, lib=_library)
    return getattr(torch.ops.llm_comm_vllm, name).default


# ---- All-reduce and RMSNorm -----------------------------------------------------------------------------------------


def _run(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    epsilon: float,
    weight_bias: float,
    scale: _Tensor | None,
    group_name: str,
) -> tuple[_Tensor, _Tensor]:
    """Compute all-reduce, residual add and RMSNorm; return the normed rows and the new residual.

    Args:
        x: [..., hidden], this rank's addend.
        residual: Shape and dtype of ``x``, the same on all ranks; None adds nothing.
        weight: [hidden], of the dtype of ``x``.
        epsilon: Added to the mean of squares.
        weight_bias: Added to the weights in fp32: 1 for Gemma's norms, 0 for others.
        scale: One fp32 element. Normed rows are divided by it and rounded to FP8 e4m3. None: they have the dtype of
            ``x``.
        group_name: vLLM's name of the group.

    Raises:
        ValueError: The process has no group of this name, or it was destroyed.
    """
    group, quantize = find_group(group_name), None if scale is None else "static"
    result = _fused(group, x, residual, weight, epsilon, weight_bias, quantize=quantize, scale=scale)
    if result is None:
        return run_one_by_one(group, x, residual, weight, epsilon, weight_bias, scale)
    return result  # type: ignore[no-any-return]


def _fused(group: Any, *operands: Any, **quantization: Any) -> Any:
    """Run llm_comm's fused kernel; None if it declines, or if the group has no communicator of llm_comm."""
    fused = getattr(group.device_communicator, "all_reduce_add_rms_norm", None)
    return None if fused is None else fused(*operands, **quantization)


def find_group(name: str) -> Any:
    """Return vLLM's group of a name, from the registry that torch.ops.vllm.all_reduce uses.

    Raises:
        ValueError: The process has no group of this name, or it was destroyed.
    """
    reference = parallel_state._groups.get(name)
    group = None if reference is None else reference()
    if group is None:
        raise ValueError(f"there is no group {name!r} in this process")
    return group


def run_one_by_one(
    group: Any,
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    epsilon: float,
    weight_bias: float,
    scale: _Tensor | None,
) -> tuple[_Tensor, _Tensor]:
    """Run the operations that the graph had before: the group's all-reduce, vLLM's norm, and its quantization."""
    total = group._all_reduce_out_place(x)
    if weight_bias != 0:  # as GemmaRMSNorm
        weight = weight.float() + weight_bias
    if residual is None:
        normed, new_residual = _run_ir(vllm.ir.ops.rms_norm, total, weight, epsilon), total
    else:
        normed, new_residual = _run_ir(vllm.ir.ops.fused_add_rms_norm, total, residual, weight, epsilon)
    if scale is not None:
        normed, _ = _custom_ops.scaled_fp8_quant(normed, scale, group_shape=(-1, -1))
    return normed, new_residual


def _run_ir(op: Any, total: _Tensor, *arguments: Any) -> Any:
    """Run an operator of vLLM's IR with vLLM's CUDA kernel, if the kernel supports the arguments.

    In compiled graphs vLLM prefers "native", torch operators that inductor fuses into one kernel. Called eagerly, as
    here, each of them would be a kernel.
    """
    kernel = op.impls.get("vllm_c")
    if kernel is None or not kernel.supported or not kernel.supports_args(total, *arguments):
        return op(total, *arguments)
    if kernel.inplace:  # it may overwrite ``total``, but not the residual, which the graph owns
        arguments = (arguments[0].clone(), *arguments[1:])
    return kernel.impl_fn(total, *arguments)


def _fake_norm(x: _Tensor, *others: Any) -> tuple[_Tensor, _Tensor]:
    *_, scale, _ = others
    return torch.empty_like(x, dtype=x.dtype if scale is None else FP8), torch.empty_like(x)


def name_of(by_columns: bool, for_tma: bool, ue8m0: bool) -> str:
    """Return llm_comm's ``quantize`` mode for these switches of vLLM's quantization by groups."""
    layout = "_column_major_tma" if for_tma else "_column_major"
    return f"group{layout if by_columns else ''}{'_ue8m0' if ue8m0 else ''}"


def _run_by_groups(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    epsilon: float,
    weight_bias: float,
    quantize: str,
    group_name: str,
) -> tuple[_Tensor, _Tensor, _Tensor]:
    """Compute all-reduce, residual add and RMSNorm with FP8 rows; return the rows, the new residual and the scales.

    Args:
        x: [tokens, hidden], this rank's addend.
        residual, weight, epsilon, weight_bias, group_name: As in ``_run``.
        quantize: Mode of ``Communicator.all_reduce_add_rms_norm`` with a scale for each group of 128 elements.

    Raises:
        ValueError: The process has no group of this name, or it was destroyed.
    """
    group = find_group(group_name)
    result = _fused(group, x, residual, weight, epsilon, weight_bias, quantize=quantize)
    if result is None:  # the operations that the graph had before
        normed, new_residual = run_one_by_one(group, x, residual, weight, epsilon, weight_bias, None)
        return _quantize(normed, quantize, new_residual)
    return result  # type: ignore[no-any-return]


def _quantize(normed: _Tensor, quantize: str, new_residual: _Tensor) -> tuple[_Tensor, _Tensor, _Tensor]:
    """Quantize by vLLM's operator; return the FP8 rows, ``new_residual`` as given, and the scales."""
    quantized = torch.empty_like(normed, dtype=FP8)
    scales = fp8.empty_scales(quantize, normed)
    switches = (quantize.endswith("_ue8m0"), "column_major" in quantize, "tma" in quantize)
    torch.ops._C.per_token_group_fp8_quant.default(
        normed, quantized, scales, fp8.GROUP_SIZE, EPS, -LARGEST, LARGEST, *switches
    )
    return quantized, new_residual, scales


def _fake_by_groups(x: _Tensor, *others: Any) -> tuple[_Tensor, _Tensor, _Tensor]:
    *_, quantize, _ = others
    return torch.empty_like(x, dtype=FP8), torch.empty_like(x), fp8.empty_scales(quantize, x)


def _run_nvfp4(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    epsilon: float,
    weight_bias: float,
    global_scale: _Tensor,
    group_name: str,
) -> tuple[_Tensor, _Tensor, _Tensor]:
    """Compute all-reduce, residual add and RMSNorm with NVFP4 rows; return the rows, the new residual and the scales.

    Rows are uint8, two values to a byte. Scales are those of vLLM's operator: tiles of 128x4, four in an int32.

    Args:
        x: [tokens, hidden], this rank's addend.
        residual, weight, epsilon, weight_bias, group_name: As in ``_run``.
        global_scale: One fp32 element, ``input_scale`` of vLLM's operator.

    Raises:
        ValueError: The process has no group of this name, or it was destroyed.
    """
    group = find_group(group_name)
    options = {"quantize": "nvfp4", "global_scale": global_scale}
    result = _fused(group, x, residual, weight, epsilon, weight_bias, **options)
    if result is not None:
        packed, new_residual, scales = result
        return packed, new_residual, scales.view(torch.int32)
    # the operations that the graph had before
    normed, new_residual = run_one_by_one(group, x, residual, weight, epsilon, weight_bias, None)
    packed, scales = _custom_ops.scaled_fp4_quant(normed, global_scale)
    return packed, new_residual, scales.view(torch.int32)


def _fake_nvfp4(x: _Tensor, *others: Any) -> tuple[_Tensor, _Tensor, _Tensor]:
    return fp8.empty_normed("nvfp4", x), torch.empty_like(x), fp8.empty_scales("nvfp4", x).view(torch.int32)


# ---- Linear layers --------------------------------------------------------------------------------------------------


class _Operands(NamedTuple):
    """Operands of a linear layer, in the order of the operators' arguments.

    Attributes:
        x, weight, bias, x_scale, weight_scale: As in the docstring of this module.
        out_dtype: Dtype of the result of FP8 operands; None: that of ``x``.
    """

    x: _Tensor
    weight: _Tensor
    bias: _Tensor | None
    x_scale: _Tensor | None
    weight_scale: _Tensor | None
    out_dtype: torch.dtype | None

    @property
    def has_blocks(self) -> bool:
        """True if the scales are block scales: their weight is not transposed."""
        return self.weight_scale is not None and self.weight.stride(-1) == 1

    def is_declined(self, communicator: Any, silu_and_mul: bool) -> bool:
        """Return whether llm_comm would decline a batch whose x is not quantized yet, so that quantizing is wasted."""
        if not self.has_blocks or self.x_scale is not None:
            return False
        rows, inputs = self.weight.shape
        outputs = rows // 2 if silu_and_mul else rows
        return not communicator.prefers_blocks(outputs, inputs, self.x.shape[:-1].numel(), silu_and_mul)

    def as_ours(self) -> tuple[_Tensor, _Tensor, _Tensor | None, Any]:
        """Return x, weight [outputs, inputs], bias and scales as llm_comm takes them.

        Quantizes x if the layer has block scales and x is bf16.
        """
        x, x_scale = self.x, self.x_scale
        if self.has_blocks and x_scale is None:
            x, _, x_scale = _quantize(x, "group", x)
        if x_scale is None:
            return x, self.weight, self.bias, None
        return x, self.weight if self.has_blocks else self.weight.t(), self.bias, (x_scale, self.weight_scale)

    def as_before(self) -> _Tensor:
        """Compute the layer by the operator that the graph had before."""
        if self.has_blocks:
            ue8m0 = deep_gemm.is_deep_gemm_e8m0_used()  # vLLM's layers make the same query
            if self.x_scale is None:
                by_both = torch.ops.vllm.dynamic_flashinfer_deepgemm_blockscale_gemm
                y: _Tensor = by_both(self.x, self.weight, self.weight_scale, fp8.GROUP_SIZE, ue8m0)
                return y
            y = self.empty_result()
            torch.ops.vllm.fp8_gemm_nt_op(self.x, self.x_scale, self.weight, self.weight_scale, y, ue8m0)
            return y
        if self.x_scale is None:
            return torch.nn.functional.linear(self.x, self.weight, self.bias)
        operands = self.x, self.weight, self.x_scale, self.weight_scale, self.out_dtype, self.bias
        result: _Tensor = _custom_ops.cutlass_scaled_mm(*operands)
        return result

    def empty_result(self) -> _Tensor:
        """Allocate a tensor of the shape and dtype of the result."""
        outputs = self.weight.shape[0 if self.x_scale is None or self.has_blocks else 1]
        return self.x.new_empty((*self.x.shape[:-1], outputs), dtype=self.out_dtype or self.x.dtype)


def _linear(*arguments: Any) -> _Tensor:
    """Compute ``x @ weight.T + bias``. Arguments: the fields of ``_Operands``, then vLLM's name of the group.

    Raises:
        ValueError: The process has no group of this name, or it was destroyed.
    """
    result = _by_llm_comm("linear", *arguments)
    return _Operands(*arguments[:-1]).as_before() if result is None else result


def _linear_activated(activation: str, *arguments: Any) -> _Tensor:
    """Compute ``activation(x @ gate.T) * (x @ up.T)``. The weight holds the outputs of gate, then those of up.

    Arguments and errors as in ``_linear``.
    """
    result = _by_llm_comm(f"linear_{activation}", *arguments)
    return _activated(activation, _linear(*arguments)) if result is None else result


def _by_llm_comm(method: str, *arguments: Any) -> _Tensor | None:
    """Compute a layer by a method of the group's communicator.

    Returns:
        The result. None: llm_comm declines, or does not serve the group.
    """
    operands, communicator = _Operands(*arguments[:-1]), find_group(arguments[-1]).device_communicator
    ours = getattr(communicator, method, None)
    if ours is None or operands.is_declined(communicator, method != "linear"):
        return None
    return ours(*operands.as_ours(), operands.out_dtype)  # type: ignore[no-any-return]


def _activated(activation: str, y: _Tensor) -> _Tensor:
    """Compute the activation of the first half of each row times the second half, by vLLM's kernel.

    The operator marks an activation between the steps of ``ColumnLinearPass``; no final graph has it. The graph may
    have had torch operators for inductor to fuse. Called eagerly, as here, each of them would be a kernel. vLLM's
    kernel rounds the activation before the product, as they do.
    """
    result = _fake_activated(y)
    getattr(torch.ops._C, activation)(result, y)
    return result


def _linear_all_reduce_add_rms_norm(
    x: _Tensor,
    weight: _Tensor,
    bias: _Tensor | None,
    x_scale: _Tensor | None,
    weight_scale: _Tensor | None,
    residual: _Tensor | None,
    norm_weight: _Tensor,
    epsilon: float,
    weight_bias: float,
    scale: _Tensor | None,
    group_name: str,
) -> tuple[_Tensor, _Tensor]:
    """Compute a linear layer, all-reduce, residual add and RMSNorm; return the normed rows and the new residual.

    Args:
        x, weight, bias, x_scale, weight_scale: This rank's operands, as in the docstring of this module. Only one rank
            passes a bias of the sum.
        residual: [..., outputs], of the dtype of ``norm_weight``, the same on all ranks; None adds nothing.
        norm_weight: [outputs], of the dtype of the layer's result.
        epsilon, weight_bias, scale, group_name: As in ``_run``.

    Raises:
        ValueError: The process has no group of this name, or it was destroyed.
    """
    communicator = find_group(group_name).device_communicator
    fused = getattr(communicator, "linear_all_reduce_add_rms_norm", None)
    operands = _Operands(x, weight, bias, x_scale, weight_scale, norm_weight.dtype)
    norm = (residual, norm_weight, epsilon, weight_bias, scale)
    result = None
    if fused is not None and not operands.is_declined(communicator, False):
        ours, our_weight, *optional = operands.as_ours()
        result = fused(ours, our_weight, *norm, *optional)
    if result is None:
        return _run(operands.as_before(), *norm, group_name)
    return result  # type: ignore[no-any-return]


def _fake_activated(y: _Tensor) -> _Tensor:
    return y.new_empty((*y.shape[:-1], y.shape[-1] // 2))


def _fake_linear(*arguments: Any) -> _Tensor:
    return _Operands(*arguments[:-1]).empty_result()


def _fake_linear_activated(*arguments: Any) -> _Tensor:
    return _fake_activated(_fake_linear(*arguments))


def _fake_linear_all_reduce_add_rms_norm(*operands: Any) -> tuple[_Tensor, _Tensor]:
    x, weight, bias, x_scale, weight_scale, _, norm_weight, _, _, scale, _ = operands
    total = _Operands(x, weight, bias, x_scale, weight_scale, norm_weight.dtype).empty_result()
    return torch.empty_like(total, dtype=total.dtype if scale is None else FP8), total


def _define_activated(activation: str) -> tuple[Any, Any]:
    """Define the operators of an activation, named like vLLM's kernel for it: alone, and with the layer before it."""
    layer = f"Tensor x, Tensor weight, {_OPTIONAL}, ScalarType? out_dtype, str group_name"
    alone = define(f"{activation}(Tensor y) -> Tensor", partial(_activated, activation), _fake_activated)
    computed = partial(_linear_activated, activation)
    return alone, define(f"linear_{activation}({layer}) -> Tensor", computed, _fake_linear_activated)


# ---- The operators as graphs have them ------------------------------------------------------------------------------

all_reduce_add_rms_norm = define(
    "all_reduce_add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float epsilon, float weight_bias, "
    "Tensor? scale, str group_name) -> (Tensor, Tensor)",
    _run,
    _fake_norm,
)
all_reduce_add_rms_norm_group_fp8 = define(
    "all_reduce_add_rms_norm_group_fp8(Tensor x, Tensor? residual, Tensor weight, float epsilon, float weight_bias, "
    "str quantize, str group_name) -> (Tensor, Tensor, Tensor)",
    _run_by_groups,
    _fake_by_groups,
)
all_reduce_add_rms_norm_nvfp4 = define(
    "all_reduce_add_rms_norm_nvfp4(Tensor x, Tensor? residual, Tensor weight, float epsilon, float weight_bias, "
    "Tensor global_scale, str group_name) -> (Tensor, Tensor, Tensor)",
    _run_nvfp4,
    _fake_nvfp4,
)
linear = define(
    f"linear(Tensor x, Tensor weight, {_OPTIONAL}, ScalarType? out_dtype, str group_name) -> Tensor",
    _linear,
    _fake_linear,
)
silu_and_mul, linear_silu_and_mul = _define_activated("silu_and_mul")
gelu_tanh_and_mul, linear_gelu_tanh_and_mul = _define_activated("gelu_tanh_and_mul")
linear_all_reduce_add_rms_norm = define(
    f"linear_all_reduce_add_rms_norm(Tensor x, Tensor weight, {_OPTIONAL}, Tensor? residual, Tensor norm_weight, "
    "float epsilon, float weight_bias, Tensor? scale, str group_name) -> (Tensor, Tensor)",
    _linear_all_reduce_add_rms_norm,
    _fake_linear_all_reduce_add_rms_norm,
)
