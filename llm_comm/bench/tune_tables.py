"""Installed tables of ``llm-comm tune``.

``--install`` writes the measured table to the user's directory, where every later start finds it. ``--list`` shows the
tables that starts find, and ``--remove`` removes an installed one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llm_comm import _core, files
from llm_comm.bench.report import columns
from llm_comm.cli import launch
from llm_comm.config import Config
from llm_comm.errors import ConfigError
from llm_comm.files import locked
from llm_comm.planning.catalogue import (
    TableFile,
    find_table,
    installed_files,
    load_table,
    shipped_tables,
    table_directory,
    table_text,
)
from llm_comm.planning.tables import BY_OPTION, OF_USER, SHIPPED, TuningTable

_OPTION = "--install"
_LOCK = ".lock"
_UNKNOWN = "-"
_DIGITS_OF_COMMIT = 7


def prepare(config: Config) -> Path:
    """Create the user's directory of tables before anything is measured. Return it.

    Raises:
        ConfigError: The user has no directory, it is not writable, or the table could name programs. A start without
            option ``dsl`` would fail with such a table.
    """
    if config.dsl is not None:
        raise ConfigError(
            f"{_OPTION}: with programs ({config.origins.get('dsl', 'Python')}) the table is of no use to a start "
            "without option dsl: give --out, and both options to a start"
        )
    directory = directory_or_error(_OPTION)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{_OPTION}: {directory} cannot be made: {error.strerror or error}; set LLM_COMM_TABLE_DIR to another"
        ) from error
    if not os.access(directory, os.W_OK):
        raise ConfigError(f"{_OPTION}: no permission to write to {directory}; set LLM_COMM_TABLE_DIR to another")
    return directory


def directory_or_error(option: str) -> Path:
    """Return the user's directory. Raise ConfigError if this user has none."""
    directory = table_directory()
    if directory is None:
        raise ConfigError(f"{option}: this user has no home: set LLM_COMM_TABLE_DIR to the directory of tuning tables")
    return directory


def write(
    table: TuningTable,
    device: torch.device,
    world_size: int,
    args: argparse.Namespace,
    environment: Mapping[str, Any],
    config: Config,
    *,
    out: Path | None,
) -> bool:
    """Write a table to the places that ``out`` and ``--install`` give. Return whether all succeeded.

    Args:
        table: Table for ``world_size`` ranks of the device.
        device, world_size: Device and number of ranks.
        args, environment, config: Arguments, environment and configuration of the run.
        out: File of ``--out``, or None.
    """
    device_name = torch.cuda.get_device_name(device)
    measured = {
        "date": environment["date"],
        **environment["versions"],
        "operations": list(args.operations),
        "method": environment["options"]["method"],
        "complete": environment["complete"],
        # value that option dsl needs if a row names a program
        **({} if config.dsl is None else {"dsl": config.dsl}),
    }
    text = table_text(device_name, world_size, table, measured)
    written = out is None or files.write_text("--out", out, text)
    if args.install:
        written = install(text, device_name, world_size, measured, config, force=args.force) and written
    return written


def install(
    text: str, device_name: str, world_size: int, measured: Mapping[str, Any], config: Config, *, force: bool
) -> bool:
    """Install a table for the device and world size, replacing an earlier one. If it is not installed, report why and
    print it.

    The file is replaced atomically. A lock serializes processes that compare and write.

    Args:
        text: Content of the file.
        device_name, world_size: Device and number of ranks.
        measured: ``date`` and ``complete`` as in the file.
        config: Configuration of this run. If it names a table, a message says that it has precedence.
        force: Replace also a table that was measured later, or completely while this one was not.

    Returns:
        True if it was installed. Otherwise the command must fail.
    """
    try:
        path = prepare(config) / _core.table_file_name(device_name, world_size)
        why_not = ""
        with locked(path.with_name(_LOCK)):
            if not force:
                why_not = _why_kept(path, measured)
            if not why_not:
                files.replace_text(path, text)
    except (OSError, ConfigError) as error:
        why_not = str(error)
    if why_not:
        print(f"llm-comm: {_OPTION}: {why_not}. The table that was measured is on the standard output", file=sys.stderr)
        print(text, flush=True)
        return False
    print(f"installed {path}: every later start on {world_size} of {device_name} finds it, without an option")
    if config.table is not None:
        print(f"but option table ({config.origins.get('table', 'Python')}) goes before it: unset that")
    return True


def _why_kept(path: Path, measured: Mapping[str, Any]) -> str:
    """Return why the installed table must stay; "" if it may be replaced or is unusable."""
    try:
        present = load_table(path).measured
    except ConfigError:
        return ""
    if present.get("complete") != "False" and not measured["complete"]:
        return f"{path} was measured completely and this table was not, so it stays; --force replaces it"
    there, here = _time(present.get("date", "")), _time(str(measured["date"]))
    if there is not None and here is not None and there > here:
        return f"{path} was measured later ({present['date']}), so it stays; --force replaces it"
    return ""


def _time(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)


class Listed(NamedTuple):
    """Line of the list; the fields are the columns."""

    origin: str
    device: str
    ranks: str
    measured: str
    commit: str
    llm_comm: str
    file: str


def run(args: argparse.Namespace) -> int:
    """Run ``--list`` or ``--remove``. Return 0.

    Raises:
        ConfigError: The configuration is invalid, or there is nothing to remove.
    """
    if args.remove is not None:
        remove(args.remove)
        return 0
    config = launch.checked_config({})
    print(columns([Listed(*(name.upper() for name in Listed._fields)), *listed(config)], str.ljust))
    print("\nHere:")
    for world, table in tables_here(config).items():
        print(f"  {world} ranks: {table.describe()}")
    return 0


def remove(name: str) -> None:
    """Remove an installed table.

    Args:
        name: File name as shown by ``--list``, with or without the directory.

    Raises:
        ConfigError: No table has this name, or it cannot be removed.
    """
    directory = directory_or_error("--remove")
    files = {path.name: path for path in installed_files()}
    path = files.get(Path(name).name)
    if path is None or Path(name) not in (path, Path(path.name)):
        there = ", ".join(files) or "no table"
        raise ConfigError(f"--remove {name}: {directory} has no such table; it has {there}")
    try:
        path.unlink()
    except OSError as error:
        raise ConfigError(f"--remove {name}: {path} cannot be removed: {error.strerror or error}") from error
    print(f"removed {path}")


def listed(config: Config) -> Iterator[Listed]:
    """Yield all tables in the order in which a start considers them. Tables of nearest devices are among the shipped
    ones."""
    if config.table is not None:
        yield _of_file(BY_OPTION, Path(config.table))
    for path in installed_files():
        yield _of_file(OF_USER, path)
    for shipped in shipped_tables():
        yield _listed(SHIPPED, shipped, shipped.table.name)


def _of_file(origin: str, path: Path) -> Listed:
    try:
        return _listed(origin, load_table(path), str(path))
    except ConfigError as error:
        nothing = Listed(f"{origin}, cannot be used", *[_UNKNOWN] * (len(Listed._fields) - 1))
        return nothing._replace(file=f"{path} ({' '.join(str(error).split())})")


def _listed(origin: str, found: TableFile, name: str) -> Listed:
    date, commit, version = (found.measured.get(key, _UNKNOWN) for key in ("date", "commit", "llm_comm"))
    return Listed(origin, found.device, str(found.world_size), date, commit[:_DIGITS_OF_COMMIT], version, name)


def tables_here(config: Config) -> dict[int, TuningTable]:
    """Return the tables that communicators on this machine would use, by number of ranks.

    Raises:
        ConfigError: The table of option ``table`` cannot be used.
    """
    gpus = launch.usable_gpus()[0]
    if gpus < launch.WORLDS[0]:
        return {launch.DEFAULT_EMULATED_WORLD: find_table("emulated", launch.DEFAULT_EMULATED_WORLD, 1, config)}
    gpu = torch.cuda.get_device_properties(0)
    capability = 10 * gpu.major + gpu.minor
    worlds = [world for world in launch.WORLDS if world <= gpus]
    return {world: find_table(gpu.name, world, gpu.multi_processor_count, config, capability) for world in worlds}
