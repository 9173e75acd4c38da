"""How many schedules a program gets."""

from __future__ import annotations

from llm_comm.dsl import ir

#: Of all schedules of a program together.
_WORK = 50_000
_FEWEST, _MOST = 12, 200
#: Of a loop, in the messages of schedules.
_PIECES = 4


def schedules_for(program: ir.Program) -> int:
    """Fewer, the larger a program is: each gets about the same work, which is some seconds.

    That is no loss: a schedule of a large program makes more accesses to memory, each of which may be delayed or
    overtaken, so the same work meets a mistake about as often, be it many short schedules or few long ones.
    """
    return max(_FEWEST, min(_MOST, _WORK // max(1, _work(program))))


def _work(program: ir.Program) -> int:
    """Of one schedule: operations of all ranks. A signal or a wait counts for each rank: it brings all that the other
    has seen."""
    work = 0
    for group in program.groups:
        for step in group.steps:
            ops = step.body if isinstance(step, ir.Loop) else (step,)
            for op in ops:
                ranks = program.world if op.only is None else len(op.only)
                weight = program.world if isinstance(op, ir.Signal | ir.Wait) else 1
                work += ranks * weight * (_PIECES if isinstance(step, ir.Loop) else 1)
    return work
