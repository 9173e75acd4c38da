"""The operators that vLLM's compiled graphs call where all-reduces with the RMSNorms after them were
(``fusion_pass.py``), and linear layers (``linear_passes.py``).

Compiled graphs are kept on disk and loaded by processes that compile nothing, so operators are defined apart from the
passes, when a communicator is made. They are functional and opaque to inductor, and decide at run time, by the shape of
the batch, who computes: a graph is compiled for all batch sizes, and llm_comm declines the largest. What llm_comm
declines goes by what the graph held before. It declines no norm in batch-invariant mode
(``Config.batch_invariant_norm``).

A linear layer has ``x`` [..., inputs] and ``weight`` [outputs, inputs], bf16 or fp16. Of FP8 it has scales, and its
operands are those of vLLM's ``cutlass_scaled_mm``: ``weight`` [inputs, outputs], the transpose of a contiguous tensor,
``x_scale`` one number or [tokens, 1], ``weight_scale`` one or one for each output, both fp32. With scales of blocks the
operands are those of vLLM's ``fp8_gemm_nt_op``: ``weight`` [outputs, inputs], ``x_scale`` [tokens, inputs / 128] and
``weight_scale`` [outputs / 128, inputs / 128]; or those of its ``dynamic_flashinfer_deepgemm_blockscale_gemm``, where
``x`` is bf16 and ``x_scale`` None. ``bias`` is [outputs], of the dtype of the result, or None. Weight, its scale and
bias are read before the kernels ahead have ended, so none of these may write them. No other rank takes part in a layer.
"""

from __future__ import annotations

from collections.abc import Callable
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

#: vLLM's quantization by groups of 128: numbers with which its layers call it, and llm_comm computes.
EPS = 1e-10
LARGEST = 448.0

#: Holds the operators for as long as it lives.
_library = torch.library.Library("llm_comm_vllm", "DEF")


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator of vLLM's graphs.

    Args:
        schema: As torch has it, from the name on.
        function: The operator, on CPU and CUDA.
        fake: The shapes of its results.

    Returns:
        The operator as graphs have it.
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
    """The RMSNorm of (the sum of ``x`` over the group + ``residual``), and what was normed.

    Args:
        x: [..., hidden], this rank's addend.
        residual: Like ``x``, the same on all ranks; None adds nothing.
        weight: [hidden], like ``x``.
        epsilon: Added to the mean of squares.
        weight_bias: Added to the weights in fp32: 1 for norms of Gemma, 0 for others.
        scale: One fp32 number: the norm is divided by it and rounded to FP8 e4m3. None leaves it in the dtype of ``x``.
        group_name: vLLM's name of the group.

    Raises:
        ValueError: There is no such group (any more).
    """
    group = find_group(group_name)
    fused = getattr(group.device_communicator, "all_reduce_add_rms_norm", None)
    result = None if fused is None else fused(x, residual, weight, epsilon, weight_bias, scale)
    if result is None:
        return run_one_by_one(group, x, residual, weight, epsilon, weight_bias, scale)
    return result  # type: ignore[no-any-return]


def find_group(name: str) -> Any:
    """vLLM's group of a name, as torch.ops.vllm.all_reduce finds it.

    Raises:
        ValueError: There is no such group (any more).
    """
    reference = parallel_state._groups.get(name)
    group = None if reference is None else reference()
    if group is None:
        raise ValueError(f"there is no group {name!r} in this process (any more)")
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
    """What the graph held before: the group's all-reduce, whoever serves it, vLLM's norm, and its quantization."""
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
    """Runs an operator of vLLM's IR by vLLM's CUDA kernel, if it serves the arguments.

    In compiled graphs vLLM prefers "native", a chain of torch operators for inductor to generate a kernel of. Called
    eagerly, as here, that would be a kernel for each operator.
    """
    kernel = op.impls.get("vllm_c")
    if kernel is None or not kernel.supported or not kernel.supports_args(total, *arguments):
        return op(total, *arguments)
    if kernel.inplace:  # it may have ``total``, but the residual belongs to the graph
        arguments = (arguments[0].clone(), *arguments[1:])
    return kernel.impl_fn(total, *arguments)


def _fake_norm(x: _Tensor, *others: Any) -> tuple[_Tensor, _Tensor]:
    *_, scale, _ = others
    return torch.empty_like(x, dtype=x.dtype if scale is None else FP8), torch.empty_like(x)


def name_of(by_columns: bool, for_tma: bool, ue8m0: bool) -> str:
    """What llm_comm calls the quantization of vLLM's with these switches."""
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
    """The RMSNorm of (the sum of ``x`` over the group + ``residual``) in FP8, what was normed, and the scales.

    Args:
        x: [tokens, hidden], this rank's addend.
        residual, weight, epsilon, weight_bias, group_name: As of ``all_reduce_add_rms_norm``.
        quantize: As of ``Communicator.all_reduce_add_rms_norm``: one of those by groups.

    Raises:
        ValueError: There is no such group (any more).
    """
    group = find_group(group_name)
    fused = getattr(group.device_communicator, "all_reduce_add_rms_norm_group_fp8", None)
    result = None if fused is None else fused(x, residual, weight, epsilon, weight_bias, quantize)
    if result is None:  # what the graph held before
        normed, new_residual = run_one_by_one(group, x, residual, weight, epsilon, weight_bias, None)
        return _quantize(normed, quantize, new_residual)
    return result  # type: ignore[no-any-return]


def _quantize(normed: _Tensor, quantize: str, new_residual: _Tensor) -> tuple[_Tensor, _Tensor, _Tensor]:
    """By vLLM's operator."""
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


# ---- Linear layers --------------------------------------------------------------------------------------------------


class _Operands(NamedTuple):
    """Operands of a linear layer, in the order of the operators.

    Attributes:
        x, weight, bias, x_scale, weight_scale: See above.
        out_dtype: Of the result of FP8; None: that of ``x``.
    """

    x: _Tensor
    weight: _Tensor
    bias: _Tensor | None
    x_scale: _Tensor | None
    weight_scale: _Tensor | None
    out_dtype: torch.dtype | None

    @property
    def has_blocks(self) -> bool:
        """Whether scales are those of blocks."""
        return self.weight_scale is not None and self.weight.stride(-1) == 1

    def is_declined(self, communicator: Any, silu_and_mul: bool) -> bool:
        """Whether llm_comm would decline a batch for whose x there are no scales yet: it is quantized for nothing."""
        if not self.has_blocks or self.x_scale is not None:
            return False
        rows, inputs = self.weight.shape
        outputs = rows // 2 if silu_and_mul else rows
        return not communicator.prefers_blocks(outputs, inputs, self.x.shape[:-1].numel(), silu_and_mul)

    def as_ours(self) -> tuple[_Tensor, _Tensor, _Tensor | None, Any]:
        """x, the weight, [outputs, inputs], the bias, and the scales as llm_comm takes them."""
        x, x_scale = self.x, self.x_scale
        if self.has_blocks and x_scale is None:
            x, _, x_scale = _quantize(x, "group", x)
        if x_scale is None:
            return x, self.weight, self.bias, None
        return x, self.weight if self.has_blocks else self.weight.t(), self.bias, (x_scale, self.weight_scale)

    def as_before(self) -> _Tensor:
        """The layer by what the graph held before."""
        if self.has_blocks:
            ue8m0 = deep_gemm.is_deep_gemm_e8m0_used()  # as vLLM's layers ask
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
        """A tensor of the shape and dtype of the result."""
        outputs = self.weight.shape[0 if self.x_scale is None or self.has_blocks else 1]
        return self.x.new_empty((*self.x.shape[:-1], outputs), dtype=self.out_dtype or self.x.dtype)


def _linear(*arguments: Any) -> _Tensor:
    """``x @ weight.T + bias``, of ``_Operands`` and vLLM's name of the group whose communicator computes the layer.

    Raises:
        ValueError: There is no such group (any more).
    """
    result = _by_llm_comm("linear", *arguments)
    return _Operands(*arguments[:-1]).as_before() if result is None else result


def _linear_silu_and_mul(*arguments: Any) -> _Tensor:
    """``silu(x @ gate.T) * (x @ up.T)``: half of the outputs of ``weight`` are those of gate, then come those of up.
    Arguments and errors as of ``linear``."""
    result = _by_llm_comm("linear_silu_and_mul", *arguments)
    return _silu_and_mul(_linear(*arguments)) if result is None else result


def _linear_gelu_tanh_and_mul(*arguments: Any) -> _Tensor:
    """``gelu(x @ gate.T) * (x @ up.T)`` with the tanh approximation of gelu, as ``linear_silu_and_mul``."""
    result = _by_llm_comm("linear_gelu_tanh_and_mul", *arguments)
    return _gelu_tanh_and_mul(_linear(*arguments)) if result is None else result


def _by_llm_comm(method: str, *arguments: Any) -> _Tensor | None:
    """By a method of the group's communicator; None, if it declines, or is not llm_comm's."""
    operands, communicator = _Operands(*arguments[:-1]), find_group(arguments[-1]).device_communicator
    ours = getattr(communicator, method, None)
    if ours is None or operands.is_declined(communicator, method == "linear_silu_and_mul"):
        return None
    return ours(*operands.as_ours(), operands.out_dtype)  # type: ignore[no-any-return]


def _silu_and_mul(y: _Tensor) -> _Tensor:
    """silu of the first half of each row times the second half. No graph holds it in the end.

    By vLLM's kernel, also where the graph held torch's operators for inductor to generate one of: called eagerly, as
    here, that would be a kernel for each. As those it rounds silu before it multiplies.
    """
    result = _fake_activated(y)
    torch.ops._C.silu_and_mul(result, y)
    return result


def _gelu_tanh_and_mul(y: _Tensor) -> _Tensor:
    """gelu of the first half of each row times the second half, by vLLM's kernel, as ``silu_and_mul``."""
    result = _fake_activated(y)
    torch.ops._C.gelu_tanh_and_mul(result, y)
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
    """The RMSNorm of (the sum of the layer's result over the group + ``residual``), and what was normed.

    Args:
        x, weight, bias, x_scale, weight_scale: See above, of this rank. A bias of the sum is that of one rank.
        residual: [..., outputs], the same on all ranks; None adds nothing.
        norm_weight: [outputs], of the dtype of the layer's result.
        epsilon, weight_bias, scale, group_name: As of ``all_reduce_add_rms_norm``.

    Raises:
        ValueError: There is no such group (any more).
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
silu_and_mul = define("silu_and_mul(Tensor y) -> Tensor", _silu_and_mul, _fake_activated)
gelu_tanh_and_mul = define("gelu_tanh_and_mul(Tensor y) -> Tensor", _gelu_tanh_and_mul, _fake_activated)
linear = define(
    f"linear(Tensor x, Tensor weight, {_OPTIONAL}, ScalarType? out_dtype, str group_name) -> Tensor",
    _linear,
    _fake_linear,
)
linear_silu_and_mul = define(
    f"linear_silu_and_mul(Tensor x, Tensor weight, {_OPTIONAL}, ScalarType? out_dtype, str group_name) -> Tensor",
    _linear_silu_and_mul,
    _fake_linear_activated,
)
linear_gelu_tanh_and_mul = define(
    f"linear_gelu_tanh_and_mul(Tensor x, Tensor weight, {_OPTIONAL}, ScalarType? out_dtype, str group_name) -> Tensor",
    _linear_gelu_tanh_and_mul,
    _fake_linear_activated,
)
linear_all_reduce_add_rms_norm = define(
    f"linear_all_reduce_add_rms_norm(Tensor x, Tensor weight, {_OPTIONAL}, Tensor? residual, Tensor norm_weight, "
    "float epsilon, float weight_bias, Tensor? scale, str group_name) -> (Tensor, Tensor)",
    _linear_all_reduce_add_rms_norm,
    _fake_linear_all_reduce_add_rms_norm,
)
