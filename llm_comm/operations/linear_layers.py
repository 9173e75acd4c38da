"""Mixin of ``Communicator``: linear layers, alone and followed by an all-reduce, residual add and RMSNorm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from llm_comm.operations import linear_operators, torch_operators
from llm_comm.operations.fp8 import Scaling
from llm_comm.operations.operands import PLAIN as _PLAIN
from llm_comm.operations.operands import PLAIN_WEIGHTS as _WEIGHTS
from llm_comm.operations.operands import attempt
from llm_comm.operations.operands import is_watched as _is_watched
from llm_comm.planning.layers import LINEAR, LINEAR_GELU_TANH_AND_MUL, LINEAR_SILU_AND_MUL, of_factors
from llm_comm.planning.planner import Planner

# Global names cost less than attributes.
_is_compiling = torch.compiler.is_compiling
_Tensor = torch.Tensor


class LinearLayers:
    """Mixin of ``Communicator``: linear layers, their ``accepts_*`` queries, and ``prefers_*`` for engines."""

    name: str
    _operations: torch_operators.Operations
    _planner: Planner
    # Bound ``run`` methods of the operations: one attribute look-up for a call.
    _linear: Callable[..., Any]
    _batch_invariant_linear: Callable[..., Any]
    _linear_silu_and_mul: Callable[..., Any]
    _linear_gelu_tanh_and_mul: Callable[..., Any]
    _linear_all_reduce: Callable[..., Any]
    _linear_all_reduce_add_rms_norm: Callable[..., Any]

    # ---- Operations ---------------------------------------------------------------------------------------------

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Compute ``x @ weight.T + bias`` for up to 64 tokens on this rank alone.

        Partial sums are fp32. Only the number of inputs decides the order of additions. The bias is added in fp32, and
        the result is rounded once. So the bits of a row depend neither on the other rows nor on their number.

        **The weight is read before earlier kernels of the stream have ended** (programmatic dependent launch). The
        kernel that writes it must have ended before the call. Synchronize the device after loading or updating weights.
        The same holds for ``weight_scale`` and ``bias``. ``x`` and ``x_scale`` need no such care.

        FP8 operands (float8_e4m3fn) need scales. The result is ``x_scale * (weight_scale * sum) + bias`` in fp32,
        rounded to ``out_dtype``. Tensor cores keep fewer bits of an FP8 sum than fp32 has (docs/reference/linear.md).

        Block scales (DeepSeek-V3, Qwen3-FP8) belong to blocks of 128 inputs: of one token, and of 128 outputs. Tensor
        cores sum the products of one block. ``(x_scale * weight_scale) * products`` is then added to an fp32 sum of
        the even blocks, or to one of the odd blocks. The result is the sum of both, plus the bias.

        Args:
            x: [..., inputs], contiguous, bfloat16, float16 or float8_e4m3fn, 1 to 64 rows, on this communicator's
                device. It is copied if it does not begin at a multiple of 16 bytes.
            weight: [outputs, inputs], contiguous, of the dtype of ``x``, at a multiple of 16 bytes, as new tensors are.
                Inputs and outputs are multiples of 64 up to 2**24; inputs of float8_e4m3fn are multiples of 128.
            out: Takes the result: contiguous, with its number of elements and its dtype. It must share no memory with
                the operands. None: a new tensor.
            bias: [outputs], contiguous, of the dtype of the result. None: no bias.
            x_scale: For float8_e4m3fn only: float32, one scale, or one for each row of ``x``; contiguous. Block
                scales: [..., inputs / 128], contiguous, or two dimensions with any positive strides, as group
                quantizations return them.
            weight_scale: For float8_e4m3fn only: float32, one scale, or one for each output; contiguous. Block scales,
                required if ``x_scale`` has them: [outputs / 128, rounded up, inputs / 128], contiguous.
            out_dtype: For float8_e4m3fn only: dtype of the result, bfloat16 or float16. None: the dtype of ``out``,
                else bfloat16.

        Returns:
            ``out``, or a new tensor [..., outputs]. Its dtype is ``out_dtype`` for float8_e4m3fn, else that of ``x``.

        Raises:
            UnsupportedInputError: ``accepts_linear`` of the operands is False, ``weight`` is not aligned, or ``out``
                does not fit.
            CommunicatorError: An earlier call has failed, as in ``all_reduce``.
            RuntimeError: The layer could not be launched. No rank waits for it, and the communicator stays usable.
        """
        # Host time of a call matters: this path avoids Python calls.
        if (
            _is_compiling()
            or type(x) is not _Tensor
            or type(weight) not in _WEIGHTS
            or type(bias) not in _PLAIN
            or type(x_scale) not in _PLAIN
            or type(weight_scale) not in _PLAIN
            or _is_watched()
        ):
            scaling = Scaling.of(x_scale, weight_scale, out_dtype, out)
            result: torch.Tensor = linear_operators.linear("linear", x, weight, out, bias, scaling, self.name)
        else:
            result = self._linear(x, weight, out, bias, x_scale, weight_scale, out_dtype)
        return result

    def batch_invariant_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute ``linear`` for 1 to 2**20 tokens, such as a whole prefill. Each row has the bits of ``linear``.

        For batch-invariant modes of engines. One launch computes all tokens. More than 64 are cut into tiles of 128 or
        256, which have the same order of additions. cuBLAS is faster for many tokens; use it where bits may depend on
        the batch.

        Args:
            x: [..., inputs], contiguous, bfloat16 or float16, 1 to 2**20 rows; otherwise as in ``linear``.
            weight, out, bias: As in ``linear``, including when the weight and bias may be written.

        Returns:
            ``out``, or a new tensor [..., outputs] of the dtype of ``x``.

        Raises:
            UnsupportedInputError, CommunicatorError, RuntimeError: As in ``linear``.
        """
        if (
            _is_compiling()
            or type(x) is not _Tensor
            or type(weight) not in _WEIGHTS
            or type(bias) not in _PLAIN
            or _is_watched()
        ):
            result: torch.Tensor = linear_operators.linear(
                "batch_invariant_linear", x, weight, out, bias, None, self.name
            )
        else:
            result = self._batch_invariant_linear(x, weight, out, bias)
        return result

    def linear_silu_and_mul(
        self,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Compute ``silu(x @ gate.T) * (x @ up.T)`` for up to 64 tokens on this rank alone: a gated MLP's projection.

        One kernel, without a tensor for gate and up. Both are rounded to the dtype of the result, as in ``linear(x,
        gate_up_weight, bias=bias)``. The activation silu(g) = g / (1 + exp(-g)) and the product are fp32 and rounded
        once. The bits of a row do not depend on other rows. The weight, its scale and the bias must be written before
        the call, as for ``linear``.

        Args:
            x: As in ``linear``.
            gate_up_weight: [2 * outputs, inputs], the rows of gate, then the rows of up, as engines merge them.
                Contiguous, of the dtype of ``x``, at a multiple of 16 bytes. Inputs and outputs as in ``linear``.
            out: As in ``linear``, for [..., outputs].
            x_scale, out_dtype: As in ``linear``.
            bias: [2 * outputs], for gate, then for up. None: no bias.
            weight_scale: One scale, or one for each of the 2 * outputs rows. Block scales:
                [2 * outputs / 128, rounded up, inputs / 128].

        Returns:
            ``out``, or a new tensor [..., outputs]. Its dtype is ``out_dtype`` for float8_e4m3fn, else that of ``x``.

        Raises:
            UnsupportedInputError: ``accepts_linear_silu_and_mul`` of the operands is False, ``gate_up_weight`` is not
                aligned, or ``out`` does not fit.
            CommunicatorError, RuntimeError: As in ``linear``.
        """
        operands = x, gate_up_weight, out, bias, x_scale, weight_scale, out_dtype
        return self._gated(LINEAR_SILU_AND_MUL, self._linear_silu_and_mul, *operands)

    def linear_gelu_tanh_and_mul(
        self,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Compute ``gelu(x @ gate.T) * (x @ up.T)`` with the tanh approximation of gelu, as in Gemma's MLP.

        Arguments, result and errors are those of ``linear_silu_and_mul``. The activation in fp32 is
        gelu(g, approximate="tanh"): g / (1 + exp(-2u)) with u = sqrt(2 / pi) * (g + 0.044715 * g**3).
        ``prefers_linear_silu_and_mul`` answers for this method too: both run the same kernel.
        """
        operands = x, gate_up_weight, out, bias, x_scale, weight_scale, out_dtype
        return self._gated(LINEAR_GELU_TANH_AND_MUL, self._linear_gelu_tanh_and_mul, *operands)

    def _gated(
        self,
        operation: str,
        run: Callable[..., torch.Tensor],
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None,
        bias: torch.Tensor | None,
        x_scale: torch.Tensor | None,
        weight_scale: torch.Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        """Call ``run``, or the torch operator of ``operation`` if tracing or a tensor subclass requires it."""
        if (
            _is_compiling()
            or type(x) is not _Tensor
            or type(weight) not in _WEIGHTS
            or type(bias) not in _PLAIN
            or type(x_scale) not in _PLAIN
            or type(weight_scale) not in _PLAIN
            or _is_watched()
        ):
            scaling = Scaling.of(x_scale, weight_scale, out_dtype, out)
            result: torch.Tensor = linear_operators.linear(operation, x, weight, out, bias, scaling, self.name)
            return result
        return run(x, weight, out, bias, x_scale, weight_scale, out_dtype)

    def linear_all_reduce(
        self,
        x: torch.Tensor,
        linear_weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Sum ``x @ linear_weight.T + bias`` over all ranks, bitwise ``all_reduce(linear(x, linear_weight))``
        without option ``wire``.

        With one rank it is ``linear``. The weight, its scale and the bias must be written before the call, as for
        ``linear``. Operands that do not fit raise an error before anything is enqueued.

        Args:
            x, linear_weight, x_scale, weight_scale, out_dtype: As in ``linear``; shapes and dtypes must be equal on all
                ranks.
            bias: As in ``linear``; part of this rank's addend. Pass a bias of the sum on one rank, and None on the
                others.
            out: As in ``linear``, at any address.

        Returns:
            ``out``, or a new tensor [..., outputs]. Its dtype is ``out_dtype`` for float8_e4m3fn, else that of ``x``.

        Raises:
            UnsupportedInputError: ``accepts_linear_all_reduce`` of the operands is False, ``linear_weight`` is not
                aligned, or ``out`` does not fit.
            CommunicatorError: This or an earlier call has failed, as in ``all_reduce``.
        """
        if (
            _is_compiling()
            or type(x) is not _Tensor
            or type(linear_weight) not in _WEIGHTS
            or type(bias) not in _PLAIN
            or type(x_scale) not in _PLAIN
            or type(weight_scale) not in _PLAIN
            or _is_watched()
        ):
            scaling = Scaling.of(x_scale, weight_scale, out_dtype, out)
            result: torch.Tensor = linear_operators.linear(
                "linear_all_reduce", x, linear_weight, out, bias, scaling, self.name
            )
        else:
            result = self._linear_all_reduce(x, linear_weight, out, bias, x_scale, weight_scale, out_dtype)
        return result

    def linear_all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        linear_weight: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        *,
        weight_bias: float = 0.0,
        out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        quantize: str | None = None,
        scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Compute a linear layer, its sum over all ranks, residual add and RMSNorm.

        Bitwise ``all_reduce_add_rms_norm(linear(x, linear_weight), residual, norm_weight, eps, ...)``. The layer's
        weight, its scale and the bias must be written before the call, as for ``linear``. Operands that do not fit
        raise an error before anything is enqueued.

        Args:
            x, linear_weight: As in ``linear``; shapes and dtype must be equal on all ranks. At most 16384 outputs.
            residual: [..., outputs], of the dtype of ``norm_weight``, the same on all ranks; None adds nothing.
            norm_weight: [outputs], of the dtype of the layer's result. For float8_e4m3fn operands this dtype, bfloat16
                or float16, decides that of the result.
            eps, weight_bias, quantize, scale, global_scale: As in ``all_reduce_add_rms_norm``.
            bias, x_scale, weight_scale: Of the layer, as in ``linear_all_reduce``.
            out: Takes the normed rows, as in ``all_reduce_add_rms_norm``. It must share no memory with ``x``,
                ``linear_weight``, their scales or ``bias``.
            residual_out: Takes the new residual: [..., outputs], of the dtype of ``norm_weight``; may be ``residual``.
                It must share no memory with ``x``, ``linear_weight``, their scales or ``bias``.

        Returns:
            ``(normed, new_residual)``; if the call computes scales ``(normed, new_residual, scale)``.

        Raises:
            UnsupportedInputError: ``accepts_linear_all_reduce_add_rms_norm`` of the operands is False,
                ``linear_weight`` is not aligned, or another tensor does not fit.
            CommunicatorError: This or an earlier call has failed, as in ``all_reduce``.
        """
        if (
            _is_compiling()
            or type(x) is not _Tensor
            or type(linear_weight) not in _WEIGHTS
            or type(residual) not in _PLAIN
            or type(norm_weight) not in _WEIGHTS
            or type(scale) not in _PLAIN
            or type(global_scale) not in _PLAIN
            or type(bias) not in _PLAIN
            or type(x_scale) not in _PLAIN
            or type(weight_scale) not in _PLAIN
            or _is_watched()
        ):
            operands = {"x": x, "linear_weight": linear_weight, "residual": residual, "norm_weight": norm_weight}
            operands |= {"bias": bias, "x_scale": x_scale, "weight_scale": weight_scale}
            name = "linear_all_reduce_add_rms_norm"
            return torch_operators.add_rms_norm(
                name, operands, eps, weight_bias, out, residual_out, quantize, scale, self.name, global_scale
            )
        results: tuple[torch.Tensor, ...] = self._linear_all_reduce_add_rms_norm(
            *(x, linear_weight, residual, norm_weight, eps, weight_bias),
            *(out, residual_out, quantize, scale, bias, x_scale, weight_scale, global_scale),
        )
        return results

    # ---- For engines, which go their own way where a layer is not served ----------------------------------------

    def try_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor | None:
        """Compute ``linear`` if ``prefers_linear`` and ``accepts_linear`` hold and ``weight`` is aligned.

        Args:
            x, weight, bias, x_scale, weight_scale, out_dtype: As in ``linear``.

        Returns:
            A new tensor, as ``linear`` returns it. None if nothing was enqueued; the engine computes the layer.

        Raises:
            CommunicatorError, RuntimeError: As in ``linear``.
        """
        options = {"bias": bias, "x_scale": x_scale, "weight_scale": weight_scale, "out_dtype": out_dtype}
        return self._try_layer(LINEAR, self.accepts_linear, self.linear, x, weight, options)

    def try_linear_silu_and_mul(
        self,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor | None:
        """Compute ``linear_silu_and_mul`` if the layer is preferred and supported, else return None.

        Arguments are those of ``linear_silu_and_mul``, result and errors as in ``try_linear``.
        """
        options = {"bias": bias, "x_scale": x_scale, "weight_scale": weight_scale, "out_dtype": out_dtype}
        calls = self.accepts_linear_silu_and_mul, self.linear_silu_and_mul
        return self._try_layer(LINEAR_SILU_AND_MUL, *calls, x, gate_up_weight, options)

    def try_linear_gelu_tanh_and_mul(
        self,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor | None:
        """Compute ``linear_gelu_tanh_and_mul`` if the layer is preferred and supported, else return None.

        Arguments are those of ``linear_gelu_tanh_and_mul``, result and errors as in ``try_linear``.
        """
        options = {"bias": bias, "x_scale": x_scale, "weight_scale": weight_scale, "out_dtype": out_dtype}
        calls = self.accepts_linear_gelu_tanh_and_mul, self.linear_gelu_tanh_and_mul
        return self._try_layer(LINEAR_SILU_AND_MUL, *calls, x, gate_up_weight, options)

    def _try_layer(
        self,
        preferred_as: str,
        accepts: Callable[..., bool],
        call: Callable[..., torch.Tensor],
        x: torch.Tensor,
        weight: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor | None:
        if not self._prefers_operands(preferred_as, x, weight, options["x_scale"], options["weight_scale"]):
            return None
        return attempt(partial(accepts, x, weight, **options), partial(call, x, weight, **options))

    def try_linear_all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        linear_weight: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        *,
        weight_bias: float = 0.0,
        quantize: str | None = None,
        scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...] | None:
        """Compute ``linear_all_reduce_add_rms_norm`` if the layer is preferred and supported, else return None.

        None may be the answer of this rank alone, if its weight is not aligned. The other ranks then wait for this
        rank's addend. The caller must compute the layer itself and pass it to ``all_reduce_add_rms_norm``.

        Args:
            x, linear_weight, residual, norm_weight, eps, weight_bias: As in ``linear_all_reduce_add_rms_norm``.
            quantize, scale, bias, x_scale, weight_scale, global_scale: As in ``linear_all_reduce_add_rms_norm``.

        Raises:
            CommunicatorError: As in ``linear_all_reduce_add_rms_norm``.
        """
        if not self._prefers_operands(LINEAR, x, linear_weight, x_scale, weight_scale):
            return None
        options: dict[str, Any] = {"bias": bias, "x_scale": x_scale, "weight_scale": weight_scale}
        return attempt(
            partial(self.accepts_linear_all_reduce_add_rms_norm, x, linear_weight, norm_weight, quantize, **options),
            partial(
                self.linear_all_reduce_add_rms_norm,
                *(x, linear_weight, residual, norm_weight, eps),
                weight_bias=weight_bias,
                quantize=quantize,
                scale=scale,
                global_scale=global_scale,
                **options,
            ),
        )

    def _prefers_operands(
        self,
        operation: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        x_scale: torch.Tensor | None,
        weight_scale: torch.Tensor | None,
    ) -> bool:
        """Return whether the layer of these operands is preferred."""
        if weight.dim() != 2 or weight.is_nested or x.is_nested:  # which have no shape
            return False
        rows, inputs = weight.shape
        outputs = rows // 2 if operation == LINEAR_SILU_AND_MUL else rows
        fp8 = x_scale is not None
        blocks = fp8 and weight_scale is not None and Scaling(x_scale, weight_scale, None).of_blocks(x, rows)
        return self._prefers(operation, outputs, inputs, x.shape[:-1].numel(), fp8, blocks)

    # ---- What would be served -----------------------------------------------------------------------------------

    def accepts_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> bool:
        """Return whether ``linear`` supports these operands, at any address.

        Depends only on properties named in ``accepts``, of all operands. So ranks that run the same program with the
        same shapes and dtypes get the same answer.
        """
        return self._operations.linear.accepts(x, weight, Scaling.of(x_scale, weight_scale, out_dtype), bias)

    def accepts_batch_invariant_linear(
        self, x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None
    ) -> bool:
        """Return whether ``batch_invariant_linear`` supports these operands, on the terms of ``accepts_linear``."""
        return self._operations.batch_invariant_linear.accepts(x, weight, None, bias)

    def accepts_linear_silu_and_mul(
        self,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> bool:
        """Return whether ``linear_silu_and_mul`` supports these operands, on the terms of ``accepts_linear``."""
        scaling = Scaling.of(x_scale, weight_scale, out_dtype)
        return self._operations.linear_silu_and_mul.accepts(x, gate_up_weight, scaling, bias)

    def accepts_linear_gelu_tanh_and_mul(
        self,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> bool:
        """Return whether ``linear_gelu_tanh_and_mul`` supports these operands, on the terms of ``accepts_linear``."""
        scaling = Scaling.of(x_scale, weight_scale, out_dtype)
        return self._operations.linear_gelu_tanh_and_mul.accepts(x, gate_up_weight, scaling, bias)

    def accepts_linear_all_reduce(
        self,
        x: torch.Tensor,
        linear_weight: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> bool:
        """Return whether ``linear_all_reduce`` supports these operands, on the terms of ``accepts_linear``.

        A bias that only one rank passes is checked on that rank only. If it does not fit, the answers of the ranks
        differ.
        """
        scaling = Scaling.of(x_scale, weight_scale, out_dtype)
        return self._operations.linear_all_reduce.accepts(x, linear_weight, scaling, bias)

    def accepts_linear_all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        linear_weight: torch.Tensor,
        norm_weight: torch.Tensor,
        quantize: str | None = None,
        *,
        bias: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
    ) -> bool:
        """Return whether ``linear_all_reduce_add_rms_norm`` supports these operands.

        On the terms of ``accepts_linear``. False with one rank, as ``accepts_all_reduce_add_rms_norm``.
        """
        accepts = self._operations.linear_all_reduce_add_rms_norm.accepts
        return accepts(x, linear_weight, norm_weight, quantize, bias, x_scale, weight_scale)

    #: Deprecated alias, kept for one release.
    accepts_fused_linear = accepts_linear_all_reduce_add_rms_norm

    def prefers_linear(
        self, outputs: int, inputs: int, tokens: int, *, fp8: bool = False, block_scales: bool = False
    ) -> bool:
        """Return whether an engine should use llm_comm for a layer of this shape, in place of its own kernel.

        Applies to ``linear``, ``linear_all_reduce`` and ``linear_all_reduce_add_rms_norm``. The answer follows
        ``Config.fuse_linear`` and is the same on all ranks:

        - ``"auto"``: the tuning table has a faster row for this shape and ``Config.pdl``. A shape without rows is
          preferred by its size (docs/reference/linear.md).
        - True: every supported shape.
        - False: none.

        Args:
            outputs, inputs: Shape of this rank's weight.
            tokens: Rows of ``x``.
            fp8: ``x`` and the weight are float8_e4m3fn. Tables have separate rows for it.
            block_scales: The scales of FP8 operands are block scales. Tables have separate rows for them.
        """
        return self._prefers(LINEAR, outputs, inputs, tokens, fp8, block_scales)

    def prefers_linear_silu_and_mul(
        self, outputs: int, inputs: int, tokens: int, *, fp8: bool = False, block_scales: bool = False
    ) -> bool:
        """Return whether an engine should use ``linear_silu_and_mul`` in place of its own projection and activation.

        The answer also holds for ``linear_gelu_tanh_and_mul``, and follows ``Config.fuse_linear`` as in
        ``prefers_linear``.

        Args:
            outputs: Outputs of gate, half of the rows of the weight.
            inputs, tokens, fp8, block_scales: As in ``prefers_linear``.
        """
        return self._prefers(LINEAR_SILU_AND_MUL, outputs, inputs, tokens, fp8, block_scales)

    def _prefers(self, operation: str, outputs: int, inputs: int, tokens: int, fp8: bool, block_scales: bool) -> bool:
        if fp8 and not self._operations.linear.has_fp8:
            return False
        return self._planner.prefers_layer(of_factors(operation, fp8, block_scales), outputs, inputs, tokens)

    @property
    def max_preferred_tokens(self) -> int:
        """Largest number of tokens for which any layer may be preferred; 0 if no layer is."""
        return self._planner.most_preferred_tokens()
