"""Experts of few tokens: gate, up and down-projection of the experts that a router has chosen, on one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from llm_comm import _core, registry
from llm_comm.errors import UnsupportedInputError
from llm_comm.operations.operands import (
    ALIGNMENT,
    Operands,
    attempt,
    check_memory,
    check_unwatched,
    delivered,
    output_for,
    why_not_buffer,
    why_not_out,
)
from llm_comm.operations.operation import TORCH_TYPES, keep, within_range
from llm_comm.planning.layers import takes_features
from llm_comm.planning.plan import NONE
from llm_comm.planning.planner import Planner
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.devices import current_stream_of

_NAME = "fused_experts"
_SERVED = ("bf16", "fp16")
_EPILOGUES: dict[str, _core.Epilogue] = {"silu": "silu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}
_OPERANDS = Operands(_NAME, ("x", "gate_up_weight", "down_weight", "topk_weights", "topk_ids"), ("out",))


class _Prepared(NamedTuple):
    #: Result of the core's ``prepare_experts``. Returns False if the communicator has failed.
    run: Callable[..., bool]
    #: Shape of the state between the layers.
    state: tuple[int, ...]


class Experts:
    """Experts of one communicator. Other ranks take no part."""

    def __init__(self, handle: CoreHandle, planner: Planner) -> None:
        self._handle = handle
        self._planner = planner
        self._device = handle.device
        self._current_stream = current_stream_of(handle.device)
        numbers = {name: number for number, name in enumerate(registry.data_types())}
        self._data_types = {TORCH_TYPES[name]: numbers[name] for name in _SERVED}
        #: Prepared calls by shapes, dtype and activation.
        self._prepared: dict[tuple[Any, ...], _Prepared] = {}

    def forget(self) -> None:
        """Drop the prepared calls, which hold references to the core."""
        self._prepared.clear()

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
        check_unwatched(_NAME)
        self._handle.check_open()
        operands = x, gate_up_weight, down_weight, topk_weights, topk_ids
        why = self.why_not(*operands, activation)
        if not why:
            check_memory(_NAME, **dict(zip(_OPERANDS.reads, operands, strict=True)))
            why = self._why_not_aligned(gate_up_weight, down_weight)
        if not why and out is not None:
            why = why_not_out(out, x.shape, x.dtype, self._device) or why_not_buffer(out, self._device)
        if why:
            self._handle.statistics.decline(_NAME, why)
            raise UnsupportedInputError(f"{_NAME}: {why}")
        if out is not None:
            _OPERANDS.check_written(*operands, out)
        prepared = self._prepare(x, down_weight, topk_ids, activation)
        # A copy may be freed before the kernels have run: later users of its memory follow in the stream.
        if x.data_ptr() % ALIGNMENT != 0:
            x = x.clone()
        y = output_for(out, partial(torch.empty_like, x))
        state = x.new_empty(prepared.state)
        read = (tensor.data_ptr() for tensor in (x, gate_up_weight, down_weight, topk_ids, topk_weights))
        is_enqueued = prepared.run(*read, state.data_ptr(), y.data_ptr(), self._current_stream())
        if not is_enqueued:
            self._handle.check()
        return delivered(y, out)

    def _prepare(
        self, x: torch.Tensor, down_weight: torch.Tensor, topk_ids: torch.Tensor, activation: str
    ) -> _Prepared:
        key = (x.shape, down_weight.shape, topk_ids.shape[1], x.dtype, activation)
        prepared = self._prepared.get(key)
        if prepared is None:
            experts, hidden, intermediate = down_weight.shape
            tokens, top_k = topk_ids.shape
            kind = _NAME, x.nbytes, "experts", NONE
            try:
                run = self._handle.core().prepare_experts(
                    tokens=tokens,
                    top_k=top_k,
                    experts=experts,
                    hidden=hidden,
                    intermediate=intermediate,
                    data_type=self._data_types[x.dtype],
                    epilogue=_EPILOGUES[activation],
                    counter=self._handle.statistics.counter(*kind),
                )
            except ValueError as error:  # more shared memory than the device has
                raise UnsupportedInputError(f"{_NAME}: {error}") from None
            if self._planner.config.nvtx:
                run = within_range(run, self._device, *kind)
            prepared = _Prepared(run, (tokens * top_k, intermediate))
            keep(self._prepared, key, prepared)
        return prepared

    # ---- What does not fit --------------------------------------------------------------------------------------

    def accepts(self, *operands: Any) -> bool:
        """Return whether ``why_not`` is "", and count a decline."""
        self._handle.check_open()
        why = self.why_not(*operands)
        if why:
            self._handle.statistics.decline(_NAME, why)
        return not why

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
        for name, tensor in given.items():
            why = why_not_buffer(tensor, self._device)
            if why:
                return f"{name}: {why}"
        if activation not in _EPILOGUES:
            return f"activation is {activation!r}; it must be one of {', '.join(_EPILOGUES)}"
        if x.dtype not in self._data_types:
            return f"x is {x.dtype}, which is not one of {', '.join(map(str, self._data_types))}"
        dtypes = {"gate_up_weight": x.dtype, "down_weight": x.dtype, "topk_weights": torch.float32}
        for name, dtype in {**dtypes, "topk_ids": torch.int32}.items():
            if given[name].dtype != dtype:
                return f"{name} is {given[name].dtype}; it must be {dtype}"
        return self._why_not_shapes({name: tuple(tensor.shape) for name, tensor in given.items()})

    def _why_not_shapes(self, shapes: dict[str, tuple[int, ...]]) -> str:
        x, down, chosen = shapes["x"], shapes["down_weight"], shapes["topk_ids"]
        if len(x) != 2 or len(down) != 3 or len(chosen) != 2:
            return f"x, down_weight and topk_ids have shapes {x}, {down} and {chosen}; they must have 2, 3 and 2 sizes"
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
        for name, size in (("hidden", hidden), ("intermediate", intermediate)):
            if not takes_features(size):
                return (
                    f"{size} columns of the {name} state: it takes multiples of {_core.linear_multiple} up to "
                    f"{_core.linear_max_features}"
                )
        limits = {
            "tokens": (tokens, _core.linear_max_tokens),
            "experts": (experts, _core.experts_max),
            "experts of a token": (chosen[1], _core.experts_max_top_k),
        }
        for name, (value, most) in limits.items():
            if not 1 <= value <= most:
                return f"{value} {name}: it takes 1 to {most}"
        return ""

    @staticmethod
    def _why_not_aligned(*weights: torch.Tensor) -> str:
        for name, weight in zip(("gate_up_weight", "down_weight"), weights, strict=True):
            if weight.data_ptr() % ALIGNMENT != 0:
                return (
                    f"{name} begins at {weight.data_ptr():#x}, which is no multiple of {ALIGNMENT} bytes: pass a "
                    "copy, made once"
                )
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
            UnsupportedInputError: ``accepts_fused_experts`` of the operands is False, a weight is not aligned, or
                ``out`` does not fit.
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
