"""Programs by name: from a Python function to a program for a world, and the registry for options and tuning tables."""

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

#: Function that ``program`` decorates.
Definition = Callable[[Builder], None]
#: Operations whose communicator method can run a registered program.
OPERATIONS = (Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.REDUCE_SCATTER)
#: Largest world of a program: kernels pack the senders of a wait into four bits each (compiler/prelude.cuh).
MAX_WORLD = 8

_registered: dict[str, ProgramDefinition] = {}


class ProgramDefinition:
    """Program for any world that its function supports; made by ``dsl.program``.

    Attributes:
        name: Name of the function.
        operation: Operation that it implements.
        root: Root of a broadcast.
        instances: Number of shares of each chunk.

    Raises:
        ValueError: The argument is no function, or the function's name is not printable.
    """

    def __init__(self, text: Definition, operation: Operation, root: int, instances: int) -> None:
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
        """Number of non-empty source lines of the function, from its decorator on; 0 if the source is unavailable."""
        try:
            source, _ = inspect.getsourcelines(self._text)
        except (OSError, TypeError):
            return 0
        return sum(1 for line in source if line.strip())

    def build(self, world: int) -> Program:
        """Trace the program for a world. Correctness is checked by ``dsl.check``.

        Args:
            world: Number of ranks, 2 to ``MAX_WORLD``.

        Raises:
            ProgramError: An operation is invalid.
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
        if world > MAX_WORLD:
            raise ProgramError(
                Fault.MISUSE, f"program {self.name!r} for {world} ranks: programs serve worlds up to {MAX_WORLD}", where
            )
        builder = Builder(self.operation, world, self.root)
        self._text(builder)
        return builder.finish(self.name, self.operation, self.instances, where)


def program(
    operation: str | Operation, *, root: int = 0, instances: int = 1
) -> Callable[[Definition], ProgramDefinition]:
    """Decorate a function that takes a ``Builder``, and make it a program.

    Args:
        operation: all_reduce, all_gather, reduce_scatter, broadcast or all_to_all.
        root: Root of a broadcast.
        instances: Number of equal shares of each chunk. Separate blocks process each share.

    Raises:
        ValueError: The operation is unknown, ``instances`` is not positive, or the decorated object is no function with
            a printable name.
    """
    if instances < 1:
        raise ValueError(f"instances={instances}: it is at least 1")
    known = Operation(operation)
    return lambda text: ProgramDefinition(text, known, root, instances)


def register(program: ProgramDefinition) -> ProgramDefinition:
    """Register a program as ``dsl:NAME`` for communicators that this process makes afterwards.

    Every rank must register the same programs. ``Config.dsl`` registers its programs itself.

    Args:
        program: Program of an all-reduce, all-gather or reduce-scatter. ``Config.algorithm`` and rows of tuning tables
            can select it.

    Returns:
        ``program``, so that the function can be a decorator above ``dsl.program``.

    Raises:
        ValueError: ``program`` has another operation, its name has characters that options cannot hold, or another
            program has the name.
    """
    if not isinstance(program, ProgramDefinition):
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


def name_of(program: ProgramDefinition | Program) -> str:
    """Return the name of a program in options and tables."""
    return f"{PROGRAM_PREFIX}{program.name}"


def registered() -> tuple[str, ...]:
    """Return the names of all registered programs, sorted."""
    return tuple(sorted(_registered))


def find(name: str) -> ProgramDefinition:
    """Return the program that is registered under ``name``.

    Raises:
        ConfigError: No such program is registered; the text lists those that are.
    """
    why = why_not_known("program", name, registered())
    if why:
        raise ConfigError(f"{why}. Option dsl=module:program registers one, as does llm_comm.dsl.register")
    return _registered[name]


def register_all(names: str) -> tuple[ProgramDefinition, ...]:
    """Import and register the programs of option ``dsl``.

    Args:
        names: ``module:program``, separated by commas.

    Raises:
        ConfigError: A module cannot be imported or has no such program, or the program cannot be registered.
    """
    return tuple(register_one(name.strip()) for name in names.split(","))


def of_option(config: Config) -> dict[str, ProgramDefinition]:
    """Register the programs that option ``dsl`` names. Return them by their names in options and tables.

    Raises:
        ConfigError: See ``register_all``; the text also says where the option was set.
    """
    if config.dsl is None:
        return {}
    try:
        return {name_of(text): text for text in register_all(config.dsl)}
    except ConfigError as error:
        raise ConfigError(f"{origin(config)}: {error}") from error


def origin(config: Config) -> str:
    """Return where option ``dsl`` was set, in words."""
    return f"option dsl ({config.origins.get('dsl', 'Python')})"


def register_one(name: str) -> ProgramDefinition:
    """Import and register one program, see ``register_all``."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    # SystemExit must not end this process: the other ranks would wait for it.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{name}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, ProgramDefinition):
        have = [key for key, value in vars(module).items() if isinstance(value, ProgramDefinition)]
        raise ConfigError(f"{name}: {why_not_known('program', attribute, have)}")
    try:
        return register(found)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
