"""The tuning table for a device: of option ``table``, the user's directory, the package, a near device, or for any."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from llm_comm import _core
from llm_comm.config import Config
from llm_comm.errors import ConfigError
from llm_comm.planning.default_tables import emulated_table, general_table
from llm_comm.planning.installed import look_up
from llm_comm.planning.layers import LayerRow
from llm_comm.planning.table_files import TableFile, load_table
from llm_comm.planning.tables import BY_OPTION, EMULATED, GENERAL, NEAREST, OF_USER, SHIPPED, Origin, TuningTable

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


def find_table(
    device_name: str, world_size: int, sm_count: int, config: Config, compute_capability: int = 0
) -> TuningTable:
    """The table of ``config.table``; else that of the user's directory, or else the shipped one, for the device and
    world size; else the shipped one of a near device; else a general one. Its ``origin`` says which.

    Args:
        device_name: As the driver gives it, for example ``"NVIDIA H200"``, or ``"emulated"``.
        sm_count: Multiprocessors of the device.
        compute_capability: 90 for 9.0; 0 where it is not known, and then no device is near.

    Raises:
        ConfigError: The table of the option cannot be used. One of the user's directory that cannot be used is warned
            of and passed over.
    """
    if config.table is not None:
        return _of_option(config.table, device_name, world_size)
    installed = look_up(device_name, world_size)
    if installed is not None and installed.found is not None:
        return _found(installed.found.table, OF_USER, str(installed.path))
    table = _without_installed(device_name, world_size, sm_count, compute_capability)
    if installed is None:
        return table
    return table._replace(origin=table.origin._replace(passed_over=str(installed.path)))


def _of_option(path: str, device_name: str, world_size: int) -> TuningTable:
    device, world, table = load_table(Path(path))
    if (device, world) != (device_name, world_size):
        logger.warning(
            "%s was measured on %d ranks of %s, not on %d of %s: sums are right, the choice may not be the fastest",
            *(table.name, world, device, world_size, device_name),
        )
    # Emulated GPUs are not tuned for.
    is_tuned = device_name == "emulated" or (device, world) == (device_name, world_size)
    return _found(table, BY_OPTION, path, is_tuned=is_tuned)


def _without_installed(device_name: str, world_size: int, sm_count: int, compute_capability: int) -> TuningTable:
    """The table that the core chooses, by the rule of the NCCL library."""
    shipped = _read_shipped()
    measured_on = [(device, world) for device, world, _ in shipped]
    kind, index, near = _core.choose_table(device_name, world_size, sm_count, compute_capability, measured_on)
    if kind == EMULATED:
        return _found(emulated_table(), EMULATED)
    if kind == GENERAL:
        return _found(general_table(world_size, sm_count), GENERAL, is_tuned=False)
    table = shipped[index].table
    if kind == SHIPPED:
        return _found(table, SHIPPED)
    here = table._replace(name=f"{table.name}, nearest: {near}", layers=_layers_of(device_name))
    return _found(here, NEAREST, is_tuned=False)


def _layers_of(device_name: str) -> tuple[LayerRow, ...]:
    """Linear layers as measured on this very device: a rank computes them alone, so with any number of ranks. Those of
    a near device say nothing, as its memory may be faster."""
    return next((table.layers for device, _, table in _read_shipped() if device == device_name), ())


def _found(table: TuningTable, kind: str, path: str = "", *, is_tuned: bool = True) -> TuningTable:
    return table._replace(origin=Origin(kind, path, is_tuned))
