"""Programs for people who look for one: what each computes, and whether ``Communicator.all_reduce`` can run it."""

from __future__ import annotations

from typing import NamedTuple

from llm_comm.config import Config
from llm_comm.dsl import library, registry
from llm_comm.dsl.programs import ProgramText
from llm_comm.dsl.selected import examine
from llm_comm.errors import ConfigError


class Listed(NamedTuple):
    """A program, for a world.

    Attributes:
        name: As options and tables name it.
        option: What option ``dsl`` has to say for that.
        operation: What it computes.
        lines: Of its text in Python; 0 where that is not known.
        why_not: Why it cannot be selected as an all-reduce; "" if it can.
    """

    name: str
    option: str
    operation: str
    lines: int
    why_not: str


def listed(config: Config, world: int, with_library: bool) -> list[Listed]:
    """The programs that ``config.dsl`` names, and those that come with llm_comm.

    Args:
        config: Options by which programs would be selected.
        world: Ranks that they are built and checked for.
        with_library: List those of ``llm_comm.dsl.library`` too.

    Raises:
        ConfigError: What option ``dsl`` names cannot be imported, or cannot be registered.
    """
    registry.of_option(config)  # tells what is wrong with it
    options = [] if config.dsl is None else [option.strip() for option in config.dsl.split(",")]
    found = {registry.register_one(option): option for option in options}
    if with_library:
        for text in library.PROGRAMS:
            found.setdefault(text, f"{library.__name__}:{text.name}")
    return [
        Listed(registry.name_of(text), option, text.operation.value, text.lines, _why_not(text, world, config))
        for text, option in found.items()
    ]


def _why_not(text: ProgramText, world: int, config: Config) -> str:
    try:
        return examine(text, world, config)[1]
    except ConfigError as error:
        return str(error)
