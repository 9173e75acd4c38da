"""Generator of the C++ source of a program's kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.data_run import ARRIVE, DataRunWriter
from llm_comm.dsl.compiler.layout import Layout, batch_of, outer_parts, synchronizing_blocks_of_sm
from llm_comm.dsl.compiler.runs import (
    DataRun,
    GroupRuns,
    LoopRuns,
    PortOp,
    PortRun,
    SignalRun,
    WaitRun,
    carried_values,
    uses_ports,
)
from llm_comm.dsl.compiler.text import Element, Text, address_of, comment, number_of, runs_on

_PRELUDE = Path(__file__).with_name("prelude.cuh")
#: Maximum characters of the program's name in the kernel's name.
_MOST_OF_A_NAME = 60
#: Maximum threads of a block.
MAX_THREADS = 512
#: Bytes of shared memory before the counts: a flag that the block must end early. Counts of sent and received signals
#: follow.
SHARED_BYTES_BEFORE_COUNTS = 16


class PortRunWriter:
    """Generator for port operations, which one thread of a block performs.

    Args:
        out: Destination of the source text.
        program: Program of the operations.
        layout: Layout of the workspace.
    """

    def __init__(self, out: Text, program: ir.Program, layout: Layout) -> None:
        self._out = out
        self._program = program
        self._layout = layout

    def add(self, op: PortOp, lag: int | None) -> None:
        """Generate an operation. ``lag``: its lag in a loop, in iterations; None outside of loops."""
        semaphore = 0 if isinstance(op, ir.PortPut | ir.Flush) else op.semaphore
        self._out.add(
            f"HeapPortChannel port = args.port_channel({number_of(op.peer)}, "
            f"instance * {self._program.semaphores} + {semaphore});"
        )
        if isinstance(op, ir.PortPut):
            self._put(op, lag)
        else:
            call = "flush" if isinstance(op, ir.Flush) else "signal" if isinstance(op, ir.Signal) else "wait"
            self._out.add(f"done = done && port.{call}();")

    def _put(self, op: ir.PortPut, lag: int | None) -> None:
        out, parts = self._out, op.source.buffer.parts
        if lag is None:
            out.add(f"const uint32_t from = begin{parts};", f"const uint32_t to = end{parts};")
        else:
            out.add(
                f"const uint32_t u = t - {lag};",
                f"const uint32_t from = begin{parts} + u * piece < end{parts} ? begin{parts} + u * piece : end{parts};",
                f"const uint32_t to = end{parts} - from < piece ? end{parts} : from + piece;",
            )
        out.add("uint64_t bytes = uint64_t{to - from} * sizeof(Line);")
        # The last line of a tensor may be partial: bytes beyond the tensor are not copied.
        for chunk in (op.source, op.target):
            if chunk.buffer.space.is_tensor:
                out.add(
                    f"const uint64_t end_of_{chunk.buffer.space.value} = {self._end(chunk)};  {comment(str(chunk))}",
                    f"bytes = bytes_within(from, bytes, end_of_{chunk.buffer.space.value});",
                )
        source = self._offset(op.source, lag)
        base = f"args.{op.source.buffer.space.value}" if op.source.buffer.space.is_tensor else "at0"
        target = self._offset(op.target, lag)
        if op.target.buffer.space.is_tensor:
            out.add(f"port.memory = kInHeap | args.{op.target.buffer.space.value}_symmetric_offset;")
        out.add(f"done = done && (bytes == 0 || port.put({target}, {base} + {source}, bytes));")

    def _offset(self, chunk: ir.Chunk, lag: int | None) -> str:
        """Return the expression for the offset of line ``from`` of a chunk, in a tensor or in the workspace."""
        buffer = chunk.buffer
        if buffer.space.is_tensor:
            part, piece = self._part_and_piece(chunk)
            return f"({part} * part_bytes + (uint64_t{{{piece}}} * lines{buffer.parts} + from) * sizeof(Line))"
        layout, found = self._layout, self._layout.buffers[buffer.name]
        terms = [
            f"{layout.half_offset} + (call.is_odd() ? {layout.half_bytes}ull : 0)",
            f"{found.offset}",
            f"uint64_t{{{number_of(chunk.index)}}} * {found.chunk_stride}",
        ]
        if lag is not None:
            terms.append(f"uint64_t{{u % {buffer.stages}}} * {found.stage_lines * 16}")
            terms.append("uint64_t{instance * piece} * sizeof(Line)")
        else:
            terms.append("uint64_t{from} * sizeof(Line)")
        return f"({' + '.join(terms)})"

    def _end(self, chunk: ir.Chunk) -> str:
        """Return the expression for the bytes from the begin of a chunk to the end of its shard."""
        _, piece = self._part_and_piece(chunk)
        return f"bytes_behind(part_bytes, {piece}, lines{chunk.buffer.parts})"

    def _part_and_piece(self, chunk: ir.Chunk) -> tuple[str, str]:
        pieces = chunk.buffer.parts // outer_parts(self._program.operation, self._program.world)
        index = number_of(chunk.index)
        return ("0u", index) if pieces == chunk.buffer.chunks else (f"{index} / {pieces}u", f"{index} % {pieces}u")


def kernel_name(program: ir.Program) -> str:
    """Return the name of the kernel: an ASCII identifier that is also valid in a file name."""
    return "dsl_" + re.sub(r"\W", "_", program.name, flags=re.ASCII)[:_MOST_OF_A_NAME]


def shared_bytes(program: ir.Program) -> int:
    """Return the bytes of shared memory of a block."""
    return SHARED_BYTES_BEFORE_COUNTS + 2 * 4 * program.semaphores * program.world


def is_moved(program: ir.Program) -> bool:
    """Return whether results are bytes of the inputs. Packets must then carry arbitrary bit patterns."""
    return not program.operation.adds_up


def symmetric_spaces(program: ir.Program) -> list[ir.Space]:
    """Return which of the caller's tensors peers access: input, output."""
    spaces = {buffer.space for buffer in program.buffers if buffer.is_symmetric}
    return [space for space in (ir.Space.INPUT, ir.Space.OUTPUT) if space in spaces]


def generate(program: ir.Program, groups: tuple[GroupRuns, ...], layout: Layout, element: Element) -> str:
    """Generate the source of the kernel, for any rank and any message size up to that of the layout.

    The kernel takes ProgramArgs (``llm_comm/program.cuh``).
    """
    return _Source(program, groups, layout, element).text()


class _Source:
    def __init__(self, program: ir.Program, groups: tuple[GroupRuns, ...], layout: Layout, element: Element) -> None:
        self._program = program
        self._groups = groups
        self._layout = layout
        self._element = element
        self._ports = uses_ports(groups)
        self._out = Text()

    def text(self) -> str:
        program, out = self._program, self._out
        out.add(
            comment(f"{program.name}: {program.operation.value} in a world of {program.world}, {self._element.dtype}."),
            comment(str(program.where)),
            "// Generated by llm_comm.dsl.",
            _PRELUDE.read_text(encoding="utf-8"),
            "using namespace llm_comm;",
            "using namespace llm_comm::dsl;",
            "",
        )
        # Bound the registers so that all blocks that must be resident at once fit.
        bound = MAX_THREADS * synchronizing_blocks_of_sm(self._groups)
        head = f'extern "C" LLM_COMM_KERNEL({bound}) {kernel_name(program)}'
        with self._out.block(f"{head}(LLM_COMM_KERNEL_PARAM ProgramArgs args)"):
            self._head()
            for number, group in enumerate(self._groups):
                if len(self._groups) == 1:
                    self._group(group)
                else:
                    with self._out.block(f"if (block % {len(self._groups)} == {number})", remark=group.name):
                        self._group(group)
        return out.joined()

    # ---- Code of all groups --------------------------------------------------------------------------------------

    @property
    def _has_signals(self) -> bool:
        """True if blocks signal or wait. The threads of such a block synchronize and end together."""
        return any(isinstance(run, SignalRun | WaitRun | PortRun) for group in self._groups for run in group.runs())

    @property
    def _groups_begin(self) -> bool:
        """True if each group begins the call itself, in parallel with its first loads."""
        first = [group.steps[0] for group in self._groups]
        return not self._has_signals and all(isinstance(step, DataRun) and step.only is None for step in first)

    def _head(self) -> None:
        program, out = self._program, self._out
        world = program.world
        outer = outer_parts(program.operation, world)
        out.add(
            f"constexpr uint32_t kWorld = {world};",
            f"using Storage = {self._element.storage};",
            "const uint32_t block = block_number(args.comm);",
            "Call call(args);",
            "const uint32_t rank = args.comm.rank;",
            *(f"[[maybe_unused]] char* const at{offset} = args.at[{offset}];" for offset in range(world)),
            "const uint64_t part_bytes = args.part_bytes;",
            "[[maybe_unused]] const Tensor<Storage> input_lines(args.input, part_bytes);",
            "[[maybe_unused]] const Tensor<Storage> output_lines(args.output, part_bytes);",
        )
        for offset in range(1, world):
            out.add(
                f"[[maybe_unused]] const uint32_t r{offset} = "
                f"rank + {offset} < kWorld ? rank + {offset} : rank + {offset} - kWorld;"
            )
        out.add(
            f"const uint32_t instance = block / {len(self._groups)};",
            f"const uint32_t instances = block_count() / {len(self._groups)};",
            "const uint32_t stride = block_threads();"
            if self._ports
            else "const uint32_t stride = instances * block_threads();",
        )
        for parts in self._sizes():
            pieces = parts // outer
            out.add(
                "// Of a chunk: its lines, the first one of this thread, and where those of the "
                f"{'block' if self._ports else 'grid'} end.",
                f"const uint32_t lines{parts} = static_cast<uint32_t>(((part_bytes + sizeof(Line) - 1) / sizeof(Line) "
                f"+ {pieces - 1}) / {pieces});",
            )
            if self._ports:
                out.add(
                    f"const uint32_t share{parts} = (lines{parts} + instances - 1) / instances;",
                    f"const uint32_t begin{parts} = "
                    f"instance * share{parts} < lines{parts} ? instance * share{parts} : lines{parts};",
                    f"const uint32_t first{parts} = begin{parts} + thread_index();",
                    f"const uint32_t end{parts} = "
                    f"lines{parts} - begin{parts} < share{parts} ? lines{parts} : begin{parts} + share{parts};",
                )
            else:
                out.add(
                    f"const uint32_t first{parts} = instance * block_threads() + thread_index();",
                    f"const uint32_t end{parts} = lines{parts};",
                )
        if not self._groups_begin:
            firsts = ", ".join(f"first{parts}" for parts in self._sizes())
            out.add(f"call.wait_for_grids_before({firsts});")
        ranks = {p for group in self._groups for run in group.runs() for op in run.ops for p in _peers(op)}
        if any(not hasattr(rank, "offset") for rank in ranks):
            select = " : ".join(f"offset == {i} ? at{i}" for i in range(1, world))
            with self._out.block("const auto at_rank = [&](uint32_t to) -> char*", end="};"):
                out.add(
                    "const uint32_t offset = to >= rank ? to - rank : to + kWorld - rank;", f"return {select} : at0;"
                )
        if self._has_signals:
            semaphores = program.semaphores
            out.add(
                "// Whether the block ends early; then, of each semaphore and rank, the signals of this call that were",
                "// sent, and that were waited for.",
                "uint32_t* const incomplete = shared_memory<uint32_t>();",
                f"[[maybe_unused]] uint32_t* const sent = incomplete + {SHARED_BYTES_BEFORE_COUNTS // 4};",
                f"[[maybe_unused]] uint32_t* const awaited = sent + {semaphores} * kWorld;",
                "if (thread_index() == 0) *incomplete = 0;",
                f"for (uint32_t i = thread_index(); i < 2 * {semaphores} * kWorld; i += block_threads()) sent[i] = 0;",
                "block_sync();",
                "// Threads may get different answers: the block goes on as one.",
                "if (!call.begin()) *incomplete = 1;",
                "block_sync();",
                "if (*incomplete != 0) return;",
                "if (thread_index() == 0) call.arrive();",
                "// Where `from` signals to the block of this number, in a workspace.",
            )
            with self._out.block(
                "[[maybe_unused]] const auto word = "
                "[&](char* workspace, uint32_t semaphore, uint32_t from) -> uint64_t*",
                end="};",
            ):
                out.add(
                    "return reinterpret_cast<uint64_t*>(workspace) + "
                    f"(instance * {semaphores} + semaphore) * kWorld + from;"
                )
        elif not self._groups_begin:
            out.add("if (!call.begin()) return;", *ARRIVE)

    def _sizes(self) -> list[int]:
        """Return the chunk sizes in use, as parts of the message."""
        found = {step.parts for group in self._groups for step in group.steps if isinstance(step, DataRun | LoopRuns)}
        runs = [run for group in self._groups for run in group.runs()]
        found |= {op.source.buffer.parts for run in runs for op in run.ops if isinstance(op, ir.PortPut)}
        return sorted(found)

    # ---- Groups --------------------------------------------------------------------------------------------------

    def _group(self, group: GroupRuns) -> None:
        begins = self._groups_begin
        for number, step in enumerate(group.steps):
            if isinstance(step, LoopRuns):
                self._loop(step, number)
            elif isinstance(step, DataRun):
                with self._out.block(""):
                    self._writer(step.parts, 1).straight(step, begins)
            elif isinstance(step, PortRun):
                self._port(step, None)
            else:
                self._signal_or_wait(step, None)
            begins = False

    def _writer(self, parts: int, batch: int) -> DataRunWriter:
        give_up = "{ *incomplete = 1; return; }" if self._has_signals else "return;"
        return DataRunWriter(self._out, self._program, self._layout, self._element, parts, batch, give_up)

    def _loop(self, loop: LoopRuns, number: int) -> None:
        out = self._out
        batch = batch_of(loop)
        writer = self._writer(loop.parts, batch)
        carried = carried_values(loop)
        with self._out.block(""):
            out.add(
                f"const uint32_t piece = {batch} * stride;  // lines",
                f"const uint32_t pieces = ({'share' if self._ports else 'lines'}{loop.parts} + piece - 1) / piece;",
                "// Offset of this thread's line in a stage of scratch.",
                "const uint32_t place = instance * piece + thread_index();"
                if self._ports
                else f"const uint32_t place = first{loop.parts};",
            )
            with self._out.block(f"for (uint32_t t = 0; t < pieces + {loop.lag}; ++t)"):
                for value in carried:
                    out.add(*(f"Line v{value.number}_{j}{{}};" for j in range(batch)))
                for run in loop.runs:
                    if isinstance(run, PortRun):
                        self._port(run, loop)
                        continue
                    if not isinstance(run, DataRun):
                        self._signal_or_wait(run, loop)
                        continue
                    with self._out.block(f"if ({_has_piece(run.lag)})" if loop.lag else ""):
                        out.add(f"const uint32_t u = t - {run.lag};" if run.lag else "const uint32_t u = t;")
                        writer.piece(run, set(carried))

    def _signal_or_wait(self, run: SignalRun | WaitRun, loop: LoopRuns | None) -> None:
        out = self._out
        if isinstance(run, SignalRun):
            out.add("block_sync();", "if (*incomplete != 0) return;")
        with self._out.block(""):
            is_signal = isinstance(run, SignalRun)
            counts = "sent" if is_signal else "awaited"
            out.add("uint64_t* at = nullptr;", "uint64_t value = 0;", "uint32_t peer = 0;")
            ops: tuple[ir.Signal | ir.Wait, ...] = run.ops
            for thread, op in enumerate(ops):
                conditions = [f"thread_index() == {thread}"]
                if op.only is not None and len(op.only) < self._program.world:
                    conditions.append(runs_on(op.only))
                if loop is not None and loop.lag:
                    conditions.append(_has_piece(op.lag))
                workspace = address_of(op.peer) if is_signal else "at0"
                sender = "rank" if is_signal else "peer"
                with self._out.block(f"if ({' && '.join(conditions)})", remark=op.where.text):
                    out.add(
                        f"peer = {number_of(op.peer)};",
                        f"at = word({workspace}, {op.semaphore}, {sender});",
                        f"value = call.signal_word(++{counts}[{op.semaphore} * kWorld + peer]);",
                    )
            if is_signal:
                out.add("if (at != nullptr) store_release(at, value);")
            else:
                out.add("if (at != nullptr && !call.wait(at, value, peer)) *incomplete = 1;")
        if isinstance(run, WaitRun):
            out.add("block_sync();", "if (*incomplete != 0) return;")

    def _port(self, run: PortRun, loop: LoopRuns | None) -> None:
        out = self._out
        out.add("block_sync();", "if (*incomplete != 0) return;")
        writer = PortRunWriter(out, self._program, self._layout)
        with self._out.block("if (thread_index() == 0)"):
            out.add("bool done = true;")
            for op in run.ops:
                conditions = []
                if op.only is not None and len(op.only) < self._program.world:
                    conditions.append(runs_on(op.only))
                if loop is not None and loop.lag:
                    conditions.append(_has_piece(op.lag))
                head = f"if ({' && '.join(conditions)})" if conditions else ""
                with self._out.block(head, remark=op.where.text):
                    writer.add(op, None if loop is None else op.lag)
            out.add("if (!done) *incomplete = 1;")
        out.add("block_sync();", "if (*incomplete != 0) return;")


def _has_piece(lag: int) -> str:
    return f"t >= {lag} && t - {lag} < pieces" if lag else "t < pieces"


def _peers(op: ir.Op) -> Iterator[object]:
    peer = getattr(op, "peer", None)
    if peer is not None:
        yield peer
