"""A linear layer whose partial results are summed over all ranks, plain or with residual add and RMSNorm: two launches,
of which the second begins early. ``Communicator.linear_all_reduce`` and its kin say more.

The layer goes first on the stream, but is enqueued last of all that can be declined: what does not fit is an error
before anything is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from llm_comm import arrays
from llm_comm.errors import LlmCommError, UnsupportedInputError
from llm_comm.operations.all_reduce import AllReduce
from llm_comm.operations.all_reduce_add_rms_norm import AllReduceAddRmsNorm
from llm_comm.operations.linear import Linear
from llm_comm.operations.operation import overlap, why_not_operand
from llm_comm.operations.quantization import makes_scales
from llm_comm.operations.watched import check_memory, is_traced
from llm_comm.runtime.core_handle import CoreHandle

_Tensor = torch.Tensor

PLAIN = "linear_all_reduce"
WITH_NORM = "linear_all_reduce_add_rms_norm"


class LinearAllReduce:
    """Those of one communicator, of whose operations it is made.

    Args:
        handle: Of the core that launches them.
        layers, sums: Of the same communicator.
    """

    def __init__(self, handle: CoreHandle, layers: Linear, sums: AllReduce) -> None:
        self._handle = handle
        self._layers = layers
        self._sums = sums

    def run(self, x: _Tensor, weight: _Tensor, out: Any = None) -> Any:
        """``Communicator.linear_all_reduce`` of tensors that have memory of their own, now.

        Raises:
            UnsupportedInputError: Something does not fit.
            CommunicatorError: This or an earlier call has failed.
        """
        try:
            prepared = self._layers.find(PLAIN, x, weight)
            if out is not None:
                self._layers.check_out(PLAIN, prepared, x, weight, out)
            y = x.new_empty(prepared.shape)
            layer = partial(self._layers.enqueue, prepared, x, weight, y)
            total = self._sums.run(y, y if out is None else out, True, layer)
            if total is None:
                raise UnsupportedInputError(f"{PLAIN}: {self._sums.plan(y).reason}")
        except LlmCommError:
            raise
        except RuntimeError as error:
            check_memory(PLAIN, x=x, weight=weight, out=out)
            self._handle.end_for(error)
            raise
        return total

    def accepts(self, x: _Tensor, weight: _Tensor) -> bool:
        """Whether ``run`` serves such operands."""
        return self._layers.accepts(x, weight) and self._sums.takes(_elements(x, weight), x.element_size())


class LinearAllReduceAddRmsNorm:
    """The same with residual add and RMSNorm.

    Args:
        handle, layers: As of ``LinearAllReduce``.
        norms: Of the same communicator.
    """

    def __init__(self, handle: CoreHandle, layers: Linear, norms: AllReduceAddRmsNorm) -> None:
        self._handle = handle
        self._layers = layers
        self._norms = norms

    def run(
        self,
        x: _Tensor,
        weight: _Tensor,
        residual: _Tensor | None,
        norm_weight: _Tensor,
        eps: float,
        out: _Tensor | None = None,
        residual_out: _Tensor | None = None,
        quantize: str | None = None,
        scale: _Tensor | None = None,
    ) -> tuple[_Tensor, ...]:
        """``Communicator.linear_all_reduce_add_rms_norm`` of tensors that have memory of their own, now.

        Raises:
            UnsupportedInputError: Something does not fit.
            CommunicatorError: This or an earlier call has failed.
        """
        try:
            prepared = self._layers.find(WITH_NORM, x, weight)
            written = {"out": out, "residual_out": residual_out, "scale": scale if makes_scales(quantize) else None}
            for name, tensor in written.items():
                if isinstance(tensor, _Tensor) and (overlap(tensor, x) or overlap(tensor, weight)):
                    raise UnsupportedInputError(f"{WITH_NORM}: {name} overlaps x or linear_weight")
            y = x.new_empty(prepared.shape)
            layer = partial(self._layers.enqueue, prepared, x, weight, y)
            if out is None and quantize is None:
                out = y
            try:
                return self._norms.run(y, residual, norm_weight, eps, out, residual_out, quantize, scale, layer)
            except UnsupportedInputError as error:
                raise UnsupportedInputError(f"{WITH_NORM}: where x is the layer's result, {error}") from error
        except LlmCommError:
            raise
        except RuntimeError as error:
            given = {"x": x, "linear_weight": weight, "residual": residual, "norm_weight": norm_weight}
            check_memory(WITH_NORM, **given, out=out, residual_out=residual_out, scale=scale)
            self._handle.end_for(error)
            raise

    def accepts(self, x: _Tensor, weight: _Tensor, norm_weight: _Tensor, quantize: str | None) -> bool:
        """Whether ``run`` serves such operands."""
        outputs = weight.shape[0] if weight.dim() > 0 else 0
        return (
            self._layers.accepts(x, weight)
            and norm_weight.dtype == x.dtype
            and norm_weight.dim() == 1
            and norm_weight.numel() == outputs
            and self._norms.takes(_elements(x, weight), x.element_size(), outputs, x.dim(), quantize)
            and self._accepts_operand(norm_weight, is_traced(x))
        )

    def _accepts_operand(self, tensor: _Tensor, traced: bool) -> bool:
        """Of any shape and type."""
        if traced:  # by torch.compile, which cannot trace texts with sizes
            is_constant = not (torch.is_grad_enabled() and tensor.requires_grad)
            return is_constant and arrays.is_dense_on(tensor, self._handle.device)
        return not why_not_operand(tensor, self._handle.device)


def _elements(x: _Tensor, weight: _Tensor) -> int:
    """Of the layer's result."""
    return x.numel() // weight.shape[1] * weight.shape[0]
