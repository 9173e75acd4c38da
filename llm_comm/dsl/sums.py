"""In which order a program adds up."""

from __future__ import annotations

from llm_comm.dsl import ir


def sums_in_rank_order(program: ir.Program) -> bool:
    """Whether each sum of a correct program is of all ranks at once: then it is made in their order and rounded once,
    as the library's own."""
    return all(len(op.operands) == program.world for op in program.ops() if isinstance(op, ir.Sum))
