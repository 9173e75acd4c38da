"""Selection of DSL programs: which program an option or a table names for a message, and whether the program serves
it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from llm_comm import _core, registry
from llm_comm.config import LARGE_BYTES, Config
from llm_comm.errors import ConfigError
from llm_comm.planning.plan import Plan, Problem
from llm_comm.planning.selection import Layout, wire_of
from llm_comm.planning.tables import OPERATIONS_OF_PROGRAMS, Row, TuningTable, of_programs, row_of

#: Protocol of DSL programs in plans and tables.
PROTOCOL = "DSL"


@dataclass(frozen=True)
class LaunchParameters:
    """Launch parameters of a DSL program.

    Attributes:
        blocks: Maximum thread blocks of all block groups together; small messages take fewer. None: the program's own
            number.
        threads: Threads of each block. None: the program's own number.
    """

    blocks: int | None = None
    threads: int | None = None


#: Leaves both parameters to the program.
DEFAULT_LAUNCH = LaunchParameters()


class Kernels(Protocol):
    """DSL program compiled for the calls of one communicator."""

    @property
    def operation(self) -> str:
        """Operation that the program implements, one of ``OPERATIONS_OF_PROGRAMS``."""

    @property
    def max_bytes(self) -> int:
        """Largest message in bytes; for all-gather and reduce-scatter, the largest shard."""

    @property
    def data_types(self) -> tuple[str, ...]:
        """Names of the data types that the program is compiled for."""

    @property
    def sums_in_rank_order(self) -> bool:
        """True if sums are those of the library: in rank order, in fp32, rounded once."""

    def why_not(self, parameters: LaunchParameters) -> str:
        """Return why the program cannot be launched with these parameters, or "". Equal on all ranks."""

    def candidates(self, data_type: str, message_bytes: int) -> Sequence[LaunchParameters]:
        """Return launch parameters worth measuring for a message, the program's own first. No two give the same
        grid."""

    def grid(self, data_type: str, message_bytes: int, parameters: LaunchParameters) -> tuple[int, int]:
        """Return the blocks of a launch and their threads. ``why_not(parameters)`` must be ""."""

    def prepare(
        self, data_type: str, message_bytes: int, parameters: LaunchParameters, counter: _core.Counter
    ) -> Callable[..., bool]:
        """Return a function that launches the program. It takes addresses of input and output and a stream, and returns
        whether the launch was enqueued. ``counter`` counts the calls."""


#: Programs of a communicator without any.
NO_PROGRAMS: Mapping[str, Kernels] = MappingProxyType({})


def named_by(config: Config, table: TuningTable) -> dict[str, str]:
    """Return all programs that an option or a row names, each with the place of its name."""
    found = {row.algorithm: f"tuning table {table.name}" for row in rows_of_programs(table)}
    if registry.is_program(config.algorithm):
        found[config.algorithm] = f"option algorithm ({config.origins.get('algorithm', 'Python')})"
    return found


def rows_of_programs(table: TuningTable) -> Iterator[Row]:
    """Return the rows of all operations that name a program."""
    for operation in OPERATIONS_OF_PROGRAMS:
        yield from table.rows.get(of_programs(operation), ())


def launch_parameters_of(row: Row) -> LaunchParameters:
    """Return the launch parameters of a row."""
    return LaunchParameters(row.blocks or None, row.threads or None)


def check_rows(table: TuningTable, programs: Mapping[str, Kernels]) -> None:
    """Raise ConfigError if a row names a program that is not compiled, has another operation, or rejects the row's
    launch parameters."""
    for row in rows_of_programs(table):
        if row.algorithm not in programs:
            raise ConfigError(
                f"tuning table {table.name}: no program {row.algorithm} was compiled for this communicator; compiled: "
                f"{', '.join(programs) or 'none'}. Option dsl has programs compiled when a communicator is made"
            )
        operation = programs[row.algorithm].operation
        if operation != row.operation:
            raise ConfigError(
                f"tuning table {table.name}: the row of {row.algorithm} up to {row.up_to} bytes is of {row.operation}; "
                f"the program is one of {operation}"
            )
        why = programs[row.algorithm].why_not(launch_parameters_of(row))
        if why:
            raise ConfigError(
                f"tuning table {table.name}: the row of {row.algorithm} up to {row.up_to} bytes: {why}. Without blocks "
                "and threads a row leaves both to the program"
            )


def with_program(
    layout: Layout, problem: Problem, table: TuningTable, config: Config, programs: Mapping[str, Kernels]
) -> Layout:
    """Replace a layout by that of the program named for the message. Equal on all ranks.

    Return ``layout`` if no program is named. If the program does not serve the message, return ``layout`` with the
    reason added to its plan.
    """
    if problem.operation not in OPERATIONS_OF_PROGRAMS or layout.launches is None:
        return layout
    named = _named_for(problem, table, config)
    if named is None or named.name not in programs or programs[named.name].operation != problem.operation:
        return layout
    name, because, parameters = named
    kernels, message_bytes = programs[name], problem.message_bytes()
    why = _why_not(kernels, problem)
    if not why:
        parameters = _within_max_blocks(kernels, problem, parameters, config)
        why = kernels.why_not(parameters)
    if why:
        return layout._replace(plan=dataclasses.replace(layout.plan, reason=f"{layout.plan.reason}; {name}: {why}"))
    blocks, threads = kernels.grid(problem.data_type, message_bytes, parameters)
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
    return Layout(
        plan, None, None, lambda counter: kernels.prepare(problem.data_type, message_bytes, parameters, counter)
    )


class _Named(NamedTuple):
    """Program named for a message: its name, where it was named, and its launch parameters."""

    name: str
    because: str
    parameters: LaunchParameters


def _named_for(problem: Problem, table: TuningTable, config: Config) -> _Named | None:
    """Return the program named for a message, or None."""
    if registry.is_program(config.algorithm):
        return _Named(config.algorithm, f"algorithm forced to {config.algorithm}", DEFAULT_LAUNCH)
    if wire_of(problem, config):
        return None
    rows = table.rows.get(of_programs(problem.operation), ())
    if config.algorithm != "auto" or not rows:
        return None
    # If rows of a program and of an algorithm have one size, the program's counts. The other serves messages that the
    # program does not.
    of_all = sorted((*rows, *table.rows.get(problem.operation, ())), key=lambda row: row.up_to)
    row = row_of(tuple(of_all), problem.message_bytes())
    if row is None or not registry.is_program(row.algorithm):
        return None
    return _Named(row.algorithm, f"{table.name}, up to {row.up_to} bytes", launch_parameters_of(row))


def _within_max_blocks(
    kernels: Kernels, problem: Problem, parameters: LaunchParameters, config: Config
) -> LaunchParameters:
    """Apply option max_blocks to the launch parameters of a large message."""
    most = config.max_blocks
    if most is None or problem.message_bytes() < LARGE_BYTES:
        return parameters
    blocks, _ = kernels.grid(problem.data_type, problem.message_bytes(), parameters)
    return parameters if blocks <= most else LaunchParameters(most, parameters.threads)


def _why_not(kernels: Kernels, problem: Problem) -> str:
    if problem.message_bytes() > kernels.max_bytes:
        if registry.operations()[problem.operation].has_shards:
            return f"more than {kernels.max_bytes} bytes a shard: option dsl_max_bytes bounds all shards together"
        return f"more than dsl_max_bytes={kernels.max_bytes}"
    if problem.data_type not in kernels.data_types:
        return f"not compiled for {problem.data_type}"
    if problem.has_strided_shards() or not problem.has_equal_shards():
        return "programs take shards of one size, along the first dimension"
    return ""
