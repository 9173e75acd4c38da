"""The user's directory of tuning tables: what ``llm-comm tune --install`` has written, and every later start finds."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import NamedTuple

from llm_comm import _core
from llm_comm.errors import ConfigError
from llm_comm.planning.table_files import TableFile, load_table

logger = logging.getLogger("llm_comm")


class Lookup(NamedTuple):
    """What there is for a device and world size.

    Attributes:
        path: Of the file.
        found: What it says; None if it cannot be used.
    """

    path: Path
    found: TableFile | None


def table_directory() -> Path | None:
    """``LLM_COMM_TABLE_DIR``, else ``llm_comm/tables`` in ``XDG_CONFIG_HOME`` or ``~/.config``; None for a user without
    a home. It need not exist."""
    found = _core.table_directory()
    return None if found is None else Path(found)


def file_name(device_name: str, world_size: int) -> str:
    """Name of the file for so many of a device: ``nvidia_h200_8.format1.yaml``."""
    return _core.table_file_name(device_name, world_size)


def installed_files() -> list[Path]:
    """All files in the user's directory that this llm_comm would look for."""
    directory = table_directory()
    return sorted(directory.glob(f"*{_core.table_suffix}")) if directory is not None else []


def look_up(device_name: str, world_size: int) -> Lookup | None:
    """The installed table for a device and world size; None if there is none. Warns, once for each state of the file,
    of one that cannot be used."""
    directory = table_directory()
    if directory is None:
        return None
    path = directory / file_name(device_name, world_size)
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return Lookup(path, _read(path, device_name, world_size, ()))
    state = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return Lookup(path, _read(path, device_name, world_size, state))


@functools.lru_cache(maxsize=64)
def _read(path: Path, device_name: str, world_size: int, _state: tuple[int, ...]) -> TableFile | None:
    """Cached: reading takes a good part of a second, and each communicator asks."""
    try:
        found = load_table(path)
        if (found.device, found.world_size) != (device_name, world_size):
            raise ConfigError(
                f"tuning table {path}: it is for {found.world_size} of {found.device}, and its name says "
                f"{world_size} of {device_name}"
            )
    except ConfigError as error:
        logger.warning(
            "%s. It is passed over. `llm-comm tune --install` measures it anew, `llm-comm tune --remove %s` removes it",
            error,
            path.name,
        )
        return None
    return found
