"""Programs of llm_comm.dsl in place of algorithms: which one an option or a table names for a message, and whether it
serves that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from llm_comm import registry
from llm_comm.config import LARGE_BYTES, Config
from llm_comm.errors import ConfigError
from llm_comm.planning.plan import Plan, Problem
from llm_comm.planning.selection import Layout
from llm_comm.planning.tables import ALL_REDUCE, TuningTable, of_programs, row_of

#: In place of that of an algorithm, in plans and tables.
PROTOCOL = "DSL"


class Kernels(Protocol):
    """A program that is compiled for all-reduces of a communicator."""

    @property
    def max_bytes(self) -> int:
        """Of a message, at most."""

    @property
    def data_types(self) -> tuple[str, ...]:
        """Names of the types that it is compiled for."""

    def grid(self, data_type: str, message_bytes: int) -> tuple[int, int]:
        """Blocks of a launch, and their threads."""

    def prepare(self, data_type: str, message_bytes: int) -> Callable[..., bool]:
        """What takes the addresses of input and output and a stream, launches, and tells whether it could."""


def named_by(config: Config, table: TuningTable) -> dict[str, str]:
    """All programs that an option or a row names, each with the place that does."""
    rows = table.rows.get(of_programs(ALL_REDUCE), ())
    found = {row.algorithm: f"tuning table {table.name}" for row in rows}
    if registry.is_program(config.algorithm):
        found[config.algorithm] = f"option algorithm ({config.origins.get('algorithm', 'Python')})"
    return found


def check_rows(table: TuningTable, programs: Mapping[str, Kernels]) -> None:
    """Raises ConfigError if a row names a program that is not compiled."""
    for row in table.rows.get(of_programs(ALL_REDUCE), ()):
        if row.algorithm not in programs:
            raise ConfigError(
                f"tuning table {table.name}: no program {row.algorithm} was compiled for this communicator; compiled: "
                f"{', '.join(programs) or 'none'}. Option dsl has programs compiled when a communicator is made"
            )


def with_program(
    layout: Layout, problem: Problem, table: TuningTable, config: Config, programs: Mapping[str, Kernels]
) -> Layout:
    """A layout for the program that is named for a message; the one that is given where no program is, or where that
    does not serve the message, with the reason. The same on all ranks."""
    if problem.operation != ALL_REDUCE or layout.launches is None:
        return layout
    name, because = _named_for(problem, table, config)
    if name not in programs:
        return layout
    kernels, message_bytes = programs[name], problem.message_bytes()
    why = _why_not(kernels, problem, config)
    if why:
        return layout._replace(plan=dataclasses.replace(layout.plan, reason=f"{layout.plan.reason}; {name}: {why}"))
    blocks, threads = kernels.grid(problem.data_type, message_bytes)
    plan = Plan(
        operation=problem.operation,
        algorithm=name,
        protocol=PROTOCOL,
        blocks=blocks,
        threads=threads,
        tile_lines=0,
        cluster=0,
        depth=0,
        chunks=1,
        chunk_elements=problem.count,
        message_bytes=message_bytes,
        reason=because,
    )
    return Layout(plan, None, None, lambda: kernels.prepare(problem.data_type, message_bytes))


def _named_for(problem: Problem, table: TuningTable, config: Config) -> tuple[str, str]:
    """The program that is named for a message, "" for none, and by what."""
    if registry.is_program(config.algorithm):
        return config.algorithm, f"algorithm forced to {config.algorithm}"
    rows = table.rows.get(of_programs(ALL_REDUCE), ())
    if config.algorithm != "auto" or not rows:
        return "", ""
    # Where a row of a program and one of an algorithm have the same size, that of the program counts: the other one is
    # for messages that the program does not serve.
    of_all = sorted((*rows, *table.rows.get(ALL_REDUCE, ())), key=lambda row: row.up_to)
    row = row_of(tuple(of_all), problem.message_bytes())
    if row is None or not registry.is_program(row.algorithm):
        return "", ""
    return row.algorithm, f"{table.name}, up to {row.up_to} bytes"


def _why_not(kernels: Kernels, problem: Problem, config: Config) -> str:
    message_bytes = problem.message_bytes()
    if message_bytes > kernels.max_bytes:
        return f"more than dsl_max_bytes={kernels.max_bytes}"
    if problem.data_type not in kernels.data_types:
        return f"not compiled for {problem.data_type}"
    most = config.max_blocks
    if most is not None and message_bytes >= LARGE_BYTES:
        blocks, _ = kernels.grid(problem.data_type, message_bytes)
        if blocks > most:
            return f"it takes {blocks} blocks, more than max_blocks={most}"
    return ""
