"""Tuning tables as YAML files, and the choice of the table for a device.

The core reads and validates files (``csrc/host/tables.h``) and chooses tables (``csrc/host/table_choice.h``), since the
NCCL library does the same. ``configs/`` holds the shipped tables; ``llm-comm tune`` writes new ones.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from llm_comm import _core
from llm_comm.config import Config
from llm_comm.errors import ConfigError, shortened
from llm_comm.planning.layers import LayerRow
from llm_comm.planning.node_rows import NodeRow
from llm_comm.planning.tables import MulticastEntry, Origin, TuningTable, by_operation, row_of_fields

logger = logging.getLogger("llm_comm")

_LIMITS = ("max_fused_bytes", "large_fused_bytes", "fused_blocks", "min_symmetric_bytes")


class TableFile(NamedTuple):
    """A table, the device and world size it was measured on, and when and by which versions."""

    device: str
    world_size: int
    table: TuningTable
    measured: dict[str, str]


def load_table(path: Path) -> TableFile:
    """Read a tuning table.

    Raises:
        ConfigError: The file cannot be read or has an invalid entry. The text says what is valid.
    """
    try:
        return _table_of(*_core.read_table(os.fsencode(path)))
    except ValueError as error:
        raise _unusable(path, error) from None


def _unusable(path: Path | str, error: ValueError) -> ConfigError:
    """Build the error for an invalid table file."""
    return ConfigError(f"tuning table {shortened(str(path))}: {error}")


def _table_of(
    name: str,
    device: str,
    world_size: int,
    max_message_bytes: int,
    rows: Iterable[_core.RowFields],
    content: Mapping[str, Any],
) -> TableFile:
    """Build a table from the fields that the core has read. ``content`` holds the other entries of the file."""
    multicast = content.get("multicast")
    table = TuningTable(
        name,
        by_operation(row_of_fields(row) for row in rows),
        max_message_bytes,
        **{limit: content[limit] for limit in _LIMITS if limit in content},
        multicast=None if multicast is None else _multicast(**multicast),
        layers=tuple(LayerRow(**row) for row in content.get("layers") or ()),
        nodes=tuple(NodeRow(**row) for row in content.get("nodes") or ()),
    )
    measured = content.get("measured")
    words = measured.items() if isinstance(measured, dict) else ()
    return TableFile(device, world_size, table, {about: str(value) for about, value in words})


def _multicast(world_size: int, **words: Any) -> MulticastEntry:
    return MulticastEntry(world_size=world_size, **{about: str(word) for about, word in words.items()})


def check_table_option(config: Config) -> None:
    """Read the table that the option ``table`` names, so that an invalid file is reported before the rendezvous.

    Raises:
        ConfigError: The file cannot be used. The text says where the option was set.
    """
    if config.table is None:
        return
    try:
        load_table(Path(config.table))
    except ConfigError as error:
        raise ConfigError(f"option table ({config.origins.get('table', 'Python')}): {error}") from error


@functools.cache
def shipped_tables() -> tuple[TableFile, ...]:
    """Return the tuning tables of the package."""
    return tuple(_table_of(*fields) for fields in _core.shipped_tables())


def table_directory() -> Path | None:
    """Return the user's directory of tables, into which ``llm-comm tune --install`` writes. It need not exist.

    ``LLM_COMM_TABLE_DIR``, or ``llm_comm/tables`` in ``XDG_CONFIG_HOME`` or ``~/.config``. None for a user without a
    home.
    """
    found = _core.table_directory()
    return None if found is None else Path(found)


def installed_files() -> list[Path]:
    """Return the table files in the user's directory whose names this version looks for."""
    directory = table_directory()
    return sorted(directory.glob(f"*{_core.table_suffix}")) if directory is not None else []


def find_table(
    device_name: str, world_size: int, sm_count: int, config: Config, compute_capability: int = 0
) -> TuningTable:
    """Find the tuning table for a device and world size. The ``origin`` of the result says where it was found.

    The order is: the table of ``config.table``; the user's installed table; the shipped table for device and world
    size; the shipped table of the nearest device; a general table.

    Args:
        device_name: Name by the driver, such as ``"NVIDIA H200"``, or ``"emulated"``.
        world_size: Number of ranks.
        sm_count: Number of SMs of the device.
        config: Options.
        compute_capability: 10 * major + minor, such as 90; 0 if unknown, which rules out nearest devices.

    Raises:
        ConfigError: The table of ``config.table`` cannot be used. An unusable table of the user's directory is skipped,
            with one warning in a process.
    """
    named = config.table or ""
    try:
        fields, origin, remarks = _core.find_table(
            os.fsencode(named), device_name, world_size, sm_count, compute_capability
        )
    except ValueError as error:
        raise _unusable(named, error) from None
    for remark in remarks:
        logger.warning("%s", remark)
    return _table_of(*fields).table._replace(origin=Origin(*origin))


class _Dumper(yaml.SafeDumper):
    """Write repeated values in full: the core rejects aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def table_text(device: str, world_size: int, table: TuningTable, measured: dict[str, Any]) -> str:
    """Return the text of a table file. ``measured``: date and versions of the measurement."""
    least = table.min_symmetric_bytes
    head = {
        "device": device,
        "world_size": world_size,
        "max_message_bytes": table.max_message_bytes,
        "max_fused_bytes": table.max_fused_bytes,
        **({} if table.large_fused_bytes is None else {"large_fused_bytes": table.large_fused_bytes}),
        "fused_blocks": table.fused_blocks,
        "min_symmetric_bytes": least if isinstance(least, int) else dict(least),
        "measured": measured,
        **({} if table.multicast is None else {"multicast": table.multicast._asdict()}),
    }
    rows = _lines(row.entry() for of_operation in table.rows.values() for row in of_operation)
    of_layers = _lines(row.entry() for row in table.layers)
    of_nodes = _lines(row.entry() for row in table.nodes)
    return (
        "# Written by `llm-comm tune`. The last row of an operation serves all larger messages, up to "
        f"max_message_bytes.\n{_written(head)}rows:\n{rows}"
        + (f"layers:\n{of_layers}" if of_layers else "")
        + (f"nodes:\n{of_nodes}" if of_nodes else "")
    )


def _lines(entries: Iterable[dict[str, Any]]) -> str:
    """Format one row a line, so that readers can compare rows."""
    return "".join("  - " + _written(entry, default_flow_style=True) for entry in entries)


def _written(entry: dict[str, Any], *, default_flow_style: bool = False) -> str:
    """Format as YAML without line breaks in values."""
    style: dict[str, Any] = {"default_flow_style": default_flow_style, "width": math.inf, "allow_unicode": True}
    return str(yaml.dump(entry, None, _Dumper, sort_keys=False, **style))
