"""Dispatch and combine: tokens of mixture-of-experts layers travel to the ranks of their experts and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from llm_comm.errors import quoted
from llm_comm.operations.one_rank import aligned
from llm_comm.operations.operands import (
    ALIGNMENT,
    Operands,
    attempt,
    check_memory,
    check_unwatched,
    delivered,
    output_for,
    why_not_buffer,
    why_not_buffers,
    why_not_out,
)
from llm_comm.operations.operation import Operation, Prepared, keep
from llm_comm.operations.shards import SPARE
from llm_comm.planning.planner import Planner
from llm_comm.planning.tables import MOE_COMBINE, MOE_DISPATCH
from llm_comm.runtime.core_handle import CoreHandle

#: Largest numbers that reach the core, which has limits of its own.
_MOST = 1 << 31
#: Dtypes whose rows dispatch moves as bytes.
_MOVED = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
)

_Tensors = Mapping[str, torch.Tensor]


class _MoeOperation(Operation):
    """One of the two operations, of one communicator.

    Args:
        handle, planner: Arguments of ``Operation``.
        why_none: Reason why the communicator has none, or "".
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def __init__(self, handle: CoreHandle, planner: Planner, why_none: str = "") -> None:
        super().__init__(self.name, handle, planner)
        self._why_none = why_none
        self._operands = Operands(self.name, self.reads, self.writes)
        self._world_size = planner.world_size

    def accepts(self, *arguments: Any) -> bool:
        """Return whether ``run`` serves the arguments, and count a decline."""
        self._handle.check_open()
        found = self._prepare(*arguments)
        if isinstance(found, str):
            self._count_declined(found)
        return not isinstance(found, str)

    def _prepare(self, *arguments: Any) -> Prepared | str:
        """Prepare the launch. Return the reason as text if the arguments are not supported."""
        raise NotImplementedError

    def _prepared_for(self, *arguments: Any) -> Prepared:
        """Prepare the launch of a call.

        Raises:
            UnsupportedInputError: The arguments are not supported, or torch's dispatcher must see the call.
        """
        check_unwatched(self.name)
        self._handle.check_open()
        found = self._prepare(*arguments)
        if isinstance(found, str):
            self._count_declined(found)
            raise self._error(found)
        return found

    def _prepare_rows(
        self, data_type: str, max_tokens: int, row: int, num_experts: Any, *others: int
    ) -> Prepared | str:
        """Prepare the launch for rows of ``row`` elements. ``others``: parameters behind the number of experts."""
        if not isinstance(num_experts, int) or not 0 < num_experts <= _MOST:
            return f"num_experts is {quoted(num_experts)}; it must be an int from 1 to 2**31"
        key = data_type, max_tokens, row, num_experts, *others
        found = self._prepared.get(key) or self._reasons.get(key)
        if found is not None:
            return found
        parameters = float(num_experts), *map(float, others)
        call = self._prepare_call(self._planner.lay_out(self.name, max_tokens * row, row, data_type, parameters))
        if isinstance(call, str):
            keep(self._reasons, key, call)
        else:
            keep(self._prepared, key, call)
        return call

    def _why_not_tensors(self, tensors: _Tensors, dtypes: Mapping[str, torch.dtype]) -> str:
        """Return why tensors cannot be operands, or "". All of them have two dimensions.

        Args:
            tensors: Operands by name.
            dtypes: Dtypes that operands must have.
        """
        return self._why_none or why_not_buffers(tensors, {}, dtypes, self._device)


class MoeDispatch(_MoeOperation):
    """Dispatch of one communicator."""

    name = MOE_DISPATCH
    reads, writes = ("x", "topk_ids", "topk_weights", "x_scales"), ()

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        max_tokens: int | None = None,
        x_scales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run ``Communicator.moe_dispatch``."""
        prepared = self._prepared_for(x, topk_ids, topk_weights, num_experts, max_tokens, x_scales)
        check_memory(self.name, x=x, topk_ids=topk_ids, topk_weights=topk_weights, x_scales=x_scales)
        x = aligned(x)
        places = self._world_size * (len(x) if max_tokens is None else max_tokens)
        sent = [x, topk_ids, topk_weights] if x_scales is None else [x, topk_ids, topk_weights, x_scales]
        received = tuple(tensor.new_empty((places, tensor.shape[1])) for tensor in sent)
        read = _address(x), *_ends(topk_ids), _address(topk_weights)
        scales = (0, 0) if x_scales is None else (_address(x_scales), _address(received[3]))
        self._launch(prepared, (*read, *map(_address, received[:3]), *scales))
        return received

    def _prepare(self, *arguments: Any) -> Prepared | str:
        x, topk_ids, topk_weights, num_experts, max_tokens, x_scales = arguments
        tensors = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights}
        if x_scales is not None:
            tensors["x_scales"] = x_scales
        floats = dict.fromkeys(("topk_weights", "x_scales"), torch.float32)
        why = self._why_not_tensors(tensors, {"topk_ids": torch.int32, **floats})
        if why:
            return why
        if x.dtype not in _MOVED:
            return f"x is {x.dtype}, which is not one of {', '.join(map(str, _MOVED))}"
        if any(len(tensor) != len(x) for tensor in tensors.values()) or topk_weights.shape != topk_ids.shape:
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
            return f"{shapes}: they must have as many rows, and topk_weights the shape of topk_ids"
        if max_tokens is None:
            max_tokens = len(x)
        if not isinstance(max_tokens, int) or not len(x) <= max_tokens <= _MOST:
            return f"max_tokens is {quoted(max_tokens)}; it must be an int from {len(x)}, the tokens of x, to 2**31"
        row = x.shape[1] * x.element_size()
        if not self._info.takes_rows_of(row):
            most = self._info.max_row
            return f"rows of x have {row} bytes: it takes multiples of {ALIGNMENT} up to {most}"
        groups = 0 if x_scales is None else x_scales.shape[1]
        if x_scales is not None and groups == 0:
            return f"x_scales has shape {tuple(x_scales.shape)}; it must have a column"
        return self._prepare_rows("byte", max_tokens, row, num_experts, topk_ids.shape[1], groups)


class MoeCombine(_MoeOperation):
    """Combine of one communicator."""

    name = MOE_COMBINE
    reads, writes = ("y", "ids", "topk_ids"), ("out",)

    def run(self, y: torch.Tensor, ids: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, out: Any) -> Any:
        """Run ``Communicator.moe_combine``."""
        prepared = self._prepared_for(y, ids, topk_ids, num_experts)
        check_memory(self.name, y=y, ids=ids, topk_ids=topk_ids)
        shape = len(topk_ids), y.shape[1]
        if out is not None:
            why = why_not_out(out, shape, y.dtype, self._device) or why_not_buffer(out, self._device)
            if why:
                raise self._error(why)
            self._operands.check_written(y, ids, topk_ids, out)
        y = aligned(y)
        result = output_for(out, partial(y.new_empty, shape))
        self._launch(prepared, (_address(y), _address(ids), *_ends(topk_ids), _address(result)))
        return delivered(result, out)

    def _prepare(self, *arguments: Any) -> Prepared | str:
        y, ids, topk_ids, num_experts = arguments
        why = self._why_not_tensors(
            {"y": y, "ids": ids, "topk_ids": topk_ids}, {"ids": torch.int32, "topk_ids": torch.int32}
        ) or self._why_not_type(y.dtype)
        if why:
            return why
        (places, hidden), (tokens, top_k), world = y.shape, topk_ids.shape, self._world_size
        if tuple(ids.shape) != (places, top_k):
            return f"ids has shape {tuple(ids.shape)}; with y {tuple(y.shape)} it must be {(places, top_k)}"
        if places % world != 0:
            return f"y has {places} rows; they must be as many for each of {world} ranks"
        if tokens * world > places:
            return f"topk_ids has {tokens} tokens; y has {places} rows, {places // world} for each of {world} ranks"
        return self._prepare_rows(self._data_types[y.dtype], places // world, hidden, num_experts, top_k)


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() or SPARE


def _ends(ids: torch.Tensor) -> tuple[int, int]:
    """Return the addresses where a tensor begins and ends, which tell this rank's number of tokens."""
    begin = _address(ids)
    return begin, begin + ids.nbytes


class ExpertParallel:
    """Mixin of ``Communicator``: dispatch and combine of tokens for expert parallelism."""

    _moe_dispatch: MoeDispatch
    _moe_combine: MoeCombine

    def moe_dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        max_tokens: int | None = None,
        x_scales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Send each token to the ranks that own one of its experts. Collective.

        Expert e belongs to rank ``e // (num_experts // world_size)``. A rank gets a place for each token that any rank
        may have, in the order of source rank and token, whatever the tokens chose: no token is dropped, and the host
        reads nothing. The result is the input of ``fused_experts`` with this rank's experts, or of other kernels that
        skip experts of number -1.

        Args:
            x: [tokens, hidden], contiguous: 0 to ``max_tokens`` tokens of this rank, bfloat16, float16, float32, FP8,
                int8 or uint8, which are copied as bytes. A row has a multiple of 16 bytes, up to 16384.
            topk_ids: [tokens, top_k], contiguous, int32: the experts of a token; top_k is 1 to 16. Other numbers than
                those of experts, such as -1, are no expert.
            topk_weights: [tokens, top_k], contiguous, float32: weight of each expert.
            num_experts: Experts of all ranks: a multiple of the number of ranks.
            max_tokens: Most tokens of a rank, up to 128, equal on all ranks. None: the tokens of ``x``, which must then
                be as many on all ranks.
            x_scales: [tokens, groups], contiguous, float32: scales that travel with the rows, up to 512 a row. On all
                ranks or on none.

        Returns:
            ``rows`` [world_size * max_tokens, hidden], ``ids`` and ``weights`` [world_size * max_tokens, top_k], and
            with ``x_scales`` their ``scales`` [world_size * max_tokens, groups]. ``ids`` are numbers among this rank's
            experts, or -1; the weight of an expert -1 is 0. Rows and scales of tokens without an expert here are not
            written: they hold anything, NaN included.

        Raises:
            UnsupportedInputError: ``accepts_moe_dispatch`` of the arguments is False. One rank alone, or ranks on
                several nodes, decline every call.
            CommunicatorError: This or an earlier call has failed, see ``all_reduce``.
        """
        return self._moe_dispatch.run(x, topk_ids, topk_weights, num_experts, max_tokens, x_scales)

    def moe_combine(
        self,
        y: torch.Tensor,
        ids: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the rows of this rank's tokens, summed over the ranks that own one of their experts. Collective.

        A row is the fp32 sum in rank order, rounded once; a token without an expert has zeros. The bits of a token do
        not depend on other tokens. ``ids`` and ``topk_ids`` must be those of one ``moe_dispatch``: if ranks disagree
        about which rows are sent, the call ends in PeerTimeout.

        Args:
            y: [world_size * max_tokens, hidden], contiguous, bfloat16 or float16: what this rank's experts made of the
                rows of ``moe_dispatch``, weights applied. Rows without an expert here are ignored.
            ids: [world_size * max_tokens, top_k]: ``ids`` of the result of ``moe_dispatch``.
            topk_ids: [tokens, top_k]: ``topk_ids`` of that call, of this rank's tokens.
            num_experts: As in that call.
            out: Output: contiguous, [tokens, hidden], of the dtype of ``y``. It must share no memory with the operands.
                None: a new tensor.

        Returns:
            ``out``, or a new tensor, [tokens, hidden].

        Raises:
            UnsupportedInputError: ``accepts_moe_combine`` of the arguments is False, or ``out`` does not fit.
            CommunicatorError: This or an earlier call has failed, see ``all_reduce``.
        """
        result: torch.Tensor = self._moe_combine.run(y, ids, topk_ids, num_experts, out)
        return result

    def try_moe_dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        max_tokens: int | None = None,
        x_scales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...] | None:
        """Run ``moe_dispatch``. Return None where it would raise UnsupportedInputError."""
        arguments = x, topk_ids, topk_weights, num_experts, max_tokens, x_scales
        return attempt(partial(self.accepts_moe_dispatch, *arguments), partial(self.moe_dispatch, *arguments))

    def try_moe_combine(
        self, y: torch.Tensor, ids: torch.Tensor, topk_ids: torch.Tensor, num_experts: int
    ) -> torch.Tensor | None:
        """Run ``moe_combine`` into a new tensor. Return None where it would raise UnsupportedInputError."""
        arguments = y, ids, topk_ids, num_experts
        return attempt(partial(self.accepts_moe_combine, *arguments), partial(self.moe_combine, *arguments))

    def accepts_moe_dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        max_tokens: int | None = None,
        x_scales: torch.Tensor | None = None,
    ) -> bool:
        """Return whether ``moe_dispatch`` supports the arguments. The answer ignores addresses. It is alike on all
        ranks if they pass the same ``max_tokens`` and none has more tokens."""
        return self._moe_dispatch.accepts(x, topk_ids, topk_weights, num_experts, max_tokens, x_scales)

    def accepts_moe_combine(self, y: torch.Tensor, ids: torch.Tensor, topk_ids: torch.Tensor, num_experts: int) -> bool:
        """Return whether ``moe_combine`` supports the arguments, see ``accepts_moe_dispatch``."""
        return self._moe_combine.accepts(y, ids, topk_ids, num_experts)
