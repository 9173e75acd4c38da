"""Experts of few tokens: gate, up and down-projection of the experts that a router has chosen, on one rank alone."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from llm_comm import _core
from llm_comm.errors import quoted
from llm_comm.operations.fp8 import FP8, GROUP_SIZE
from llm_comm.operations.one_rank import FewTokens, aligned, why_not_sizes
from llm_comm.operations.operands import (
    PLAIN_WEIGHTS,
    Operands,
    attempt,
    delivered,
    output_for,
    why_not_buffer,
    why_not_operand,
    why_not_out,
)

_EPILOGUES: dict[str, _core.Epilogue] = {"silu": "silu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}
_WEIGHTS = ("gate_up_weight", "down_weight")
_SCALES = ("gate_up_scale", "down_scale")
_LARGEST = torch.finfo(torch.float32).max
#: As of ``moe_dispatch``.
_MOST_EXPERTS = 1 << 16
_CHOICE = {"topk_weights": torch.float32, "topk_ids": torch.int32}
_OPERANDS = Operands("fused_experts", ("x", *_WEIGHTS, "topk_weights", "topk_ids", *_SCALES), ("out",))


class Options(NamedTuple):
    """Options of ``Communicator.fused_experts``."""

    activation: str = "silu"
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    routed_scaling_factor: float = 1.0
    first_expert: int = 0
    num_experts: int | None = None


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
        out: Any,
        options: Options,
    ) -> torch.Tensor:
        """Run ``Communicator.fused_experts``."""
        scales = options.gate_up_scale, options.down_scale
        operands = x, gate_up_weight, down_weight, topk_weights, topk_ids
        why = self.why_not(*operands, options)
        self._check(why, dict(zip(_OPERANDS.reads, (*operands, *scales), strict=True)), weights=_WEIGHTS)
        if out is not None:
            why = why_not_out(out, x.shape, x.dtype, self._device) or why_not_buffer(out, self._device)
            if why:
                self._refuse(why)
            _OPERANDS.check_written(*operands, *scales, out)
        experts, hidden, intermediate = down_weight.shape
        tokens, top_k = topk_ids.shape
        strides = tuple(scale.stride() for scale in scales if scale is not None) or None
        activation, factor = options.activation, options.routed_scaling_factor
        numbers = options.first_expert, options.num_experts or experts
        run = self._prepare(
            (x.shape, down_weight.shape, top_k, x.dtype, activation, strides, factor, *numbers),
            x.nbytes,
            lambda counter: self._handle.core().prepare_experts(
                tokens=tokens,
                top_k=top_k,
                experts=experts,
                hidden=hidden,
                intermediate=intermediate,
                data_type=self._data_types[x.dtype],
                epilogue=_EPILOGUES[activation],
                scaling_factor=factor,
                scale_strides=strides,
                first_expert=numbers[0],
                all_experts=numbers[1],
                counter=counter,
            ),
        )
        x = aligned(x)
        y = output_for(out, partial(torch.empty_like, x))
        state = x.new_empty((tokens * top_k, intermediate))
        buffers = x, gate_up_weight, down_weight, topk_ids, topk_weights, state, y, *scales
        self._enqueue(run, *(0 if tensor is None else tensor.data_ptr() for tensor in buffers))
        return delivered(y, out)

    def why_not(
        self,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        options: Options,
    ) -> str:
        """Return why the operands are not supported, or "". The answer ignores addresses."""
        activation, factor = options.activation, options.routed_scaling_factor
        given = {"x": x, "gate_up_weight": gate_up_weight, "down_weight": down_weight}
        given |= {"topk_weights": topk_weights, "topk_ids": topk_ids}
        scales = {name: getattr(options, name) for name in _SCALES}
        is_fp8 = any(scale is not None for scale in scales.values())
        like_x, dtypes = ((), dict.fromkeys(_WEIGHTS, FP8)) if is_fp8 else (_WEIGHTS, {})
        why = self._why_not_tensors(given, dict.fromkeys(_WEIGHTS, 3), like_x, dtypes | _CHOICE)
        if not why and activation not in _EPILOGUES:
            why = f"activation is {activation!r}; it must be one of {', '.join(_EPILOGUES)}"
        if not why and not (type(factor) is float and abs(factor) <= _LARGEST):
            why = f"routed_scaling_factor is {quoted(factor)}; it must be a finite float of 32 bits"
        why = why or self._why_not_shapes({name: tuple(tensor.shape) for name, tensor in given.items()}, is_fp8)
        why = why or _why_not_numbers(options.first_expert, options.num_experts, len(down_weight))
        return why or (self._why_not_scales(scales, down_weight.shape) if is_fp8 else "")

    def _why_not_scales(self, scales: dict[str, torch.Tensor | None], down: torch.Size) -> str:
        """Return why scales do not fit FP8 weights, or ""."""
        why = self._why_no_fp8()
        if why:
            return why
        experts, hidden, intermediate = down[0], down[1] // GROUP_SIZE, down[2] // GROUP_SIZE
        shapes = {"gate_up_scale": (experts, 2 * intermediate, hidden), "down_scale": (experts, hidden, intermediate)}
        for name, shape in shapes.items():
            scale = scales[name]
            if not isinstance(scale, torch.Tensor) or type(scale) not in PLAIN_WEIGHTS:
                return f"{name}: a {type(scale).__name__} is no tensor of scales, which FP8 weights need"
            why = why_not_operand(scale, self._device, strided=True)
            if why:
                return f"{name}: {why}"
            if scale.shape != shape or scale.dtype != torch.float32:
                return f"{name} is {tuple(scale.shape)} of {scale.dtype}; it must be {shape} of torch.float32"
        return ""

    def _why_not_shapes(self, shapes: dict[str, tuple[int, ...]], fp8: bool) -> str:
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
        return why_not_sizes(tokens, experts, chosen[1], columns, fp8)


def _why_not_numbers(first: Any, count: Any, own: int) -> str:
    """Return why ``first_expert`` and ``num_experts`` do not fit ``own`` experts, or ""."""
    if count is not None and not (type(count) is int and own <= count <= _MOST_EXPERTS):
        most = f"{own}, as weights have, to {_MOST_EXPERTS}"
        return f"num_experts is {quoted(count)}; it must be a whole number of {most}"
    last = (own if count is None else count) - own
    if not (type(first) is int and 0 <= first <= last):
        of = f"{own} experts in weights and num_experts {count}"
        return f"first_expert is {quoted(first)}; with {of} it must be a whole number up to {last}"
    return ""


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
        gate_up_scale: torch.Tensor | None = None,
        down_scale: torch.Tensor | None = None,
        routed_scaling_factor: float = 1.0,
        first_expert: int = 0,
        num_experts: int | None = None,
    ) -> torch.Tensor:
        """Compute the experts of up to 64 tokens on this rank alone, by two kernels.

        Row t of the result is the sum of ``routed_scaling_factor * topk_weights[t, e] * (down_weight[e] @
        (activation(gate) * up))`` over the experts e of token t. The two halves of ``gate_up_weight[e] @ x[t]`` are
        ``gate`` and ``up``. With tensor parallelism it is this rank's part, which an all-reduce sums up. Sums and
        factors are fp32. Gate, up, and the product of activation and up are rounded to the dtype of ``x``, as is the
        result. With float16 that product must be below 65504. Experts are added in the order of ``topk_ids``. The bits
        of a token do not depend on other tokens.

        FP8 weights have a scale for each block of 128 rows and 128 columns, as checkpoints of DeepSeek-V3 and Qwen3 do.
        ``x`` and the state between the layers are not quantized. FP8 values are converted to the dtype of ``x``, which
        is exact. The sum over the columns of a block is scaled in fp32.

        Args:
            x: [tokens, hidden], contiguous, bfloat16 or float16, 1 to 64 tokens.
            gate_up_weight: [experts, 2 * intermediate, hidden], contiguous, of the dtype of ``x`` or float8_e4m3fn:
                rows of gate, then rows of up, of 1 to 512 experts. Sizes of both states are multiples of 64, with FP8
                of 128, up to 2**24.
            down_weight: [experts, hidden, intermediate], contiguous, of the dtype of ``gate_up_weight``. Both weights
                begin at a multiple of 16 bytes, as new tensors do.
            topk_weights: [tokens, top_k], contiguous, float32: factor of each expert; top_k is 1 to 16.
            topk_ids: [tokens, top_k], contiguous, int32: the experts of a token, whose numbers begin at
                ``first_expert``. Factors of an expert that a token has twice are added up. Other numbers, such as -1,
                add nothing.
            out: Takes the result: contiguous, like ``x``. It must share no memory with the operands. None: a new
                tensor.
            activation: ``"silu"``, or ``"gelu_tanh"``.
            gate_up_scale: With FP8, [experts, 2 * intermediate / 128, hidden / 128], float32, any strides: a block's
                weights are its values times its scale. One scale for a matrix can be expanded to this shape.
            down_scale: With FP8, [experts, hidden / 128, intermediate / 128], float32, any strides.
            routed_scaling_factor: Factor of all ``topk_weights``, as configurations of models have it.
            first_expert: With expert parallelism: what ``topk_ids`` call the first expert of the weights, of which
                ``num_experts`` has all.
            num_experts: With expert parallelism: number of experts that the router has chosen from, up to 65536; it
                decides about the tiling. None: those of the weights.

        Returns:
            ``out``, or a new tensor, [tokens, hidden].

        Raises:
            UnsupportedInputError: ``accepts_fused_experts`` of the operands is False, a weight is not aligned, ``out``
                does not fit, or the device has too little shared memory for a block.
            CommunicatorError: An earlier call has failed, as in ``all_reduce``.
            RuntimeError: The kernels could not be launched. No rank waits for them.
        """
        options = Options(activation, gate_up_scale, down_scale, routed_scaling_factor, first_expert, num_experts)
        return self._experts.run(x, gate_up_weight, down_weight, topk_weights, topk_ids, out, options)

    def try_fused_experts(
        self,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor | None:
        """Run ``fused_experts`` into a new tensor, with its ``options``. Return None where it would raise
        UnsupportedInputError."""
        operands = x, gate_up_weight, down_weight, topk_weights, topk_ids
        return attempt(
            partial(self.accepts_fused_experts, *operands, **options),
            partial(self.fused_experts, *operands, **options),
        )

    def accepts_fused_experts(
        self,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        **options: Any,
    ) -> bool:
        """Return whether ``fused_experts`` supports the operands and ``options``. The answer ignores addresses."""
        return self._experts.accepts(x, gate_up_weight, down_weight, topk_weights, topk_ids, Options(**options))
