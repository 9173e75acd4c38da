"""Programs that a communicator runs instead of algorithms: found, checked and compiled at its construction.

All ranks get the same programs, or all raise.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from llm_comm.config import Config
from llm_comm.dsl import ir, library, programs
from llm_comm.dsl.checks import check
from llm_comm.dsl.compiler.analysis import works_in_part, works_in_place
from llm_comm.dsl.compiler.runs import runs_of
from llm_comm.dsl.kernel import ProgramKernels, Site
from llm_comm.dsl.programs import ProgramDefinition
from llm_comm.dsl.rendering import digest
from llm_comm.errors import ConfigError, LlmCommError
from llm_comm.planning.programs import Kernels, check_rows, named_by
from llm_comm.planning.tables import TuningTable
from llm_comm.runtime.comparison import check_alike
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.rendezvous import Rendezvous
from llm_comm.runtime.symmetric_heap import SymmetricHeap

logger = logging.getLogger("llm_comm")


class Candidate(NamedTuple):
    """Program to compile for selection.

    Attributes:
        name: Name in options and tables.
        where: Option or table that names it.
        program: Program for the world of the ranks.
    """

    name: str
    where: str
    program: ir.Program


def load(
    rendezvous: Rendezvous, heap: SymmetricHeap, handle: CoreHandle, config: Config, table: TuningTable
) -> dict[str, Kernels]:
    """Compile the programs that ``config.dsl``, ``config.algorithm`` or the tuning table names. Collective.

    Args:
        rendezvous: Rendezvous of the ranks.
        heap, handle, config, table: Parts of the communicator.

    Returns:
        Kernels by the names in options and tables. Empty for one rank, which exchanges nothing.

    Raises:
        ConfigError: A program cannot be imported, is not correct, cannot be selected, or cannot be launched as a row
            says; or ``config.algorithm`` names an unregistered one. Raised on all ranks alike. Rows of unregistered
            programs are skipped with a warning.
        RendezvousError: The ranks have different programs, or a rank could not compile or place one. Raised on all
            ranks alike.
    """
    found = rendezvous.attempt("choice of programs", lambda: _find_all(config, table, rendezvous.world_size))
    said = rendezvous.collect(
        "comparison of programs", lambda: ", ".join(f"{name} ({digest(program)})" for name, _, program in found)
    )
    check_alike(rendezvous.names, "have different programs of llm_comm.dsl", said)
    site = Site(handle, heap)
    compiled: dict[str, Kernels] = {}
    for name, _, program in found:
        kernels = ProgramKernels(name, program, site, config.dsl_max_bytes)
        compiled[name] = kernels
        logger.info(
            "%s: %s serves %s to %d bytes of %s, with %d bytes of workspace",
            *(
                rendezvous.names.in_group(rendezvous.rank),
                name,
                f"{kernels.operation.replace('_', '-')}s",
                kernels.max_bytes,
            ),
            *(", ".join(kernels.data_types), kernels.workspace_bytes),
        )
    if rendezvous.world_size > 1:
        runnable = table.with_programs(compiled)
        rendezvous.attempt("check of the rows that name programs", lambda: check_rows(runnable, compiled))
    return compiled


def why_not_selectable(program: ir.Program, config: Config) -> str:
    """Return why the communicator's method of the operation cannot run a correct program, or ""."""
    operation = program.operation
    if operation not in programs.OPERATIONS:
        selectable = ", ".join(found.value for found in programs.OPERATIONS)
        return f"it is a program of {operation.value}; those of {selectable} can be selected"
    tensors = [buffer for buffer in program.buffers if buffer.space.is_tensor]
    symmetric = [buffer.space.value for buffer in tensors if buffer.is_symmetric]
    if symmetric:
        return (
            f"peers use its {' and '.join(symmetric)}, which would have to lie in symmetric memory, and "
            f"{operation.value} takes any tensor: compile it with llm_comm.dsl.compile and call that"
        )
    runs = runs_of(program)
    if operation is ir.Operation.ALL_REDUCE and not works_in_place(program, runs):
        return "it loads its input after it has stored to the output, and out of all_reduce may be its input"
    if operation is not ir.Operation.ALL_REDUCE and not works_in_part(program, runs):
        return (
            "it loads its input after it has stored to the output, and one of the two may be this rank's part of the "
            f"other in {operation.value}"
        )
    if not config.sums_in_any_order and not program.sums_in_rank_order:
        return (
            "it adds up some ranks before others, so its sums are not those in rank order, which option sum asks for: "
            "sum=any permits it, where deterministic is off"
        )
    return ""


def examine(text: ProgramDefinition, world: int, config: Config) -> tuple[ir.Program, str]:
    """Return a program for a world, and why the communicator's method of its operation cannot run it, or "".

    Raises:
        ConfigError: The program is not correct, or does not support the world.
    """
    try:
        program = text.build(world)
        check(program)
        return program, why_not_selectable(program, config)
    except Exception as error:  # the user's function may raise anything, for example for an unsupported world
        what = str(error) if isinstance(error, LlmCommError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{programs.name_of(text)} for {world} ranks: {what}") from error


def _find_all(config: Config, table: TuningTable, world: int) -> list[Candidate]:
    """Return the programs to compile, in the same order on all ranks."""
    listed = programs.of_option(config)
    named = named_by(config, table)
    found = {}
    for name, where in named.items():
        try:
            found[name] = programs.find(name)
        except ConfigError as error:
            if name == config.algorithm:
                raise ConfigError(f"{where}: {error}") from None
            logger.warning("%s: its rows of %s are left out: %s", where, name, error)
    found.update({name: text for name, text in listed.items() if name not in found})
    if world == 1:
        return []
    chosen = []
    for name, text in sorted(found.items()):
        where = named.get(name) or programs.origin(config)
        try:
            program, why = examine(text, world, config)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if why and name in named:
            raise ConfigError(f"{where}: {name} cannot be selected: {why}")
        if why:
            logger.info("%s is registered, and cannot be selected: %s", name, why)
        else:
            chosen.append(Candidate(name, where, program))
    return chosen


class Listed(NamedTuple):
    """Program in the list of ``llm-comm algorithms``.

    Attributes:
        name: Name in options and tables.
        option: Value of option ``dsl`` that registers it.
        operation: Operation that it implements.
        lines: Non-empty lines of its source; 0 if unavailable.
        why_not: Why the communicator's method of the operation cannot run it; "" if it can.
    """

    name: str
    option: str
    operation: str
    lines: int
    why_not: str


def listed(config: Config, world: int, with_library: bool) -> list[Listed]:
    """Return the programs of ``config.dsl`` and, on request, those of the library.

    Args:
        config: Options under which programs would be selected.
        world: Number of ranks to build and check for.
        with_library: Also list ``llm_comm.dsl.library``.

    Raises:
        ConfigError: A program of option ``dsl`` cannot be imported or registered.
    """
    programs.of_option(config)  # raises the errors of option dsl
    options = [] if config.dsl is None else [option.strip() for option in config.dsl.split(",")]
    found = {programs.register_one(option): option for option in options}
    if with_library:
        for text in library.PROGRAMS:
            found.setdefault(text, f"{library.__name__}:{text.name}")
    return [
        Listed(programs.name_of(text), option, text.operation.value, text.lines, _why_not(text, world, config))
        for text, option in found.items()
    ]


def _why_not(text: ProgramDefinition, world: int, config: Config) -> str:
    try:
        return examine(text, world, config)[1]
    except ConfigError as error:
        return str(error)
