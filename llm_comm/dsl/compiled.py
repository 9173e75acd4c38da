"""Programs as kernels: ``compile`` makes one for a communicator, and the result is called as an operation is."""

from __future__ import annotations

import torch

from llm_comm.communicator import Communicator
from llm_comm.dsl import ir
from llm_comm.dsl.compiler.addresses import addresses_of
from llm_comm.dsl.compiler.element import Element, element_of
from llm_comm.dsl.compiler.grid import Limits, limits_of
from llm_comm.dsl.compiler.in_place import works_in_place
from llm_comm.dsl.compiler.kernel import Launch, compile_kernel
from llm_comm.dsl.compiler.layout import Layout, armed_ranges, chunk_lines, lay_out, outer_parts
from llm_comm.dsl.compiler.runs import runs_of, uses_ports
from llm_comm.dsl.compiler.source import generate, is_moved, kernel_name, shared_bytes, symmetric_spaces
from llm_comm.dsl.programs import ProgramText
from llm_comm.runtime.channels import Channels

#: What a place in the symmetric heap is made of (workspace_layout.h).
_PLACE_OFFSET_BITS = 48


class Compiled:
    """A program as a kernel, for messages up to a size; made by ``compile``.

    It is called as an operation of the communicator is: by all ranks, in the same order among its operations, with
    messages of one size. Calls can be captured in CUDA graphs. Keep the object, and the communicator open, as long as
    graphs have its calls. One call at a time: those of two streams must be ordered.

    Attributes:
        program: What was compiled.
        source: The C++ source of its kernel.
        max_bytes: Of a message, at most.
        workspace_bytes: What it takes of symmetric memory, on each rank.
    """

    def __init__(
        self,
        program: ir.Program,
        comm: Communicator,
        element: Element,
        max_bytes: int,
        blocks: int | None,
        threads: int | None,
    ) -> None:
        self.program = program
        self.max_bytes = max_bytes
        self._comm = comm
        self._element = element
        groups = runs_of(program)
        self._limits: Limits = limits_of(program, comm.device, blocks, threads, uses_ports(groups))
        self._layout: Layout = lay_out(
            program, groups, max_bytes, self._limits.instances, self._limits.threads, masks=is_moved(program)
        )
        self._outer = outer_parts(program.operation, program.world)
        self._pieces = min((buffer.parts for buffer in program.buffers), default=self._outer) // self._outer
        self._in_place = works_in_place(program, groups)
        self._symmetric = symmetric_spaces(program)
        self._shared_bytes = shared_bytes(program)
        self.source = generate(program, groups, self._layout, element)
        self.workspace_bytes = self._layout.bytes
        # Before the ranks meet, so that none waits for one that has no compiler.
        self._launch: Launch = compile_kernel(self.source, kernel_name(program), comm.device)
        self._memory, self._channels = self._make_workspace()
        state, memory = addresses_of(self._channels.handle, program.world, comm.device)
        self._fixed = (self._channels.handle, state, comm.rank, *memory)

    def _make_workspace(self) -> tuple[torch.Tensor, Channels]:
        memory = self._comm.empty(self._layout.bytes, torch.uint8)
        memory.zero_()
        for begin, end in armed_ranges(self.program, self._layout):
            memory[begin:end] = 0xFF
        if memory.is_cuda:
            torch.cuda.current_stream(memory.device).synchronize()
        # A rank has its channels only when all have asked for them: so all workspaces are ready.
        return memory, self._comm.channels(memory, semaphores=self._limits.instances * self.program.semaphores)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Runs the program on the current stream.

        Args:
            x: The input: contiguous, of the dtype that was compiled for, on the communicator's device. Of an operation
                with a part for each rank, its first dimension is the ranks' together.
            out: Where the result goes. It may be ``x`` where the operation's output is as large as its input and the
                program allows it. None: a new tensor. Required where the program has peers store to the output: a
                tensor of ``Communicator.empty``, at the same place on all ranks.

        Returns:
            ``out``, or a new tensor: like ``x``; of an all-gather ``world`` times, of a reduce-scatter one ``world``-th
            of its first dimension.

        Raises:
            ValueError: A tensor does not fit; nothing has been launched.
            CommunicatorError: The communicator has failed before. What goes wrong in this call, ``Communicator.check``
                and later calls raise.
            RuntimeError: The communicator is closed.
        """
        self._comm.check()
        self._check_tensor("x", x)
        shape = self._output_shape(x)
        if out is None:
            if ir.Space.OUTPUT in self._symmetric:
                raise ValueError(f"{self._name}: peers store to the output: pass out=, a tensor of Communicator.empty")
            out = x.new_empty(shape)
        else:
            self._check_tensor("out", out)
            if out.shape != shape:
                raise ValueError(f"{self._name}: out has shape {tuple(out.shape)}; it must have {tuple(shape)}")
            self._check_overlap(x, out)
        message = max(x.nbytes, out.nbytes)
        if message > self.max_bytes:
            raise ValueError(
                f"{self._name}: the message has {message} bytes; it was compiled for max_bytes={self.max_bytes}"
            )
        places = [self._place(space, x if space is ir.Space.INPUT else out) for space in self._symmetric]
        if message == 0:
            return out
        part = message // self._outer
        instances, threads = self._limits.of_call(chunk_lines(part, self._pieces))
        self._launch(
            instances * len(self.program.groups),
            threads,
            (*self._fixed_arguments(), x.data_ptr(), out.data_ptr(), part, *places),
            self._shared_bytes,
        )
        return out

    def _fixed_arguments(self) -> tuple[int, ...]:
        _ = self._channels.handle  # raises where the communicator is closed
        return self._fixed

    @property
    def _name(self) -> str:
        return f"program {self.program.name!r}"

    # ---- Tensors -------------------------------------------------------------------------------------------------

    def _check_tensor(self, name: str, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{self._name}: {name} is a {type(tensor).__name__}; it must be a tensor")
        if tensor.dtype != self._element.dtype:
            raise ValueError(
                f"{self._name}: {name} is of {tensor.dtype}; it was compiled for dtype={self._element.dtype}"
            )
        if tensor.device != self._comm.device:
            raise ValueError(f"{self._name}: {name} is on {tensor.device}; the communicator is on {self._comm.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{self._name}: {name} is not contiguous: pass {name}.contiguous()")

    def _output_shape(self, x: torch.Tensor) -> torch.Size:
        operation, world = self.program.operation, self.program.world
        is_parted, becomes_parted = operation.has_parted_input, operation.has_parted_output
        if (is_parted or becomes_parted) and x.dim() == 0:
            raise ValueError(f"{self._name}: x has no dimension; the first one holds the parts of the ranks")
        if is_parted and x.shape[0] % world:
            raise ValueError(
                f"{self._name}: the first dimension of x is {x.shape[0]}; it must be a multiple of {world}, a part for "
                "each rank"
            )
        if is_parted == becomes_parted:
            return x.shape
        first = x.shape[0] * world if becomes_parted else x.shape[0] // world
        return torch.Size((first, *x.shape[1:]))

    def _check_overlap(self, x: torch.Tensor, out: torch.Tensor) -> None:
        begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
        if out.data_ptr() >= end or out.data_ptr() + out.nbytes <= begin:
            return
        if out.data_ptr() != begin or out.nbytes != x.nbytes:
            raise ValueError(f"{self._name}: out overlaps x: pass other memory, or x itself")
        if not self._in_place:
            raise ValueError(f"{self._name}: out is x, but the program loads x after it has stored to out")

    def _place(self, space: ir.Space, tensor: torch.Tensor) -> int:
        """Of a tensor that peers use, as kernels name it."""
        place = self._comm._handle.core().find(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else (0, 0)
        if place is None:
            raise ValueError(
                f"{self._name}: peers use the {space.value}, so it must be a tensor of Communicator.empty, or a view "
                "of one"
            )
        segment, offset = place
        return segment << _PLACE_OFFSET_BITS | offset


def compile(
    program: ir.Program | ProgramText,
    comm: Communicator,
    *,
    dtype: torch.dtype,
    max_bytes: int,
    blocks: int | None = None,
    threads: int | None = None,
) -> Compiled:
    """Makes one kernel of a program, for a type of elements and all sizes up to ``max_bytes``.

    Collective: every rank makes the same call. It does not check the program: ``dsl.check`` does.

    Args:
        program: What to compile; of a text, for the world of ``comm``.
        comm: Whose ranks run it.
        dtype: Of the elements. Sums are of bfloat16, float16 and float32.
        max_bytes: Of the message: of the larger one of input and output. Memory of the workspace grows with it.
        blocks: Of the kernel, of all groups together, at most; all have to run at once. None: as many as the program
            has instances, or, where it does not say, as many as the device has multiprocessors.
        threads: Of a block, at most. None: 512.

    Returns:
        What is called as the operation is.

    Raises:
        CompileError: There is no kernel for an operation of the program yet.
        ValueError: A number, or the world of the program, does not fit.
        RendezvousError: The ranks ask for different kernels, or one of them has no memory.
        MissingRankError: A rank has not made the call within ``Config.timeout_s``.
        ModuleNotFoundError: cupy, which compiles for GPUs, is not installed.
        RuntimeError: There is no compiler for emulated GPUs, or the communicator is closed.
    """
    if isinstance(program, ProgramText):
        program = program.build(comm.world_size)
    if program.world != comm.world_size:
        raise ValueError(f"program {program.name!r} is for {program.world} ranks; there are {comm.world_size}")
    if max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}; it must be positive")
    return Compiled(program, comm, element_of(dtype), max_bytes, blocks, threads)
