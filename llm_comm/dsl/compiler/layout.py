"""Layout: chunks of a message, and a program's buffers in the workspace."""

from __future__ import annotations

from dataclasses import dataclass

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.runs import DataRun, GroupRuns, LoopRuns, SignalRun, WaitRun, chunk_of, uses_ports

LINE_BYTES = 16
MASK_BYTES = 4
_ALIGNMENT = 128
_WORD_BYTES = 8
#: Offsets in kernels are 32-bit.
_MOST_BYTES = 1 << 32

#: Maximum lines that a thread processes together, and maximum lines held in registers meanwhile.
_MAX_BATCH = 4
_LIVE_LINES = 16
#: Lines in flight for which 64 registers suffice: ptxas does not spill up to 8, and spills from 12 on.
_LINES_IN_64_REGISTERS = 8


def outer_parts(operation: ir.Operation, world: int) -> int:
    """Return the number of shards of an operation's message. Each is a tensor of its own, and chunks do not cross
    shards."""
    return world if operation.has_parted_input or operation.has_parted_output else 1


def chunk_lines(part_bytes: int, pieces: int) -> int:
    """Return the lines of each chunk if a shard of ``part_bytes`` bytes is cut into ``pieces``. The last chunks may be
    short."""
    lines = -(-part_bytes // LINE_BYTES)
    return max(1, -(-lines // pieces))


def batch_of(loop: LoopRuns) -> int:
    """Return how many lines a thread processes together in all runs of a loop.

    Outside of loops it is one line: more blocks with a line in flight were faster.
    """
    return max(1, min(_MAX_BATCH, _LIVE_LINES // _loads_of_line(loop)))


def _loads_of_line(loop: LoopRuns) -> int:
    """Return how many lines are loaded for one line of a chunk, in the run with the most loads."""
    runs = [run for run in loop.runs if isinstance(run, DataRun)]
    return max([1, *(sum(isinstance(op, ir.Load | ir.Get | ir.ReadPackets) for op in run.ops) for run in runs)])


def synchronizing_blocks_of_sm(groups: tuple[GroupRuns, ...]) -> int:
    """Return how many blocks of a program that signal and wait are resident on each SM: 1 or 2.

    Two, if the blocks signal or wait in loops and half of the registers suffice. One block then moves data while the
    other waits for a signal (docs/experiments/dsl.md).
    """
    loops = [step for group in groups for step in group.steps if isinstance(step, LoopRuns)]
    talk = any(isinstance(run, SignalRun | WaitRun) for loop in loops for run in loop.runs)
    fit = all(batch_of(loop) * _loads_of_line(loop) <= _LINES_IN_64_REGISTERS for loop in loops)
    return 2 if talk and fit and not uses_ports(groups) else 1


@dataclass(frozen=True)
class BufferLayout:
    """Position of a buffer in each half of the workspace, in bytes from the begin of the half.

    Attributes:
        offset: Offset of the first chunk.
        chunk_stride: Distance between chunks.
        stage_lines: Distance between stages of a chunk, in 16-byte lines.
        mask_offset: Offset of the masks that packets of arbitrary bytes need, four bytes for each line; None without
            masks.
    """

    offset: int
    chunk_stride: int
    stage_lines: int
    mask_offset: int | None


@dataclass(frozen=True)
class Layout:
    """Workspace of a rank: words of semaphores, and two halves with all buffers.

    Attributes:
        max_part_bytes: Shard size of the largest message, in bytes.
        instances: Maximum blocks of a group.
        threads: Maximum threads of a block.
        buffers: Positions of the buffers, by name.
        half_offset: Offset of the first half, in bytes.
        half_bytes: Size of a half.
    """

    max_part_bytes: int
    instances: int
    threads: int
    buffers: dict[str, BufferLayout]
    half_offset: int
    half_bytes: int

    @property
    def bytes(self) -> int:
        """Size of the workspace in bytes."""
        return self.half_offset + 2 * self.half_bytes


def lay_out(
    program: ir.Program,
    groups: tuple[GroupRuns, ...],
    max_bytes: int,
    instances: int,
    threads: int,
    masks: bool,
) -> Layout:
    """Compute the layout of a program's workspace.

    Args:
        program: Program with the buffers.
        groups: Runs of the program.
        max_bytes: Largest message in bytes.
        instances: Maximum blocks of a group.
        threads: Maximum threads of a block.
        masks: Packets carry arbitrary bytes, and need masks.

    Raises:
        ValueError: The workspace would be too large.
    """
    outer = outer_parts(program.operation, program.world)
    max_part_bytes = -(-max_bytes // outer)
    batches: dict[str, int] = {}
    for group in groups:
        for step in group.steps:
            if isinstance(step, LoopRuns):
                for name in _buffers_of(step):
                    batches[name] = max(batches.get(name, 1), batch_of(step))
    offset = 0
    buffers = {}
    for buffer in program.buffers:
        if buffer.space.is_tensor:
            continue
        lines = chunk_lines(max_part_bytes, buffer.parts // outer)
        stage_lines = lines
        if buffer.name in batches:
            of_all = batches[buffer.name] * threads * instances
            # With port channels a block's share is contiguous, so every block needs its place however few lines there
            # are.
            stage_lines = of_all if uses_ports(groups) else min(lines, of_all)
        chunk_stride = _up(stage_lines * buffer.stages * LINE_BYTES, _ALIGNMENT)
        start, offset = offset, offset + buffer.chunks * chunk_stride
        mask_offset = None
        if masks and buffer.space is ir.Space.PACKETS:
            mask_offset = offset
            offset = _up(offset + buffer.chunks * chunk_stride // LINE_BYTES * MASK_BYTES, _ALIGNMENT)
        buffers[buffer.name] = BufferLayout(start, chunk_stride, stage_lines, mask_offset)
    words = instances * program.semaphores * program.world * _WORD_BYTES
    layout = Layout(
        max_part_bytes=max_part_bytes,
        instances=instances,
        threads=threads,
        buffers=buffers,
        half_offset=_up(words, _ALIGNMENT),
        half_bytes=offset,
    )
    if layout.bytes >= _MOST_BYTES:
        raise ValueError(
            f"program {program.name!r} would take {layout.bytes} bytes of workspace for messages of {max_bytes} bytes; "
            f"kernels reach less than {_MOST_BYTES}: lower max_bytes, or go over the pieces of chunks in a loop"
        )
    return layout


def sentinel_ranges(program: ir.Program, layout: Layout) -> list[tuple[int, int]]:
    """Return begin and end, in bytes, of the workspace ranges that initially hold the sentinel."""
    ranges = []
    for buffer in program.buffers:
        if buffer.space is not ir.Space.PACKETS:
            continue
        found = layout.buffers[buffer.name]
        nbytes = buffer.chunks * found.chunk_stride
        for half in range(2):
            base = layout.half_offset + half * layout.half_bytes
            ranges.append((base + found.offset, base + found.offset + nbytes))
            if found.mask_offset is not None:
                masks = base + found.mask_offset
                ranges.append((masks, masks + nbytes // LINE_BYTES * MASK_BYTES))
    return ranges


def _buffers_of(loop: LoopRuns) -> set[str]:
    chunks = [chunk_of(op) for run in loop.runs if isinstance(run, DataRun) for op in run.ops]
    puts = [op for run in loop.runs for op in run.ops if isinstance(op, ir.PortPut)]
    chunks += [chunk for op in puts for chunk in (op.source, op.target)]
    return {chunk.buffer.name for chunk in chunks if chunk is not None}


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
