"""Collectives as programs: written in Python, checked, and compiled to one kernel; see docs/dsl.md."""

from __future__ import annotations

from llm_comm.dsl.buffers import Chunks
from llm_comm.dsl.builder import Builder
from llm_comm.dsl.checks import check
from llm_comm.dsl.compiled import Compiled, compile
from llm_comm.dsl.drawing import draw
from llm_comm.dsl.errors import Fault, ProgramError, ScheduleError
from llm_comm.dsl.programs import ProgramText, program
from llm_comm.dsl.ranks import Absolute, Rank, Relative
from llm_comm.dsl.registry import register
from llm_comm.dsl.schedules import Explored, explore
from llm_comm.dsl.text import describe

__all__ = [
    "Absolute",
    "Builder",
    "Chunks",
    "Compiled",
    "Explored",
    "Fault",
    "ProgramError",
    "ProgramText",
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
