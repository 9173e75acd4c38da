"""The tuning table for a device: of option ``table``, the user's directory, the package, a near device, or for any. The
core looks for it (``csrc/host/table_choice.h``), by the same rule for the NCCL library."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

from llm_comm import _core
from llm_comm.config import Config
from llm_comm.errors import ConfigError
from llm_comm.planning.table_files import TableFile, load_table, table_of, unusable
from llm_comm.planning.tables import Origin, TuningTable

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


@functools.cache
def shipped_tables() -> tuple[TableFile, ...]:
    """The tuning tables that come with the package."""
    return tuple(table_of(*fields) for fields in _core.shipped_tables())


def table_directory() -> Path | None:
    """The user's directory of tables: ``LLM_COMM_TABLE_DIR``, else ``llm_comm/tables`` in ``XDG_CONFIG_HOME`` or
    ``~/.config``; None for a user without a home. It need not exist. ``llm-comm tune --install`` writes there."""
    found = _core.table_directory()
    return None if found is None else Path(found)


def installed_files() -> list[Path]:
    """All files in the user's directory that this llm_comm would look for."""
    directory = table_directory()
    return sorted(directory.glob(f"*{_core.table_suffix}")) if directory is not None else []


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
            of, once in a process, and passed over.
    """
    named = config.table or ""
    try:
        fields, origin, remarks = _core.find_table(
            os.fsencode(named), device_name, world_size, sm_count, compute_capability
        )
    except ValueError as error:
        raise unusable(named, error) from None
    for remark in remarks:
        logger.warning("%s", remark)
    return table_of(*fields).table._replace(origin=Origin(*origin))
