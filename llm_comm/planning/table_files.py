"""Tuning tables as YAML files, as ``configs/`` has them and ``llm-comm tune`` writes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from llm_comm import registry
from llm_comm.errors import ConfigError, quoted, shortened
from llm_comm.files import InvalidYamlError, YamlList, YamlMapping, kind_of, read_yaml
from llm_comm.planning import layers, node_rows
from llm_comm.planning.layers import LayerRow
from llm_comm.planning.node_rows import NodeRow
from llm_comm.planning.programs import PROTOCOL
from llm_comm.planning.tables import (
    ALL_REDUCE,
    FUSED,
    OPERATIONS_OF_PROGRAMS,
    TUNABLES_OF_PROGRAMS,
    MulticastEntry,
    Row,
    RunnerUp,
    TuningTable,
    by_operation,
)

_KEYS = ("device", "world_size", "max_message_bytes", "rows")
_BY_OPERATION = "min_symmetric_bytes"  # may be
_LIMITS = ("max_fused_bytes", "fused_blocks", _BY_OPERATION)
_MULTICAST = "multicast"
_LAYERS = "layers"
_NODES = "nodes"
_MEASURED = "measured"
_OPTIONAL_KEYS = (*_LIMITS, _MEASURED, _MULTICAST, _LAYERS, _NODES)
#: Files of before have a list for each operation in place of ``rows``, and no protocols: there was one.
_KEYS_OF_BEFORE = {"all_reduce": ALL_REDUCE, "fused": FUSED}
_PROTOCOL_OF_BEFORE = "LL"
_OF_EVERY_ROW = ("operation", "up_to", "algorithm", "protocol")
#: What a row may say of how it was measured.
_FIGURES = ("us", "runner_up")
_LONGEST_US = 1e9
#: Of a launch of a program; what it was compiled for bounds them further (planning/programs.py).
_MOST_OF_PROGRAMS = {"blocks": (1 << 16) - 1, "threads": 1024}

_T = TypeVar("_T")
_Sized = TypeVar("_Sized", LayerRow, NodeRow)


class TableFile(NamedTuple):
    """A table, and what it was measured on."""

    device: str
    world_size: int
    table: TuningTable


def load_table(path: Path | resources.abc.Traversable) -> TableFile:
    """Reads a tuning table.

    Raises:
        ConfigError: The file cannot be read, or something in it is not valid; the text says what would be.
    """
    try:
        return _read(path.name, read_yaml(path))
    except (InvalidYamlError, _InvalidError) as error:
        raise ConfigError(f"tuning table {shortened(str(path))}: {error}") from None


def read_measured(path: Path | resources.abc.Traversable) -> dict[str, str]:
    """What the file of a valid table says of when, and by what, it was measured; empty if nothing.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        content = read_yaml(path)
    except InvalidYamlError as error:
        raise ConfigError(f"tuning table {shortened(str(path))}: {error}") from None
    measured = content.get(_MEASURED) if isinstance(content, YamlMapping) else None
    return {str(key): str(value) for key, value in measured.items()} if isinstance(measured, dict) else {}


class _InvalidError(Exception):
    """What is wrong with a table, without its name.

    Args:
        line: Where it stands in the file.
    """

    def __init__(self, what: str, line: int | None = None) -> None:
        super().__init__(what if line is None else f"line {line}: {what}")


def _read(name: str, content: Any) -> TableFile:
    if not isinstance(content, YamlMapping):
        raise _InvalidError(f"expected 'key: value' lines, found {kind_of(content)}")
    entries = _entries(content)
    missing = [key for key in _KEYS if key not in content]
    # A limit that is misspelt would not hold.
    unknown = [key for key in content if key not in (*_KEYS, *_OPTIONAL_KEYS)]
    if missing or unknown:
        what = f"it lacks {', '.join(missing)}" if missing else f"it has no such key as {_listed(unknown)}"
        raise _InvalidError(
            f"{what}; keys: {', '.join(_KEYS)}; optional: {', '.join(_OPTIONAL_KEYS)}",
            None if missing else content.lines[unknown[0]],
        )
    for key in ("world_size", "max_message_bytes", *_LIMITS):
        value = content.get(key, 0)
        if key == _BY_OPERATION and isinstance(value, dict):
            content[key] = _by_operation(key, value, content.lines[key])
        elif type(value) is not int or value < 0:
            raise _InvalidError(
                f"{key} is {quoted(value)}; it must be a whole number of at least 0", content.lines[key]
            )
    rows = by_operation(
        _checked("row", number, line, entry, _row) for number, (line, entry) in enumerate(entries, start=1)
    )
    if not rows:
        raise _InvalidError("no rows")
    for operation, of_operation in rows.items():
        for previous, row in itertools.pairwise(of_operation):
            if row.up_to == previous.up_to and _is_by_switch(previous):
                continue  # for where that is passed over
            if row.up_to <= previous.up_to:
                raise _InvalidError(
                    f"{row}: the rows of {operation} must be sorted by up_to, in bytes; the one before says "
                    f"{previous.up_to}"
                )
    limits = {key: content[key] for key in _LIMITS if key in content}
    table = TuningTable(
        name,
        rows,
        content["max_message_bytes"],
        **limits,
        multicast=_multicast(content),
        layers=_layers(content),
        nodes=_nodes(content),
    )
    return TableFile(str(content["device"]), content["world_size"], table)


def _layers(content: YamlMapping) -> tuple[LayerRow, ...]:
    """The rows of linear layers."""
    found: dict[tuple[str, int, int, bool], list[LayerRow]] = {}
    for number, line, row in _rows_under(content, _LAYERS, "layer", _layer_row):
        _require_behind(found.setdefault(row.layer(), []), row, f"layer {number}", "rows of one layer", "tokens", line)
    return tuple(row for of_layer in found.values() for row in of_layer)


def _layer_row(entry: dict[str, Any]) -> LayerRow:
    _check_keys(entry, LayerRow, ("us", "cublas_us"))
    _require(registry.why_not_known("operation", entry["operation"], layers.OPERATIONS))
    for name in ("pdl", "is_faster"):
        _check_boolean(name, entry[name])
    row = LayerRow(**entry)
    _require(layers.why_not_row(row))
    return row


def _nodes(content: YamlMapping) -> tuple[NodeRow, ...]:
    """The rows of groups over several nodes."""
    found: dict[int, list[NodeRow]] = {}
    for number, line, row in _rows_under(content, _NODES, "row of nodes", _node_row):
        what = f"row of nodes {number}", "rows of one number of nodes"
        _require_behind(found.setdefault(row.nodes, []), row, *what, "bytes", line)
    return tuple(row for of_number in found.values() for row in of_number)


def _node_row(entry: dict[str, Any]) -> NodeRow:
    _check_keys(entry, NodeRow, ("us", "nccl_us"))
    _check_boolean("is_faster", entry["is_faster"])
    row = NodeRow(**entry)
    _require(node_rows.why_not_row(row))
    return row


def _rows_under(
    content: YamlMapping, key: str, kind: str, read: Callable[[dict[str, Any]], _T]
) -> Iterator[tuple[int, int, _T]]:
    """What ``read`` makes of each entry of the list under a key, with its number and line."""
    for number, (line, entry) in enumerate(_list(content, key, content.get(key)), start=1):
        yield number, line, _checked(kind, number, line, entry, read)


def _require_behind(before: list[_Sized], row: _Sized, which: str, of_what: str, unit: str, line: int) -> None:
    """Puts a row behind those that it belongs to, if it is of more."""
    if before and row.up_to <= before[-1].up_to:
        raise _InvalidError(
            f"{which}: {of_what} must be sorted by up_to, in {unit}; the one before says {before[-1].up_to}", line
        )
    before.append(row)


def _check_keys(entry: dict[str, Any], kind: type[LayerRow] | type[NodeRow], figures: tuple[str, ...]) -> None:
    """That an entry has the keys of a kind of row that it needs, and no others; and that times are numbers."""
    for name in entry:
        _require(registry.why_not_known("key", name, kind._fields))
    missing = [name for name in kind._fields if name not in entry and name not in kind._field_defaults]
    if missing:
        raise _InvalidError(f"it lacks {', '.join(missing)}")
    for name in figures:
        if name in entry:
            _check_us(name, entry[name])


def _check_boolean(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise _InvalidError(f"{name} is {quoted(value)}; it must be true or false")


def _multicast(content: YamlMapping) -> MulticastEntry | None:
    """What a table that permits NVLink multicast was made on."""
    if _MULTICAST not in content:
        return None
    value, line = content[_MULTICAST], content.lines[_MULTICAST]
    if not isinstance(value, dict) or set(value) != set(MulticastEntry._fields):
        raise _InvalidError(f"{_MULTICAST} is {quoted(value)}; it must have {', '.join(MulticastEntry._fields)}", line)
    if type(value["world_size"]) is not int:
        raise _InvalidError(f"world_size of {_MULTICAST} is {quoted(value['world_size'])}; it must be a number", line)
    words = {name: str(value[name]) for name in ("device", "driver", "date")}
    return MulticastEntry(world_size=value["world_size"], **words)


def _is_by_switch(row: Row) -> bool:
    algorithm = registry.operations()[row.operation].find(row.algorithm, row.protocol)
    return algorithm is not None and algorithm.by_switch


def _by_operation(key: str, value: dict[Any, Any], line: int) -> dict[str, int]:
    known = registry.operations()
    for operation, number in value.items():
        if operation not in known:
            raise _InvalidError(f"{key} names {quoted(operation)}; operations: {', '.join(known)}", line)
        if type(number) is not int or number < 0:
            raise _InvalidError(
                f"{key} of {operation} is {quoted(number)}; it must be a whole number of at least 0", line
            )
    return {operation: value[operation] for operation in known if operation in value}


def _entries(content: YamlMapping) -> list[tuple[int, Any]]:
    """The rows of a file in either form, each with its line; turns ``content`` into the present one."""
    lists = {key: content.pop(key) for key in _KEYS_OF_BEFORE if key in content}
    if not lists:
        return _list(content, "rows", content.get("rows"))
    if "rows" in content:
        raise _InvalidError(f"it has both rows and {' and '.join(lists)}: put all of them under rows")
    content["rows"] = []
    entries = []
    for key, found in lists.items():
        usual = {"operation": _KEYS_OF_BEFORE[key], "protocol": _PROTOCOL_OF_BEFORE}
        for line, entry in _list(content, key, found):
            entries.append((line, {**usual, **entry} if isinstance(entry, dict) else entry))
    return entries


def _list(content: YamlMapping, key: str, value: Any) -> list[tuple[int, Any]]:
    """The entries of a list, each with its line."""
    if value is None:
        return []
    if not isinstance(value, YamlList):
        raise _InvalidError(f"{key} is {quoted(value)}; it must be a list of rows", content.lines[key])
    return list(zip(value.lines, value, strict=True))


def _listed(names: list[Any]) -> str:
    return shortened(", ".join(map(str, names)))


def _checked(kind: str, number: int, line: int, entry: Any, read: Callable[[dict[str, Any]], _T]) -> _T:
    """What ``read`` makes of an entry of a list. What is wrong with it is said with its kind, number and line."""
    try:
        if not isinstance(entry, dict):
            raise _InvalidError("it must be 'key: value' pairs")
        return read(entry)
    except _InvalidError as error:
        raise _InvalidError(f"{kind} {number}, {quoted(entry)}: {error}", line) from None


def _row(entry: dict[str, Any]) -> Row:
    if registry.is_program(entry.get("algorithm")):
        return _row_of_program(entry)
    missing = [name for name in _OF_EVERY_ROW if name not in entry]
    if missing:
        raise _InvalidError(f"it lacks {', '.join(missing)}")
    operations = registry.operations()
    _require(registry.why_not_known("operation", entry["operation"], operations))
    algorithms = operations[entry["operation"]].algorithms
    _require(registry.why_not_known("algorithm", entry["algorithm"], (a.name for a in algorithms)))
    of_name = [a for a in algorithms if a.name == entry["algorithm"]]
    _require(registry.why_not_known("protocol", entry["protocol"], (a.protocol for a in of_name)))
    ranges = next(a.ranges for a in of_name if a.protocol == entry["protocol"])
    for name in entry:
        if name not in (*_OF_EVERY_ROW, *_FIGURES):
            _require(registry.why_not_known("tunable", name, ranges))
    missing = [name for name in ranges if name not in entry]
    if missing:
        raise _InvalidError(f"it lacks {', '.join(missing)}; {entry['algorithm']} has {', '.join(ranges)}")
    _check_up_to(entry["up_to"])
    for name, range_ in ranges.items():
        why = range_.why_not(entry[name])
        if why:
            raise _InvalidError(f"{name}: {why}")
    return _with_figures(entry)


def _row_of_program(entry: dict[str, Any]) -> Row:
    """A row that names a program of llm_comm.dsl. Whether there is such a program, and whether it can be launched with
    so many blocks and threads, is found out when a communicator is made."""
    missing = [name for name in ("operation", "up_to") if name not in entry]
    if missing:
        raise _InvalidError(f"it lacks {', '.join(missing)}")
    if entry["operation"] not in OPERATIONS_OF_PROGRAMS:
        raise _InvalidError(
            f"operation is {quoted(entry['operation'])}; programs are selected for {', '.join(OPERATIONS_OF_PROGRAMS)}"
        )
    if entry.get("protocol", PROTOCOL) != PROTOCOL:
        raise _InvalidError(f"protocol is {quoted(entry['protocol'])}; that of programs is {PROTOCOL}")
    for name in entry:
        known = (*_OF_EVERY_ROW, *TUNABLES_OF_PROGRAMS, *_FIGURES)
        _require(registry.why_not_known("key of a program's row", name, known))
    _check_up_to(entry["up_to"])
    for name in TUNABLES_OF_PROGRAMS:
        if name in entry and (type(entry[name]) is not int or not 1 <= entry[name] <= _MOST_OF_PROGRAMS[name]):
            raise _InvalidError(
                f"{name} is {quoted(entry[name])}; it must be a whole number from 1 to {_MOST_OF_PROGRAMS[name]}. "
                "Without it the program chooses"
            )
    return _with_figures({**entry, "protocol": PROTOCOL})


def _check_up_to(value: Any) -> None:
    if type(value) is not int or value <= 0:
        raise _InvalidError(f"up_to is {quoted(value)}; it must be a number of bytes above 0")


def _with_figures(entry: dict[str, Any]) -> Row:
    """The row of an entry whose other keys are valid."""
    if "us" in entry:
        _check_us("us", entry["us"])
    if "runner_up" not in entry:
        return Row(**entry)
    return Row(**{**entry, "runner_up": _runner_up(entry["runner_up"], entry["operation"])})


def _runner_up(value: Any, operation: str) -> RunnerUp:
    if not isinstance(value, dict) or set(value) != set(RunnerUp._fields):
        raise _InvalidError(f"runner_up is {quoted(value)}; it must have {', '.join(RunnerUp._fields)}")
    is_program = (
        operation in OPERATIONS_OF_PROGRAMS
        and registry.is_program(value["algorithm"])
        and value["protocol"] == PROTOCOL
    )
    if not is_program:
        what = [f"{a.name} {a.protocol}" for a in registry.operations()[operation].algorithms]
        _require(registry.why_not_known("runner_up", f"{value['algorithm']} {value['protocol']}", what))
    _check_us("us of runner_up", value["us"])
    return RunnerUp(**value)


def _check_us(name: str, value: Any) -> None:
    # A time that another was taken off can be negative.
    if type(value) not in (int, float) or not -_LONGEST_US <= value <= _LONGEST_US:
        raise _InvalidError(f"{name} is {quoted(value)}; it must be a number of microseconds")


def _require(why_not: str) -> None:
    if why_not:
        raise _InvalidError(why_not)


class _Dumper(yaml.SafeDumper):
    """Writes what appears twice out twice: ``read_yaml`` takes no aliases."""

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
        _BY_OPERATION: least if isinstance(least, int) else dict(least),
        _MEASURED: measured,
        **({} if table.multicast is None else {_MULTICAST: table.multicast._asdict()}),
    }
    rows = _lines(row.entry() for of_operation in table.rows.values() for row in of_operation)
    of_layers = _lines(row.entry() for row in table.layers)
    of_nodes = _lines(row.entry() for row in table.nodes)
    return (
        "# Written by `llm-comm tune`. The last row of an operation serves all larger messages, up to "
        f"max_message_bytes.\n{yaml.dump(head, Dumper=_Dumper, sort_keys=False)}rows:\n{rows}"
        + (f"{_LAYERS}:\n{of_layers}" if of_layers else "")
        + (f"{_NODES}:\n{of_nodes}" if of_nodes else "")
    )


def _lines(entries: Iterable[dict[str, Any]]) -> str:
    """A row a line: tables are read by people who compare rows."""
    return "".join(
        "  - " + yaml.dump(entry, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=400)
        for entry in entries
    )
