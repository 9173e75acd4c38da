"""Runs a program under seeded schedules."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from llm_comm.dsl import ir
from llm_comm.dsl.errors import ScheduleError
from llm_comm.dsl.schedules.budget import schedules_for
from llm_comm.dsl.schedules.kernel import ExploredKernel, Failure, Outcome
from llm_comm.dsl.schedules.plan import Plan, plan_of
from llm_comm.dsl.schedules.suspects import readers_of_byte, waits_for, writers_of

#: Of the lines that a failure may be about.
_LINES_NAMED = 4
_SEEDS = 1 << 64


class Explored(NamedTuple):
    """What has been run, and passed.

    Attributes:
        schedules: How many.
        steps: Of the last one.
        fingerprint: Of the last one: changes with every access to memory, its order and its value.
    """

    schedules: int
    steps: int
    fingerprint: int


def explore(
    program: ir.Program,
    schedules: int | None = None,
    seed: int = 0,
    *,
    trace: str | os.PathLike[str] | None = None,
) -> Explored:
    """Runs the kernel of a program on all ranks of its world under seeded schedules; see docs/dsl.md, "Schedules".

    All ranks are threads of one emulator, which chooses who goes on at each access to memory, and delays and reorders
    stores as a GPU may. All of a schedule follows from its seed, on any machine: ``explore(program, schedules=1,
    seed=error.seed)`` runs again what has failed. Programs are those that ``dsl.check`` has found to be correct.

    Args:
        program: For one world.
        schedules: How many: those with ``seed``, ``seed + 1``, ... None: by the size of the program.
        seed: Of the first one, from 0 on.
        trace: A file to write every access to memory to.

    Raises:
        ScheduleError: A schedule has failed: it has the seed and the step.
        CompileError: There is no kernel for an operation of the program.
        ValueError: A number does not fit.
        RuntimeError: There is no C++ compiler (``CXX`` names one; else it is g++), or it does not take the kernel.
        ConfigError: Another user could have put code into the directory of compiled kernels.
        OSError: The trace cannot be written.
    """
    if schedules is not None and not 1 <= schedules < 1 << 32:
        raise ValueError(f"schedules is {schedules}; there is 1 at least")
    count = schedules_for(program) if schedules is None else schedules
    if not 0 <= seed <= _SEEDS - count:
        raise ValueError(f"seed is {seed}; it is 0 at least, and all of them are below 2^64")
    file = None if trace is None else Path(trace)
    if file is not None:
        file.write_bytes(b"")  # raises here what the emulator could not say
    return explore_plan(plan_of(program), count, seed, file)


def explore_plan(plan: Plan, schedules: int, seed: int, trace: Path | None = None) -> Explored:
    """The same for a plan."""
    outcome = ExploredKernel(plan).run(seed, schedules, trace)
    if outcome.failure != Failure.NONE:
        raise _error(plan, outcome)
    return Explored(outcome.schedules, outcome.steps, outcome.fingerprint)


def _error(plan: Plan, outcome: Outcome) -> ScheduleError:
    lines = _suspects(plan, outcome)
    others = ", ".join(str(line.line) for line in lines[1:_LINES_NAMED])
    return ScheduleError(
        f"program {plan.program.name!r} for {plan.program.world} ranks fails under schedule {outcome.seed} of the "
        f"deterministic emulator, at step {outcome.step}: {outcome.text.decode()}."
        + (f" It may be line {others} as well." if others else "")
        + f" dsl.explore(program, schedules=1, seed={outcome.seed}) runs it again",
        lines[0] if lines else plan.program.where,
        seed=outcome.seed,
        step=outcome.step,
        rank=outcome.rank,
    )


def _suspects(plan: Plan, outcome: Outcome) -> list[ir.Location]:
    program = plan.program
    if outcome.failure == Failure.WAIT:
        return waits_for(program, outcome.rank, outcome.peer)
    if outcome.failure == Failure.RESULT:
        return writers_of(program, outcome.rank, outcome.element, outcome.part_bytes)
    if outcome.failure == Failure.NOT_ARMED:
        return readers_of_byte(program, plan.layout, outcome.element)
    return []
