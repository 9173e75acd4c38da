"""Linear layers of one rank, plain or with an activation: checks of operands, prepared launches by shape, and calls.

Operands are bf16, fp16, or FP8 with scales. The contract is in the docstrings of ``Communicator.linear`` and
``Communicator.linear_silu_and_mul``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from llm_comm import _core, arrays
from llm_comm.errors import LlmCommError, UnsupportedInputError
from llm_comm.operations.fp8 import FP8, Scaling
from llm_comm.operations.one_rank import OneRank
from llm_comm.operations.operands import (
    ALIGNMENT,
    Operands,
    check_memory,
    delivered,
    is_traced,
    output_for,
    why_not_operand,
    why_not_out,
)
from llm_comm.operations.operation import keep
from llm_comm.planning.layers import (
    LINEAR,
    LINEAR_GELU_TANH_AND_MUL,
    LINEAR_SILU_AND_MUL,
    inputs_multiple,
    of_factors,
    takes_features,
)
from llm_comm.planning.planner import Planner
from llm_comm.runtime.core_handle import CoreHandle

logger = logging.getLogger("llm_comm")

# Global names cost less than attributes.
_Tensor = torch.Tensor
_strided = torch.strided
_is_grad_enabled = torch.is_grad_enabled

#: Parameter name of the layer's weight in each operation. Other operations call it ``linear_weight``.
_WEIGHTS = {
    LINEAR: "weight",
    "batch_invariant_linear": "weight",
    LINEAR_SILU_AND_MUL: "gate_up_weight",
    LINEAR_GELU_TANH_AND_MUL: "gate_up_weight",
}


class PreparedLinear(NamedTuple):
    """Launch of a layer for one combination of operand shapes and dtypes."""

    #: Result of the core's ``prepare_linear``. Takes the addresses of x, weight, out and bias (0: none), for FP8 also
    #: of x_scale and weight_scale, and a stream. Returns False if the communicator has failed.
    run: Callable[..., bool]
    #: Shape of the result, and its number of elements.
    shape: tuple[int, ...]
    elements: int
    dtype: torch.dtype


class Linear(OneRank):
    """Linear layers of one communicator, for one epilogue. Other ranks take no part.

    Args:
        handle: Handle of the core that launches the layers.
        planner: Planner of the communicator; it chooses tilings.
        epilogue: ``"none"``, or the activation of a gated MLP: ``"silu_and_mul"`` or ``"gelu_tanh_and_mul"``. With an
            activation the weight holds the rows of gate, then those of up.
        many_tokens: Serve up to 2**20 tokens instead of 64. Not for FP8 operands.
    """

    algorithm = "linear"

    def __init__(
        self, handle: CoreHandle, planner: Planner, epilogue: _core.Epilogue = "none", many_tokens: bool = False
    ) -> None:
        super().__init__(handle, planner)
        self._epilogue = epilogue
        self._most_tokens = _core.linear_max_many_tokens if many_tokens else _core.linear_max_tokens
        self._name = LINEAR if epilogue == "none" else f"linear_{epilogue}"
        #: Rows of the weight for each output.
        self._parts = 1 if epilogue == "none" else 2
        #: Prepared layers by shapes of x and weight, and dtype of x or ``Scaling.kind``.
        self._prepared: dict[tuple[Any, ...], PreparedLinear] = {}

    def forget(self) -> None:
        """Drop the prepared layers, which hold references to the core."""
        self._prepared.clear()

    # ---- Calls --------------------------------------------------------------------------------------------------

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
        """Run ``Communicator.linear``, or the variant with an activation.

        The tensors must have memory. Traced tensors and tensor subclasses use the torch operators instead
        (``linear_operators.py``).

        Raises:
            UnsupportedInputError: An operand or ``out`` is not supported.
            CommunicatorError: An earlier call has failed.
            RuntimeError: The layer could not be launched. No other rank waits for it: the communicator goes on.
        """
        scaling = Scaling.of(x_scale, weight_scale, out_dtype, out)
        try:
            prepared = self.find(self._name, x, weight, scaling, bias)
            if out is None:
                y = out = x.new_empty(prepared.shape, dtype=prepared.dtype)
                is_enqueued = self.enqueue(prepared, x, weight, y, scaling, bias)
            else:
                self.check_out(self._name, prepared, x, weight, out, scaling, bias)
                y = output_for(out, partial(x.new_empty, prepared.shape, dtype=prepared.dtype))
                is_enqueued = self.enqueue(prepared, x, weight, y, scaling, bias)
                delivered(y, out)
        except LlmCommError:
            raise
        except (RuntimeError, ValueError):
            given = {"x": x, weight_of(self._name): weight, "out": out, "bias": bias}
            check_memory(self._name, **given, x_scale=x_scale, weight_scale=weight_scale)
            raise
        if not is_enqueued:
            self._handle.check()
        return out

    def find(
        self,
        operation: str,
        x: _Tensor,
        weight: _Tensor,
        scaling: Scaling | None = None,
        bias: _Tensor | None = None,
    ) -> PreparedLinear:
        """Return the prepared layer for these operands, as ``enqueue`` takes it.

        Args:
            operation: Name of the public method, for error texts.
            x, weight: Operands of the layer.
            scaling: Scales of FP8 operands; None for other dtypes.
            bias: Bias of the layer, or None.

        Raises:
            UnsupportedInputError: The operands are not supported, or ``weight`` is not aligned.
        """
        # Host time of a call matters: this path avoids Python calls.
        dtype, device = x.dtype, self._device
        # A nested tensor has no shape.
        is_nested = x.is_nested or weight.is_nested
        kind = dtype if scaling is None else scaling.kind()
        prepared = None if is_nested else self._prepared.get((x.shape, weight.shape, kind))
        if (
            prepared is None
            or weight.dtype is not dtype
            or (_is_grad_enabled() and (x.requires_grad or weight.requires_grad))
            or x.device != device
            or weight.device != device
            or x.layout is not _strided
            or weight.layout is not _strided
            or not x.is_contiguous()
            or not weight.is_contiguous()
            or x.is_neg()
            or weight.is_neg()
            or (scaling is not None and (dtype is not FP8 or not scaling.is_dense_on(device)))
            or (bias is not None and self._why_not_bias(bias, weight, prepared.dtype))
        ):
            why = self._why_not(x, weight, scaling, bias, weight_of(operation))
            if why:
                self._handle.statistics.decline(self._name, why)
                raise UnsupportedInputError(f"{operation}: {why}")
            prepared = self._prepare(x, weight, scaling)
        if weight.data_ptr() % ALIGNMENT != 0:
            raise UnsupportedInputError(
                f"{operation}: {weight_of(operation)} begins at {weight.data_ptr():#x}, which is no multiple of "
                f"{ALIGNMENT} bytes: pass a copy, made once"
            )
        # data_ptr() raises for a tensor without memory. This must happen before anything is enqueued.
        if bias is not None:
            bias.data_ptr()
        if scaling is not None:
            scaling.x.data_ptr()
            scaling.weight.data_ptr()
        return prepared

    def enqueue(
        self,
        prepared: PreparedLinear,
        x: _Tensor,
        weight: _Tensor,
        out: _Tensor,
        scaling: Scaling | None = None,
        bias: _Tensor | None = None,
    ) -> bool:
        """Enqueue a layer on the current stream. Return False if the communicator has failed.

        Args:
            prepared: Result of ``find`` for these operands.
            x, weight, scaling, bias: Operands of the layer.
            out: Takes the result. Contiguous, at a multiple of ``ALIGNMENT`` bytes.
        """
        address = x.data_ptr()
        if address % ALIGNMENT != 0:
            # Addresses differ between ranks, so a rank must not decline because of one. The copy may be freed before
            # the layer has run: later users of its memory follow in the stream.
            x = x.clone()
            address = x.data_ptr()
        stream = self._current_stream()
        of_bias = 0 if bias is None else bias.data_ptr()
        if scaling is None:
            return prepared.run(address, weight.data_ptr(), out.data_ptr(), of_bias, stream)
        scales = scaling.x.data_ptr(), scaling.weight.data_ptr()
        return prepared.run(address, weight.data_ptr(), out.data_ptr(), of_bias, *scales, stream)

    def check_out(
        self,
        operation: str,
        prepared: PreparedLinear,
        x: _Tensor,
        weight: _Tensor,
        out: Any,
        scaling: Scaling | None = None,
        bias: _Tensor | None = None,
    ) -> None:
        """Check that ``out`` can take the result.

        Raises:
            UnsupportedInputError: It has another shape, dtype or device, or shares memory with an operand.
        """
        why = why_not_out(out, prepared.shape, prepared.dtype, self._device)
        if why:
            raise UnsupportedInputError(f"{operation}: {why}")
        scales = (None, None) if scaling is None else (scaling.x, scaling.weight)
        operands_of(operation, ("out",)).check_written(x, weight, bias, *scales, out)

    # ---- What would be served -----------------------------------------------------------------------------------

    def accepts(self, x: _Tensor, weight: _Tensor, scaling: Scaling | None = None, bias: _Tensor | None = None) -> bool:
        """Return whether the operands are supported. The answer ignores addresses, which differ between ranks."""
        self._handle.check_open()
        if is_traced(x):
            return self._accepts_traced(x, weight, scaling, bias)
        why = self._why_not(x, weight, scaling, bias)
        if why:
            self._handle.statistics.decline(self._name, why)
        return not why

    def _accepts_traced(
        self, x: _Tensor, weight: _Tensor, scaling: Scaling | None = None, bias: _Tensor | None = None
    ) -> bool:
        """Return ``accepts`` of traced tensors: torch.compile cannot trace the texts with sizes of ``_why_not``."""
        is_fp8 = scaling is not None
        return (
            arrays.is_dense_on(x, self._device)
            and arrays.is_dense_on(weight, self._device)
            and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
            and (x.dtype in self._data_types if not is_fp8 else x.dtype is FP8 and self.has_fp8)
            and weight.dtype == x.dtype
            and weight.dim() == 2
            and x.dim() > 0
            and x.shape[-1] == weight.shape[1]
            and takes_features(weight.shape[1], inputs_multiple(is_fp8))
            and weight.shape[0] % self._parts == 0
            and takes_features(weight.shape[0] // self._parts)
            and 1 <= x.numel() // weight.shape[1] <= self._most_tokens
            and (scaling is None or scaling.accepts_traced(self._device, x, weight.shape[0]))
            and (bias is None or self._accepts_traced_bias(bias, weight, result_type(x, scaling)))
        )

    def _accepts_traced_bias(self, bias: _Tensor, weight: _Tensor, dtype: torch.dtype) -> bool:
        return (
            isinstance(bias, torch.Tensor)
            and arrays.is_dense_on(bias, self._device)
            and not (torch.is_grad_enabled() and bias.requires_grad)
            and bias.dtype == dtype
            and bias.dim() == 1
            and bias.shape[0] == weight.shape[0]
        )

    def _prepare(self, x: _Tensor, weight: _Tensor, scaling: Scaling | None) -> PreparedLinear:
        key = (x.shape, weight.shape, x.dtype if scaling is None else scaling.kind())
        prepared = self._prepared.get(key)
        if prepared is None:
            rows, inputs = weight.shape
            outputs = rows // self._parts
            tokens = x.numel() // inputs
            dtype = result_type(x, scaling)
            shape = (*x.shape[:-1], outputs)
            elements = math.prod(shape)
            scales = {} if scaling is None else {"scales": scaling.whose(x, rows)}
            if scaling is not None and _core.SCALE_OF_BLOCK in scales["scales"]:
                scales["x_scale_strides"] = scaling.strides_of_blocks()
            run = self._counted(
                self._name,
                elements * dtype.itemsize,
                lambda counter: self._prepare_by_table(tokens, inputs, outputs, dtype, scales, counter),
            )
            prepared = PreparedLinear(run, shape, elements, dtype)
            keep(self._prepared, key, prepared)
        return prepared

    def _prepare_by_table(
        self,
        tokens: int,
        inputs: int,
        outputs: int,
        dtype: torch.dtype,
        scales: dict[str, Any],
        counter: _core.Counter,
    ) -> Callable[..., bool]:
        """Prepare a layer in the core with the tiling of the tuning table, or with the kernel's own."""
        operation = of_factors(self._name, bool(scales), "x_scale_strides" in scales)
        prepare = partial(
            self._handle.core().prepare_linear,
            tokens=tokens,
            inputs=inputs,
            outputs=outputs,
            data_type=self._data_types[dtype],
            epilogue=self._epilogue,
            counter=counter,
            **scales,
        )
        try:
            return prepare(choice=self._planner.layer_choice(operation, outputs, inputs, tokens))
        except ValueError as error:
            # The row was measured on another device or written by hand. The layer itself is supported.
            logger.warning(
                "llm_comm: tuning table %s: %s; uses the kernel's own choice", self._planner.table.name, error
            )
            return prepare(choice=_core.LinearChoice())

    # ---- What does not fit --------------------------------------------------------------------------------------

    def _why_not(
        self,
        x: _Tensor,
        weight: _Tensor,
        scaling: Scaling | None,
        bias: _Tensor | None,
        weight_name: str = "weight",
    ) -> str:
        """Return why the operands are not supported, or ""."""
        for name, tensor in (("x", x), (weight_name, weight)):
            why = why_not_operand(tensor, self._device)
            if why:
                return f"{name}: {why}"
        why = self._why_not_type(x.dtype, scaling)
        if why:
            return why
        if weight.dtype != x.dtype:
            return f"{weight_name} is {weight.dtype}, x is {x.dtype}"
        if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1] or weight.shape[0] % self._parts != 0:
            outputs = "outputs" if self._parts == 1 else "2 * outputs"
            return (
                f"{weight_name} has shape {tuple(weight.shape)}: it must be [{outputs}, inputs] with the inputs of a "
                f"row of x, {tuple(x.shape)}"
            )
        rows, inputs = weight.shape
        multiples = inputs_multiple(scaling is not None), _core.linear_multiple
        for name, features, multiple in zip(
            ("inputs", "outputs"), (inputs, rows // self._parts), multiples, strict=True
        ):
            if not takes_features(features, multiple):
                return f"{features} {name}: it takes multiples of {multiple} up to {_core.linear_max_features}"
        tokens = x.numel() // inputs
        if not 1 <= tokens <= self._most_tokens:
            return f"{tokens} tokens: it takes 1 to {self._most_tokens}"
        why = "" if scaling is None else scaling.why_not(self._device, x, rows)
        return why or ("" if bias is None else self._why_not_bias(bias, weight, result_type(x, scaling)))

    def _why_not_bias(self, bias: _Tensor, weight: _Tensor, dtype: torch.dtype) -> str:
        why = why_not_operand(bias, self._device)
        if why:
            return f"bias: {why}"
        if bias.dtype is not dtype:
            return f"bias is {bias.dtype}, the result {dtype}"
        if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
            return f"bias has shape {tuple(bias.shape)}: it must be [{weight.shape[0]}], one for each row of the weight"
        return ""

    def _why_not_type(self, dtype: torch.dtype, scaling: Scaling | None) -> str:
        if dtype is not FP8:
            if dtype not in self._data_types:
                return f"{dtype} is not one of {', '.join(map(str, (*self._data_types, FP8)))}"
            return "" if scaling is None else f"x_scale, weight_scale and out_dtype are for {FP8}, x is {dtype}"
        if scaling is None:
            return f"x is {FP8}: it needs x_scale and weight_scale"
        return self._why_no_fp8()


def weight_of(operation: str) -> str:
    """Return the parameter name of the layer's weight in an operation."""
    return _WEIGHTS.get(operation, "linear_weight")


def operands_of(operation: str, writes: tuple[str, ...]) -> Operands:
    """Return the operand descriptions of an operation with a layer; it writes the tensors named ``writes``."""
    return Operands(operation, ("x", weight_of(operation), "bias", "x_scale", "weight_scale"), writes)


def result_type(x: _Tensor, scaling: Scaling | None) -> torch.dtype:
    """Return the dtype of a layer's result."""
    dtype: torch.dtype = x.dtype if scaling is None else scaling.out_dtype
    return dtype
