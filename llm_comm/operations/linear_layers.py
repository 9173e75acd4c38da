"""The methods of a communicator for linear layers, alone and with what comes behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llm_comm.operations import linear_operators, torch_operators
from llm_comm.operations.watched import is_watched as _is_watched
from llm_comm.planning.layers import LINEAR, LINEAR_SILU_AND_MUL
from llm_comm.planning.planner import Planner

# Global names cost less than attributes.
_is_compiling = torch.compiler.is_compiling
_Tensor = torch.Tensor
#: Types of weights, and of what may be left out, that are what they seem.
_WEIGHTS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = _WEIGHTS | {type(None)}


class LinearLayers:
    """What ``Communicator`` inherits."""

    name: str
    _operations: torch_operators.Operations
    _planner: Planner
    # ``run`` of them, found with one look-up each.
    _linear: Callable[..., Any]
    _linear_silu_and_mul: Callable[..., Any]
    _linear_all_reduce: Callable[..., Any]
    _linear_all_reduce_add_rms_norm: Callable[..., Any]

    # ---- Operations ---------------------------------------------------------------------------------------------

    def linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T`` for a few tokens, on this rank alone: a stream of the weight that begins early.

        Partial sums are made in fp32, in an order that the number of inputs alone decides, and rounded once: a row's
        bits do not depend on the rows beside it, nor on how many there are.

        **The weight is read before what is ahead in the stream has ended** (programmatic dependent launch). What writes
        it must have ended before the call: after loading or updating weights synchronize the device. ``x`` needs no
        care.

        Args:
            x: [..., inputs], contiguous, bfloat16 or float16, 1 to 64 rows, on this communicator's device. Where it
                does not begin at a multiple of 16 bytes it is copied.
            weight: [outputs, inputs], contiguous, of the dtype of ``x``; it begins at a multiple of 16 bytes, as new
                tensors do. Inputs and outputs are multiples of 64 up to 2**24.
            out: Where the result goes: contiguous, of as many elements as that, and the dtype of ``x``. It must share
                no memory with ``x`` or ``weight``. None: a new tensor.

        Returns:
            ``out``, or a new tensor [..., outputs], of the dtype of ``x``.

        Raises:
            UnsupportedInputError: ``accepts_linear(x, weight)`` is false, ``weight`` is not aligned, or ``out`` does
                not fit.
            CommunicatorError: An earlier call has failed, as of ``all_reduce``.
            RuntimeError: The layer could not be launched. No rank waits for it, and the communicator goes on.
        """
        # Host time of a call is a bar: this path makes no Python call that it can do without.
        if _is_compiling() or type(x) is not _Tensor or type(weight) not in _WEIGHTS or _is_watched():
            result: torch.Tensor = linear_operators.linear(x, weight, out, self.name)
        else:
            result = self._linear(x, weight, out)
        return result

    def linear_silu_and_mul(
        self, x: torch.Tensor, gate_up_weight: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``silu(x @ gate.T) * (x @ up.T)`` for a few tokens, on this rank alone: the projection of a gated MLP.

        One layer and no tensor between: bitwise silu-and-mul of the two halves of ``linear(x, gate_up_weight)``, which
        are those of the dtype, with silu(g) = g / (1 + exp(-g)) and the product in fp32, rounded once. What ``linear``
        promises of its bits, and its caveat about the weight, hold.

        Args:
            x: As of ``linear``.
            gate_up_weight: [2 * outputs, inputs], the rows of gate and then those of up, as engines merge them;
                contiguous, of the dtype of ``x``, at a multiple of 16 bytes. Inputs and outputs are multiples of 64 up
                to 2**24.
            out: As of ``linear``.

        Returns:
            ``out``, or a new tensor [..., outputs], of the dtype of ``x``.

        Raises:
            UnsupportedInputError: ``accepts_linear_silu_and_mul(x, gate_up_weight)`` is false, ``gate_up_weight`` is
                not aligned, or ``out`` does not fit.
            CommunicatorError, RuntimeError: As of ``linear``.
        """
        if _is_compiling() or type(x) is not _Tensor or type(gate_up_weight) not in _WEIGHTS or _is_watched():
            result: torch.Tensor = linear_operators.linear_silu_and_mul(x, gate_up_weight, out, self.name)
        else:
            result = self._linear_silu_and_mul(x, gate_up_weight, out)
        return result

    def linear_all_reduce(
        self, x: torch.Tensor, linear_weight: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sums ``x @ linear_weight.T`` over all ranks: bitwise ``all_reduce(linear(x, linear_weight))``.

        With one rank it is ``linear``. The caveat of ``linear`` about the weight holds. What does not fit is an error
        before anything is enqueued.

        Args:
            x, linear_weight: As of ``linear``; of the same shapes and dtype on all ranks.
            out: As of ``linear``, wherever it begins.

        Returns:
            ``out``, or a new tensor [..., outputs], of the dtype of ``x``.

        Raises:
            UnsupportedInputError: ``accepts_linear_all_reduce(x, linear_weight)`` is false, ``linear_weight`` is not
                aligned, or ``out`` does not fit.
            CommunicatorError: This or an earlier call has failed, as of ``all_reduce``.
        """
        if _is_compiling() or type(x) is not _Tensor or type(linear_weight) not in _WEIGHTS or _is_watched():
            result: torch.Tensor = linear_operators.linear_all_reduce(x, linear_weight, out, self.name)
        else:
            result = self._linear_all_reduce(x, linear_weight, out)
        return result

    def linear_all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        linear_weight: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        *,
        out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        quantize: str | None = None,
        scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The end of a transformer's layer: a linear layer, its sum over all ranks, residual add and RMSNorm.

        Bitwise ``all_reduce_add_rms_norm(linear(x, linear_weight), residual, norm_weight, eps, ...)``. The caveat of
        ``linear`` about its weight holds. What does not fit is an error before anything is enqueued.

        Args:
            x, linear_weight: As of ``linear``; of the same shapes and dtype on all ranks. The outputs are at most
                16384.
            residual: [..., outputs], of the dtype of ``x``, the same on all ranks; None adds nothing.
            norm_weight: [outputs], of the dtype of ``x``.
            eps, quantize, scale: As of ``all_reduce_add_rms_norm``.
            out: [..., outputs], of the dtype of ``x`` or float8_e4m3fn: where the normed rows go.
            residual_out: [..., outputs], of the dtype of ``x``: where the new residual goes; it may be ``residual``.
                What is written shares no memory with ``x`` or ``linear_weight``, otherwise as of
                ``all_reduce_add_rms_norm``.

        Returns:
            ``(normed, new_residual)``; with ``"dynamic"`` and ``"group..."`` ``(normed, new_residual, scale)``.

        Raises:
            UnsupportedInputError: ``accepts_fused_linear(x, linear_weight, norm_weight, quantize)`` is false,
                ``linear_weight`` is not aligned, or another tensor does not fit.
            CommunicatorError: This or an earlier call has failed, as of ``all_reduce``.
        """
        if (
            _is_compiling()
            or type(x) is not _Tensor
            or type(linear_weight) not in _WEIGHTS
            or type(residual) not in _PLAIN
            or type(norm_weight) not in _WEIGHTS
            or type(scale) not in _PLAIN
            or _is_watched()
        ):
            return linear_operators.linear_all_reduce_add_rms_norm(
                x, linear_weight, residual, norm_weight, eps, out, residual_out, quantize, scale, self.name
            )
        results: tuple[torch.Tensor, ...] = self._linear_all_reduce_add_rms_norm(
            x, linear_weight, residual, norm_weight, eps, out, residual_out, quantize, scale
        )
        return results

    # ---- What would be served -----------------------------------------------------------------------------------

    def accepts_linear(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether ``linear(x, weight)`` is served, wherever the tensors begin. Depends on the same as ``accepts``, of
        both, so all ranks that run the same program with the same kinds of tensors get the same answer."""
        return self._operations.linear.accepts(x, weight)

    def accepts_linear_silu_and_mul(self, x: torch.Tensor, gate_up_weight: torch.Tensor) -> bool:
        """The same for ``linear_silu_and_mul(x, gate_up_weight)``."""
        return self._operations.linear_silu_and_mul.accepts(x, gate_up_weight)

    def accepts_linear_all_reduce(self, x: torch.Tensor, linear_weight: torch.Tensor) -> bool:
        """The same for ``linear_all_reduce(x, linear_weight)``."""
        return self._operations.linear_all_reduce.accepts(x, linear_weight)

    def accepts_fused_linear(
        self, x: torch.Tensor, linear_weight: torch.Tensor, norm_weight: torch.Tensor, quantize: str | None = None
    ) -> bool:
        """The same for ``linear_all_reduce_add_rms_norm`` of ``x``, ``linear_weight`` and ``norm_weight``. False where
        there is one rank, as ``accepts_fused`` is."""
        return self._operations.linear_all_reduce_add_rms_norm.accepts(x, linear_weight, norm_weight, quantize)

    def prefers_linear(self, outputs: int, inputs: int, tokens: int) -> bool:
        """Whether an engine is to compute a layer of this shape by ``linear`` and its kin, in place of its own kernel.

        As ``Config.fuse_linear`` says: ``"auto"`` where the tuning table has measured that it is faster, with ``pdl``
        as it is now; True for every shape that is served; False for none. The same on all ranks.

        Args:
            outputs, inputs: Of the weight of this rank.
            tokens: Rows of ``x``.
        """
        return self._planner.prefers_layer(LINEAR, outputs, inputs, tokens)

    def prefers_linear_silu_and_mul(self, outputs: int, inputs: int, tokens: int) -> bool:
        """The same of ``linear_silu_and_mul``, in place of a gate-and-up projection and the activation behind it.

        Args:
            outputs: Of gate, and as many of up: half of the rows of the weight.
            inputs, tokens: As of ``prefers_linear``.
        """
        return self._planner.prefers_layer(LINEAR_SILU_AND_MUL, outputs, inputs, tokens)

    @property
    def max_preferred_tokens(self) -> int:
        """The most tokens for which either is true of any layer; 0: of none."""
        return self._planner.most_preferred_tokens()
