"""Schedules of the programs of a communicator, before it is made: run on one rank, while the others wait.

Programs that have passed are remembered in files beside the compiled kernels, shared by all processes of a user.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDoneError
from pathlib import Path
from typing import NamedTuple

from llm_comm.dsl import ir
from llm_comm.dsl.compiler import code_files
from llm_comm.dsl.compiler.cache import library_path
from llm_comm.dsl.compiler.source import kernel_name
from llm_comm.dsl.errors import CompileError, ScheduleError
from llm_comm.dsl.schedules.explore import explore_plan
from llm_comm.dsl.schedules.kernel import SCHEDULES
from llm_comm.dsl.schedules.plan import Plan, plan_of, schedules_for
from llm_comm.emulated import why_no_compiler
from llm_comm.errors import ConfigError
from llm_comm.runtime.rendezvous import Rendezvous

logger = logging.getLogger("llm_comm")

#: The rank that runs them.
_RUNNER = 0
#: How often the ranks meet meanwhile, at least, in seconds: no step of theirs may take as long as their time limit.
_MEET_S = 1.0
#: Of a text that the ranks tell each other.
_MOST_CHARACTERS = 1200


class Candidate(NamedTuple):
    """A program that is to be selected.

    Attributes:
        name: As options and tables give it.
        where: The option or table that names it.
        program: For the world of the ranks.
    """

    name: str
    where: str
    program: ir.Program


def explore_all(
    rendezvous: Rendezvous, candidates: Sequence[Candidate], schedules: int | None, timeout_s: float
) -> None:
    """Runs the schedules of programs that have not passed them before. Collective.

    Args:
        rendezvous: Of the ranks.
        candidates: The same on all ranks.
        schedules: Of each program; None: by its size; 0: none are run.
        timeout_s: Of the rendezvous, for each of its steps.

    Raises:
        ConfigError: A schedule of a program has failed. Raised on all ranks alike.
    """
    if not candidates or schedules == 0:
        return
    with ThreadPoolExecutor(1) as pool:

        def start() -> Future[str] | None:
            return pool.submit(_first_failure, candidates, schedules) if rendezvous.rank == _RUNNER else None

        running = rendezvous.attempt("start of the schedules of programs", start)
        while True:
            said = rendezvous.collect("schedules of programs", lambda: _ask(running, min(_MEET_S, timeout_s / 4)))
            is_done, failure = said[_RUNNER]
            if is_done:
                break
    if failure:
        raise ConfigError(failure)


def _ask(running: Future[str] | None, patience_s: float) -> tuple[bool, str]:
    """Whether the schedules have been run, and what went wrong."""
    if running is None:
        return True, ""
    try:
        return True, running.result(patience_s)[:_MOST_CHARACTERS]
    except NotDoneError:
        return False, ""


def _first_failure(candidates: Sequence[Candidate], schedules: int | None) -> str:
    """What is wrong with the first program that fails, or ""."""
    why = why_no_compiler()
    if why:
        logger.info("schedules of programs were not run: %s", why)
        return ""
    for candidate in candidates:
        try:
            _explore(candidate, schedules)
        except ScheduleError as error:
            return f"{candidate.where}: {candidate.name} for {candidate.program.world} ranks: {error}"
        except CompileError:
            pass  # so says who compiles it for the device, too
        except (RuntimeError, OSError) as error:
            logger.warning("schedules of %s were not run: %s", candidate.name, error)
    return ""


def _explore(candidate: Candidate, schedules: int | None) -> None:
    plan = plan_of(candidate.program)
    count = schedules_for(candidate.program) if schedules is None else schedules
    if has_passed(plan, count):
        logger.info("%s has passed %d schedules before", candidate.name, count)
        return
    begin = time.monotonic()
    explore_plan(plan, count, 0)
    logger.info("%s has passed %d schedules, in %.1f s", candidate.name, count, time.monotonic() - begin)
    try:
        remember(plan, count)
    except OSError as error:
        logger.warning("schedules of %s are not remembered: %s", candidate.name, error)


def has_passed(plan: Plan, schedules: int) -> bool:
    """Whether ``remember`` was called of the same kernel, emulator, headers and compiler, and so many schedules."""
    file = _file(plan, schedules)
    return code_files.read(file, file.name) is not None


def remember(plan: Plan, schedules: int) -> None:
    """Notes that schedules 0, 1, ... have passed.

    Raises:
        ConfigError, OSError: The directory of the cache cannot be used.
    """
    file = _file(plan, schedules)
    code_files.prepare(file.parent)
    code_files.write(file, file.name, b"")


def _file(plan: Plan, schedules: int) -> Path:
    # The name of the library follows from the source, and all else that it is made of.
    library = library_path(plan.source, kernel_name(plan.program), driver=SCHEDULES)
    calls = hashlib.sha256(repr((plan.sizes, plan.layout, plan.works_in_place)).encode()).hexdigest()[:8]
    return library.with_suffix(f".{schedules}_schedules_passed_{calls}")
