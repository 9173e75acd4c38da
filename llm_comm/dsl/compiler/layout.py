"""Where things lie: chunks of a message, and the buffers of a program in the workspace."""

from __future__ import annotations

from dataclasses import dataclass

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.runs import DataRun, GroupRuns, LoopRuns, SignalRun, WaitRun, chunk_of, uses_ports

LINE_BYTES = 16
MASK_BYTES = 4
_ALIGNMENT = 128
_WORD_BYTES = 8
#: Offsets of kernels are words of 32 bits.
_MOST_BYTES = 1 << 32

#: Lines that a thread has under way together, and how many registers' worth of values it may hold meanwhile.
_MAX_BATCH = 4
_LIVE_LINES = 16
#: Lines under way in a thread for which 64 registers do: ptxas spills none then, and from 12 lines on some.
_LINES_IN_64_REGISTERS = 8


def outer_parts(operation: ir.Operation, world: int) -> int:
    """Of how many parts, each a tensor by itself, the message of an operation is: chunks do not cross them."""
    return world if operation.has_parted_input or operation.has_parted_output else 1


def chunk_lines(part_bytes: int, pieces: int) -> int:
    """Lines of each chunk, where a part of so many bytes is cut into so many pieces. The last ones may not be full."""
    lines = -(-part_bytes // LINE_BYTES)
    return max(1, -(-lines // pieces))


def batch_of(loop: LoopRuns) -> int:
    """How many lines a thread carries together through all runs of a loop. (Elsewhere it is one: more blocks that have
    lines on their way served better.)"""
    return max(1, min(_MAX_BATCH, _LIVE_LINES // _loads_of_line(loop)))


def _loads_of_line(loop: LoopRuns) -> int:
    """How many lines are loaded for one of a chunk, in the run that loads most."""
    runs = [run for run in loop.runs if isinstance(run, DataRun)]
    return max([1, *(sum(isinstance(op, ir.Load | ir.Get | ir.ReadPackets) for op in run.ops) for run in runs)])


def meeting_blocks_of_sm(groups: tuple[GroupRuns, ...]) -> int:
    """Of blocks that meet, which are to be resident at once: how many there can be for each multiprocessor, 1 or 2.

    Two where they meet in loops, and their threads do with half of the registers. Then one moves data while the other
    waits for a signal (docs/experiments/dsl.md).
    """
    loops = [step for group in groups for step in group.steps if isinstance(step, LoopRuns)]
    talk = any(isinstance(run, SignalRun | WaitRun) for loop in loops for run in loop.runs)
    fit = all(batch_of(loop) * _loads_of_line(loop) <= _LINES_IN_64_REGISTERS for loop in loops)
    return 2 if talk and fit and not uses_ports(groups) else 1


@dataclass(frozen=True)
class Place:
    """Of a buffer in each half of the workspace, in bytes from the begin of the half.

    Attributes:
        offset: Of the first chunk.
        chunk_stride: From one chunk to the next.
        turn_lines: From one turn of a chunk to the next, in lines.
        mask_offset: Of the masks of packets of any bytes, four bytes for each line; None: there are none.
    """

    offset: int
    chunk_stride: int
    turn_lines: int
    mask_offset: int | None


@dataclass(frozen=True)
class Layout:
    """The workspace of a rank: words of semaphores, and twice the buffers.

    Attributes:
        max_part_bytes: Of the largest message.
        instances: At most, of blocks of a group.
        threads: At most, of a block.
    """

    max_part_bytes: int
    instances: int
    threads: int
    places: dict[str, Place]
    half_offset: int
    half_bytes: int

    @property
    def bytes(self) -> int:
        return self.half_offset + 2 * self.half_bytes


def lay_out(
    program: ir.Program,
    groups: tuple[GroupRuns, ...],
    max_bytes: int,
    instances: int,
    threads: int,
    masks: bool,
) -> Layout:
    """Places the buffers of a program.

    Args:
        program: What has the buffers.
        groups: Its runs.
        max_bytes: Of a message.
        instances: At most, of blocks of a group.
        threads: At most, of a block.
        masks: Packets carry any bytes.

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
    places = {}
    for buffer in program.buffers:
        if buffer.space.is_tensor:
            continue
        lines = chunk_lines(max_part_bytes, buffer.parts // outer)
        turn_lines = lines
        if buffer.name in batches:
            of_all = batches[buffer.name] * threads * instances
            # Where a block's share lies in one piece it has its place, however few lines there are.
            turn_lines = of_all if uses_ports(groups) else min(lines, of_all)
        chunk_stride = _up(turn_lines * buffer.turns * LINE_BYTES, _ALIGNMENT)
        start, offset = offset, offset + buffer.chunks * chunk_stride
        mask_offset = None
        if masks and buffer.space is ir.Space.PACKETS:
            mask_offset = offset
            offset = _up(offset + buffer.chunks * chunk_stride // LINE_BYTES * MASK_BYTES, _ALIGNMENT)
        places[buffer.name] = Place(start, chunk_stride, turn_lines, mask_offset)
    words = instances * program.semaphores * program.world * _WORD_BYTES
    layout = Layout(
        max_part_bytes=max_part_bytes,
        instances=instances,
        threads=threads,
        places=places,
        half_offset=_up(words, _ALIGNMENT),
        half_bytes=offset,
    )
    if layout.bytes >= _MOST_BYTES:
        raise ValueError(
            f"program {program.name!r} would take {layout.bytes} bytes of workspace for messages of {max_bytes} bytes; "
            f"kernels reach less than {_MOST_BYTES}: lower max_bytes, or go over the pieces of chunks in a loop"
        )
    return layout


def armed_ranges(program: ir.Program, layout: Layout) -> list[tuple[int, int]]:
    """Begin and end of what holds the sentinel at first, in bytes of the workspace."""
    ranges = []
    for buffer in program.buffers:
        if buffer.space is not ir.Space.PACKETS:
            continue
        place = layout.places[buffer.name]
        nbytes = buffer.chunks * place.chunk_stride
        for half in range(2):
            base = layout.half_offset + half * layout.half_bytes
            ranges.append((base + place.offset, base + place.offset + nbytes))
            if place.mask_offset is not None:
                masks = base + place.mask_offset
                ranges.append((masks, masks + nbytes // LINE_BYTES * MASK_BYTES))
    return ranges


def _buffers_of(loop: LoopRuns) -> set[str]:
    chunks = [chunk_of(op) for run in loop.runs if isinstance(run, DataRun) for op in run.ops]
    puts = [op for run in loop.runs for op in run.ops if isinstance(op, ir.PortPut)]
    chunks += [chunk for op in puts for chunk in (op.source, op.target)]
    return {chunk.buffer.name for chunk in chunks if chunk is not None}


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
