"""Errors of programs, and the user's lines that they point at."""

from __future__ import annotations

import linecache
import sys
from enum import Enum
from types import FrameType

from llm_comm.dsl.ir import Location
from llm_comm.errors import LlmCommError

_PACKAGE = __name__.rpartition(".")[0]
#: Its programs are users of the DSL as others are.
_LIBRARY = f"{_PACKAGE}.library"


class Fault(Enum):
    """Kinds of errors of a program."""

    MISUSE = "misuse"  # an operation that cannot be: found as the program is traced
    UNMATCHED = (
        "unmatched"  # a signal nobody waits for, a wait nobody signals; packets without a reader, or the reverse
    )
    DEADLOCK = "deadlock"  # waits that wait for each other
    RACE = "race"  # two accesses to a chunk that no wait orders
    UNWRITTEN = "unwritten"  # a chunk that is read, and holds nothing yet
    CONTENT = "content"  # a value or a result that is not what it has to be
    CALLS = "calls"  # a rank may get too far ahead in later calls
    SCHEDULE = "schedule"  # its kernel fails under a schedule of the deterministic emulator


class ProgramError(LlmCommError):
    """A program of the DSL cannot be built, or is not correct. The text begins with the user's line.

    Attributes:
        fault: The kind of error.
        where: The line that it points at.
    """

    def __init__(self, fault: Fault, message: str, where: Location) -> None:
        super().__init__(f"{where.file}:{where.line}: {message}\n    {where.text}")
        self.fault = fault
        self.where = where


class ScheduleError(ProgramError):
    """The kernel of a program hangs, or gives a wrong result, under a schedule of the deterministic emulator.

    Attributes:
        seed: Of the schedule: ``dsl.explore(program, schedules=1, seed=seed)`` runs it again.
        step: Of the schedule, at which it failed.
        rank: On which it failed.
    """

    def __init__(self, message: str, where: Location, *, seed: int, step: int, rank: int) -> None:
        super().__init__(Fault.SCHEDULE, message, where)
        self.seed = seed
        self.step = step
        self.rank = rank


class CompileError(LlmCommError):
    """A program, or a part of it, that there is no kernel for. The text says which line and what to do."""

    def __init__(self, where: Location, what: str) -> None:
        super().__init__(f"{what}\n  {where}")


def users_frame() -> FrameType:
    """The innermost frame outside of the DSL's own code."""
    frame = sys._getframe(1)
    while _is_own(frame.f_globals.get("__name__", "")):
        assert frame.f_back is not None, "a program is called from somewhere"
        frame = frame.f_back
    return frame


def users_line() -> Location:
    """Where that frame is."""
    frame = users_frame()
    return location(frame.f_code.co_filename, frame.f_lineno)


def location(file: str, line: int) -> Location:
    return Location(file, line, linecache.getline(file, line).strip())


def _is_own(module: str) -> bool:
    in_package = module == _PACKAGE or module.startswith(f"{_PACKAGE}.")
    return module == "contextlib" or (in_package and not module.startswith(_LIBRARY))
