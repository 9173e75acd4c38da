"""DSL programs as candidates: which are measured, with which rows, and why others are not."""

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
    """Return the programs that a communicator with ``config`` could run, by name. ``comm`` may permit sums in any order
    for the measurement only."""
    return {
        name: kernels
        for name, kernels in comm.programs.items()
        if kernels.sums_in_rank_order or config.sums_in_any_order
    }


def unmeasured(
    measured: Mapping[str, Kernels], config: Config, world_size: int, operations: Collection[str]
) -> list[str]:
    """Return which programs of option ``dsl`` are not measured, and why.

    Args:
        measured: Programs that are measured; others are ignored.
        config: Configuration with the option.
        world_size: Number of ranks.
        operations: Measured operations, by their names on the command line.

    Raises:
        ConfigError: A program that is not measured is not correct.
    """
    return [
        f"{name} is not measured: {examine(text, world_size, config)[1]}"
        for name, text in programs.of_option(config).items()
        if name not in measured and _on_command_line(text.operation.value) in operations
    ]


def print_remarks(
    measured: Mapping[str, Kernels], config: Config, world_size: int, operations: Collection[str], largest: int
) -> None:
    """Print which programs are not among the candidates, and which only up to a size.

    Args:
        measured, config, world_size, operations: Arguments of ``unmeasured``.
        largest: Size in bytes of the largest message or shard.
    """
    for remark in unmeasured(measured, config, world_size, operations):
        print(remark, flush=True)
    for name, kernels in measured.items():
        if _on_command_line(kernels.operation) in operations and largest > kernels.max_bytes:
            print(f"{name} is measured up to {format_bytes(kernels.max_bytes)} (option dsl_max_bytes)", flush=True)


def _on_command_line(operation: str) -> str:
    return operation.replace("_", "-")


def digests(config: Config, world_size: int) -> list[str]:
    """Return the programs of option ``dsl``, each with a digest of its operations.

    Raises:
        ConfigError: A program cannot be imported or is not correct.
    """
    texts = programs.of_option(config)
    return [f"{name} ({digest(examine(text, world_size, config)[0])})" for name, text in texts.items()]


def rows_for(problem: Problem, programs: Mapping[str, Kernels]) -> Iterator[Row]:
    """Yield rows to measure for a problem, for every program that serves it. A program's own launch parameters come
    first."""
    size = problem.message_bytes()
    for name, kernels in programs.items():
        is_served = size <= kernels.max_bytes and problem.data_type in kernels.data_types
        if kernels.operation != problem.operation or not is_served:
            continue
        for choice in kernels.candidates(problem.data_type, size):
            yield Row(size, problem.operation, name, PROTOCOL, blocks=choice.blocks or 0, threads=choice.threads or 0)


def table_of(name: str, operation: str) -> TuningTable:
    """Return a table that names a program for all messages of its operation."""
    return TuningTable("bench", by_operation([Row(_NO_LIMIT, operation, name, PROTOCOL)]), _NO_LIMIT)


def why_not_run(plan: Plan, name: str) -> str:
    """Return why a plan does not use the program that the table names, or ""."""
    return "" if plan.algorithm == name else plan.reason.rpartition(f"; {name}: ")[2]
