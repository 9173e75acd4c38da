"""Experts of few tokens: gate, up and down-projection of the experts that a router has chosen, on one rank alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from llm_comm import _core
from llm_comm.operations.one_rank import FewTokens, aligned, why_not_sizes
from llm_comm.operations.operands import Operands, attempt, delivered, output_for, why_not_buffer, why_not_out

_EPILOGUES: dict[str, _core.Epilogue] = {"silu": "silu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}
_WEIGHTS = ("gate_up_weight", "down_weight")
_CHOICE = {"topk_weights": torch.float32, "topk_ids": torch.int32}
_OPERANDS = Operands("fused_experts", ("x", *_WEIGHTS, "topk_weights", "topk_ids"), ("out",))


class Experts(FewTokens):
    """Experts of one communicator."""

    name = "fused_experts"
    algorithm = "experts"

    def run(
        self,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: Any = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        """Run ``Communicator.fused_experts``."""
        operands = x, gate_up_weight, down_weight, topk_weights, topk_ids
        self._check(
            self.why_not(*operands, activation), dict(zip(_OPERANDS.reads, operands, strict=True)), weights=_WEIGHTS
        )
        if out is not None:
            why = why_not_out(out, x.shape, x.dtype, self._device) or why_not_buffer(out, self._device)
            if why:
                self._refuse(why)
            _OPERANDS.check_written(*operands, out)
        experts, hidden, intermediate = down_weight.shape
        tokens, top_k = topk_ids.shape
        run = self._prepare(
            (x.shape, down_weight.shape, top_k, x.dtype, activation),
            x.nbytes,
            lambda counter: self._handle.core().prepare_experts(
                tokens=tokens,
                top_k=top_k,
                experts=experts,
                hidden=hidden,
                intermediate=intermediate,
                data_type=self._data_types[x.dtype],
                epilogue=_EPILOGUES[activation],
                counter=counter,
            ),
        )
        x = aligned(x)
        y = output_for(out, partial(torch.empty_like, x))
        state = x.new_empty((tokens * top_k, intermediate))
        buffers = x, gate_up_weight, down_weight, topk_ids, topk_weights, state, y
        self._enqueue(run, *(tensor.data_ptr() for tensor in buffers))
        return delivered(y, out)

    def why_not(
        self,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str = "silu",
    ) -> str:
        """Return why the operands are not supported, or "". The answer ignores addresses."""
        given = {"x": x, "gate_up_weight": gate_up_weight, "down_weight": down_weight}
        given |= {"topk_weights": topk_weights, "topk_ids": topk_ids}
        why = self._why_not_tensors(given, dict.fromkeys(_WEIGHTS, 3), _WEIGHTS, _CHOICE)
        if not why and activation not in _EPILOGUES:
            why = f"activation is {activation!r}; it must be one of {', '.join(_EPILOGUES)}"
        return why or self._why_not_shapes({name: tuple(tensor.shape) for name, tensor in given.items()})

    def _why_not_shapes(self, shapes: dict[str, tuple[int, ...]]) -> str:
        x, down, chosen = shapes["x"], shapes["down_weight"], shapes["topk_ids"]
        (tokens, hidden), (experts, _, intermediate) = x, down
        expected = {
            "gate_up_weight": (experts, 2 * intermediate, hidden),
            "down_weight": (experts, hidden, intermediate),
            "topk_weights": (tokens, chosen[1]),
            "topk_ids": (tokens, chosen[1]),
        }
        for name, shape in expected.items():
            if shapes[name] != shape:
                return f"{name} has shape {shapes[name]}; with x {x} and down_weight {down} it must be {shape}"
        columns = {"the hidden state": hidden, "the intermediate state": intermediate}
        return why_not_sizes(tokens, experts, chosen[1], columns)


class ExpertLayers:
    """Mixin of ``Communicator``: experts of few tokens."""

    _experts: Experts

    def fused_experts(
        self,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        activation: str = "silu",
    ) -> torch.Tensor:
        """Compute the experts of up to 64 tokens on this rank alone, by two kernels.

        Row t of the result is the sum over the experts e of token t of ``topk_weights[t, e] * (down_weight[e] @
        (activation(gate) * up))``, with ``gate, up = gate_up_weight[e] @ x[t]`` in two halves. With tensor parallelism
        it is this rank's part, which an all-reduce sums up. Sums and factors are fp32. Gate, up, and the product of
        activation and up are rounded to the dtype of ``x``, as is the result. With float16 that product must be below
        65504. Experts are added in the order of ``topk_ids``. The bits of a token do not depend on other tokens.

        Args:
            x: [tokens, hidden], contiguous, bfloat16 or float16, 1 to 64 tokens.
            gate_up_weight: [experts, 2 * intermediate, hidden], contiguous, of the dtype of ``x``: rows of gate, then
                rows of up, of 1 to 512 experts. Sizes of both states are multiples of 64 up to 2**24.
            down_weight: [experts, hidden, intermediate], contiguous, of the dtype of ``x``. Both weights begin at a
                multiple of 16 bytes, as new tensors do.
            topk_weights: [tokens, top_k], contiguous, float32: factor of each expert; top_k is 1 to 16.
            topk_ids: [tokens, top_k], contiguous, int32: the experts of a token. Factors of an expert that a token has
                twice are added up. Other numbers than those of experts, such as -1, add nothing.
            out: Takes the result: contiguous, like ``x``. It must share no memory with the operands. None: a new
                tensor.
            activation: ``"silu"``, or ``"gelu_tanh"``.

        Returns:
            ``out``, or a new tensor, [tokens, hidden].

        Raises:
            UnsupportedInputError: ``accepts_fused_experts`` of the operands is False, a weight is not aligned, ``out``
                does not fit, or the device has too little shared memory for a block.
            CommunicatorError: An earlier call has failed, as in ``all_reduce``.
            RuntimeError: The kernels could not be launched. No rank waits for them.
        """
        return self._experts.run(x, gate_up_weight, down_weight, topk_weights, topk_ids, out, activation)

    def try_fused_experts(
        self,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        activation: str = "silu",
    ) -> torch.Tensor | None:
        """Run ``fused_experts`` into a new tensor. Return None where it would raise UnsupportedInputError."""
        operands = (x, gate_up_weight, down_weight, topk_weights, topk_ids)
        return attempt(
            partial(self.accepts_fused_experts, *operands, activation=activation),
            partial(self.fused_experts, *operands, activation=activation),
        )

    def accepts_fused_experts(
        self,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        activation: str = "silu",
    ) -> bool:
        """Return whether ``fused_experts`` supports the operands. The answer ignores addresses."""
        return self._experts.accepts(x, gate_up_weight, down_weight, topk_weights, topk_ids, activation)
