"""All-to-all of parts of any sizes, which are in device memory (csrc/algorithms/all_to_all_v).

Validation, cache of prepared calls, and launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from llm_comm import arrays
from llm_comm.errors import UnsupportedInputError, quoted
from llm_comm.operations.operands import Operands, check_memory, count_write, why_not_operand
from llm_comm.operations.operation import Operation, keep
from llm_comm.operations.shards import INTEGERS, SPARE, why_not_bytes
from llm_comm.planning.plan import Plan, declined, without_kernel
from llm_comm.planning.planner import Planner
from llm_comm.planning.selection import Layout, limits_whole_tensor
from llm_comm.planning.tables import ALL_TO_ALL, ALL_TO_ALL_V
from llm_comm.runtime.core_handle import CoreHandle

#: Values of parameter ``size_type``, by the dtype of the sizes.
_SIZE_TYPES = {torch.int64: 0.0, torch.int32: 1.0}
#: Bound of ``max_rows``: kernels compare sizes as 32-bit numbers.
_MANY_ROWS = (1 << 32) - 1


class PreparedParts(NamedTuple):
    """Prepared call."""

    plan: Plan
    #: See ``Prepared.run``.
    run: Callable[..., bool] | None
    max_rows: int
    #: Shape of a new result.
    shape: tuple[int, ...]


class AllToAllV(Operation):
    """All-to-all of parts of any sizes of one communicator. Errors name the method, ``all_to_all``.

    Args:
        handle, planner: Arguments of ``Operation``.
        why_none: Reason why the communicator has no all-to-all, or "".
    """

    def __init__(self, handle: CoreHandle, planner: Planner, why_none: str = "") -> None:
        super().__init__(ALL_TO_ALL_V, handle, planner)
        self.world_size = planner.world_size
        self._why_none = why_none
        self._operands = Operands(ALL_TO_ALL, reads=("x", "send_sizes", "recv_sizes"), writes=("out",))

    # ---- Calls --------------------------------------------------------------------------------------------------

    def run(
        self,
        x: torch.Tensor,
        send_sizes: Any,
        recv_sizes: Any,
        max_rows: int | None = None,
        out: Any = None,
    ) -> Any:
        """Run the operation. ``x`` must have memory of its own: no tracer, mode or wrapper is handled here.

        Args:
            x, send_sizes, recv_sizes, max_rows, out: Arguments of ``Communicator.all_to_all``.

        Raises:
            UnsupportedInputError: The input is declined, or ``out`` does not fit.
            CommunicatorError: This or an earlier call has failed.
        """
        prepared = self._prepare(x, send_sizes, recv_sizes, max_rows)
        if isinstance(prepared, str):
            self._count_declined(prepared)
            raise self._error(prepared)
        check_memory(ALL_TO_ALL, x=x, send_sizes=send_sizes, recv_sizes=recv_sizes)
        if out is not None:
            self._check_out(x, out)
            self._operands.check_written(x, send_sizes, recv_sizes, out)
        result = x.new_empty(prepared.shape) if out is None else out
        if prepared.run is None:  # one rank, or nothing to exchange
            self._handle.check()
            self._count_unlaunched(prepared.plan)
            if prepared.plan.message_bytes:
                _copy_own_part(x, torch.minimum(send_sizes, recv_sizes), prepared.max_rows, result)
            return result
        try:
            input_begin, output_begin = x.data_ptr() or SPARE, result.data_ptr() or SPARE
            is_enqueued = prepared.run(
                input_begin,
                output_begin,
                send_sizes.data_ptr(),
                recv_sizes.data_ptr(),
                input_begin + x.nbytes,
                output_begin + result.nbytes,
                self._current_stream(),
            )
            if out is not None:
                count_write((out,))
        except RuntimeError as error:
            self._handle.end_after_launch_error(error)
            raise
        if not is_enqueued:
            self._handle.check()
        return result

    def check_numbers(self, x: torch.Tensor, max_rows: Any) -> None:
        """Validate ``max_rows`` before a graph is built.

        Raises:
            UnsupportedInputError: ``x`` has no first dimension, or ``max_rows`` is invalid.
        """
        why = self._why_not_numbers(x, max_rows)
        if why:
            raise self._error(why)

    def _check_out(self, x: torch.Tensor, out: Any) -> None:
        """Raise UnsupportedInputError unless rows like those of ``x`` can be written to ``out``."""
        if not isinstance(out, torch.Tensor):
            raise self._error(f"x is a tensor, out a {type(out).__name__}; they must be of one library")
        why = arrays.why_not_plain(out)
        if why:
            raise self._error(f"out: {why}")
        is_like = out.dim() > 0 and out.shape[1:] == x.shape[1:] and out.dtype == x.dtype and out.device == x.device
        if not is_like or not out.is_contiguous():
            raise self._error(
                f"out ({tuple(out.shape)}, {out.dtype}, {out.device}) must be contiguous, with rows like those of x "
                f"({tuple(x.shape)}, {x.dtype}, {x.device})"
            )

    # ---- Queries ------------------------------------------------------------------------------------------------

    def accepts(self, x: torch.Tensor, send_sizes: Any, recv_sizes: Any, max_rows: int | None) -> bool:
        """Return whether ``run`` serves the input."""
        found = self._prepare(x, send_sizes, recv_sizes, max_rows)
        if isinstance(found, str):
            self._count_declined(found)
            return False
        return True

    def accepts_traced(self, x: torch.Tensor, send_sizes: Any, recv_sizes: Any, max_rows: int | None) -> bool:
        """Return whether ``run`` serves the input, for torch.compile, which cannot trace the planning."""
        if not arrays.is_dense_on(x, self._device) or (x.requires_grad and torch.is_grad_enabled()):
            return False
        for sizes in (send_sizes, recv_sizes):
            if not isinstance(sizes, torch.Tensor) or not arrays.is_dense_on(sizes, self._device):
                return False
        if self._why_none or why_not_bytes(x.dtype) or self._why_not_sizes(send_sizes, recv_sizes):
            return False
        if self._why_not_numbers(x, max_rows):
            return False
        nbytes = _part_bytes(x, max_rows)
        if limits_whole_tensor(self._planner.config):
            nbytes *= self.world_size
        return self.world_size == 1 or nbytes <= self._planner.message_limit(self._info.name)

    def plan(self, x: torch.Tensor, send_sizes: Any, recv_sizes: Any, max_rows: int | None) -> Plan:
        """Return the plan of ``run``."""
        found = self._prepare(x, send_sizes, recv_sizes, max_rows)
        if not isinstance(found, str):
            return found.plan
        why = self._why_not(x, send_sizes, recv_sizes, max_rows)
        if why:
            return declined(self._info.name, x.numel() * x.element_size(), why)
        return self._layout(x, send_sizes.dtype, max_rows).plan

    def _prepare(self, x: torch.Tensor, send_sizes: Any, recv_sizes: Any, max_rows: int | None) -> PreparedParts | str:
        """Prepare the launch. Return the reason as text if the input is declined."""
        why = self._why_not(x, send_sizes, recv_sizes, max_rows)
        if why:
            return why
        most = x.shape[0] if max_rows is None else int(max_rows)
        key = (x.shape[1:], x.dtype, send_sizes.dtype, most)
        found: PreparedParts | str | None = self._prepared.get(key) or self._reasons.get(key)
        if found is not None:
            return found
        call = self._prepare_call(self._layout(x, send_sizes.dtype, max_rows))
        if isinstance(call, str):
            keep(self._reasons, key, call)
            return call
        prepared = PreparedParts(*call, most, (self.world_size * most, *x.shape[1:]))
        keep(self._prepared, key, prepared)
        return prepared

    def _layout(self, x: torch.Tensor, size_dtype: torch.dtype, max_rows: int | None) -> Layout:
        nbytes = _part_bytes(x, max_rows)
        if self.world_size == 1:
            return Layout(without_kernel(self._info.name, "none", nbytes, "one rank"), None)
        return self._planner.lay_out(
            self._info.name, nbytes, 0, "byte", (float(_row_bytes(x)), _SIZE_TYPES[size_dtype])
        )

    # ---- Validation ---------------------------------------------------------------------------------------------

    def _why_not(self, x: torch.Tensor, send_sizes: Any, recv_sizes: Any, max_rows: Any) -> str:
        """Return why the arguments are invalid, or ""."""
        why = self._why_none or why_not_operand(x, self._device) or why_not_bytes(x.dtype)
        if why:
            return why
        for name, sizes in (("send_sizes", send_sizes), ("recv_sizes", recv_sizes)):
            if sizes is None:
                return f"{name} is missing: parts of any sizes need send_sizes and recv_sizes"
            if not isinstance(sizes, torch.Tensor):
                return f"{name} is a {type(sizes).__name__}, not a tensor"
            why = why_not_operand(sizes, self._device)
            if why:
                return f"{name}: {why}"
        return self._why_not_sizes(send_sizes, recv_sizes) or self._why_not_numbers(x, max_rows)

    def _why_not_sizes(self, send_sizes: torch.Tensor, recv_sizes: torch.Tensor) -> str:
        """Return why tensors cannot be sizes, or "". Their values are not read."""
        for name, sizes in (("send_sizes", send_sizes), ("recv_sizes", recv_sizes)):
            if sizes.dtype not in _SIZE_TYPES:
                return f"{name} is of {sizes.dtype}; it must be int64 or int32"
            if sizes.dim() != 1 or sizes.shape[0] != self.world_size:
                return f"{name} has shape {tuple(sizes.shape)}; it must have {self.world_size} sizes, one for each rank"
        if send_sizes.dtype != recv_sizes.dtype:
            return f"send_sizes is of {send_sizes.dtype}, recv_sizes of {recv_sizes.dtype}; they must be alike"
        return ""

    def _why_not_numbers(self, x: torch.Tensor, max_rows: Any) -> str:
        """Return why ``x`` has no rows or ``max_rows`` is invalid, or ""."""
        if x.dim() == 0:
            return "x has 0 dimensions; parts are along the first one"
        if max_rows is None:
            return "" if x.shape[0] < _MANY_ROWS else f"x has {x.shape[0]} rows: pass max_rows below 2**32 - 1"
        is_integer = isinstance(max_rows, INTEGERS) and not isinstance(max_rows, bool)
        if not (is_integer and 0 <= max_rows < _MANY_ROWS):
            return f"max_rows is {quoted(max_rows)}; it must be an int from 0 to 2**32 - 2"
        return ""

    def _error(self, why: str) -> UnsupportedInputError:
        return UnsupportedInputError(f"{ALL_TO_ALL}: {why}")


def _row_bytes(x: torch.Tensor) -> int:
    return math.prod(x.shape[1:]) * x.element_size()


def _part_bytes(x: torch.Tensor, max_rows: int | None) -> int:
    """Return the bytes of the largest part."""
    return (x.shape[0] if max_rows is None else max_rows) * _row_bytes(x)


def _copy_own_part(x: torch.Tensor, rows: torch.Tensor, max_rows: int, out: torch.Tensor) -> None:
    """Copy as many first rows of ``x`` as ``rows``, a tensor of one number, says. The host does not read it."""
    most = min(x.shape[0], out.shape[0], max_rows)
    source, target = (whole[:most].view(torch.uint8).view(most, _row_bytes(x)) for whole in (x, out))
    is_sent = torch.arange(most, device=x.device) < rows
    target.copy_(torch.where(is_sent[:, None], source, target))
