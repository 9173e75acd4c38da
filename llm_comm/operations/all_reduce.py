"""All-reduce: validation, cache of prepared calls, and launch. ``Communicator.all_reduce`` is the public interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llm_comm import _core, arrays
from llm_comm.errors import UnsupportedInputError
from llm_comm.operations.operands import Operands, check_memory, count_write, why_not_operand, why_not_out
from llm_comm.operations.operation import Operation, Prepared, keep
from llm_comm.planning.plan import Plan, declined, without_kernel
from llm_comm.planning.planner import Planner
from llm_comm.planning.selection import Layout
from llm_comm.planning.tables import ALL_REDUCE
from llm_comm.runtime.core_handle import CoreHandle

# Global names are cheaper to look up than attributes.
_Tensor = torch.Tensor
_strided = torch.strided
_is_grad_enabled = torch.is_grad_enabled
_is_inference = torch.is_inference_mode_enabled
_is_writable = _core.is_writable

_OPERANDS = Operands(ALL_REDUCE, reads=("x",), writes=("out",))
_IN_PLACE = {("out", "x"): 0}


class AllReduce(Operation):
    """All-reduce of one communicator."""

    def __init__(self, handle: CoreHandle, planner: Planner) -> None:
        super().__init__(ALL_REDUCE, handle, planner)
        self._prepared: dict[tuple[int, torch.dtype], Prepared] = {}

    def run(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        or_none: bool = False,
        before: Callable[[], object] | None = None,
    ) -> Any:
        """Sum ``x`` over all ranks. ``x`` must have memory of its own: no tracer, mode or wrapper is handled here.

        Args:
            x, out: Arguments of ``Communicator.all_reduce``.
            or_none: Return None if ``x`` is declined, instead of raising.
            before: Enqueues the kernel that writes ``x``. Called once nothing can be declined any longer.

        Raises:
            UnsupportedInputError: ``x`` is declined, or ``out`` does not fit.
            CommunicatorError: This or an earlier call has failed.
        """
        # Host time of a call is measured and bounded: this path avoids every Python call that it can.
        count, dtype = x.numel(), x.dtype
        prepared = self._prepared.get((count, dtype))
        differentiates = _is_grad_enabled()
        if (
            prepared is None
            or (differentiates and x.requires_grad)
            or x.device != self._device
            or x.layout is not _strided
            or x.is_nested
            or not x.is_contiguous()
            or x.is_neg()
        ):
            found = self._prepare(x)
            if isinstance(found, str):
                self._count_declined(found)
                if or_none:
                    return None
                raise UnsupportedInputError(f"all_reduce: {found}")
            prepared = found
        try:
            # A cheap test first. Only if it fails does _check_out find the exact reason.
            if out is not None and (
                (
                    out is not x
                    and (
                        not isinstance(out, _Tensor)
                        or out.numel() != count
                        or out.dtype is not dtype
                        or out.device != self._device
                        or not out.is_contiguous()
                        or out.is_neg()
                        or (differentiates and out.requires_grad)
                        or 0 < abs(x.data_ptr() - out.data_ptr()) < x.nbytes
                    )
                )
                or (out.is_inference() and not _is_inference())
                or (self._is_emulated and not _is_writable(out.data_ptr(), out.nbytes))
            ):
                self._check_out(x, out)
        except UnsupportedInputError:
            raise
        except RuntimeError:
            check_memory("all_reduce", x=x, out=out)
            raise
        run = prepared.run
        if run is None:  # one rank, or an empty message
            self._handle.check()
            if before is not None:
                before()
            self._count_unlaunched(prepared.plan)
            return x.clone() if out is None else out if out is x else out.copy_(x)
        try:
            total = torch.empty_like(x) if out is None else out
            if before is not None:
                before()
            is_enqueued = run(x.data_ptr(), total.data_ptr(), self._current_stream())
            if out is not None:
                count_write((out,))
        except ValueError:  # an address is 0; nothing was launched
            check_memory("all_reduce", x=x, out=out)
            raise
        except RuntimeError as error:
            check_memory("all_reduce", x=x, out=out)
            self._handle.end_after_launch_error(error)
            raise
        if not is_enqueued:
            self._handle.check()
        return total

    def _check_out(self, x: torch.Tensor, out: Any) -> None:
        """Raise UnsupportedInputError unless the sum can be written to ``out``."""
        why = why_not_out(out, x.shape, x.dtype, self._device)
        if why:
            raise UnsupportedInputError(f"all_reduce: {why}")
        _OPERANDS.check_written(x, out, in_place=_IN_PLACE)

    def accepts(self, x: torch.Tensor) -> bool:
        """Return whether ``run`` serves ``x``."""
        found = self._prepare(x)
        if isinstance(found, str):
            self._count_declined(found)
            return False
        return True

    def accepts_traced(self, x: torch.Tensor) -> bool:
        """Return whether ``run`` serves ``x``, for torch.compile. It can trace neither the planning nor texts with
        sizes."""
        is_input = arrays.is_dense_on(x, self._device) and x.dtype in self._data_types
        is_input = is_input and not (x.requires_grad and torch.is_grad_enabled())
        return is_input and self.takes(x.numel(), x.element_size())

    def takes(self, count: int, element_size: int) -> bool:
        """Return whether a message of a supported dtype is within the size limit: the part of planning that
        torch.compile can trace."""
        nbytes, limit = count * element_size, self._planner.message_limit(ALL_REDUCE)
        return self._planner.world_size == 1 or count == 0 or nbytes <= limit

    def count_declined_result(self, count: int, dtype: torch.dtype) -> None:
        """Count a result that ``takes`` has declined before it was computed."""
        self._count_declined(self._layout(count, dtype).plan.reason)

    def plan(self, x: torch.Tensor) -> Plan:
        """Return the plan of ``run`` for ``x``."""
        found = self._prepare(x)
        return declined(ALL_REDUCE, x.numel() * x.element_size(), found) if isinstance(found, str) else found.plan

    def _prepare(self, x: torch.Tensor) -> Prepared | str:
        """Prepare the launch for ``x``. Return the reason as text if ``x`` is declined."""
        why = self._why_not(x)
        if why:
            return why
        key = (x.numel(), x.dtype)
        found = self._prepared.get(key) or self._reasons.get(key)
        if found is None:
            found = self._prepare_call(self._layout(*key))
            if isinstance(found, str):
                keep(self._reasons, key, found)
            else:
                keep(self._prepared, key, found)
        return found

    def _layout(self, count: int, dtype: torch.dtype) -> Layout:
        if self._planner.world_size == 1:
            return Layout(without_kernel(ALL_REDUCE, "none", count * dtype.itemsize, "one rank"), None)
        return self._lay_out(count, 0, dtype)

    def _why_not(self, x: torch.Tensor) -> str:
        """Return why ``x`` cannot be an input, whatever its size, or ""."""
        return why_not_operand(x, self._device) or self._why_not_type(x.dtype)
