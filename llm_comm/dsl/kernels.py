"""The kernels of one program for the types of an all-reduce, launched by addresses: what a communicator calls in place
of an algorithm of its core."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from llm_comm.communicator import Communicator
from llm_comm.dsl import ir
from llm_comm.dsl.compiled import Compiled
from llm_comm.dsl.compiler.element import element_of
from llm_comm.dsl.compiler.layout import chunk_lines
from llm_comm.operations.operation import TORCH_TYPES
from llm_comm.runtime.channels import Channels, open_channels
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.devices import is_capturing
from llm_comm.runtime.rendezvous import Rendezvous
from llm_comm.runtime.symmetric_heap import SymmetricHeap


@dataclass(frozen=True)
class Site:
    """What a program needs of a communicator, without the communicator: that holds the kernels, and nothing is to keep
    one that its user has dropped."""

    rank: int
    world_size: int
    device: torch.device
    _handle: CoreHandle
    heap: SymmetricHeap

    def check(self) -> None:
        """``Communicator.check``."""
        self._handle.check()

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """``Communicator.empty``; such memory is not what algorithms for symmetric tensors are for."""
        return self.heap.empty(shape, dtype)

    def channels(self, memory: torch.Tensor | None = None, *, semaphores: int = 16) -> Channels:
        """``Communicator.channels``."""
        return open_channels(self.heap, self._handle, memory, semaphores)


class StreamOrder:
    """Keeps calls of all programs of a communicator in order where they come on several streams: a call waits for the
    one before, as those of algorithms do among themselves. Calls in captures take no part.

    Args:
        device: Of the communicator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: int | None = 0 if device.type == "cpu" else None

    def follow(self, stream: int) -> None:
        """Before a call on a stream, which is the current one.

        Raises:
            RuntimeError: The call before is on a stream that is being captured now.
        """
        if stream == self._last or is_capturing(self._device):
            return
        if self._last is not None:
            last = torch.cuda.ExternalStream(self._last, device=self._device)
            with torch.cuda.stream(last):
                if is_capturing(self._device):  # an event recorded there would draw this call into the graph
                    raise RuntimeError(
                        "an eager call has to wait for the last eager call of a program, on another stream, which is "
                        "being captured into a graph now: make the call before the capture begins or after it ends"
                    )
            torch.cuda.current_stream(self._device).wait_stream(last)
        self._last = stream

    def wait(self) -> None:
        """Until the last call has ended, if that can be waited for: not while its stream is captured, nor where the
        device has failed."""
        if self._last is None or self._device.type == "cpu":
            return
        with contextlib.suppress(RuntimeError):
            last = torch.cuda.ExternalStream(self._last, device=self._device)
            with torch.cuda.stream(last):
                if not is_capturing(self._device):
                    last.synchronize()


class _Kernel(Compiled):
    """For one type of elements.

    Args:
        program: What is compiled.
        site: Of the communicator.
        dtype: Of the elements.
        max_bytes: Of a message.
        workspace: Of a kernel of the same program for another type, whose calls and these count as those of one. None:
            its own.
        meet: Called when the kernel is compiled: returns when it is on all ranks.
    """

    def __init__(
        self,
        program: ir.Program,
        site: Site,
        dtype: torch.dtype,
        max_bytes: int,
        workspace: tuple[torch.Tensor, Channels] | None,
        meet: Callable[[], None],
    ) -> None:
        self._shared = workspace
        self._meet = meet
        super().__init__(program, cast(Communicator, site), element_of(dtype), max_bytes, None, None)

    def _make_workspace(self) -> tuple[torch.Tensor, Channels]:
        self._meet()
        # How it is laid out does not depend on the type; whose turn it is, and all signals, count calls of any.
        return super()._make_workspace() if self._shared is None else self._shared

    @property
    def workspace(self) -> tuple[torch.Tensor, Channels]:
        """For kernels of other types."""
        return self._memory, self._channels

    def grid(self, message_bytes: int) -> tuple[int, int]:
        """Blocks of a launch, and their threads."""
        instances, threads = self._limits.of_call(chunk_lines(message_bytes // self._outer, self._pieces))
        return instances * len(self.program.groups), threads

    def prepare(self, message_bytes: int, order: StreamOrder) -> Callable[..., bool]:
        """What launches it by addresses."""
        blocks, threads = self.grid(message_bytes)
        part, fixed, core = message_bytes // self._outer, self._fixed_arguments(), self._comm._handle.core()

        def run(x: int, out: int, stream: int) -> bool:
            if core.error() is not None:  # of an earlier call
                return False
            order.follow(stream)
            self._launch(blocks, threads, (*fixed, x, out, part), self._shared_bytes)
            return core.error() is None

        return run


class ProgramKernels:
    """A program for all types that all-reduces are of. Making one is collective.

    Args:
        name: As options and tables name it.
        program: A correct one of an all-reduce, which works in place, and whose tensors need not be symmetric.
        site: Of the communicator.
        rendezvous: Of the ranks.
        max_bytes: Of a message.
        order: Of the calls of all programs of the communicator.

    Raises:
        RendezvousError: It cannot be compiled on a rank, or a rank has no memory for it. Raised on all ranks alike.
    """

    def __init__(
        self,
        name: str,
        program: ir.Program,
        site: Site,
        rendezvous: Rendezvous,
        max_bytes: int,
        order: StreamOrder,
    ) -> None:
        self.max_bytes = max_bytes
        self.data_types = tuple(TORCH_TYPES)
        self._order = order
        self._kernels: dict[str, _Kernel] = {}
        workspace = None
        for data_type, dtype in TORCH_TYPES.items():
            what = f"compilation of {name} for {data_type}"
            kernel = _compile(what, rendezvous, program, site, dtype, max_bytes, workspace)
            workspace = kernel.workspace
            self._kernels[data_type] = kernel
        self.workspace_bytes = kernel.workspace_bytes

    def grid(self, data_type: str, message_bytes: int) -> tuple[int, int]:
        """See ``planning.programs.Kernels``."""
        return self._kernels[data_type].grid(message_bytes)

    def prepare(self, data_type: str, message_bytes: int) -> Callable[..., bool]:
        """See ``planning.programs.Kernels``."""
        return self._kernels[data_type].prepare(message_bytes, self._order)

    def wait(self) -> None:
        """See ``planning.programs.Kernels``."""
        self._order.wait()


def _compile(
    what: str,
    rendezvous: Rendezvous,
    program: ir.Program,
    site: Site,
    dtype: torch.dtype,
    max_bytes: int,
    workspace: tuple[torch.Tensor, Channels] | None,
) -> _Kernel:
    """A kernel, once it is compiled on all ranks."""
    have_met = False

    def meet() -> None:
        nonlocal have_met
        have_met = True
        rendezvous.attempt(what, lambda: None)

    try:
        return _Kernel(program, site, dtype, max_bytes, workspace, meet)
    except Exception as error:
        if have_met:  # a step of all ranks has failed, on all
            raise
        failure = error

    def fail() -> None:
        raise failure

    rendezvous.attempt(what, fail)
    raise AssertionError("the ranks have passed over a failure")
