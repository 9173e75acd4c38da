"""Errors of programs, and the user's lines that they refer to."""

from __future__ import annotations

import linecache
import sys
from enum import Enum
from types import FrameType

from llm_comm.dsl.ir import Location
from llm_comm.errors import LlmCommError

_PACKAGE = __name__.rpartition(".")[0]
#: The library's programs count as user code.
_LIBRARY = f"{_PACKAGE}.library"


class Fault(Enum):
    """Kind of an error in a program."""

    MISUSE = "misuse"  # an invalid operation, found while tracing
    UNMATCHED = (
        "unmatched"  # a signal without a wait or a wait without a signal; packets without a read, or the reverse
    )
    DEADLOCK = "deadlock"  # waits that wait for each other
    RACE = "race"  # two accesses to a chunk that no synchronization orders
    UNWRITTEN = "unwritten"  # a chunk is read before it is written
    CONTENT = "content"  # a value or result differs from what the operation requires
    CALLS = "calls"  # a rank may get too far ahead in later calls
    SCHEDULE = "schedule"  # the kernel fails under a schedule of the deterministic emulator


class ProgramError(LlmCommError):
    """A DSL program cannot be built or is not correct. The text begins with the user's line.

    Attributes:
        fault: Kind of the error.
        where: Line that it refers to.
    """

    def __init__(self, fault: Fault, message: str, where: Location) -> None:
        super().__init__(f"{where.file}:{where.line}: {message}\n    {where.text}")
        self.fault = fault
        self.where = where


class ScheduleError(ProgramError):
    """The kernel of a program hangs or computes a wrong result under a schedule of the deterministic emulator.

    Attributes:
        seed: Seed of the schedule. ``dsl.explore(program, schedules=1, seed=seed)`` repeats it.
        step: Step of the schedule at which it failed.
        rank: Rank on which it failed.
    """

    def __init__(self, message: str, where: Location, *, seed: int, step: int, rank: int) -> None:
        super().__init__(Fault.SCHEDULE, message, where)
        self.seed = seed
        self.step = step
        self.rank = rank


class CompileError(LlmCommError):
    """No kernel exists for a program or one of its operations. The text gives the line and what to do."""

    def __init__(self, where: Location, what: str) -> None:
        super().__init__(f"{what}\n  {where}")


def users_frame() -> FrameType:
    """Return the innermost stack frame outside of the DSL's own code."""
    frame = sys._getframe(1)
    while _is_own(frame.f_globals.get("__name__", "")):
        assert frame.f_back is not None, "a program is called from somewhere"
        frame = frame.f_back
    return frame


def users_line() -> Location:
    """Return the source line of ``users_frame``."""
    frame = users_frame()
    return location(frame.f_code.co_filename, frame.f_lineno)


def location(file: str, line: int) -> Location:
    """Return a line of a file, with its text."""
    return Location(file, line, linecache.getline(file, line).strip())


def _is_own(module: str) -> bool:
    in_package = module == _PACKAGE or module.startswith(f"{_PACKAGE}.")
    return module == "contextlib" or (in_package and not module.startswith(_LIBRARY))
