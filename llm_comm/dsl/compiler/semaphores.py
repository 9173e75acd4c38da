"""Which group has an end of a semaphore: a kernel counts signals by block, so it can be one only."""

from __future__ import annotations

from llm_comm.dsl import ir
from llm_comm.dsl.compiler.errors import CompileError


def check_owners(program: ir.Program) -> None:
    """Refuses a program in which two groups of a rank signal by one semaphore, or wait for it.

    Raises:
        CompileError: At the first such line of the second group.
    """
    owners: dict[tuple[type[ir.Op], bool, int, int, int], str] = {}
    for group in program.groups:
        for op in group.ops():
            if not isinstance(op, ir.Signal | ir.Wait):
                continue
            for rank in range(program.world) if op.only is None else sorted(op.only):
                end = (type(op), op.through_port, op.semaphore, rank, op.peer.on(rank, program.world))
                owner = owners.setdefault(end, group.name)
                if owner != group.name:
                    raise CompileError(
                        op.where,
                        f"groups {owner!r} and {group.name!r} of rank {rank} use semaphore {op.semaphore} with "
                        f"rank {end[-1]}; signals are counted by each group: give each a semaphore of its own",
                    )
