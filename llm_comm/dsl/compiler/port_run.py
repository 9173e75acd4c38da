"""The part of a kernel that has proxies copy a block's share of chunks."""

from __future__ import annotations

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.layout import Layout, outer_parts
from llm_comm.dsl.compiler.runs import PortOp
from llm_comm.dsl.compiler.text import Text, comment, number_of


class PortRunWriter:
    """Writes operations of ports, for the one thread of a block that has them.

    Args:
        out: Where to.
        program: What they are of.
        layout: Of the workspace.
    """

    def __init__(self, out: Text, program: ir.Program, layout: Layout) -> None:
        self._out = out
        self._program = program
        self._layout = layout

    def add(self, op: PortOp, lag: int | None) -> None:
        """An operation. ``lag``: turns that it is behind in a loop; None outside of one."""
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
        # What a tensor does not have of its last line is not copied.
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
            out.add(f"port.memory = kInHeap | args.{op.target.buffer.space.value}_place;")
        out.add(f"done = done && (bytes == 0 || port.put({target}, {base} + {source}, bytes));")

    def _offset(self, chunk: ir.Chunk, lag: int | None) -> str:
        """Of line ``from`` of a chunk, in a tensor or in the workspace."""
        buffer = chunk.buffer
        if buffer.space.is_tensor:
            part, piece = self._part_and_piece(chunk)
            return f"({part} * part_bytes + (uint64_t{{{piece}}} * lines{buffer.parts} + from) * sizeof(Line))"
        layout, place = self._layout, self._layout.places[buffer.name]
        terms = [
            f"{layout.half_offset} + (call.is_odd() ? {layout.half_bytes}ull : 0)",
            f"{place.offset}",
            f"uint64_t{{{number_of(chunk.index)}}} * {place.chunk_stride}",
        ]
        if lag is not None:
            terms.append(f"uint64_t{{u % {buffer.turns}}} * {place.turn_lines * 16}")
            terms.append("uint64_t{instance * piece} * sizeof(Line)")
        else:
            terms.append("uint64_t{from} * sizeof(Line)")
        return f"({' + '.join(terms)})"

    def _end(self, chunk: ir.Chunk) -> str:
        """Bytes from the begin of a chunk to the end of the part of the tensor that it lies in."""
        _, piece = self._part_and_piece(chunk)
        return f"bytes_behind(part_bytes, {piece}, lines{chunk.buffer.parts})"

    def _part_and_piece(self, chunk: ir.Chunk) -> tuple[str, str]:
        pieces = chunk.buffer.parts // outer_parts(self._program.operation, self._program.world)
        index = number_of(chunk.index)
        return ("0u", index) if pieces == chunk.buffer.chunks else (f"{index} / {pieces}u", f"{index} % {pieces}u")
