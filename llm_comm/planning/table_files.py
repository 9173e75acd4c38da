"""Tuning tables as YAML files, as ``configs/`` has them and ``llm-comm tune`` writes them.

The core reads and checks them (``csrc/host/tables.h``), for the NCCL library too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from llm_comm import _core
from llm_comm.errors import ConfigError
from llm_comm.planning.layers import LayerRow
from llm_comm.planning.node_rows import NodeRow
from llm_comm.planning.tables import MulticastEntry, TuningTable, by_operation, row_of_fields
from llm_comm.quoting import shortened

_LIMITS = ("max_fused_bytes", "fused_blocks", "min_symmetric_bytes")


class TableFile(NamedTuple):
    """A table, and what it was measured on, when and by what."""

    device: str
    world_size: int
    table: TuningTable
    measured: dict[str, str]


def load_table(path: Path) -> TableFile:
    """Reads a tuning table.

    Raises:
        ConfigError: The file cannot be read, or something in it is not valid; the text says what would be.
    """
    try:
        return table_of(*_core.read_table(os.fsencode(path)))
    except ValueError as error:
        raise unusable(path, error) from None


def unusable(path: Path | str, error: ValueError) -> ConfigError:
    """The error for a file that is no table."""
    return ConfigError(f"tuning table {shortened(str(path))}: {error}")


def table_of(
    name: str,
    device: str,
    world_size: int,
    max_message_bytes: int,
    rows: Iterable[_core.RowFields],
    content: Mapping[str, Any],
) -> TableFile:
    """A table from what the core has read. ``content``: the other entries of the file."""
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


class _Dumper(yaml.SafeDumper):
    """Writes what appears twice out twice: the core takes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def table_text(device: str, world_size: int, table: TuningTable, measured: dict[str, Any]) -> str:
    """What a file says of a table; ``measured``: when, and by what."""
    least = table.min_symmetric_bytes
    head = {
        "device": device,
        "world_size": world_size,
        "max_message_bytes": table.max_message_bytes,
        "max_fused_bytes": table.max_fused_bytes,
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
    """A row a line: tables are read by people who compare rows."""
    return "".join("  - " + _written(entry, default_flow_style=True) for entry in entries)


def _written(entry: dict[str, Any], *, default_flow_style: bool = False) -> str:
    """YAML with each word in one line."""
    style: dict[str, Any] = {"default_flow_style": default_flow_style, "width": math.inf, "allow_unicode": True}
    return str(yaml.dump(entry, None, _Dumper, sort_keys=False, **style))
