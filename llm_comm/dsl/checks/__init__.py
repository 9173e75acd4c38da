"""Whether a program is correct, whatever the order in which ranks, groups and proxies get on."""

from __future__ import annotations

from llm_comm.dsl.checks.accesses import check_calls, check_packets, check_port_work, check_races
from llm_comm.dsl.checks.balance import check_balance
from llm_comm.dsl.checks.simulation import Simulation, check_waits
from llm_comm.dsl.checks.trial import trials
from llm_comm.dsl.ir import Program

#: Calls that follow each other in a trial: the third one uses the workspace of the first.
CALLS = 3


def check(program: Program) -> None:
    """Refuses a program that is not correct in its world: see docs/reference/dsl.md for what is found.

    Raises:
        ProgramError: It may hang, race, or give wrong results. The first error that was found; there may be more.
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
