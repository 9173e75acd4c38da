"""Base class of the operations of a communicator: planning a call, preparing its launch, and caching both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from llm_comm import registry
from llm_comm.errors import UnsupportedInputError
from llm_comm.operations.operands import count_write
from llm_comm.planning.plan import Plan
from llm_comm.planning.planner import Planner
from llm_comm.planning.selection import Layout
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.devices import current_stream_of

#: Maximum number of prepared calls in a cache, about 1 KB each. Prefill brings a new message size with each length.
MAX_PREPARED = 4096

#: torch dtypes by the core's names.
TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Prepared(NamedTuple):
    """Prepared call.

    Attributes:
        plan: Plan of the call.
        run: Launches it.
    """

    plan: Plan
    #: Result of ``Core.prepare``, or the same for a DSL program: takes buffer addresses and a stream, returns whether
    #: it was enqueued. None if there is nothing to exchange.
    run: Callable[..., bool] | None


class Operation:
    """One operation of one communicator.

    Args:
        name: Name in the registry.
        handle: Handle of the core that launches the operation.
        planner: Planner of the communicator.
    """

    def __init__(self, name: str, handle: CoreHandle, planner: Planner) -> None:
        self._info = registry.operations()[name]
        self._handle = handle
        self._device = handle.device
        #: Emulated buffers are memory of this process: a store to read-only memory would end it.
        self._is_emulated = handle.device.type == "cpu"
        self._current_stream = current_stream_of(handle.device)
        self._planner = planner
        #: Element types for which some algorithm has kernels, with the core's names.
        self._data_types = {
            torch_type: data_type
            for data_type, torch_type in TORCH_TYPES.items()
            if any(data_type in algorithm.data_types for algorithm in self._info.algorithms)
        }
        #: Prepared calls, by message size, dtype and the like.
        self._prepared: dict[Any, Any] = {}
        #: Reasons of declined messages, by the same keys. Engines repeat their queries.
        self._reasons: dict[Any, str] = {}

    def forget(self) -> None:
        """Drop prepared calls: the tuning table has changed, or the core is closed."""
        self._prepared.clear()
        self._reasons.clear()

    def _lay_out(self, count: int, row: int, dtype: torch.dtype, **parameters: float) -> Layout:
        """Plan a call. The layout also holds the arguments of ``Core.prepare``."""
        in_order = tuple(parameters[name] for name in self._info.parameters)
        return self._planner.lay_out(self._info.name, count, row, self._data_types[dtype], in_order)

    def _prepare_call(self, layout: Layout) -> Prepared | str:
        """Prepare the launch of a call. Return the reason as text if the message is declined."""
        core = self._handle.core()
        plan, counter_of = layout.plan, self._handle.statistics.counter
        if plan.algorithm == "declined":
            return plan.reason
        of_message = plan.operation, plan.message_bytes
        counter = counter_of(*of_message, plan.algorithm, plan.protocol, layout.saved_share)
        run: Callable[..., bool] | None = None
        if layout.launches is not None:
            direct_counter = None
            if layout.direct is not None:
                direct = next(a for a in self._info.algorithms if a.number == layout.direct[0])
                direct_counter = counter_of(*of_message, direct.name, direct.protocol)
            try:
                run = core.prepare(*layout.launches, layout.direct, counter, direct_counter)
            except RuntimeError as error:
                self._handle.end_after_launch_error(error)
                raise
        elif layout.program is not None:
            run = layout.program(counter)
        if run is not None and self._planner.config.nvtx:
            run = within_range(run, self._device, *of_message, plan.algorithm, plan.protocol)
        return Prepared(plan, run)

    def _launch(self, prepared: Prepared, addresses: Sequence[int], written: Sequence[torch.Tensor] = ()) -> None:
        """Launch a prepared call, or count one that exchanges nothing.

        Args:
            prepared: The call.
            addresses: Addresses of its buffers.
            written: Tensors whose write is counted.

        Raises:
            CommunicatorError: This or an earlier call has failed.
        """
        if prepared.run is None:
            self._handle.check()
            self._count_unlaunched(prepared.plan)
            return
        try:
            is_enqueued = prepared.run(*addresses, self._current_stream())
        except (RuntimeError, ValueError) as error:
            self._handle.end_after_launch_error(error)
            raise
        count_write(written)
        if not is_enqueued:
            self._handle.check()

    def _error(self, why: str) -> UnsupportedInputError:
        return UnsupportedInputError(f"{self._info.name}: {why}")

    def _count_unlaunched(self, plan: Plan) -> None:
        """Count a call that exchanges nothing and is therefore not launched. The core counts launched calls."""
        self._handle.statistics.counter(plan.operation, plan.message_bytes, plan.algorithm, plan.protocol).add()

    def _count_declined(self, why: str) -> None:
        """Count a declined input."""
        self._handle.statistics.decline(self._info.name, why)

    def _why_not_type(self, dtype: torch.dtype) -> str:
        return "" if dtype in self._data_types else f"{dtype} is not one of {', '.join(map(str, self._data_types))}"


def keep(cache: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Insert a value into a cache. A full cache is cleared first."""
    if len(cache) >= MAX_PREPARED:
        cache.clear()
    cache[key] = value


def within_range(
    run: Callable[..., bool], device: torch.device, operation: str, message_bytes: int, algorithm: str, protocol: str
) -> Callable[..., bool]:
    """Wrap ``run`` in an NVTX range such as "llm_comm all_reduce one_shot LL 16384 B". On emulated GPUs return ``run``
    itself: torch may be built without CUDA.

    Args:
        run: Launches a call, see ``Core.prepare``.
        device: Device of the communicator.
        operation, message_bytes, algorithm, protocol: Attributes of ``Plan``.
    """
    if device.type != "cuda":
        return run
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    title = f"llm_comm {operation} {algorithm} {protocol} {message_bytes} B"

    def run_in_range(*arguments: int) -> bool:
        push(title)
        try:
            return run(*arguments)
        finally:
            pop()

    return run_in_range
