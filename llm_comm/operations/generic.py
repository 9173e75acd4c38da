"""Operations without a method of their own: called by name, with buffers that are all like the input.

``Communicator.run`` is the public interface.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llm_comm import registry
from llm_comm.errors import UnsupportedInputError
from llm_comm.operations.operands import Operands, check_memory, check_unwatched, why_not_buffer
from llm_comm.operations.operation import Operation, Prepared, keep
from llm_comm.planning.plan import Plan, declined
from llm_comm.planning.planner import Planner
from llm_comm.planning.tables import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    ALL_TO_ALL_V,
    FUSED,
    MOE_COMBINE,
    MOE_DISPATCH,
    REDUCE_SCATTER,
)
from llm_comm.runtime.core_handle import CoreHandle

#: Methods of operations.
_METHODS = {
    **{name: name for name in (ALL_REDUCE, FUSED, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, MOE_DISPATCH, MOE_COMBINE)},
    ALL_TO_ALL_V: ALL_TO_ALL,
}

_Buffers = Mapping[str, "torch.Tensor | None"]
_Parameters = Mapping[str, float]


class GenericOperations:
    """Generic operations of one communicator, created when first called.

    Args:
        handle, planner: Arguments of ``Operation``.
        why_none: Reason why the communicator has no generic operations, or "".
    """

    def __init__(self, handle: CoreHandle, planner: Planner, why_none: str = "") -> None:
        self._common = (handle, planner)
        self._why_none = why_none
        self._operations: dict[str, GenericOperation] = {}

    def run(self, operation: str, buffers: _Buffers, row: int, parameters: _Parameters) -> None:
        """Implement ``Communicator.run``."""
        self._find(operation).run(buffers, row, parameters)

    def plan(self, operation: str, x: torch.Tensor, row: int, parameters: _Parameters) -> Plan:
        """Implement ``Communicator.plan_for``."""
        if self._why_none:
            return declined(operation, x.nbytes, self._why_none)
        return self._find(operation).plan(x, row, parameters)

    def forget(self) -> None:
        """Drop prepared calls."""
        for operation in self._operations.values():
            operation.forget()

    def _find(self, name: str) -> GenericOperation:
        if self._why_none:
            raise UnsupportedInputError(f"{name}: Communicator.run {self._why_none}")
        found = self._operations.get(name)
        if found is not None:
            return found
        if name in _METHODS:
            raise UnsupportedInputError(f"{name} has a method of its own: call Communicator.{_METHODS[name]}")
        why = registry.why_not_known("operation", name, (n for n in registry.operations() if n not in _METHODS))
        if why:
            raise UnsupportedInputError(why)
        self._operations[name] = GenericOperation(name, *self._common)
        return self._operations[name]


class GenericOperation(Operation):
    """One generic operation. Its first buffer is the input, whose size and dtype the plan depends on."""

    def __init__(self, name: str, handle: CoreHandle, planner: Planner) -> None:
        super().__init__(name, handle, planner)
        buffers, outputs = self._info.buffers, self._info.outputs
        reads, writes = ([name for name in buffers if (name in outputs) == are] for are in (False, True))
        self._operands = Operands(name, tuple(reads), tuple(writes))
        self._prepared: dict[tuple[int, int, torch.dtype, tuple[float, ...]], Prepared] = {}

    def run(self, buffers: _Buffers, row: int, parameters: _Parameters) -> None:
        """Implement ``Communicator.run``."""
        check_unwatched(self._info.name)
        in_order = self._in_order(parameters)
        x = self._check_buffers(buffers)
        key = (x.numel(), row, x.dtype, in_order)
        prepared = self._prepared.get(key)
        if prepared is None:
            found = self._prepare_call(self._lay_out(x.numel(), row, x.dtype, **parameters))
            if isinstance(found, str):
                self._count_declined(found)
                raise self._error(found)
            prepared = found
            keep(self._prepared, key, prepared)
        given = [buffers.get(name) for name in self._info.buffers]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in given]
        written = [tensor for name in self._info.outputs if (tensor := buffers.get(name)) is not None]
        self._launch(prepared, addresses, written)

    def plan(self, x: torch.Tensor, row: int, parameters: _Parameters) -> Plan:
        """Implement ``Communicator.plan_for``."""
        self._handle.check_open()
        self._in_order(parameters)
        why = self._why_not(x)
        if why:
            return declined(self._info.name, x.nbytes, why)
        return self._lay_out(x.numel(), row, x.dtype, **parameters).plan

    def _in_order(self, parameters: _Parameters) -> tuple[float, ...]:
        for name, value in parameters.items():
            why = registry.why_not_known("parameter", name, self._info.parameters)
            if why:
                raise self._error(why)
            if not isinstance(value, int | float):
                raise self._error(f"parameter {name} is {value!r}; it must be a number")
        missing = [name for name in self._info.parameters if name not in parameters]
        if missing:
            raise self._error(f"it needs parameter {', '.join(missing)}")
        return tuple(float(parameters[name]) for name in self._info.parameters)

    def _check_buffers(self, buffers: _Buffers) -> torch.Tensor:
        """Return the input tensor.

        Raises:
            UnsupportedInputError: A buffer is missing or unknown, or the buffers do not fit each other.
        """
        for name in buffers:
            why = registry.why_not_known("buffer", name, self._info.buffers)
            if why:
                raise self._error(why)
        given: dict[str, torch.Tensor] = {}
        for name in self._info.buffers:
            tensor = buffers.get(name)
            if tensor is None:
                if name not in self._info.optional:
                    raise self._error(f"it needs buffer {name}")
                continue
            why = self._why_not(tensor)
            if why:
                raise self._error(f"{name}: {why}")
            given[name] = tensor
        check_memory(self._info.name, **given)
        first, x = next(iter(given.items()))
        for name, tensor in given.items():
            if tensor.numel() != x.numel() or tensor.dtype != x.dtype:
                raise self._error(
                    f"{name} has {tensor.numel()} elements of {tensor.dtype}, {first} {x.numel()} of {x.dtype}; they "
                    "must be alike"
                )
        self._operands.check_written(*(given.get(name) for name in self._operands.reads + self._operands.writes))
        return x

    def _why_not(self, tensor: torch.Tensor) -> str:
        """Return why a tensor cannot be a buffer, whatever its size, or ""."""
        return why_not_buffer(tensor, self._device) or self._why_not_type(tensor.dtype)
