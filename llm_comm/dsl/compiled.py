"""Compiled programs: ``compile`` makes a kernel for one communicator, called like an operation of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llm_comm.communicator import Communicator
from llm_comm.dsl import ir, programs
from llm_comm.dsl.checks import check as check_program
from llm_comm.dsl.kernel import Kernel, Site, load_kernel
from llm_comm.dsl.programs import ProgramDefinition
from llm_comm.errors import UnsupportedInputError, quoted
from llm_comm.operations.operands import Operands, check_memory, check_unwatched, count_write, why_not_buffer
from llm_comm.operations.operation import keep, within_range
from llm_comm.planning.plan import NONE
from llm_comm.planning.programs import PROTOCOL
from llm_comm.runtime.devices import current_stream_of


class Compiled:
    """Program as a kernel for messages up to ``max_bytes``; made by ``compile``.

    A call is an operation of the communicator: all ranks make it, in the same order among their operations, with
    messages of one size. The rules of operations apply, for several streams, for CUDA graphs and for a closed
    communicator. Keep the object while graphs hold its calls, since they use its workspace.

    Attributes:
        program: Compiled program.
        source: C++ source of the kernel.
        max_bytes: Largest message in bytes.
        workspace_bytes: Symmetric memory in use on each rank, in bytes.
    """

    def __init__(self, kernel: Kernel, site: Site, has_ranges: bool) -> None:
        self._kernel = kernel
        self._site = site
        self._has_ranges = has_ranges
        self._stream = current_stream_of(site.device)
        self._prepared: dict[int, Callable[..., bool]] = {}
        self.program = kernel.program
        self._name = f"program {kernel.program.name!r}"
        self._operands = Operands(self._name, reads=("x",), writes=("out",))
        self.source = kernel.source
        self.max_bytes = kernel.max_bytes
        self.workspace_bytes = kernel.workspace_bytes

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Run the program on the current stream.

        Args:
            x: Input: contiguous, of the compiled dtype, on the communicator's device. If the operation has a shard of
                the input for each rank, the first dimension holds the shards in rank order.
            out: Output. It may be ``x`` if input and output have one size and the program allows it. None: a new
                tensor. Required if peers store to the output: then a tensor of ``Communicator.empty`` with the same
                symmetric offset on all ranks.

        Returns:
            ``out``, or a new tensor of the shape of ``x``. Its first dimension is ``world`` times that of ``x`` for an
            all-gather, and 1/``world`` for a reduce-scatter.

        Raises:
            UnsupportedInputError: A tensor does not fit, or a mode, tracer or transform of torch would miss the call.
                Nothing was launched.
            CommunicatorError: The communicator has failed earlier. A failure of this call is raised by
                ``Communicator.check`` and by later calls.
            RuntimeError: The communicator is closed.
        """
        check_unwatched(self._name)
        self._site.handle.check()
        self._check_tensor("x", x)
        shape = self._output_shape(x)
        if out is None:
            if ir.Space.OUTPUT in self._kernel.symmetric:
                raise self._error("peers store to the output: pass out=, a tensor of Communicator.empty")
            written: tuple[torch.Tensor, ...] = ()
            out = x.new_empty(shape)
        else:
            written = (out,)
            self._check_tensor("out", out)
            if out.shape != shape:
                raise self._error(f"out has shape {tuple(out.shape)}; it must have {tuple(shape)}")
            is_in_place = out.data_ptr() == x.data_ptr() and out.nbytes == x.nbytes
            if is_in_place and out.nbytes and not self._kernel.in_place:
                raise self._error("out is x, but the program loads x after it has stored to out")
            self._operands.check_written(x, out, in_place={("out", "x"): 0} if is_in_place else None)
        message = max(x.nbytes, out.nbytes)
        if message > self.max_bytes:
            raise self._error(f"the message has {message} bytes; it was compiled for max_bytes={self.max_bytes}")
        for space in self._kernel.symmetric:
            self._check_symmetric(space, x if space is ir.Space.INPUT else out)
        if message == 0:
            self._site.handle.statistics.counter(self.program.operation.value, 0, NONE, NONE).add()
            return out
        run = self._prepared.get(x.nbytes)
        if run is None:
            run = self._prepare(x.nbytes, out.nbytes)
            keep(self._prepared, x.nbytes, run)
        try:
            is_enqueued = run(x.data_ptr(), out.data_ptr(), self._stream())
        except RuntimeError as error:
            self._site.handle.end_after_launch_error(error)
            raise
        count_write(written)
        if not is_enqueued:
            self._site.handle.check()
        return out

    def _prepare(self, input_bytes: int, output_bytes: int) -> Callable[..., bool]:
        # A message of an operation with shards is one shard, as in plans.
        message_bytes = min(input_bytes, output_bytes)
        kind = self.program.operation.value, message_bytes, programs.name_of(self.program), PROTOCOL
        run = self._kernel.prepare(input_bytes, output_bytes, self._site.handle.statistics.counter(*kind))
        return within_range(run, self._site.device, *kind) if self._has_ranges else run

    def _error(self, why: str) -> UnsupportedInputError:
        return UnsupportedInputError(f"{self._name}: {why}")

    # ---- Tensors -------------------------------------------------------------------------------------------------

    def _check_tensor(self, name: str, tensor: torch.Tensor) -> None:
        why = why_not_buffer(tensor, self._site.device)
        if why:
            raise self._error(f"{name}: {why}")
        check_memory(self._name, **{name: tensor})
        if tensor.dtype != self._kernel.element.dtype:
            raise self._error(f"{name} is of {tensor.dtype}; it was compiled for dtype={self._kernel.element.dtype}")

    def _output_shape(self, x: torch.Tensor) -> torch.Size:
        operation, world = self.program.operation, self.program.world
        is_parted, becomes_parted = operation.has_parted_input, operation.has_parted_output
        if (is_parted or becomes_parted) and x.dim() == 0:
            raise self._error("x has no dimension; the first one holds the parts of the ranks")
        if is_parted and x.shape[0] % world:
            raise self._error(
                f"the first dimension of x is {x.shape[0]}; it must be a multiple of {world}, a part for each rank"
            )
        if is_parted == becomes_parted:
            return x.shape
        first = x.shape[0] * world if becomes_parted else x.shape[0] // world
        return torch.Size((first, *x.shape[1:]))

    def _check_symmetric(self, space: ir.Space, tensor: torch.Tensor) -> None:
        if tensor.nbytes and self._site.heap.symmetric_offset_of(tensor) is None:
            raise self._error(
                f"peers use the {space.value}, so it must be a tensor of Communicator.empty, or a view of one"
            )


def compile(
    program: ir.Program | ProgramDefinition,
    comm: Communicator,
    *,
    dtype: torch.dtype,
    max_bytes: int,
    blocks: int | None = None,
    threads: int | None = None,
    check: bool = True,
) -> Compiled:
    """Compile a program to one kernel, for a dtype and all sizes up to ``max_bytes``. Collective.

    Args:
        program: Program to compile. A ``ProgramDefinition`` is built for the world of ``comm``.
        comm: Communicator whose ranks run it.
        dtype: Dtype of the elements. Sums need bfloat16, float16 or float32.
        max_bytes: Largest message in bytes: the larger of input and output. Workspace memory grows with it.
        blocks: Maximum blocks of all groups together. None: the program's ``instances`` of each group; if that is 1, a
            number by the device's SMs.
        threads: Maximum threads of a block. None: 512 if blocks signal and wait, else 256.
        check: Run ``dsl.check`` first. An incorrect program can also corrupt the communicator's other operations,
            because the reuse of their slots relies on what the check proves.

    Returns:
        Callable like the operation.

    Raises:
        RendezvousError: The ranks compile different programs, dtypes or sizes, or a step failed on a rank. The text
            says which. Raised on all ranks alike; the communicator stays usable.
        MissingRankError: A rank has not made the call within ``Config.timeout_s``.
        UnsupportedInputError: The ranks are on several nodes, or a CUDA graph is being captured.
        ProgramError: The program is not correct. This and the following errors are raised if every rank fails alike;
            otherwise they are in the text of a RendezvousError.
        CompileError: No kernel exists for an operation of the program.
        ValueError: A number, or the world of the program, does not fit.
        ConfigError: Another user could have put code into the directory of compiled kernels (docs/reference/dsl.md).
        ModuleNotFoundError: cupy, which compiles for GPUs, is not installed.
        RuntimeError: There is no compiler for emulated GPUs, or the communicator is closed.
    """
    comm.check_one_node("dsl.compile")
    site = Site(comm._handle, comm._heap)

    def make() -> Kernel:
        traced = program.build(comm.world_size) if isinstance(program, ProgramDefinition) else program
        if not isinstance(traced, ir.Program):
            raise ValueError(f"dsl.compile takes what dsl.program has made of a function, not {quoted(traced)}")
        if traced.world != comm.world_size:
            raise ValueError(f"program {traced.name!r} is for {traced.world} ranks; there are {comm.world_size}")
        if check:
            check_program(traced)
        return Kernel(traced, site, dtype, max_bytes, blocks, threads)

    kernel, _ = load_kernel("a program by dsl.compile", make, site, own_error=True)
    return Compiled(kernel, site, comm.config.nvtx)
