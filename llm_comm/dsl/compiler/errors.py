"""What the compiler of the DSL raises."""

from __future__ import annotations

from llm_comm.dsl import ir
from llm_comm.errors import LlmCommError


class CompileError(LlmCommError):
    """A program, or a part of it, that there is no kernel for. The text says which line and what to do."""

    def __init__(self, where: ir.Location, what: str) -> None:
        super().__init__(f"{what}\n  {where}")
