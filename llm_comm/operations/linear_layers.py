"""The methods of a communicator for linear layers, alone and with what comes behind them."""

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
    """Mixin of ``Communicator``: linear layers, their ``accepts``, and which of them an engine is to prefer."""

    name: str
    _operations: torch_operators.Operations
    _planner: Planner
    # ``run`` of them, found with one look-up each.
    _linear: Callable[..., Any]
    _linear_of_any_batch: Callable[..., Any]
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
        """``x @ weight.T + bias`` for a few tokens, on this rank alone: a stream of the weight that begins early.

        Partial sums are made in fp32, in an order that the number of inputs alone decides. The bias is added in fp32
        too, and the result is rounded once. So a row's bits do not depend on the rows beside it, nor on how many there
        are.

        **The weight is read before what is ahead in the stream has ended** (programmatic dependent launch). What writes
        it must have ended before the call: after loading or updating weights synchronize the device. ``x`` needs no
        care.

        FP8 (float8_e4m3fn) goes with scales: ``x_scale * (weight_scale * sum) + bias`` in fp32 is rounded to
        ``out_dtype``. On GPUs the sum has fewer bits than fp32 then (docs/reference/linear.md).
        ``weight_scale`` and ``bias`` are read as early as the weight.

        Scales of blocks (DeepSeek-V3, Qwen3-FP8) belong to 128 inputs: of one token, and of 128 outputs. The products
        of each block of inputs are summed by the tensor cores. The fp32 sum of even blocks, and that of odd blocks,
        adds ``(x_scale * weight_scale) * products`` block by block. The result is the sum of the two, and the bias.

        Args:
            x: [..., inputs], contiguous, bfloat16, float16 or float8_e4m3fn, 1 to 64 rows, on this communicator's
                device. Where it does not begin at a multiple of 16 bytes it is copied.
            weight: [outputs, inputs], contiguous, of the dtype of ``x``; it begins at a multiple of 16 bytes, as new
                tensors do. Inputs and outputs are multiples of 64 up to 2**24, inputs of float8_e4m3fn of 128.
            out: Where the result goes: contiguous, of as many elements as that, and its dtype. It must share no memory
                with ``x``, ``weight``, their scales or ``bias``. None: a new tensor.
            bias: [outputs], contiguous, of the dtype of the result. None: nothing is added.
            x_scale: float32, of float8_e4m3fn alone: one scale, or one for each row of ``x``; contiguous. Of blocks:
                [..., inputs / 128], contiguous, or two dimensions with any strides, as group quantizations return.
            weight_scale: The same of ``weight``: one scale, or one for each output; contiguous. Of blocks, where
                ``x_scale`` is too: [outputs / 128, rounded up, inputs / 128], contiguous.
            out_dtype: Of the result of float8_e4m3fn: bfloat16 or float16. None: that of ``out``, else bfloat16.

        Returns:
            ``out``, or a new tensor [..., outputs], of the dtype of ``x``, or ``out_dtype``.

        Raises:
            UnsupportedInputError: ``accepts_linear`` of these is false, ``weight`` is not aligned, or ``out`` does not
                fit.
            CommunicatorError: An earlier call has failed, as of ``all_reduce``.
            RuntimeError: The layer could not be launched. No rank waits for it, and the communicator goes on.
        """
        # Host time of a call is a bar: this path makes no Python call that it can do without.
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

    def linear_of_any_batch(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``linear`` of any number of tokens, a few or a whole prefill, bitwise the same.

        For engines in which a token's result must not depend on its batch. More than 64 tokens are cut into tiles of
        128 or 256. One launch multiplies them all, in the order of additions that few tokens have. Where bits may
        depend on the batch, cuBLAS is faster for many tokens.

        Args:
            x: [..., inputs], contiguous, bfloat16 or float16, 1 to 2**20 rows; else as of ``linear``.
            weight, out, bias: As of ``linear``, and so is its caveat about the weight.

        Returns:
            ``out``, or a new tensor [..., outputs].

        Raises:
            UnsupportedInputError, CommunicatorError, RuntimeError: As of ``linear``.
        """
        if (
            _is_compiling()
            or type(x) is not _Tensor
            or type(weight) not in _WEIGHTS
            or type(bias) not in _PLAIN
            or _is_watched()
        ):
            result: torch.Tensor = linear_operators.linear("linear_of_any_batch", x, weight, out, bias, None, self.name)
        else:
            result = self._linear_of_any_batch(x, weight, out, bias)
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
        """``silu(x @ gate.T) * (x @ up.T)`` for a few tokens, on this rank alone: the projection of a gated MLP.

        One layer and no tensor between: bitwise silu-and-mul of the two halves of ``linear(x, gate_up_weight, bias)``,
        which are those of the dtype, with silu(g) = g / (1 + exp(-g)) and the product in fp32, rounded once. What
        ``linear`` promises of its bits, and its caveat about the weight, hold.

        Args:
            x: As of ``linear``.
            gate_up_weight: [2 * outputs, inputs], the rows of gate and then those of up, as engines merge them;
                contiguous, of the dtype of ``x``, at a multiple of 16 bytes. Inputs and outputs are multiples as of
                ``linear``.
            out, x_scale, out_dtype: As of ``linear``.
            bias: [2 * outputs], for gate and then for up.
            weight_scale: One scale, or one for each of the 2 * outputs rows; of blocks
                [2 * outputs / 128, rounded up, inputs / 128].

        Returns:
            ``out``, or a new tensor [..., outputs], of the dtype of ``x``, or ``out_dtype``.

        Raises:
            UnsupportedInputError: ``accepts_linear_silu_and_mul`` of these is false, ``gate_up_weight`` is not aligned,
                or ``out`` does not fit.
            CommunicatorError, RuntimeError: As of ``linear``.
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
        """``gelu(x @ gate.T) * (x @ up.T)`` with the tanh approximation of gelu, as Gemma's MLP has it.

        Arguments, result and errors are those of ``linear_silu_and_mul``. The activation is g / (1 + exp(-2u)) with
        u = sqrt(2 / pi) * (g + 0.044715 * g**3), which is gelu(g, approximate="tanh"), in fp32.
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
        """Call the method named ``operation``: by ``run``, or by its torch operator where tensors are not plain."""
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
        """Sums ``x @ linear_weight.T + bias`` over all ranks: bitwise ``all_reduce(linear(x, linear_weight))``.

        With one rank it is ``linear``. The caveat of ``linear`` about the weight holds. What does not fit is an error
        before anything is enqueued.

        Args:
            x, linear_weight, x_scale, weight_scale, out_dtype: As of ``linear``; of the same shapes and dtypes on all
                ranks.
            bias: As of ``linear``; this rank's addend. A bias of the whole sum goes to one rank, and the others give
                None.
            out: As of ``linear``, wherever it begins.

        Returns:
            ``out``, or a new tensor [..., outputs], of the dtype of ``x``, or ``out_dtype``.

        Raises:
            UnsupportedInputError: ``accepts_linear_all_reduce`` of these is false, ``linear_weight`` is not aligned, or
                ``out`` does not fit.
            CommunicatorError: This or an earlier call has failed, as of ``all_reduce``.
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
    ) -> tuple[torch.Tensor, ...]:
        """The end of a transformer's layer: a linear layer, its sum over all ranks, residual add and RMSNorm.

        Bitwise ``all_reduce_add_rms_norm(linear(x, linear_weight), residual, norm_weight, eps, ...)``. The caveat of
        ``linear`` about its weight holds. What does not fit is an error before anything is enqueued.

        Args:
            x, linear_weight: As of ``linear``; of the same shapes and dtype on all ranks. The outputs are at most
                16384.
            residual: [..., outputs], of the dtype of the layer's result, the same on all ranks; None adds nothing.
            norm_weight: [outputs], of the dtype of the layer's result: where ``x`` is float8_e4m3fn, it says which.
            eps, weight_bias, quantize, scale: As of ``all_reduce_add_rms_norm``.
            bias, x_scale, weight_scale: Of the layer, as of ``linear_all_reduce``.
            out: [..., outputs], of the dtype of ``norm_weight`` or float8_e4m3fn: where the normed rows go.
            residual_out: [..., outputs], of the dtype of ``norm_weight``: where the new residual goes; it may be
                ``residual``.
                What is written shares no memory with ``x``, ``linear_weight``, their scales or ``bias``, otherwise as
                of ``all_reduce_add_rms_norm``.

        Returns:
            ``(normed, new_residual)``; with ``"dynamic"`` and ``"group..."`` ``(normed, new_residual, scale)``.

        Raises:
            UnsupportedInputError: ``accepts_linear_all_reduce_add_rms_norm`` of these is false, ``linear_weight`` is
                not aligned, or another tensor does not fit.
            CommunicatorError: This or an earlier call has failed, as of ``all_reduce``.
        """
        if (
            _is_compiling()
            or type(x) is not _Tensor
            or type(linear_weight) not in _WEIGHTS
            or type(residual) not in _PLAIN
            or type(norm_weight) not in _WEIGHTS
            or type(scale) not in _PLAIN
            or type(bias) not in _PLAIN
            or type(x_scale) not in _PLAIN
            or type(weight_scale) not in _PLAIN
            or _is_watched()
        ):
            operands = {"x": x, "linear_weight": linear_weight, "residual": residual, "norm_weight": norm_weight}
            operands |= {"bias": bias, "x_scale": x_scale, "weight_scale": weight_scale}
            name = "linear_all_reduce_add_rms_norm"
            return torch_operators.add_rms_norm(
                name, operands, eps, weight_bias, out, residual_out, quantize, scale, self.name
            )
        results: tuple[torch.Tensor, ...] = self._linear_all_reduce_add_rms_norm(
            *(x, linear_weight, residual, norm_weight, eps, weight_bias),
            *(out, residual_out, quantize, scale, bias, x_scale, weight_scale),
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
        """``linear`` where ``prefers_linear`` and where it serves all of these, else None: in one look at them.

        Args:
            x, weight, bias, x_scale, weight_scale, out_dtype: As of ``linear``.

        Returns:
            A new tensor, or None.

        Raises:
            CommunicatorError, RuntimeError: As of ``linear``, of layers that are served.
        """
        if not self._prefers_operands(LINEAR, x, weight, x_scale, weight_scale):
            return None
        options: dict[str, Any] = {"bias": bias, "x_scale": x_scale, "weight_scale": weight_scale}
        options["out_dtype"] = out_dtype
        return attempt(partial(self.accepts_linear, x, weight, **options), partial(self.linear, x, weight, **options))

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
        """``linear_silu_and_mul`` of a preferred layer, as ``try_linear``."""
        options = {"bias": bias, "x_scale": x_scale, "weight_scale": weight_scale, "out_dtype": out_dtype}
        return self._try_gated(self.accepts_linear_silu_and_mul, self.linear_silu_and_mul, x, gate_up_weight, options)

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
        """``linear_gelu_tanh_and_mul`` of a preferred layer, as ``try_linear``."""
        options = {"bias": bias, "x_scale": x_scale, "weight_scale": weight_scale, "out_dtype": out_dtype}
        accepts = self.accepts_linear_gelu_tanh_and_mul
        return self._try_gated(accepts, self.linear_gelu_tanh_and_mul, x, gate_up_weight, options)

    def _try_gated(
        self,
        accepts: Callable[..., bool],
        call: Callable[..., torch.Tensor],
        x: torch.Tensor,
        weight: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor | None:
        scales = options["x_scale"], options["weight_scale"]
        if not self._prefers_operands(LINEAR_SILU_AND_MUL, x, weight, *scales):
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
    ) -> tuple[torch.Tensor, ...] | None:
        """The same of ``linear_all_reduce_add_rms_norm``. None may be of this rank alone, where its weight is not
        aligned: nothing has been summed then, and the ranks that were served wait for the same sum from
        ``all_reduce_add_rms_norm`` of what this rank computes itself.
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
        """Whether ``linear`` of these is served, wherever the tensors begin. Depends on the same as ``accepts``, of all
        of them, so all ranks that run the same program with the same kinds of tensors get the same answer."""
        return self._operations.linear.accepts(x, weight, Scaling.of(x_scale, weight_scale, out_dtype), bias)

    def accepts_linear_of_any_batch(
        self, x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None
    ) -> bool:
        """The same for ``linear_of_any_batch``."""
        return self._operations.linear_of_any_batch.accepts(x, weight, None, bias)

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
        """The same for ``linear_silu_and_mul``."""
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
        """The same for ``linear_gelu_tanh_and_mul``."""
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
        """The same for ``linear_all_reduce``. A bias that one rank alone has counts there alone: where it does not fit,
        the answers differ."""
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
        """The same for ``linear_all_reduce_add_rms_norm``. False where there is one rank, as
        ``accepts_all_reduce_add_rms_norm`` is."""
        accepts = self._operations.linear_all_reduce_add_rms_norm.accepts
        return accepts(x, linear_weight, norm_weight, quantize, bias, x_scale, weight_scale)

    #: The name of before, for a release.
    accepts_fused_linear = accepts_linear_all_reduce_add_rms_norm

    def prefers_linear(
        self, outputs: int, inputs: int, tokens: int, *, fp8: bool = False, block_scales: bool = False
    ) -> bool:
        """Whether an engine is to compute a layer of this shape by ``linear`` and its kin, in place of its own kernel.

        As ``Config.fuse_linear`` says: ``"auto"`` where the tuning table has measured that it is faster, with ``pdl``
        as it is now, or of a layer that it has not where its size says so (docs/reference/linear.md); True for every
        shape that is served; False for none. The same on all ranks.

        Args:
            outputs, inputs: Of the weight of this rank.
            tokens: Rows of ``x``.
            fp8: Whether ``x`` and the weight are float8_e4m3fn. Tables have rows of their own for that.
            block_scales: Of FP8, whether scales are those of blocks. Tables have rows of their own for these too.
        """
        return self._prefers(LINEAR, outputs, inputs, tokens, fp8, block_scales)

    def prefers_linear_silu_and_mul(
        self, outputs: int, inputs: int, tokens: int, *, fp8: bool = False, block_scales: bool = False
    ) -> bool:
        """The same of ``linear_silu_and_mul``, in place of a gate-and-up projection and the activation behind it.

        Args:
            outputs: Of gate, and as many of up: half of the rows of the weight.
            inputs, tokens, fp8, block_scales: As of ``prefers_linear``.
        """
        return self._prefers(LINEAR_SILU_AND_MUL, outputs, inputs, tokens, fp8, block_scales)

    def _prefers(self, operation: str, outputs: int, inputs: int, tokens: int, fp8: bool, block_scales: bool) -> bool:
        if fp8 and not self._operations.linear.has_fp8:
            return False
        return self._planner.prefers_layer(of_factors(operation, fp8, block_scales), outputs, inputs, tokens)

    @property
    def max_preferred_tokens(self) -> int:
        """The most tokens for which either is true of any layer; 0: of none."""
        return self._planner.most_preferred_tokens()
