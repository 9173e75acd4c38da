"""From the text of a program, which is a Python function, to the program for a world."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from llm_comm.dsl import ir
from llm_comm.dsl.builder import Builder
from llm_comm.dsl.errors import Fault, ProgramError
from llm_comm.dsl.lines import location
from llm_comm.errors import quoted
from llm_comm.registry import why_not_a_name

#: What ``program`` decorates.
Text = Callable[[Builder], None]


class ProgramText:
    """A program for any world that its text allows; made by ``dsl.program``.

    Attributes:
        name: That of the function.
        operation: What it computes.
        root: Of a broadcast.
        instances: Into how many shares each chunk is cut.

    Raises:
        ValueError: It is made of something else than a function, or the function has no printable name.
    """

    def __init__(self, text: Text, operation: ir.Operation, root: int, instances: int) -> None:
        if not (inspect.isfunction(text) or inspect.ismethod(text)):
            raise ValueError(f"dsl.program takes a function, not {quoted(text)}: wrap it in one")
        why = why_not_a_name(text.__name__)
        if why:
            raise ValueError(f"dsl.program: the name of the function {why}")
        self.name = text.__name__
        self.operation = operation
        self.root = root
        self.instances = instances
        self.__doc__ = text.__doc__
        self._text = text

    @property
    def lines(self) -> int:
        """Of its text in Python, from the decorator on, empty ones left out; 0 where the source is not at hand."""
        try:
            source, _ = inspect.getsourcelines(self._text)
        except (OSError, TypeError):
            return 0
        return sum(1 for line in source if line.strip())

    def build(self, world: int) -> ir.Program:
        """Traces the program for a world. ``dsl.check`` tells whether it is correct.

        Args:
            world: Number of ranks, 2 at least.

        Raises:
            ProgramError: An operation cannot be.
        """
        code = self._text.__code__
        where = location(code.co_filename, code.co_firstlineno)
        if world < 2 or not 0 <= self.root < world:
            raise ProgramError(
                Fault.MISUSE,
                f"program {self.name!r}, root {self.root}, for {world} rank(s): a world has 2 ranks at least, and the "
                "root is one of them",
                where,
            )
        builder = Builder(self.operation, world, self.root)
        self._text(builder)
        return builder.finish(self.name, self.operation, self.instances, where)


def program(operation: str | ir.Operation, *, root: int = 0, instances: int = 1) -> Callable[[Text], ProgramText]:
    """Makes a program of a function that takes a ``Builder``.

    Args:
        operation: What it computes: all_reduce, all_gather, reduce_scatter, broadcast or all_to_all.
        root: Of a broadcast.
        instances: Into how many equal shares each chunk is cut, each of which blocks of its own treat.

    Raises:
        ValueError: There is no such operation, ``instances`` is not positive, or what is decorated is no function with
            a printable name.
    """
    if instances < 1:
        raise ValueError(f"instances={instances}: it is at least 1")
    known = ir.Operation(operation)
    return lambda text: ProgramText(text, known, root, instances)
