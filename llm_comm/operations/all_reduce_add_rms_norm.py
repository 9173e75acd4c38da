"""All-reduce + residual add + RMSNorm (+ quantization) in one kernel, "fused" for short: validation, cache, launch.

``Communicator.all_reduce_add_rms_norm`` is the public interface.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from llm_comm import arrays
from llm_comm.errors import LlmCommError, UnsupportedInputError
from llm_comm.operations import fp8
from llm_comm.operations.operands import Operands, check_constant, check_memory, count_write, why_not_constant
from llm_comm.operations.operation import Operation, Prepared, keep
from llm_comm.planning.plan import Plan, declined
from llm_comm.planning.planner import Planner
from llm_comm.planning.selection import Layout
from llm_comm.planning.tables import FUSED
from llm_comm.runtime.core_handle import CoreHandle

_Tensor = torch.Tensor
_is_grad_enabled = torch.is_grad_enabled
#: Results, and whether the launch was enqueued.
_Outcome = tuple[tuple[_Tensor, ...], bool]

_READS, _WRITES = ("x", "residual", "weight"), ("out", "residual_out")
_OPERANDS = Operands(FUSED, (*_READS, "scale"), _WRITES)
#: Operands in modes of ``quantize`` that compute scales.
_MAKING_SCALES = Operands(FUSED, (*_READS, "global_scale"), ("scale", *_WRITES))
#: Overlaps that are safe: each thread overwrites elements that it alone has read. Quantized output cannot overlap its
#: input, since its elements are smaller.
_IN_PLACE = {("residual_out", "residual"): 0, ("residual_out", "x"): 0}
_IN_PLACE_UNQUANTIZED = {("out", "x"): 0, **_IN_PLACE}


class AllReduceAddRmsNorm(Operation):
    """Fused calls of one communicator."""

    def __init__(self, handle: CoreHandle, planner: Planner) -> None:
        super().__init__(FUSED, handle, planner)
        # Keys: elements, row length, dtype, eps, weight_bias, quantize. The row length is separate: messages of one
        # size can have rows of different lengths.
        self._prepared: dict[tuple[int, int, torch.dtype, float, float, str | None], Prepared] = {}
        # Plans by the same keys without eps and weight_bias, which do not affect a plan. Engines query before each
        # call.
        self._plans: dict[tuple[int, int, torch.dtype, str | None], Plan] = {}

    def forget(self) -> None:
        """Drop prepared calls and plans."""
        super().forget()
        self._plans.clear()

    def run(
        self,
        x: _Tensor,
        residual: _Tensor | None,
        weight: _Tensor,
        eps: float,
        weight_bias: float = 0.0,
        out: _Tensor | None = None,
        residual_out: _Tensor | None = None,
        quantize: str | None = None,
        scale: _Tensor | None = None,
        before: Callable[[], object] | None = None,
        global_scale: _Tensor | None = None,
    ) -> tuple[_Tensor, ...]:
        """Compute ``Communicator.all_reduce_add_rms_norm`` for tensors with memory of their own.

        Args:
            before: Enqueues the kernel that writes ``x``. Called once nothing can be declined any longer.

        Raises:
            UnsupportedInputError: An argument does not fit.
            CommunicatorError: This or an earlier call has failed.
        """
        try:
            results, enqueued = self._enqueue(
                x, residual, weight, eps, weight_bias, out, residual_out, quantize, scale, before, global_scale
            )
        except LlmCommError:  # an argument does not fit, on all ranks alike
            raise
        except (RuntimeError, ValueError) as error:
            given = {"x": x, "residual": residual, "weight": weight, "scale": scale, "global_scale": global_scale}
            check_memory("all_reduce_add_rms_norm", **given, out=out, residual_out=residual_out)
            self._handle.end_after_launch_error(error)
            raise
        if not enqueued:
            self._handle.check()
        return results

    def _enqueue(
        self,
        x: _Tensor,
        residual: _Tensor | None,
        weight: _Tensor,
        eps: float,
        weight_bias: float,
        out: _Tensor | None,
        residual_out: _Tensor | None,
        quantize: str | None,
        scale: _Tensor | None,
        before: Callable[[], object] | None,
        global_scale: _Tensor | None,
    ) -> _Outcome:
        prepared = self._prepared.get((x.numel(), weight.numel(), x.dtype, eps, weight_bias, quantize))
        if _is_grad_enabled():
            for tensor in (x, residual, weight, out, residual_out, scale, global_scale):
                if tensor is not None and getattr(tensor, "requires_grad", False):
                    given = {"x": x, "residual": residual, "weight": weight, "scale": scale}
                    given["global_scale"] = global_scale
                    check_constant("all_reduce_add_rms_norm", **given, out=out, residual_out=residual_out)
        if prepared is None or not self._fits(x, weight):
            found = self._prepare(x, weight, eps, weight_bias, quantize)
            if isinstance(found, str):
                self._count_declined(found)
                raise _error(found)
            prepared = found
        if residual is not None:
            _check_like("residual", residual, x)
        makes_scales = quantize is not None and fp8.makes_scales(quantize)
        writes = out is not None or residual_out is not None or (makes_scales and scale is not None)
        if out is not None and (out is not x or quantize is not None):
            _check_like("out", out, x, None if quantize is None else fp8.normed_layout(quantize, x))
        if residual_out is not None and residual_out is not residual:
            _check_like("residual_out", residual_out, x)
        if quantize is not None:
            scale = _scale_of(x, quantize, scale)
        elif scale is not None:
            raise _error(_SCALE_ALONE)
        if global_scale is not None or quantize in fp8.NVFP4:
            _check_global_scale(x, quantize, global_scale)
        if writes:
            operands = _MAKING_SCALES if makes_scales else _OPERANDS
            in_place = _IN_PLACE_UNQUANTIZED if quantize is None else _IN_PLACE
            scales = (global_scale, scale) if makes_scales else (scale,)
            operands.check_written(x, residual, weight, *scales, out, residual_out, in_place=in_place)
        if out is None:
            if quantize in fp8.NVFP4:
                out = fp8.empty_normed(quantize, x)
            else:
                out = torch.empty_like(x) if quantize is None else torch.empty_like(x, dtype=fp8.FP8)
        if residual_out is None:
            residual_out = torch.empty_like(x)
        results: tuple[_Tensor, ...] = (out, residual_out)
        if scale is not None and makes_scales:
            results += (scale,)
        if prepared.run is None:
            self._count_unlaunched(prepared.plan)
            return results, False
        if before is not None:
            before()
        enqueued = prepared.run(
            x.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            residual_out.data_ptr(),
            0 if scale is None else scale.data_ptr(),
            0 if global_scale is None else global_scale.data_ptr(),
            self._current_stream(),
        )
        count_write(results)
        return results, enqueued

    def accepts(self, x: _Tensor, weight: _Tensor, quantize: str | None) -> bool:
        """Return whether ``run`` serves rows like ``x``."""
        plan = self.plan(x, weight, quantize)
        if plan.algorithm != "declined":
            return True
        self._count_declined(plan.reason)
        return False

    def plan(self, x: _Tensor, weight: _Tensor, quantize: str | None) -> Plan:
        """Return the plan of ``run`` for rows like ``x``."""
        self._handle.check_open()
        why = self._why_not_fitting(x, weight, quantize)
        if why:
            return declined(FUSED, x.nbytes, why)
        key = (x.numel(), weight.numel(), x.dtype, quantize)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._layout(x.numel(), weight.numel(), x.dtype, quantize).plan
            keep(self._plans, key, plan)
        return plan

    def count_declined_result(self, shape: Sequence[int], dtype: torch.dtype, quantize: str | None) -> None:
        """Count rows that ``takes`` has declined before they were computed."""
        why = fp8.why_not(quantize, shape)
        if not why:
            why = self._layout(math.prod(shape), shape[-1], dtype, quantize).plan.reason
        self._count_declined(why)

    def _prepare(
        self, x: _Tensor, weight: _Tensor, eps: float, weight_bias: float, quantize: str | None
    ) -> Prepared | str:
        """Prepare the launch. Return the reason as text if the input is declined."""
        plan = self.plan(x, weight, quantize)
        if plan.algorithm == "declined":
            return plan.reason
        layout = self._layout(x.numel(), weight.numel(), x.dtype, quantize, eps, weight_bias)
        prepared = self._prepare_call(layout)
        if not isinstance(prepared, str):
            keep(self._prepared, (x.numel(), weight.numel(), x.dtype, eps, weight_bias, quantize), prepared)
        return prepared

    def _layout(
        self,
        count: int,
        row: int,
        dtype: torch.dtype,
        quantize: str | None,
        eps: float = 0.0,
        weight_bias: float = 0.0,
    ) -> Layout:
        code = fp8.CODES[quantize]
        return self._lay_out(count, row, dtype, epsilon=eps, quantization=code, weight_bias=weight_bias)

    def _fits(self, x: _Tensor, weight: _Tensor) -> bool:
        """Return whether the tensors fit a prepared call in the properties that are not in its cache key."""
        device = self._device
        return (
            x.device == device
            and weight.device == device
            and weight.dtype is x.dtype
            and x.is_contiguous()
            and weight.is_contiguous()
            and weight.dim() == 1
            and x.shape[-1] == weight.numel()
            and not x.is_neg()
            and not weight.is_neg()
        )

    def _why_not_fitting(self, x: _Tensor, weight: _Tensor, quantize: str | None) -> str:
        for name, tensor in (("x", x), ("weight", weight)):
            if tensor.device != self._device:
                return f"{name} is on {tensor.device}, the communicator on {self._device}"
            why = arrays.why_not_plain(tensor)
            if why:
                return f"{name}: {why}"
            if not tensor.is_contiguous():
                return f"{name} is not contiguous: shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            why = why_not_constant(tensor)
            if why:
                return f"{name}: {why}"
        why = self._why_not_type(x.dtype)
        if why:
            return why
        if weight.dtype != x.dtype:
            return f"weight is {weight.dtype}, x is {x.dtype}"
        if weight.dim() != 1 or x.dim() == 0 or x.shape[-1] != weight.numel():
            return f"weight has shape {tuple(weight.shape)}: it must be that of a row of x, {tuple(x.shape)}"
        return fp8.why_not(quantize, x.shape)

    def accepts_traced(self, x: _Tensor, weight: _Tensor, quantize: str | None) -> bool:
        """Return whether ``plan`` accepts, for torch.compile, which can trace neither caches nor texts with sizes."""
        self._handle.check_open()
        return (
            arrays.is_dense_on(x, self._device)
            and arrays.is_dense_on(weight, self._device)
            and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
            and x.dtype in self._data_types
            and weight.dtype == x.dtype
            and weight.dim() == 1
            and x.dim() > 0
            and x.shape[-1] == weight.numel()
            and self.takes(x.numel(), x.element_size(), weight.numel(), x.dim(), quantize)
        )

    def takes(self, count: int, element_size: int, row: int, dimensions: int, quantize: str | None) -> bool:
        """Return whether the sizes of rows are served, given a supported dtype: the part of planning that torch.compile
        can trace."""
        return (
            self._planner.world_size > 1
            and self._info.takes_rows_of(row)
            and fp8.takes(quantize, row, dimensions)
            and self._planner.fuses(count * element_size)
        )


def check_quantization(
    operation: str,
    quantize: str | None,
    scale: _Tensor | None,
    shape: Sequence[int] | None = None,
    global_scale: _Tensor | None = None,
) -> None:
    """Validate ``quantize`` and its scales for calls through torch operators, and for their fake results.

    Args:
        operation: Name in the error.
        quantize, scale, global_scale: Arguments of ``all_reduce_add_rms_norm``.
        shape: Shape of the normed rows; None if not known yet.

    Raises:
        UnsupportedInputError: The mode does not exist or does not fit ``shape``, ``scale`` is given without a mode, or
            ``global_scale`` is missing or not taken.
    """
    why = fp8.why_not(quantize, shape) or (_SCALE_ALONE if quantize is None and scale is not None else "")
    why = why or fp8.why_not_global_scale(quantize, global_scale)
    if why:
        raise UnsupportedInputError(f"{operation}: {why}")


def _scale_of(x: _Tensor, quantize: str, scale: _Tensor | None) -> _Tensor:
    """Return ``scale`` if it fits. If it is None, allocate the scales that the call computes."""
    why = fp8.why_not(quantize, x.shape)  # the key of a prepared call has no number of dimensions
    if why:
        raise _error(why)
    if scale is None:
        if quantize == "static":
            raise _error("quantize='static' needs scale, a float32 tensor of one element")
        return fp8.empty_scales(quantize, x)
    _check_memory("scale", scale)
    why = fp8.why_not_scales(quantize, scale, x)
    if why:
        raise _error(why)
    return scale


def _check_global_scale(x: _Tensor, quantize: str | None, global_scale: _Tensor | None) -> None:
    why = fp8.why_not_global_scale(quantize, global_scale)
    if why:
        raise _error(why)
    assert global_scale is not None
    _check_memory("global_scale", global_scale)
    if global_scale.numel() != 1 or global_scale.dtype is not torch.float32 or global_scale.device != x.device:
        raise _error(
            f"global_scale ({tuple(global_scale.shape)}, {global_scale.dtype}, {global_scale.device}) must have one "
            f"element, and be float32 on {x.device}"
        )


_SCALE_ALONE = "scale without quantize"


def _error(why: str) -> UnsupportedInputError:
    return UnsupportedInputError(f"all_reduce_add_rms_norm: {why}")


def _check_like(
    name: str, tensor: _Tensor, x: _Tensor, layout: tuple[tuple[int, ...], torch.dtype] | None = None
) -> None:
    """Reject a tensor unlike ``x``, or without the shape and dtype of ``layout``."""
    shape, dtype = layout or (x.shape, x.dtype)
    _check_memory(name, tensor)
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != x.device or not tensor.is_contiguous():
        raise _error(
            f"{name} ({tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}) must be contiguous and be "
            f"({tuple(shape)}, {dtype}, {x.device})"
        )


def _check_memory(name: str, tensor: _Tensor) -> None:
    """Reject wrappers of other tensors, which have no memory of their own."""
    if not isinstance(tensor, _Tensor):
        raise _error(f"{name} is a {type(tensor).__name__}, not a tensor")
    why = arrays.why_not_plain(tensor)
    if not why and tensor.data_ptr() == 0 and tensor.numel() > 0:
        why = f"a {type(tensor).__name__} has no memory of its own"
    if why:
        raise _error(f"{name}: {why}")
