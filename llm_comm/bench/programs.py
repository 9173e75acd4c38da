"""Programs of llm_comm.dsl as what is measured: which of them, as which rows, and why not the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from llm_comm.bench.report import format_bytes
from llm_comm.communicator import Communicator
from llm_comm.config import Config
from llm_comm.dsl import programs
from llm_comm.dsl.rendering import digest
from llm_comm.dsl.selected import examine
from llm_comm.planning.plan import Plan, Problem
from llm_comm.planning.programs import PROTOCOL, Kernels
from llm_comm.planning.tables import Row, TuningTable, by_operation

_NO_LIMIT = 1 << 40


def to_measure(comm: Communicator, config: Config) -> dict[str, Kernels]:
    """The programs of a communicator that one with ``config`` could be told to run, by name: ``comm`` may permit sums
    in any order only for what is measured."""
    return {
        name: kernels
        for name, kernels in comm.programs.items()
        if kernels.sums_in_rank_order or config.sums_in_any_order
    }


def unmeasured(
    measured: Mapping[str, Kernels], config: Config, world_size: int, operations: Collection[str]
) -> list[str]:
    """Which programs of option ``dsl`` are not measured, and why.

    Args:
        measured: Those that are, or others.
        config: Whose option it is.
        world_size: Ranks.
        operations: That are measured, by their names on the command line.

    Raises:
        ConfigError: One that is not measured is not correct.
    """
    return [
        f"{name} is not measured: {examine(text, world_size, config)[1]}"
        for name, text in programs.of_option(config).items()
        if name not in measured and _on_command_line(text.operation.value) in operations
    ]


def print_remarks(
    measured: Mapping[str, Kernels], config: Config, world_size: int, operations: Collection[str], largest: int
) -> None:
    """Says which programs are not among the candidates, and which only up to a size.

    Args:
        measured, config, world_size, operations: As of ``unmeasured``.
        largest: Bytes of the largest message, or part.
    """
    for remark in unmeasured(measured, config, world_size, operations):
        print(remark, flush=True)
    for name, kernels in measured.items():
        if _on_command_line(kernels.operation) in operations and largest > kernels.max_bytes:
            print(f"{name} is measured up to {format_bytes(kernels.max_bytes)} (option dsl_max_bytes)", flush=True)


def _on_command_line(operation: str) -> str:
    return operation.replace("_", "-")


def digests(config: Config, world_size: int) -> list[str]:
    """The programs of option ``dsl``, each with a digest of what it does.

    Raises:
        ConfigError: One cannot be imported or is not correct.
    """
    texts = programs.of_option(config)
    return [f"{name} ({digest(examine(text, world_size, config)[0])})" for name, text in texts.items()]


def rows_for(problem: Problem, programs: Mapping[str, Kernels]) -> Iterator[Row]:
    """Rows of a table worth measuring for a problem, of every program that serves it, its own choice of blocks and
    threads first."""
    size = problem.message_bytes()
    for name, kernels in programs.items():
        is_served = size <= kernels.max_bytes and problem.data_type in kernels.data_types
        if kernels.operation != problem.operation or not is_served:
            continue
        for choice in kernels.candidates(problem.data_type, size):
            yield Row(size, problem.operation, name, PROTOCOL, blocks=choice.blocks or 0, threads=choice.threads or 0)


def table_of(name: str, operation: str) -> TuningTable:
    """One that names a program for all messages of its operation."""
    return TuningTable("bench", by_operation([Row(_NO_LIMIT, operation, name, PROTOCOL)]), _NO_LIMIT)


def why_not_run(plan: Plan, name: str) -> str:
    """Why a plan is not by the program that the table names, or ""."""
    return "" if plan.algorithm == name else plan.reason.rpartition(f"; {name}: ")[2]
