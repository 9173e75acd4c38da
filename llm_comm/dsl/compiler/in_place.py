"""Whether a program may store its result where its input lies, or where that is part of it."""

from __future__ import annotations

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.runs import DataRun, GroupRuns, uses_ports


def works_in_place(program: ir.Program, groups: tuple[GroupRuns, ...]) -> bool:
    """Whether the output may be the input: every element of it is loaded before anything is stored in its place."""
    operation = program.operation
    is_parted = operation.has_parted_input or operation.has_parted_output
    return not is_parted and _loads_before_it_stores(program, groups)


def works_in_part(program: ir.Program, groups: tuple[GroupRuns, ...]) -> bool:
    """The same of a program of parts: of an input that is this rank's part of the output, or an output that is this
    rank's part of the input. A line of the one is a line of the other."""
    operation = program.operation
    return operation.has_parted_input != operation.has_parted_output and _loads_before_it_stores(program, groups)


def _loads_before_it_stores(program: ir.Program, groups: tuple[GroupRuns, ...]) -> bool:
    """Whether a line is loaded before anything is stored in its place.

    In one run a thread loads a batch of lines before it stores that batch, and no other thread has these lines. So what
    counts is that no piece comes to a run that loads the input when it has been in another one that stores to the
    output. Peers, other groups, and proxies keep to no such order.
    """
    if len(groups) > 1 or uses_ports(groups):
        return False
    tensors = [buffer for buffer in program.buffers if buffer.space.is_tensor]
    if any(buffer.is_symmetric for buffer in tensors):
        return False
    if len({buffer.parts for buffer in tensors}) > 1:
        return False  # a line of one is no line of the other
    # When a piece of a chunk gets to a run: the number of the step, turns that it is behind, number of the run.
    loads, stores = [], []
    for number, step in enumerate(groups[0].steps):
        for i, run in enumerate(getattr(step, "runs", (step,))):
            if isinstance(run, DataRun):
                loads += [(number, run.lag, i)] if _loads(run) else []
                stores += [(number, run.lag, i)] if _stores(run) else []
    return not loads or not stores or max(loads) <= min(stores)


def _loads(run: DataRun) -> bool:
    return any(isinstance(op, ir.Load) and op.source.buffer.space is ir.Space.INPUT for op in run.ops)


def _stores(run: DataRun) -> bool:
    return any(isinstance(op, ir.Store) and op.target.buffer.space is ir.Space.OUTPUT for op in run.ops)
