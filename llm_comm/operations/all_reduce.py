"""All-reduce: its checks, what is prepared for a size, and the call itself. ``Communicator.all_reduce`` says more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from llm_comm import _core, arrays
from llm_comm.config import Config
from llm_comm.errors import UnsupportedInputError
from llm_comm.operations.operation import Operation, keep
from llm_comm.planning import selection
from llm_comm.planning.selection import Plan, TuningTable
from llm_comm.runtime.core_handle import CoreHandle

# Global names cost less than attributes.
_Tensor = torch.Tensor
_strided = torch.strided

# DataType in csrc/include/llm_comm/reduce.cuh.
_DATA_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class _Prepared(NamedTuple):
    plan: Plan
    #: What ``prepare_all_reduce`` of the core returned; None where there is nothing to exchange.
    run: Callable[[int, int, int], bool] | None


class AllReduce(Operation):
    """The all-reduces of one communicator."""

    def __init__(self, handle: CoreHandle, world_size: int, table: TuningTable, config: Config) -> None:
        super().__init__(handle, world_size, table, config)
        self._prepared: dict[tuple[int, torch.dtype], _Prepared] = {}

    def run(self, x: torch.Tensor, out: torch.Tensor | None = None, or_none: bool = False) -> Any:
        """The sum of a tensor that has memory of its own, now.

        Args:
            x, out: As of ``Communicator.all_reduce``.
            or_none: Return None where ``x`` is declined.

        Raises:
            UnsupportedInputError: ``x`` is declined, or ``out`` does not fit.
            CommunicatorError: This or an earlier call has failed.
        """
        # Host time of a call is a bar: this path makes no Python call that it can do without.
        count, dtype = x.numel(), x.dtype
        prepared = self._prepared.get((count, dtype))
        if (
            prepared is None
            or x.device != self._device
            or x.layout is not _strided
            or x.is_nested
            or not x.is_contiguous()
            or x.is_neg()
        ):
            prepared = self._prepare(x)
            if prepared is None:
                if or_none:
                    return None
                raise UnsupportedInputError(f"all_reduce: {self.plan(x).reason}")
        if (
            out is not None
            and out is not x
            and (
                not isinstance(out, _Tensor)
                or out.numel() != count
                or out.dtype is not dtype
                or out.device != self._device
                or not out.is_contiguous()
                or out.is_neg()
                or 0 < abs(x.data_ptr() - out.data_ptr()) < x.nbytes
            )
        ):
            raise UnsupportedInputError(_why_not_out(x, out))
        run = prepared.run
        if run is None:  # of one rank, or empty
            self._handle.check()
            return x.clone() if out is None else out if out is x else out.copy_(x)
        try:
            if out is None:
                out = torch.empty_like(x)
            is_enqueued = run(x.data_ptr(), out.data_ptr(), self._current_stream())
        except RuntimeError as error:
            self._handle.end_for(error)
            raise
        if not is_enqueued:
            self._handle.check()
        return out

    def run_array(self, x: Any, out: Any) -> Any:
        """The same for an array of another library."""
        tensor = arrays.as_tensor(x)
        if out is None:
            return arrays.like(x, self.run(tensor))
        self.run(tensor, tensor if out is x else arrays.as_output(out))
        return out

    def accepts(self, x: torch.Tensor) -> bool:
        """Whether ``run`` serves ``x``."""
        return self._prepare(x) is not None

    def accepts_traced(self, x: torch.Tensor) -> bool:
        """The same for torch.compile, which can trace neither the layout of a launch nor texts with sizes."""
        count, nbytes = x.numel(), x.numel() * x.element_size()
        limit = selection.message_limit(self._table, self._config)
        is_input = arrays.is_dense_on(x, self._device) and x.dtype in _DATA_TYPES
        return is_input and (self._world_size == 1 or count == 0 or nbytes <= limit)

    def plan(self, x: torch.Tensor) -> Plan:
        """What ``run`` would do for ``x``."""
        prepared = self._prepare(x)
        if prepared is not None:
            return prepared.plan
        why = self._why_not(x)
        if why:
            return selection.declined(x.numel() * x.element_size(), why)
        return self._select(x.numel(), x.dtype)

    def _prepare(self, x: torch.Tensor) -> _Prepared | None:
        """What to launch for ``x``, or None if it is declined."""
        if self._why_not(x):
            return None
        key = (x.numel(), x.dtype)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._lay_out(*key)
            if prepared is not None:
                keep(self._prepared, key, prepared)
        return prepared

    def _lay_out(self, count: int, dtype: torch.dtype) -> _Prepared | None:
        core = self._handle.core()
        plan = self._select(count, dtype)
        if plan.algorithm == "declined":
            return None
        if plan.algorithm == "none":
            return _Prepared(plan, None)
        launch = _core.LaunchPlan(
            algorithm=selection.ALGORITHMS.index(plan.algorithm),
            blocks=plan.blocks,
            tile_lines_log2=plan.tile_lines.bit_length() - 1,
            depth=plan.depth,
            chunk_count=plan.chunk_elements,
        )
        try:
            return _Prepared(plan, core.prepare_all_reduce(count, _DATA_TYPES[dtype], launch))
        except RuntimeError as error:
            self._handle.end_for(error)
            raise

    def _select(self, count: int, dtype: torch.dtype) -> Plan:
        return selection.select(count, dtype.itemsize, self._world_size, self._table, self._config)

    def _why_not(self, x: torch.Tensor) -> str:
        """Why ``x`` is no input whatever its size, or ""."""
        if x.device != self._device:
            return f"the tensor is on {x.device}, the communicator on {self._device}"
        why = arrays.why_not_plain(x)
        if why:
            return why
        if not x.is_contiguous():
            return f"the tensor is not contiguous: shape {tuple(x.shape)}, strides {x.stride()}"
        if x.dtype not in _DATA_TYPES:
            return f"{x.dtype} is not one of {', '.join(map(str, _DATA_TYPES))}"
        return ""


def _why_not_out(x: torch.Tensor, out: Any) -> str:
    if not isinstance(out, _Tensor):
        return f"all_reduce: x is a tensor, out a {type(out).__name__}; they must be of one library"
    if out.is_neg():
        return f"all_reduce: out: {arrays.why_not_plain(out)}"
    if out.numel() != x.numel() or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        return (
            f"all_reduce: out ({tuple(out.shape)}, {out.dtype}, {out.device}) must be contiguous and like x "
            f"({tuple(x.shape)}, {x.dtype}, {x.device})"
        )
    return "all_reduce: out overlaps x; it may be x itself or must not share memory with it"
