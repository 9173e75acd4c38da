"""Linear layer followed by an all-reduce, plain or with residual add and RMSNorm.

A call makes two launches: the linear kernel, and the collective kernel, which starts early (PDL).
``Communicator.linear_all_reduce`` and ``linear_all_reduce_add_rms_norm`` are the public methods.

The linear kernel is enqueued by a callback of the collective operation, after that operation has checked all its
operands. So a call that does not fit raises an error before anything is enqueued.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from llm_comm import arrays
from llm_comm.errors import LlmCommError, UnsupportedInputError
from llm_comm.operations.all_reduce import AllReduce
from llm_comm.operations.all_reduce_add_rms_norm import AllReduceAddRmsNorm
from llm_comm.operations.fp8 import Scaling, makes_scales
from llm_comm.operations.linear import Linear, operands_of, result_type
from llm_comm.operations.operands import check_memory, is_traced, why_not_operand
from llm_comm.runtime.core_handle import CoreHandle

_Tensor = torch.Tensor

PLAIN = "linear_all_reduce"
WITH_NORM = "linear_all_reduce_add_rms_norm"
#: Operands of the layer, for checks of overlaps. ``AllReduceAddRmsNorm`` checks those of the norm.
_OPERANDS = operands_of(WITH_NORM, ("out", "residual_out", "scale"))


class LinearAllReduce:
    """Operation ``linear_all_reduce`` of one communicator.

    Args:
        handle: Handle of the core that launches the kernels.
        layers: Linear layers of the communicator.
        sums: All-reduce of the communicator.
    """

    def __init__(self, handle: CoreHandle, layers: Linear, sums: AllReduce) -> None:
        self._handle = handle
        self._layers = layers
        self._sums = sums

    def run(
        self,
        x: _Tensor,
        weight: _Tensor,
        out: Any = None,
        bias: _Tensor | None = None,
        x_scale: _Tensor | None = None,
        weight_scale: _Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Any:
        """Run ``Communicator.linear_all_reduce`` on plain tensors, outside of tracing.

        Raises:
            UnsupportedInputError: An operand does not fit.
            CommunicatorError: This or an earlier call has failed.
        """
        scaling = Scaling.of(x_scale, weight_scale, out_dtype, out)
        try:
            prepared = self._layers.find(PLAIN, x, weight, scaling, bias)
            if out is not None:
                self._layers.check_out(PLAIN, prepared, x, weight, out, scaling, bias)
            y = x.new_empty(prepared.shape, dtype=prepared.dtype)
            layer = partial(self._layers.enqueue, prepared, x, weight, y, scaling, bias)
            total = self._sums.run(y, y if out is None else out, True, layer)
            if total is None:
                raise UnsupportedInputError(f"{PLAIN}: {self._sums.plan(y).reason}")
        except LlmCommError:
            raise
        except (RuntimeError, ValueError) as error:
            given = {"x": x, "weight": weight, "out": out, "bias": bias}
            check_memory(PLAIN, **given, x_scale=x_scale, weight_scale=weight_scale)
            self._handle.end_after_launch_error(error)
            raise
        return total

    def accepts(self, x: _Tensor, weight: _Tensor, scaling: Scaling | None = None, bias: _Tensor | None = None) -> bool:
        """Return whether ``run`` serves such operands."""
        if not self._layers.accepts(x, weight, scaling, bias):
            return False
        elements, dtype = _elements(x, weight), result_type(x, scaling)
        if self._sums.takes(elements, dtype.itemsize):
            return True
        if not is_traced(x):
            self._sums.count_declined_result(elements, dtype)
        return False


class LinearAllReduceAddRmsNorm:
    """Operation ``linear_all_reduce_add_rms_norm`` of one communicator.

    Args:
        handle: Handle of the core that launches the kernels.
        layers: Linear layers of the communicator.
        norms: All-reduce with residual add and RMSNorm of the communicator.
    """

    def __init__(self, handle: CoreHandle, layers: Linear, norms: AllReduceAddRmsNorm) -> None:
        self._handle = handle
        self._layers = layers
        self._norms = norms

    def run(
        self,
        x: _Tensor,
        linear_weight: _Tensor,
        residual: _Tensor | None,
        norm_weight: _Tensor,
        eps: float,
        weight_bias: float = 0.0,
        out: _Tensor | None = None,
        residual_out: _Tensor | None = None,
        quantize: str | None = None,
        scale: _Tensor | None = None,
        bias: _Tensor | None = None,
        x_scale: _Tensor | None = None,
        weight_scale: _Tensor | None = None,
        global_scale: _Tensor | None = None,
    ) -> tuple[_Tensor, ...]:
        """Run ``Communicator.linear_all_reduce_add_rms_norm`` on plain tensors, outside of tracing.

        Raises:
            UnsupportedInputError: An operand does not fit.
            CommunicatorError: This or an earlier call has failed.
        """
        scaling = scaling_before_norm(x_scale, weight_scale, norm_weight)
        try:
            prepared = self._layers.find(WITH_NORM, x, linear_weight, scaling, bias)
            written = out, residual_out, scale if makes_scales(quantize) else None
            if any(tensor is not None for tensor in written):
                _OPERANDS.check_written(x, linear_weight, bias, x_scale, weight_scale, *written)
            y = x.new_empty(prepared.shape, dtype=prepared.dtype)
            layer = partial(self._layers.enqueue, prepared, x, linear_weight, y, scaling, bias)
            if out is None and quantize is None:
                out = y
            try:
                return self._norms.run(
                    y, residual, norm_weight, eps, weight_bias, out, residual_out, quantize, scale, layer, global_scale
                )
            except UnsupportedInputError as error:
                raise UnsupportedInputError(f"{WITH_NORM}: where x is the layer's result, {error}") from error
        except LlmCommError:
            raise
        except (RuntimeError, ValueError) as error:
            given = {"x": x, "linear_weight": linear_weight, "residual": residual, "norm_weight": norm_weight}
            given |= {"bias": bias, "x_scale": x_scale, "weight_scale": weight_scale}
            given |= {"scale": scale, "global_scale": global_scale}
            check_memory(WITH_NORM, **given, out=out, residual_out=residual_out)
            self._handle.end_after_launch_error(error)
            raise

    def accepts(
        self,
        x: _Tensor,
        weight: _Tensor,
        norm_weight: _Tensor,
        quantize: str | None,
        bias: _Tensor | None = None,
        x_scale: _Tensor | None = None,
        weight_scale: _Tensor | None = None,
    ) -> bool:
        """Return whether ``run`` serves such operands."""
        scaling = scaling_before_norm(x_scale, weight_scale, norm_weight)
        dtype = result_type(x, scaling)
        outputs = weight.shape[0] if weight.dim() > 0 else 0
        if not (
            self._layers.accepts(x, weight, scaling, bias)
            and norm_weight.dtype == dtype
            and norm_weight.dim() == 1
            and norm_weight.numel() == outputs
            and self._accepts_operand(norm_weight, is_traced(x))
        ):
            return False
        if self._norms.takes(_elements(x, weight), dtype.itemsize, outputs, x.dim(), quantize):
            return True
        if not is_traced(x):
            self._norms.count_declined_result((*x.shape[:-1], outputs), dtype, quantize)
        return False

    def _accepts_operand(self, tensor: _Tensor, traced: bool) -> bool:
        """Return whether an operand is a dense constant on the right device. Shape and dtype are not checked."""
        if traced:  # torch.compile cannot trace the texts with sizes that ``why_not_operand`` makes
            is_constant = not (torch.is_grad_enabled() and tensor.requires_grad)
            return is_constant and arrays.is_dense_on(tensor, self._handle.device)
        return not why_not_operand(tensor, self._handle.device)


def scaling_before_norm(x_scale: Any, weight_scale: Any, norm_weight: Any) -> Scaling | None:
    """Return the scaling of an FP8 layer before a norm, or None without scales. The layer's result has the dtype of the
    norm's weight."""
    if x_scale is None and weight_scale is None:
        return None
    return Scaling.of(x_scale, weight_scale, None, norm_weight)


def _elements(x: _Tensor, weight: _Tensor) -> int:
    """Return the number of elements of the layer's result."""
    return x.numel() // weight.shape[1] * weight.shape[0]
