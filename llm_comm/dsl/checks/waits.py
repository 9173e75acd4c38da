"""Waits that wait for each other."""

from __future__ import annotations

from llm_comm.dsl import ir
from llm_comm.dsl.checks.execution import Execution
from llm_comm.dsl.checks.trial import Act, Trial, at
from llm_comm.dsl.errors import Fault, ProgramError

_MOST_TOLD = 4


def check_waits(trial: Trial, execution: Execution) -> None:
    """Refuses a run in which ranks wait for ever. There are as many signals as waits: so some wait for each other.

    Raises:
        ProgramError: DEADLOCK, at a line that waits; it tells what the others wait for.
    """
    if not execution.stuck:
        return
    several_groups = len(trial.program.groups) > 1
    told = []
    for actor, act in execution.stuck[:_MOST_TOLD]:
        rank, group = trial.actors[actor]
        name = f" (group {trial.program.groups[group].name!r})" if several_groups else ""
        told.append(f"rank {rank}{name} waits for {_awaited(trial, act, rank)} ({at(act.op.where)})")
    if len(execution.stuck) > _MOST_TOLD:
        told.append("...")
    raise ProgramError(
        Fault.DEADLOCK,
        f"ranks wait for each other: {'; '.join(told)}. Have each rank signal, or put, before it waits",
        execution.stuck[0][1].op.where,
    )


def _awaited(trial: Trial, act: Act, rank: int) -> str:
    if isinstance(act.op, ir.Wait):
        return f"a signal of rank {act.op.peer.on(rank, trial.program.world)}"
    assert isinstance(act.op, ir.ReadPackets)
    _, place = trial.places(act, rank, rank, act.op.source, 0)[0]
    return f"packets in {place}"
