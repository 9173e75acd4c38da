"""Generator of the code that moves and sums lines: the work of a thread on a batch of lines."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.analysis import readers_of, sender_of
from llm_comm.dsl.compiler.layout import LINE_BYTES, MASK_BYTES, Layout, outer_parts
from llm_comm.dsl.compiler.runs import DataRun, chunk_of, made_by, values_read
from llm_comm.dsl.compiler.schedule import Receive, Schedule, Step, ops_of, schedule, stages_of
from llm_comm.dsl.compiler.text import Element, Text, address_of, comment, number_of, runs_on
from llm_comm.dsl.errors import CompileError
from llm_comm.dsl.ir import Rank, Relative

#: kAbsolute of prelude.cuh.
_ABSOLUTE = 8
#: Arrival of a block: counted after all its threads have begun the call.
ARRIVE = ("block_sync();  // all threads know the number of the call", "if (thread_index() == 0) call.arrive();")
#: A thread that must not begin exits after the block's barrier, not before. An earlier exit makes ptxas move the first
#: loads after it, one after the other, where each waits for the number of the call.
BEGIN = "const bool begun = call.begin();"
LEAVE = "if (!begun) return;"


class DataRunWriter:
    """Generator for runs over chunks of one size.

    Args:
        out: Destination of the source text.
        program: Program of the runs.
        layout: Layout of the workspace.
        element: Element type of the message.
        parts: Chunk size, as 1/parts of the message.
        batch: Lines that a thread processes together in a loop; else 1.
        give_up: C++ statement that a thread runs when its wait fails.
    """

    def __init__(
        self, out: Text, program: ir.Program, layout: Layout, element: Element, parts: int, batch: int, give_up: str
    ) -> None:
        self._out = out
        self._program = program
        self._layout = layout
        self._element = element
        self._parts = parts
        self._batch = batch
        self._give_up = give_up
        self._pieces = parts // outer_parts(program.operation, program.world)
        self._only_moves_data = not program.operation.adds_up
        self._places: dict[ir.Chunk, str] = {}
        self._tensors: dict[tuple[ir.Space, Rank], str] = {}
        # Prepared for a thread with one line: arguments of stores, and addresses in half 0 of the workspaces.
        self._stores: dict[ir.Chunk, str] = {}
        self._lines_of_half_0: dict[tuple[ir.Chunk, Rank | None], str] = {}
        self._in_loop = False
        self._running: frozenset[int] | None = None

    # ---- Runs ----------------------------------------------------------------------------------------------------

    def straight(self, run: DataRun, begins: bool) -> None:
        """Generate a run over all lines of the chunks. ``begins``: also begin the call, after issuing the first
        loads."""
        with self._out.block("" if run.only is None else f"if ({runs_on(run.only)})"):
            self._straight(run, begins)

    def _straight(self, run: DataRun, begins: bool) -> None:
        plan = schedule(run.ops)
        with self._out.block(f"if (end{self._parts} <= stride)", remark="a thread has one line"):
            self._start(run, in_loop=False)
            self._one_line(plan, begins)
        with self._out.block("else"):
            self._start(run, in_loop=False)
            self._lines(plan, begins)

    def _one_line(self, plan: Schedule, begins: bool) -> None:
        out = self._out
        out.add(f"const uint32_t k0 = first{self._parts};", f"const bool in0 = k0 < end{self._parts};")
        values: dict[str, list[int]] = {}  # by load expression: equal loads of one line are issued once
        for op in plan.first:
            what = ", ".join((*self._tensor(op.source, None, "k0"), " && ".join(["in0", *self._only(op)])))
            values.setdefault(what, []).append(op.result.number)
        loads = {numbers[0]: f"load{numbers[0]}" for numbers in values.values()}
        out.add(*(f"Tensor<Storage>::Load {loads[first]}({what}, at0);" for what, (first, *_) in values.items()))
        for store in (step for step in plan.steps if isinstance(step, ir.Store)):
            if store.target.buffer.space.is_tensor and store.target not in self._stores:
                name = self._stores[store.target] = f"store{len(self._stores)}"
                where = ", ".join(self._tensor(store.target, None, "k0"))
                out.add(f"const Tensor<Storage>::Store {name}({where});")
        self._prepare_lines(plan.steps)
        if begins:
            precomputed = ["k0", *(f"{name}.precomputed()" for name in (*loads.values(), *self._stores.values()))]
            precomputed += [f"reinterpret_cast<uint64_t>({name})" for name in self._lines_of_half_0.values()]
            out.add(f"call.wait_for_grids_before({', '.join(precomputed)});")
        out.add(*(f"{name}.begin();" for name in loads.values()))
        if begins:
            out.add(BEGIN)
        for first, *others in values.values():
            out.add(f"const Line v{first}_0 = {loads[first]}.end();")
            out.add(*(f"const Line v{other}_0 = v{first}_0;" for other in others))
        self._declare_all(plan.steps)
        # Sends go first: the block synchronizes while the answers are in flight.
        sends = list(itertools.takewhile(lambda step: isinstance(step, ir.PutPackets), plan.steps)) if begins else []
        if sends:
            with out.block("if (begun && in0)"):
                self._steps(sends, set())
        if begins:
            out.add(*ARRIVE, LEAVE)
        with out.block("if (in0)"):
            self._steps(plan.steps[len(sends) :], set())

    def _lines(self, plan: Schedule, begins: bool) -> None:
        """Generate a loop over lines as a pipeline: stage n works on the line that stage 0 had n iterations ago."""
        out, stages = self._out, stages_of(plan)
        lines = f"end{self._parts}"
        out.add(f"uint32_t k = first{self._parts};")
        if begins:
            out.add("call.wait_for_grids_before(k);")
        # A later stage loads its inputs itself.
        taken = {value for op in ops_of(stages[0].steps) for value in values_read(op)}
        first = [op for op in plan.first if op.result in taken]
        for op in first:
            self._declare(op.result)
        if first:
            with out.block("const auto load = [&](uint32_t from)", end="};"):
                for op in first:
                    load = f"v{op.result.number}_0 = {self._load(op.source, None, 'from')};"
                    self._guarded([f"from < {lines}", *self._only(op)], load)
            out.add("load(k);")
        if begins:
            out.add(BEGIN, *ARRIVE, LEAVE)
        self._declare_all(plan.steps)
        last = len(stages) - 1
        with out.block(f"for (; k < {lines}{f' + {last} * stride' if last else ''}; k += stride)"):
            for number, stage in enumerate(stages):
                behind = f" - {number} * stride" if number else ""
                tests = [f"k >= first{self._parts} + {number} * stride"] if number else []
                tests += [f"k{behind} < {lines}"] if last else []
                with out.block(f"if ({' && '.join(tests)})" if tests else ""):
                    out.add(f"const uint32_t k0 = k{behind};")
                    self._inputs(stage.again, set())
                    self._steps(stage.steps, set())
                    if number == 0 and first:
                        out.add("load(k + stride);")

    def _inputs(self, ops: Iterable[ir.Load], carried: set[ir.Value]) -> None:
        """Load lines of the input, guarded by their bounds."""
        for op in ops:
            if op.result not in carried:
                self._declare(op.result)
            for j in range(self._batch):
                load = f"v{op.result.number}_{j} = {self._load(op.source, None, f'k{j}')};"
                self._guarded(self._there(j, op), load)

    def _declare(self, value: ir.Value) -> None:
        self._out.add(*(f"Line v{value.number}_{j}{{}};" for j in range(self._batch)))

    def piece(self, run: DataRun, carried: set[ir.Value]) -> None:
        """Generate piece ``u`` of the chunks. ``carried``: values declared outside of the run."""
        out, plan = self._out, schedule(run.ops)
        self._start(run, in_loop=True)
        for j in range(self._batch):
            out.add(
                f"const uint32_t k{j} = first{self._parts} + u * piece + {j} * stride;",
                f"const uint32_t i{j} = place + {j} * stride;",
                f"const bool in{j} = k{j} < end{self._parts};",
            )
        self._inputs(plan.first, carried)
        self._declare_all(plan.steps)
        self._steps(plan.steps, carried)

    def _start(self, run: DataRun, in_loop: bool) -> None:
        self._places = {}
        self._tensors = {}
        self._stores = {}
        self._lines_of_half_0 = {}
        self._in_loop = in_loop
        self._running = None if in_loop else run.only

    # ---- Steps ---------------------------------------------------------------------------------------------------

    def _steps(self, steps: Iterable[Step], carried: set[ir.Value]) -> None:
        later: list[ir.ReadPackets] = []
        for step in steps:
            for op in ops_of([step]):
                made = made_by(op)
                if made is not None and made not in carried:
                    self._declare(made)
            if isinstance(step, Receive):
                later += self._receive(step)
            elif isinstance(step, ir.Sum):
                self._sum(step)
            else:
                for j in range(self._batch):
                    self._guarded(self._there(j, step), self._statement(step, j))
        self._reset_places(later)

    def _statement(self, op: Step, j: int) -> str:
        if isinstance(op, ir.Load | ir.Get):
            peer = op.peer if isinstance(op, ir.Get) else None
            is_tensor = op.source.buffer.space.is_tensor
            source = (
                self._load(op.source, peer, f"k{j}") if is_tensor else f"load_line({self._line(op.source, peer, j)})"
            )
            return f"v{op.result.number}_{j} = {source};"
        assert isinstance(op, ir.Store | ir.Put | ir.PutPackets)
        peer = None if isinstance(op, ir.Store) else op.peer
        value = f"v{op.value.number}_{j}"
        if op.target.buffer.space.is_tensor:
            if peer is None and op.target in self._stores:
                return f"{self._stores[op.target]}({value});"
            tensor, part, line = self._tensor(op.target, peer, f"k{j}")
            return f"{tensor}.store({part}, {line}, {value});"
        line = self._line(op.target, peer, j)
        if not isinstance(op, ir.PutPackets):
            return f"store_line({line}, {value});"
        if self._only_moves_data:
            return f"send_bytes({line}, {self._mask(op.target, peer, j)}, {value});"
        return f"send_line({line}, {value});"

    def _receive(self, step: Receive) -> list[ir.ReadPackets]:
        """Generate a wait for packets. Return the reads whose places are reset at the end of the batch."""
        out = self._out
        places = [(op, j) for op in step.ops for j in range(self._batch)]
        with self._out.block(""):
            self._array("const Line* const from", [self._line(op.source, None, j) for op, j in places])
            if self._only_moves_data:
                self._array("uint32_t* const masks", [self._mask(op.source, None, j) for op, j in places])
            there = [" && ".join(self._there(j, op)) for op, j in places]
            self._array(
                "Line line", [f"{test} ? sentinel_line() : Line{{}}" if test else "sentinel_line()" for test in there]
            )
            arguments = f"<0x{self._senders(step):x}, {self._batch}>"
            out.add(f"if (!call.receive{arguments}(from, line)) {self._give_up}")
            if self._only_moves_data:
                out.add(f"if (!call.receive_masks{arguments}(masks, line)) {self._give_up}")
            out.add(*(f"v{op.result.number}_{j} = line[{i}];" for i, (op, j) in enumerate(places)))
        # Resetting at the end keeps it off the critical path, if nothing uses the place until the second call from now.
        at_once = [op for op in step.ops if self._in_loop or readers_of(self._program, op) > 1]
        self._reset_places(at_once)
        return [op for op in step.ops if op not in at_once]

    def _senders(self, step: Receive) -> int:
        """Return the senders packed as in prelude.cuh: four bits each."""
        packed = 0
        for i, op in enumerate(step.ops):
            sender = sender_of(self._program, op)
            packed |= (sender.offset if isinstance(sender, Relative) else _ABSOLUTE + sender.rank) << 4 * i
        return packed

    def _reset_places(self, ops: Iterable[ir.ReadPackets]) -> None:
        for op in ops:
            for j in range(self._batch):
                self._guarded(self._there(j, op), f"reset_line({self._line(op.source, None, j)});")

    def _sum(self, op: ir.Sum) -> None:
        """Generate a sum in rank order. The order of the registers depends on the rank, so each order has its own code:
        no code then has to move registers."""
        if self._element.number is None:
            raise CompileError(op.where, f"elements of {self._element.dtype} are moved, never summed")
        world = self._program.world
        orders: dict[tuple[ir.Value, ...], list[int]] = {}
        for rank in range(world):
            if op.only is not None and rank not in op.only:
                continue
            by_rank = [value for _, value in sorted(op.operands, key=lambda operand: operand[0].on(rank, world))]
            # a + b equals b + a bitwise, so ranks that differ in the first two operands share code.
            in_order = (*sorted(by_rank[:2], key=lambda value: value.number), *by_rank[2:])
            orders.setdefault(in_order, []).append(rank)
        if len(orders) == 1:
            only = self._only(op)
            with self._out.block(f"if ({only[0]})" if only else ""):
                self._sums(op, next(iter(orders)))
            return
        with self._out.block("switch (rank)"):
            for order, ranks in orders.items():
                with self._out.block(" ".join(f"case {rank}:" for rank in ranks)):
                    self._sums(op, order)
                    self._out.add("break;")

    def _sums(self, op: ir.Sum, order: tuple[ir.Value, ...]) -> None:
        for j in range(self._batch):
            with self._out.block(f"if (in{j})" if j else ""):
                self._array("const Line of", [f"v{value.number}_{j}" for value in order])
                self._out.add(
                    f"v{op.result.number}_{j} = sum_lines<DataType::{self._element.number}, {len(order)}>(of);"
                )

    # ---- Places --------------------------------------------------------------------------------------------------

    def _used(self, steps: Iterable[Step]) -> list[tuple[ir.Chunk, Rank | None]]:
        """Return the chunks that steps access, with the peer that owns each."""
        used: list[tuple[ir.Chunk, Rank | None]] = []
        for op in ops_of(steps):
            chunk = chunk_of(op)
            if chunk is not None:
                used.append((chunk, op.peer if isinstance(op, ir.Get | ir.Put | ir.PutPackets) else None))
        return used

    def _prepare_lines(self, steps: Iterable[Step]) -> None:
        """Generate the workspace addresses for a thread with one line, relative to half 0.

        The half in use depends on the number of the call, which is known later.
        """
        for chunk, peer in self._used(steps):
            if chunk.buffer.space.is_tensor or (chunk, peer) in self._lines_of_half_0:
                continue
            self._declare_place(chunk, half=False)
            name = f"a{len(self._lines_of_half_0)}"
            place = f"{self._places[chunk]} + k0 * {LINE_BYTES}u"
            self._out.add(f"Line* const {name} = opaque(line_at({self._workspace(peer)}, {place}));")
            self._lines_of_half_0[chunk, peer] = name

    def _declare_all(self, steps: Iterable[Step]) -> None:
        """Generate variables for all places that the steps use."""
        used = self._used(steps)
        layout = self._layout
        if any(not chunk.buffer.space.is_tensor for chunk, _ in used):
            self._out.add(f"const uint32_t half = {layout.half_offset}u + (call.is_odd() ? {layout.half_bytes}u : 0u);")
        for chunk, peer in used:
            if not chunk.buffer.space.is_tensor:
                self._declare_place(chunk, half=True)
            elif peer is not None and (chunk.buffer.space, peer) not in self._tensors:
                name = self._tensors[chunk.buffer.space, peer] = f"t{len(self._tensors)}"
                where = f"address_of(args.comm, {number_of(peer)}, args.{chunk.buffer.space.value}_symmetric_offset)"
                remark = comment(f"{chunk.buffer.name} of {peer}")
                self._out.add(f"const Tensor<Storage> {name}({where}, part_bytes);  {remark}")

    def _declare_place(self, chunk: ir.Chunk, half: bool) -> None:
        """Generate the offset of a chunk in the workspace. ``half``: include the half of this call; else relative to a
        half."""
        if chunk in self._places:
            return
        buffer = chunk.buffer
        name = self._places[chunk] = f"p{len(self._places)}"
        found = self._layout.buffers[buffer.name]
        stage = f"u % {buffer.stages}u" if self._in_loop and buffer.stages > 1 else ""

        def at(offset: int, stride: int, stage_bytes: int) -> str:
            terms = [*(["half"] if half else []), f"{offset}u", f"{number_of(chunk.index)} * {stride}u"]
            return " + ".join([*terms, f"{stage} * {stage_bytes}u"] if stage else terms)

        lines = at(found.offset, found.chunk_stride, found.stage_lines * LINE_BYTES)
        self._out.add(f"const uint32_t {name} = {lines};  {comment(str(chunk))}")
        if found.mask_offset is not None:
            masks = at(found.mask_offset, found.chunk_stride // LINE_BYTES * MASK_BYTES, found.stage_lines * MASK_BYTES)
            self._out.add(f"const uint32_t m{name} = {masks};")

    def _line(self, chunk: ir.Chunk, peer: Rank | None, j: int) -> str:
        """Return the address of line ``j`` of a batch in a chunk of the workspace."""
        if (chunk, peer) in self._lines_of_half_0:
            return f"in_half({self._lines_of_half_0[chunk, peer]}, half)"
        return f"line_at({self._workspace(peer)}, {self._places[chunk]} + {self._index(j)} * {LINE_BYTES}u)"

    def _mask(self, chunk: ir.Chunk, peer: Rank | None, j: int) -> str:
        half = "half + " if self._lines_of_half_0 else ""
        place = f"{half}m{self._places[chunk]} + {self._index(j)} * {MASK_BYTES}u"
        return f"mask_at({self._workspace(peer)}, {place})"

    def _workspace(self, peer: Rank | None) -> str:
        return address_of(Relative(0) if peer is None else peer)

    def _load(self, chunk: ir.Chunk, peer: Rank | None, k: str) -> str:
        tensor, part, line = self._tensor(chunk, peer, k)
        return f"{tensor}.load({part}, {line})"

    def _tensor(self, chunk: ir.Chunk, peer: Rank | None, k: str) -> tuple[str, str, str]:
        """Return the tensor, the shard, and the line within the shard of line ``k`` of a chunk."""
        space = chunk.buffer.space
        name = f"{space.value}_lines" if peer is None else self._tensors[space, peer]
        index = number_of(chunk.index)
        if self._pieces == 1:
            return name, index if chunk.buffer.chunks > 1 else "0u", k
        if self._pieces == chunk.buffer.chunks:
            return name, "0u", f"{index} * lines{self._parts} + {k}"
        return name, f"{index} / {self._pieces}u", f"{index} % {self._pieces}u * lines{self._parts} + {k}"

    def _index(self, j: int) -> str:
        """Return the index of line ``j`` in a chunk of the workspace."""
        return f"i{j}" if self._in_loop else f"k{j}"

    # ---- Text ----------------------------------------------------------------------------------------------------

    def _only(self, op: ir.Op) -> list[str]:
        if op.only is None or op.only == self._running or len(op.only) == self._program.world:
            return []
        return [runs_on(op.only)]

    def _there(self, j: int, op: ir.Op) -> list[str]:
        """Return the conditions under which this rank runs an operation on line ``j`` of a batch."""
        return ([f"in{j}"] if j or self._in_loop else []) + self._only(op)

    def _guarded(self, conditions: list[str], statement: str) -> None:
        self._out.add(f"if ({' && '.join(conditions)}) {statement}" if conditions else statement)

    def _array(self, declaration: str, items: list[str]) -> None:
        self._out.add(f"{declaration}[{len(items)}] = {{{', '.join(items)}}};")
