"""Correctness of a program under every order in which ranks, groups and proxies can progress."""

from __future__ import annotations

from llm_comm.dsl.checks.accesses import check_calls, check_packets, check_port_work, check_races
from llm_comm.dsl.checks.balance import check_balance
from llm_comm.dsl.checks.simulation import Simulation, check_waits
from llm_comm.dsl.checks.trial import trials
from llm_comm.dsl.ir import Program

#: Consecutive calls in a simulation. The third call uses the workspace half of the first again.
CALLS = 3


def check(program: Program) -> None:
    """Raise an error for a program that is not correct in its world.

    docs/reference/dsl.md lists the errors that are found.

    Raises:
        ProgramError: The program may hang, race or compute wrong results. Only the first error is reported.
    """
    tried = list(trials(program))
    for trial in tried:
        check_balance(trial)
    for trial in tried:
        simulation = Simulation(trial, CALLS)
        simulation.run()
        check_waits(trial, simulation)
        check_packets(trial, simulation.records)
        check_races(trial, simulation.records)
        simulation.contents.check()
        check_port_work(simulation.records)
        check_calls(trial, simulation.records)
