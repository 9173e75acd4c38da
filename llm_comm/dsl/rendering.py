"""Display of a program: its operations as text, and a picture with a lane for each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

from llm_comm.dsl import ir
from llm_comm.dsl.checks.balance import Semaphore
from llm_comm.dsl.checks.trial import Act, Address, Trial
from llm_comm.dsl.ir import Rank
from llm_comm.runtime.comparison import digest_of

_WIDTH, _HEIGHT = 132, 44  # width and height of a box
_COLUMN, _LANE = 168, 84  # distances between columns and between lanes
_LEFT, _TOP = 110, 40
_FONT = 'font-family="sans-serif"'
#: Fill colour of a box by the kind of operation.
_COLOURS = {
    ir.Load: "#e8eef7",
    ir.Get: "#cfe0f5",
    ir.ReadPackets: "#bfe3c6",
    ir.Sum: "#f7e3b5",
    ir.Store: "#e8eef7",
    ir.Put: "#f2c9c0",
    ir.PutPackets: "#f2c9c0",
    ir.PortPut: "#e3b7d8",
    ir.Signal: "#d9c8ef",
    ir.Wait: "#bfe3c6",
    ir.Flush: "#bfe3c6",
}


def describe(program: ir.Program) -> str:
    """Return the buffers and operations of a program, one a line.

    ``%3`` is a value, ``rank`` the rank that runs the line. ``behind 1`` means that the line processes the previous
    piece of a loop.
    """
    return "\n".join(_lines(program))


def digest(program: ir.Program) -> str:
    """Return a digest of a program's operations, for comparison between ranks. The file path is omitted: it may differ
    between ranks."""
    head, _, *lines = describe(program).splitlines()
    content = "\n".join((head, *lines, f"{program.instances} instances, {program.semaphores} semaphores"))
    return digest_of(content)


def describe_op(op: ir.Op) -> str:
    """Format an operation, without the ranks that run it."""
    if isinstance(op, ir.Load):
        return f"{op.result} = load {op.source}"
    if isinstance(op, ir.Get):
        return f"{op.result} = get {op.source} of {_peer(op.peer)}"
    if isinstance(op, ir.ReadPackets):
        return f"{op.result} = read_packets {op.source}"
    if isinstance(op, ir.Sum):
        return f"{op.result} = sum {', '.join(f'{value} of {_peer(rank)}' for rank, value in op.operands)}"
    if isinstance(op, ir.Store):
        return f"store {op.value} to {op.target}"
    if isinstance(op, ir.Put):
        return f"put {op.value} to {op.target} of {_peer(op.peer)}"
    if isinstance(op, ir.PutPackets):
        return f"put_packets {op.value} to {op.target} of {_peer(op.peer)}"
    if isinstance(op, ir.PortPut):
        return f"port_put {op.source} to {op.target} of {_peer(op.peer)}"
    if isinstance(op, ir.Flush):
        return f"flush to {_peer(op.peer)}"
    assert isinstance(op, ir.Signal | ir.Wait)
    port = " through the port" if op.through_port else ""
    if isinstance(op, ir.Signal):
        return f"signal {_peer(op.peer)}, semaphore {op.semaphore}{port}"
    return f"wait for {_peer(op.peer)}, semaphore {op.semaphore}{port}"


def _lines(program: ir.Program) -> Iterator[str]:
    root = f", root {program.root}" if program.operation is ir.Operation.BROADCAST else ""
    yield f"program {program.name}: {program.operation.value} in a world of {program.world}{root}"
    yield f"  {program.where.file}:{program.where.line}"
    for buffer in program.buffers:
        yield f"  {_buffer(buffer)}"
    for group in program.groups:
        yield f"group {group.name}:"
        for step in group.steps:
            if isinstance(step, ir.Loop):
                yield "  loop over pieces:"
                yield from (f"    {_op(op)}" for op in step.body)
            else:
                yield f"  {_op(step)}"


def _buffer(buffer: ir.Buffer) -> str:
    kind = "" if buffer.name == buffer.space.value else f"{buffer.space.value}, "
    stages = f", {buffer.stages} stages" if buffer.stages > 1 else ""
    symmetric = ", symmetric" if buffer.is_symmetric and buffer.space.is_tensor else ""
    chunks = "1 chunk" if buffer.chunks == 1 else f"{buffer.chunks} chunks"
    return f"{buffer.name}: {kind}{chunks}, each 1/{buffer.parts} of the message{stages}{symmetric}"


def _op(op: ir.Op) -> str:
    only = "" if op.only is None else f"only {', '.join(map(str, sorted(op.only)))}: "
    behind = f"behind {op.lag}: " if op.lag else ""
    return f"{behind}{only}{describe_op(op)}"


def _peer(rank: Rank) -> str:
    return f"rank {rank}" if str(rank).isdigit() else str(rank)


@dataclass(frozen=True)
class Box:
    """Operation of a rank, in a column. ``never``: it waits for ever, or follows an operation that does."""

    act: Act
    rank: int
    lane: int
    column: int
    never: bool = False


@dataclass
class Picture:
    """Picture to draw.

    Attributes:
        boxes: All operations.
        arrows: From a signal or put to the wait or read that takes it.
    """

    boxes: list[Box] = field(default_factory=list)
    arrows: list[tuple[Box, Box]] = field(default_factory=list)


def draw(program: ir.Program, *, pieces: int = 1) -> str:
    """Draw the program as SVG. The tooltip of a box is its source line.

    Args:
        program: Program, correct or not. Operations that wait for ever have a dashed border.
        pieces: Number of pieces of each chunk in loops.
    """
    trial = Trial(program, pieces)
    picture = arrange(trial)
    columns = 1 + max(box.column for box in picture.boxes)
    width, height = _LEFT + columns * _COLUMN, _TOP + len(trial.actors) * _LANE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="24" {_FONT} font-size="15">{escape(program.name)}: {program.operation.value}, world '
        f"{program.world}</text>",
    ]
    for lane, (rank, group) in enumerate(trial.actors):
        lines += _lane(lane, rank, program.groups[group].name if len(program.groups) > 1 else "", width)
    lines += [_arrow(start, end) for start, end in picture.arrows]
    for box in picture.boxes:
        lines += _box(trial, box)
    return "\n".join([*lines, "</svg>", ""])


def arrange(trial: Trial) -> Picture:
    """Place each operation in a column to the right of those that it depends on."""
    picture = Picture()
    given: dict[Semaphore | Address, list[Box]] = defaultdict(list)
    taken: dict[Semaphore | Address, int] = defaultdict(int)
    position, column = [0] * len(trial.actors), [0] * len(trial.actors)
    going = True
    while going:
        going = False
        for lane, (rank, _) in enumerate(trial.actors):
            while position[lane] < len(trial.acts[lane]):
                act = trial.acts[lane][position[lane]]
                awaited = _takes(trial, act, rank)
                if any(len(given[key]) <= taken[key] for key in awaited):
                    break
                sources = [given[key][taken[key]] for key in awaited]
                for key in awaited:
                    taken[key] += 1
                box = Box(act, rank, lane, max([column[lane], *(source.column + 1 for source in sources)]))
                for key in _gives(trial, act, rank):
                    given[key].append(box)
                picture.boxes.append(box)
                picture.arrows += dict.fromkeys((source, box) for source in sources)
                position[lane], column[lane] = position[lane] + 1, box.column + 1
                going = True
    for lane, (rank, _) in enumerate(trial.actors):
        for act in trial.acts[lane][position[lane] :]:
            picture.boxes.append(Box(act, rank, lane, column[lane], never=True))
            column[lane] += 1
    return picture


def _takes(trial: Trial, act: Act, rank: int) -> list[Semaphore | Address]:
    op = act.op
    if isinstance(op, ir.Wait):
        return [Semaphore(op.peer.on(rank, trial.program.world), rank, op.semaphore, op.through_port)]
    if isinstance(op, ir.ReadPackets):
        return [address for _, address in trial.addresses(act, rank, rank, op.source, 0)]
    return []


def _gives(trial: Trial, act: Act, rank: int) -> list[Semaphore | Address]:
    op, world = act.op, trial.program.world
    if isinstance(op, ir.Signal):
        return [Semaphore(rank, op.peer.on(rank, world), op.semaphore, op.through_port)]
    if isinstance(op, ir.PutPackets):
        return [address for _, address in trial.addresses(act, rank, op.peer.on(rank, world), op.target, 0)]
    return []


def _lane(lane: int, rank: int, group: str, width: int) -> list[str]:
    middle = _TOP + lane * _LANE + _LANE // 2
    name = f"rank {rank}" + (f", {group}" if group else "")
    return [
        f'<line x1="{_LEFT - 10}" y1="{middle}" x2="{width}" y2="{middle}" stroke="#ccc"/>',
        f'<text class="lane" x="10" y="{middle + 5}" {_FONT} font-size="13">{escape(name)}</text>',
    ]


def _corner(box: Box) -> tuple[int, int]:
    return _LEFT + box.column * _COLUMN, _TOP + box.lane * _LANE + (_LANE - _HEIGHT) // 2


def _box(trial: Trial, box: Box) -> list[str]:
    x, y = _corner(box)
    op = box.act.op
    first, second = _label(trial, box)
    dashed = ' stroke-dasharray="4 3" stroke-width="2"' if box.never else ""
    centre = x + _WIDTH // 2
    return [
        '<g class="op">',
        f"<title>{escape(op.where.without_directory())}</title>",
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill={quoteattr(_COLOURS[type(op)])} '
        f'stroke="#555"{dashed}/>',
        f'<text x="{centre}" y="{y + 18}" {_FONT} font-size="11" text-anchor="middle">{escape(first)}</text>',
        f'<text x="{centre}" y="{y + 34}" {_FONT} font-size="11" text-anchor="middle">{escape(second)}</text>',
        "</g>",
    ]


def _arrow(start: Box, end: Box) -> str:
    (x1, y1), (x2, y2) = _corner(start), _corner(end)
    return (
        f'<line class="arrow" x1="{x1 + _WIDTH}" y1="{y1 + _HEIGHT // 2}" x2="{x2}" y2="{y2 + _HEIGHT // 2}" '
        'stroke="#555" marker-end="url(#head)"/>'
    )


def _label(trial: Trial, box: Box) -> tuple[str, str]:
    """Return two lines for a box: the action, and the chunk or rank. Ranks are given by number."""
    op, world = box.act.op, trial.program.world
    piece = f", piece {box.act.pieces[0]}" if box.act.loop and trial.pieces > 1 else ""

    def number(rank: Rank) -> int:
        return rank.on(box.rank, world)

    def name(chunk: ir.Chunk) -> str:
        return f"{chunk.buffer.name}[{chunk.index if isinstance(chunk.index, int) else number(chunk.index)}]{piece}"

    if isinstance(op, ir.Load):
        return "load", name(op.source)
    if isinstance(op, ir.Get):
        return f"get from rank {number(op.peer)}", name(op.source)
    if isinstance(op, ir.ReadPackets):
        return "read packets", name(op.source)
    if isinstance(op, ir.Sum):
        ranks = sorted(number(label) for label, _ in op.operands)
        return "sum", f"of ranks {', '.join(map(str, ranks))}" if len(ranks) <= 4 else f"of {len(ranks)} ranks"
    if isinstance(op, ir.Store):
        return "store", name(op.target)
    if isinstance(op, ir.Put | ir.PutPackets | ir.PortPut):
        verb = {ir.Put: "put", ir.PutPackets: "put packets", ir.PortPut: "port put"}[type(op)]
        return f"{verb} to rank {number(op.peer)}", name(op.target)
    if isinstance(op, ir.Flush):
        return "flush", f"to rank {number(op.peer)}"
    assert isinstance(op, ir.Signal | ir.Wait)
    verb = "signal" if isinstance(op, ir.Signal) else "wait for"
    return f"{verb} rank {number(op.peer)}", f"{'port ' if op.through_port else ''}semaphore {op.semaphore}{piece}"
