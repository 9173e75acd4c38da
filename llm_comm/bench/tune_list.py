"""``llm-comm tune --list`` and ``--remove``: the tuning tables that starts find here, and which of them they take."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from llm_comm import launch, preflight
from llm_comm.bench.tune_install import directory_or_error
from llm_comm.config import Config
from llm_comm.errors import ConfigError
from llm_comm.planning.catalogue import TableFile, find_table, installed_files, load_table, shipped_tables
from llm_comm.planning.tables import BY_OPTION, OF_USER, SHIPPED, TuningTable

_UNKNOWN = "-"
_DIGITS_OF_COMMIT = 7


class Listed(NamedTuple):
    """A table as it is listed; the fields are the columns."""

    origin: str
    device: str
    ranks: str
    measured: str
    commit: str
    llm_comm: str
    file: str


def run(args: argparse.Namespace) -> int:
    """Entry point of both options; returns 0.

    Raises:
        ConfigError: The configuration is wrong, or there is nothing to remove.
    """
    if args.remove is not None:
        remove(args.remove)
        return 0
    config = preflight.check({})
    for line in aligned([Listed(*(name.upper() for name in Listed._fields)), *listed(config)]):
        print(line)
    print("\nHere:")
    for world, table in tables_here(config).items():
        print(f"  {world} ranks: {table.describe()}")
    return 0


def remove(name: str) -> None:
    """Removes an installed table.

    Args:
        name: Of its file, as ``--list`` has it, with or without the directory.

    Raises:
        ConfigError: There is none of this name, or it cannot be removed.
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
    """All tables in the order in which a start looks at them. Those of near devices are among the shipped ones."""
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


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table; the last column is as long as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *cells, last in rows:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths[:-1], strict=True)), last])


def tables_here(config: Config) -> dict[int, TuningTable]:
    """What communicators of this machine would go by, by ranks.

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
