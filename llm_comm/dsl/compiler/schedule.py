"""In which order a thread carries out the operations of a run, for each batch of its lines.

Not always that of the program: what comes from memory is asked for early and together, and what the peers wait for goes
before what only this rank needs. Nothing is sent before what the program has received before it, and no two operations
on one buffer change places if one of them writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.runs import DataOp, chunk_of, made_by, values_read


@dataclass(frozen=True)
class Receive:
    """Packets that are waited for together."""

    ops: tuple[ir.ReadPackets, ...]


Step = DataOp | Receive

#: Of one Receive: prelude.cuh has four bits of a word for the sender of each.
MAX_READS = 16


@dataclass(frozen=True)
class Schedule:
    """Of a run.

    Attributes:
        first: Loads of the input, which wait for nothing.
        steps: The others.
    """

    first: tuple[ir.Load, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Stage:
    """What a thread does with a batch of lines before the next packets are waited for.

    Attributes:
        again: Loads of the input, whose values a stage before has had too: they are made again, not kept.
        steps: What follows.
    """

    again: tuple[ir.Load, ...]
    steps: tuple[Step, ...]


def ops_of(steps: Iterable[Step]) -> list[DataOp]:
    """Of all the steps."""
    return [op for step in steps for op in (step.ops if isinstance(step, Receive) else (step,))]


def stages_of(plan: Schedule) -> tuple[Stage, ...]:
    """The steps, cut before each Receive: there a batch may wait while the thread goes on with another one. So what a
    stage sends is on its way while earlier batches are waited for.

    It is one stage where values other than the input's go over a cut, or where the input would be loaded behind a store
    to the output, which may be the same memory.
    """
    cuts = [i for i, step in enumerate(plan.steps) if isinstance(step, Receive)]
    bounds = [0, *(cut for cut in cuts if cut > 0), len(plan.steps)]
    parts = [plan.steps[begin:end] for begin, end in itertools.pairwise(bounds)]
    whole = (Stage((), plan.steps),)
    inputs = {op.result: op for op in plan.first}
    stages: list[Stage] = []
    stored = False
    for number, steps in enumerate(parts):
        ops = ops_of(steps)
        made = {made_by(op) for op in ops}
        taken = [value for op in ops for value in values_read(op) if value not in made]
        again = (
            ()
            if number == 0
            else tuple({inputs[value].result: inputs[value] for value in taken if value in inputs}.values())
        )
        if any(value not in inputs for value in taken) or (again and stored):
            return whole
        stored = stored or any(isinstance(op, ir.Store) and op.target.buffer.space is ir.Space.OUTPUT for op in ops)
        stages.append(Stage(again, steps))
    return tuple(stages)


def schedule(ops: Sequence[DataOp]) -> Schedule:
    """The order of the operations of a run."""
    first = tuple(op for op in ops if isinstance(op, ir.Load) and op.source.buffer.space is ir.Space.INPUT)
    rest = [op for op in ops if op not in first]
    loads = [op for i, op in enumerate(rest) if isinstance(op, ir.Load | ir.Get) and not _is_written(op, rest[:i])]
    order = _Order()
    order.steps += loads
    for op in rest:
        if op not in loads:
            order.add(op)
    order.end()
    return Schedule(first, tuple(order.steps))


def _is_written(load: ir.Load | ir.Get, before: Sequence[DataOp]) -> bool:
    name = load.source.buffer.name
    return any(isinstance(op, ir.Store | ir.Put) and op.target.buffer.name == name for op in before)


@dataclass
class _Order:
    steps: list[Step] = field(default_factory=list)
    reads: list[ir.ReadPackets] = field(default_factory=list)
    stores: list[ir.Store] = field(default_factory=list)

    def add(self, op: DataOp) -> None:
        if isinstance(op, ir.ReadPackets):
            if len(self.reads) == MAX_READS or any(read.source == op.source for read in self.reads):
                self._receive()
            self.reads.append(op)
        elif isinstance(op, ir.Store):
            self.stores.append(op)
        elif isinstance(op, ir.Sum):
            if self._takes_pending(op):
                self._receive()
            self.steps.append(op)
        else:
            if self.reads:
                self._receive()
            if isinstance(op, ir.Load | ir.Get) or self._shares_buffer(op):
                self._store(self.stores)
            self.steps.append(op)

    def end(self) -> None:
        if self.reads:
            self._receive()
        self._store(self.stores)

    def _receive(self) -> None:
        # While packets are on their way there is time for what does not wait for them.
        self._store([op for op in self.stores if not self._takes_pending(op)])
        self.steps.append(Receive(tuple(self.reads)))
        self.reads = []

    def _store(self, ops: Sequence[ir.Store]) -> None:
        self.steps += ops
        self.stores = [op for op in self.stores if op not in ops]

    def _takes_pending(self, op: DataOp) -> bool:
        pending = {made_by(read) for read in self.reads}
        return any(value in pending for value in values_read(op))

    def _shares_buffer(self, op: DataOp) -> bool:
        chunk = chunk_of(op)
        return chunk is not None and any(store.target.buffer.name == chunk.buffer.name for store in self.stores)
