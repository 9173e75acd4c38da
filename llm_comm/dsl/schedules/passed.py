"""Which programs have passed their schedules before: files beside the compiled kernels, shared by all processes of a
user."""

from __future__ import annotations

import hashlib
from pathlib import Path

from llm_comm.dsl.compiler import code_files
from llm_comm.dsl.compiler.cache import library_path
from llm_comm.dsl.compiler.source import kernel_name
from llm_comm.dsl.schedules.kernel import SCHEDULES
from llm_comm.dsl.schedules.plan import Plan


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
