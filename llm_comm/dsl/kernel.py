"""Kernels of programs in a communicator's core: compiled, loaded, with their workspace in symmetric memory.

``Kernel`` is for one dtype. ``ProgramKernels`` holds the kernels of all dtypes of an operation, which a communicator
calls instead of an algorithm.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from llm_comm import _core
from llm_comm.dsl import ir
from llm_comm.dsl.compiler import grid
from llm_comm.dsl.compiler.analysis import works_in_place
from llm_comm.dsl.compiler.cache import compile_image
from llm_comm.dsl.compiler.grid import Limits, limits_of
from llm_comm.dsl.compiler.layout import Layout, chunk_lines, lay_out, outer_parts, sentinel_ranges
from llm_comm.dsl.compiler.runs import runs_of
from llm_comm.dsl.compiler.source import generate, is_moved, kernel_name, shared_bytes, symmetric_spaces
from llm_comm.dsl.compiler.text import Element, element_of
from llm_comm.dsl.rendering import digest
from llm_comm.errors import quoted
from llm_comm.operations.operation import TORCH_TYPES
from llm_comm.planning.programs import DEFAULT_LAUNCH, LaunchParameters
from llm_comm.runtime.channels import Channels, open_channels
from llm_comm.runtime.comparison import check_alike, digest_of
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.rendezvous import Rendezvous
from llm_comm.runtime.symmetric_heap import SymmetricHeap

_NUMBERS = {name: number for number, name in enumerate(_core.data_types())}
#: Data type of calls that only move elements.
_BYTES = "byte"
#: Bits by which the core names symmetric tensors.
_SYMMETRIC = {ir.Space.INPUT: 1, ir.Space.OUTPUT: 2}


@dataclass(frozen=True)
class Site:
    """Parts of a communicator that a kernel needs. A reference to the communicator itself would form a cycle and keep
    it alive after the user has dropped it."""

    handle: CoreHandle
    heap: SymmetricHeap

    @property
    def device(self) -> torch.device:
        """Device of the communicator."""
        return self.handle.device


class Workspace(NamedTuple):
    """Workspace of a program, on all ranks.

    Kernels for several dtypes can share one: the layout does not depend on the dtype, and calls do not overlap.
    """

    memory: torch.Tensor
    channels: Channels


def load_kernel(
    what: str, make: Callable[[], Kernel], site: Site, workspace: Workspace | None = None, *, own_error: bool = False
) -> tuple[Kernel, Workspace]:
    """Build a kernel on every rank, compare the ranks' kernels, and load it into the core, on all ranks or on none.
    Collective.

    This is the only function that loads code of llm_comm.dsl.

    Args:
        what: Name of the kernel, equal on all ranks.
        make: Builds the kernel of this rank.
        site: Parts of the communicator.
        workspace: Workspace of another kernel of the same program. None creates one.
        own_error: Raise the original exception of ``make`` if it has failed alike on every rank.

    Raises:
        RendezvousError: A rank could not build, place or load its kernel, or kernels differ; the text says in what.
            Raised on all ranks alike.
        MissingRankError: A rank has not made the call in time.
    """
    rendezvous = site.heap.rendezvous_for(what)
    made: list[Kernel] = []

    def step() -> dict[str, Any]:
        made.append(make())
        return made[0].described()

    said = rendezvous.collect(f"compilation of {what}", step, own_error=own_error)
    check_alike(rendezvous.names, "have different kernels of llm_comm.dsl", said)
    return made[0], made[0].connect(rendezvous, workspace)


class Kernel:
    """Compiled program for one dtype and all sizes up to ``max_bytes``.

    The constructor compiles. ``load_kernel``, which is collective, loads the kernel into the core.

    Args:
        program: Program to compile.
        site: Parts of the communicator.
        dtype: Dtype of the elements.
        max_bytes: Largest message in bytes.
        blocks: Maximum blocks of all groups together; None: a default.
        threads: Maximum threads of a block; None: a default.

    Raises:
        CompileError, ValueError, ModuleNotFoundError, ConfigError, RuntimeError: See ``dsl.compile``.
    """

    def __init__(
        self,
        program: ir.Program,
        site: Site,
        dtype: torch.dtype,
        max_bytes: int,
        blocks: int | None = None,
        threads: int | None = None,
    ) -> None:
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype is {quoted(dtype)}; it must be a torch.dtype")
        for name, number in (("max_bytes", max_bytes), ("blocks", blocks), ("threads", threads)):
            is_left_out = number is None and name != "max_bytes"
            if not is_left_out and not (type(number) is int and number > 0):
                raise ValueError(f"{name} is {quoted(number)}; it must be a positive whole number")
        self.program = program
        self.max_bytes = max_bytes
        self.element: Element = element_of(dtype)
        self._site = site
        groups = runs_of(program)
        self._limits: Limits = limits_of(program, groups, site.device, blocks, threads)
        self._layout: Layout = lay_out(
            program, groups, max_bytes, self._limits.instances, self._limits.threads, masks=is_moved(program)
        )
        self.outer = outer_parts(program.operation, program.world)
        self._pieces = min((buffer.parts for buffer in program.buffers), default=self.outer) // self.outer
        self.in_place = works_in_place(program, groups)
        self.symmetric: Sequence[ir.Space] = symmetric_spaces(program)
        self.source = generate(program, groups, self._layout, self.element)
        self.workspace_bytes = self._layout.bytes
        self._image = compile_image(self.source, kernel_name(program), site.device)
        self._workspace: Workspace | None = None
        self._number = -1

    def described(self) -> dict[str, Any]:
        """Return the properties that all ranks must share. The digest omits comments of the source: they quote file
        paths, which may differ between ranks."""
        code = re.sub(r"\s*//[^\n]*", "", self.source)
        return {
            "program": self.program.name,
            "operation": f"{self.program.operation.value} in a world of {self.program.world}",
            "dtype": str(self.element.dtype),
            "max_bytes": self.max_bytes,
            "blocks": self._limits.instances * len(self.program.groups),
            "threads": self._limits.threads,
            "digest": f"{digest(self.program)}-{digest_of(code)}",
        }

    def connect(self, rendezvous: Rendezvous, workspace: Workspace | None) -> Workspace:
        """Create the workspace unless one is given, and load the kernel. Collective, see ``load_kernel``."""
        if workspace is None:
            memory = self._site.heap.empty(self._layout.bytes, torch.uint8)
            rendezvous.attempt(f"preparation of the workspace of {self.program.name}", lambda: self._arm(memory))
            # open_channels returns once every rank has called it, so all workspaces are initialized.
            semaphores = self._limits.instances * self.program.semaphores
            workspace = Workspace(memory, open_channels(self._site.heap, self._site.handle, memory, semaphores))
        self._number = rendezvous.attempt(f"loading of program {self.program.name}", self._load)
        self._workspace = workspace
        return workspace

    def _load(self) -> int:
        title = f"program {self.program.name}"
        return self._site.handle.core().load_program(self._image, kernel_name(self.program), title)

    def _arm(self, memory: torch.Tensor) -> None:
        memory.zero_()
        for begin, end in sentinel_ranges(self.program, self._layout):
            memory[begin:end] = 0xFF
        if memory.is_cuda:
            torch.cuda.current_stream(memory.device).synchronize()

    def why_not(self, parameters: LaunchParameters) -> str:
        """Return why the kernel cannot be launched with these parameters, or ""."""
        return grid.why_not(parameters, self._limits, len(self.program.groups), self._site.device)

    def candidates(self, message_bytes: int) -> list[LaunchParameters]:
        """Return launch parameters to measure, the kernel's own first. No two give the same grid."""
        lines = chunk_lines(message_bytes // self.outer, self._pieces)
        return grid.candidates(self._limits, len(self.program.groups), lines)

    def grid(self, message_bytes: int, parameters: LaunchParameters = DEFAULT_LAUNCH) -> tuple[int, int]:
        """Return the blocks of all groups and the threads of a block. ``why_not(parameters)`` must be ""."""
        groups = len(self.program.groups)
        limits = grid.narrowed(self._limits, parameters, groups)
        instances, threads = limits.of_call(chunk_lines(message_bytes // self.outer, self._pieces))
        return instances * groups, threads

    def prepare(
        self, input_bytes: int, output_bytes: int, counter: _core.Counter, parameters: LaunchParameters = DEFAULT_LAUNCH
    ) -> Callable[..., bool]:
        """Return a function that launches a call: it takes addresses of input and output and a stream, and returns
        whether the launch was enqueued. ``counter`` counts enqueued launches.

        Raises:
            RuntimeError: The communicator is closed.
            ValueError: The device rejects the grid.
        """
        assert self._workspace is not None, "connect() comes first"
        message_bytes = max(input_bytes, output_bytes)
        blocks, threads = self.grid(message_bytes, parameters)
        memory, channels = self._workspace
        offset, words = channels.symmetric_offsets
        data_type = next((name for name, dtype in TORCH_TYPES.items() if dtype == self.element.dtype), _BYTES)
        launch = _core.ProgramLaunch(
            kernel=self._number,
            groups=len(self.program.groups),
            blocks=blocks,
            threads=threads,
            shared_bytes=shared_bytes(self.program),
            memory=offset,
            memory_bytes=memory.nbytes,
            semaphore_words=words,
            semaphores=channels.semaphores,
            data_type=_NUMBERS[data_type],
            input_bytes=input_bytes,
            output_bytes=output_bytes,
            part_bytes=message_bytes // self.outer,
            symmetric=sum(_SYMMETRIC[space] for space in self.symmetric),
        )
        return self._site.handle.core().prepare_program(launch, counter)


class ProgramKernels:
    """Kernels of a program for all dtypes of its operation. Construction is collective.

    Args:
        name: Name in options and tables.
        program: Correct program of an all-reduce, all-gather or reduce-scatter that works in place and does not require
            symmetric tensors.
        site: Parts of the communicator.
        max_bytes: Limit in bytes of the larger of input and output.

    Raises:
        RendezvousError: See ``load_kernel``. Raised on all ranks alike.
    """

    def __init__(self, name: str, program: ir.Program, site: Site, max_bytes: int) -> None:
        operation = program.operation
        self.operation = operation.value
        self._inputs, self._outputs = (
            program.world if is_parted else 1 for is_parted in (operation.has_parted_input, operation.has_parted_output)
        )
        self.max_bytes = max_bytes // max(self._inputs, self._outputs)
        # Operations that move data handle bytes, whatever the dtype.
        types = TORCH_TYPES if operation.adds_up else {"byte": torch.uint8}
        self.data_types = tuple(types)
        self.sums_in_rank_order = program.sums_in_rank_order
        self._kernels: dict[str, Kernel] = {}
        workspace: Workspace | None = None
        for data_type, dtype in types.items():
            make = functools.partial(Kernel, program, site, dtype, max_bytes)
            kernel, workspace = load_kernel(f"{name} for {data_type}", make, site, workspace)
            self._kernels[data_type] = kernel
        self.workspace_bytes = kernel.workspace_bytes

    def why_not(self, parameters: LaunchParameters) -> str:
        """See ``planning.programs.Kernels``."""
        # The kernels of all dtypes have the same limits.
        return next(iter(self._kernels.values())).why_not(parameters)

    def candidates(self, data_type: str, message_bytes: int) -> list[LaunchParameters]:
        """See ``planning.programs.Kernels``."""
        return self._kernels[data_type].candidates(self._whole(message_bytes))

    def grid(self, data_type: str, message_bytes: int, parameters: LaunchParameters) -> tuple[int, int]:
        """See ``planning.programs.Kernels``."""
        return self._kernels[data_type].grid(self._whole(message_bytes), parameters)

    def prepare(
        self, data_type: str, message_bytes: int, parameters: LaunchParameters, counter: _core.Counter
    ) -> Callable[..., bool]:
        """See ``planning.programs.Kernels``."""
        kernel = self._kernels[data_type]
        return kernel.prepare(message_bytes * self._inputs, message_bytes * self._outputs, counter, parameters)

    def _whole(self, message_bytes: int) -> int:
        """Return the bytes of all shards, the message size of a kernel."""
        return message_bytes * max(self._inputs, self._outputs)
