"""Programs by name: from a Python function to a program for a world, and what options and tuning tables can select."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

from llm_comm.config import Config
from llm_comm.dsl.builder import Builder
from llm_comm.dsl.errors import Fault, ProgramError, location
from llm_comm.dsl.ir import Operation, Program
from llm_comm.errors import ConfigError, quoted
from llm_comm.registry import PROGRAM_PREFIX, is_program, why_not_a_name, why_not_known

#: What ``program`` decorates.
Text = Callable[[Builder], None]
#: That communicators have methods for, by the table.
OPERATIONS = (Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.REDUCE_SCATTER)

_registered: dict[str, ProgramText] = {}


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

    def __init__(self, text: Text, operation: Operation, root: int, instances: int) -> None:
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

    def build(self, world: int) -> Program:
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


def program(operation: str | Operation, *, root: int = 0, instances: int = 1) -> Callable[[Text], ProgramText]:
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
    known = Operation(operation)
    return lambda text: ProgramText(text, known, root, instances)


def register(program: ProgramText) -> ProgramText:
    """Makes a program available as ``dsl:NAME`` to communicators that this process makes from now on.

    Every rank registers the same. ``Config.dsl`` registers what it names by itself.

    Args:
        program: Of an all-reduce, an all-gather or a reduce-scatter. ``Config.algorithm`` and rows of tuning tables
            select it.

    Returns:
        The program, so this can be used as a decorator above ``dsl.program``.

    Raises:
        ValueError: It is no such program, options cannot spell its name, or another one has the name.
    """
    if not isinstance(program, ProgramText):
        raise ValueError(f"register takes what dsl.program has made of a function, not a {type(program).__name__}")
    if program.operation not in OPERATIONS:
        raise ValueError(
            f"program {program.name!r} is a {program.operation.value}; register takes "
            f"{', '.join(operation.value for operation in OPERATIONS)}"
        )
    name = name_of(program)
    if not is_program(name):
        raise ValueError(
            f"program {program.name!r} cannot be registered: options and tables name programs by letters, digits and _ "
            "of ASCII: give its function such a name"
        )
    if _registered.setdefault(name, program) is not program:
        raise ValueError(f"another program is registered as {name}: give this one's function another name")
    return program


def name_of(program: ProgramText | Program) -> str:
    """As options and tables name it."""
    return f"{PROGRAM_PREFIX}{program.name}"


def registered() -> tuple[str, ...]:
    """The names of all programs that are registered, in order."""
    return tuple(sorted(_registered))


def find(name: str) -> ProgramText:
    """The program that is registered under a name.

    Raises:
        ConfigError: None is; the text says which are.
    """
    why = why_not_known("program", name, registered())
    if why:
        raise ConfigError(f"{why}. Option dsl=module:program registers one, as does llm_comm.dsl.register")
    return _registered[name]


def register_all(names: str) -> tuple[ProgramText, ...]:
    """Imports and registers what option ``dsl`` names.

    Args:
        names: ``module:program``, with commas between them.

    Raises:
        ConfigError: A module cannot be imported, or has no such program, or that cannot be registered.
    """
    return tuple(register_one(name.strip()) for name in names.split(","))


def of_option(config: Config) -> dict[str, ProgramText]:
    """The programs that option ``dsl`` names, registered, by the names that options and tables give them.

    Raises:
        ConfigError: As of ``register_all``; the text says where the option comes from.
    """
    if config.dsl is None:
        return {}
    try:
        return {name_of(text): text for text in register_all(config.dsl)}
    except ConfigError as error:
        raise ConfigError(f"{origin(config)}: {error}") from error


def origin(config: Config) -> str:
    """Of option ``dsl``, in words."""
    return f"option dsl ({config.origins.get('dsl', 'Python')})"


def register_one(name: str) -> ProgramText:
    """The same for one of them."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    # A module that ends the process would leave the other ranks waiting for it.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{name}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, ProgramText):
        have = [key for key, value in vars(module).items() if isinstance(value, ProgramText)]
        raise ConfigError(f"{name}: {why_not_known('program', attribute, have)}")
    try:
        return register(found)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
