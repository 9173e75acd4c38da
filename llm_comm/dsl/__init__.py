"""DSL for collectives: programs written in Python, checked for errors, and compiled to one kernel.

docs/reference/dsl.md describes it.
"""

from __future__ import annotations

from llm_comm.dsl.buffers import Chunks
from llm_comm.dsl.builder import Builder
from llm_comm.dsl.checks import check
from llm_comm.dsl.compiled import Compiled, compile
from llm_comm.dsl.errors import Fault, ProgramError, ScheduleError
from llm_comm.dsl.ir import Absolute, Rank, Relative
from llm_comm.dsl.programs import ProgramDefinition, program, register
from llm_comm.dsl.rendering import describe, draw
from llm_comm.dsl.schedules import Explored, explore

__all__ = [
    "Absolute",
    "Builder",
    "Chunks",
    "Compiled",
    "Explored",
    "Fault",
    "ProgramDefinition",
    "ProgramError",
    "Rank",
    "Relative",
    "ScheduleError",
    "check",
    "compile",
    "describe",
    "draw",
    "explore",
    "program",
    "register",
]
