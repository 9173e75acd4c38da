"""Instruction order: in which order a thread performs the operations of a run, for each batch of its lines.

The order may differ from the program's. Loads are issued early and together, and sends come before work that only this
rank needs. Two rules hold: nothing is sent before a receive that precedes it in the program, and two operations on one
buffer keep their order if one of them writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.runs import DataOp, chunk_of, made_by, values_read


@dataclass(frozen=True)
class Receive:
    """Packets that are polled together."""

    ops: tuple[ir.ReadPackets, ...]


Step = DataOp | Receive

#: Maximum reads of one Receive: prelude.cuh packs four bits for each sender into a word.
MAX_READS = 16


@dataclass(frozen=True)
class Schedule:
    """Order of a run's operations.

    Attributes:
        first: Loads of the input, which depend on nothing.
        steps: All other operations.
    """

    first: tuple[ir.Load, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Stage:
    """Work of a thread on a batch of lines until the next wait for packets.

    Attributes:
        again: Loads of the input that an earlier stage has also made. They are repeated instead of kept in registers.
        steps: Operations after the loads.
    """

    again: tuple[ir.Load, ...]
    steps: tuple[Step, ...]


def ops_of(steps: Iterable[Step]) -> list[DataOp]:
    """Return the operations of all steps."""
    return [op for step in steps for op in (step.ops if isinstance(step, Receive) else (step,))]


def stages_of(plan: Schedule) -> tuple[Stage, ...]:
    """Cut the steps before each Receive into pipeline stages.

    While a batch waits at a cut, the thread continues with another batch. Data sent by a stage is thereby in flight
    while earlier batches are received.

    Return one stage if values other than inputs cross a cut, or if an input would be loaded after a store to the
    output. Input and output may be the same memory.
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
    """Order the operations of a run."""
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
        # Stores that do not depend on pending packets are executed while the packets are in flight.
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
