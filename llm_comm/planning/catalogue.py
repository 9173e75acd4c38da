"""The tuning table for a device: one that option ``table`` names, a shipped one, or one for any device."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from llm_comm.config import Config
from llm_comm.errors import ConfigError
from llm_comm.planning.default_tables import emulated_table, general_table
from llm_comm.planning.table_files import TableFile, load_table
from llm_comm.planning.tables import TuningTable

logger = logging.getLogger("llm_comm")


def check_table_option(config: Config) -> None:
    """Reads the table that option ``table`` names, if any: a wrong one is to be told before ranks meet.

    Raises:
        ConfigError: It cannot be used; the text says where the option comes from.
    """
    if config.table is None:
        return
    try:
        load_table(Path(config.table))
    except ConfigError as error:
        raise ConfigError(f"option table ({config.origins.get('table', 'Python')}): {error}") from error


def shipped_tables() -> Iterator[resources.abc.Traversable]:
    """The tuning tables that come with the package."""
    directory = resources.files("llm_comm") / "configs"
    if directory.is_dir():
        yield from sorted((f for f in directory.iterdir() if f.name.startswith("tune_")), key=lambda f: f.name)


@functools.cache
def _read_shipped() -> tuple[TableFile, ...]:
    """What they say. Read once: it takes a good part of a second, and each communicator asks."""
    return tuple(load_table(path) for path in shipped_tables())


def find_table(device_name: str, world_size: int, sm_count: int, config: Config) -> TuningTable:
    """The table of ``config.table``, the shipped one for the device and world size, or a general one.

    Args:
        device_name: As the driver gives it, for example ``"NVIDIA H200"``, or ``"emulated"``.
        sm_count: Multiprocessors of the device.

    Raises:
        ConfigError: A table cannot be used.
    """
    if config.table is not None:
        device, world, table = load_table(Path(config.table))
        if (device, world) != (device_name, world_size):
            logger.warning(
                "%s was measured on %d ranks of %s, not on %d of %s: sums are right, the choice may not be the fastest",
                *(table.name, world, device, world_size, device_name),
            )
        return table
    for device, world, table in _read_shipped():
        if device == device_name and world == world_size:
            return table
    if device_name == "emulated":
        return emulated_table()
    return general_table(world_size, sm_count)
