"""Which kernel runs for a message: a pure function of its size, the group and a tuning table. No CUDA here.

A tuning table is a YAML file in ``configs/``, written by ``llm-comm tune``: rows sorted by ``up_to``, the largest
message in bytes that a row serves.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import yaml

from llm_comm.config import MIB, Config
from llm_comm.errors import ConfigError

logger = logging.getLogger("llm_comm")

#: Calls whose lay-out is kept. Prefill brings ever new sizes; each takes about a kilobyte.
MAX_PREPARED = 4096
# Of a table that does not say: what was found on 4 H200s.
_MAX_FUSED_BYTES = MIB
#: Of tables for devices on which nothing has been measured, for each SM; what is best on an H200.
_FUSED_BLOCKS_PER_SM = 3
_ANY_NUMBER_OF_BLOCKS = 1 << 40
LINE_BYTES = 16
#: Of a workspace, before its slots (kHeaderBytes of device_comm.cuh).
HEADER_BYTES = 64 << 10
MAX_WORLD_SIZE = 8
MAX_BLOCK_THREADS = 1024
ALGORITHMS = ("one_shot", "two_shot")
_TABLE_KEYS = ("device", "world_size", "max_message_bytes", "all_reduce")
_TABLE_LIMITS = ("max_fused_bytes", "fused_blocks")
_OPTIONAL_TABLE_KEYS = (*_TABLE_LIMITS, "fused", "measured")


class TuningRow(NamedTuple):
    """How to run messages of up to ``up_to`` bytes."""

    up_to: int
    algorithm: str
    #: Most blocks of a launch; a message with fewer tiles takes fewer.
    blocks: int
    #: 16-byte lines that a block exchanges with each peer at a time: a power of two.
    tile_lines: int
    #: Tiles that a block sends ahead of the one it waits for.
    depth: int


class FusedRow(NamedTuple):
    """How to run messages of up to ``up_to`` bytes that are normed too (``fused_selection``)."""

    up_to: int
    algorithm: str
    #: Most blocks of a launch; fewer where there are fewer rows.
    blocks: int
    #: Most threads of a block.
    threads: int
    #: Most blocks that share a row: a power of two up to 16; more than 8 only where the device permits it.
    cluster: int
    #: Tiles that a block sends ahead of the one it waits for.
    depth: int


class TuningTable(NamedTuple):
    """Rows for one device and world size. The last row serves all larger messages."""

    name: str
    rows: tuple[TuningRow, ...]
    max_message_bytes: int
    #: For fused operations; empty: derived from ``rows``.
    fused: tuple[FusedRow, ...] = ()
    #: Larger messages are not fused: an all-reduce and a norm of its own are as fast.
    max_fused_bytes: int = _MAX_FUSED_BYTES
    #: Where fused rows would take more blocks than this, fewer of them share a row: among the kernels of a model, many
    #: small blocks cost more than they gain (docs/performance.md).
    fused_blocks: int = _ANY_NUMBER_OF_BLOCKS

    def fingerprint(self) -> str:
        """The name, and a digest of the content: what ranks compare."""
        digest = hashlib.sha256(repr(self[1:]).encode()).hexdigest()
        return f"{self.name} ({digest[:12]})"


@dataclass(frozen=True)
class Plan:
    """What ``Communicator.all_reduce`` runs for a message.

    Attributes:
        algorithm: ``"one_shot"``, ``"two_shot"``, ``"none"`` where nothing has to be exchanged, or ``"declined"``.
        protocol: ``"LL"``, or ``"none"``.
        blocks: Blocks of a launch.
        threads: Threads of a block.
        tile_lines: Lines of 16 bytes that a block exchanges with each peer at a time.
        depth: Tiles sent ahead of the one waited for.
        chunks: Launches that the message takes.
        chunk_elements: Elements of all launches but the last.
        message_bytes: Size of the message.
        reason: Why this plan.
    """

    algorithm: str
    protocol: str
    blocks: int
    threads: int
    tile_lines: int
    depth: int
    chunks: int
    chunk_elements: int
    message_bytes: int
    reason: str


def _nothing(message_bytes: int, reason: str) -> Plan:
    return Plan("none", "none", 0, 0, 0, 0, 0, 0, message_bytes, reason)


def declined(message_bytes: int, why: str) -> Plan:
    """The plan of a message that llm_comm does not serve."""
    return Plan("declined", "none", 0, 0, 0, 0, 0, 0, message_bytes, why)


def message_limit(table: TuningTable, config: Config) -> int:
    """Larger messages are declined, in bytes."""
    return table.max_message_bytes if config.max_message_bytes is None else config.max_message_bytes


def select(count: int, element_bytes: int, world_size: int, table: TuningTable, config: Config) -> Plan:
    """The plan for a message of ``count`` elements of ``element_bytes`` each.

    The same on every rank that has the same table and config. A message that is too large is declined.
    """
    message_bytes = count * element_bytes
    limit = message_limit(table, config)
    if count == 0:
        return _nothing(0, "empty message")
    if world_size == 1:
        return _nothing(message_bytes, "one rank")
    if message_bytes > limit:
        return declined(message_bytes, f"more than max_message_bytes={limit}")

    row = next((row for row in table.rows if message_bytes <= row.up_to), table.rows[-1])
    algorithm = row.algorithm if config.algorithm == "auto" else config.algorithm
    tile_lines = min(row.tile_lines, 1 << int(math.log2(MAX_BLOCK_THREADS // world_size)))
    most_lines = max_lines_of_launch(algorithm, slot_bytes(config) // LINE_BYTES, world_size)
    message_lines = math.ceil(message_bytes / LINE_BYTES)
    chunk_lines = _lines_of_launch(message_lines, most_lines, world_size * tile_lines)
    chunk_elements = chunk_lines * LINE_BYTES // element_bytes
    chunks = math.ceil(count / chunk_elements)
    launch_lines = min(message_lines, chunk_lines)
    tiled_lines = launch_lines if algorithm == "one_shot" else math.ceil(launch_lines / world_size)
    return Plan(
        algorithm=algorithm,
        protocol="LL",
        blocks=min(row.blocks, math.ceil(tiled_lines / tile_lines)),
        threads=tile_lines * world_size,
        tile_lines=tile_lines,
        depth=row.depth,
        chunks=chunks,
        chunk_elements=chunk_elements,
        message_bytes=message_bytes,
        reason=f"{table.name}, up to {row.up_to} bytes"
        + ("" if config.algorithm == "auto" else f"; algorithm forced to {algorithm}"),
    )


def _lines_of_launch(message_lines: int, most_lines: int, unit: int) -> int:
    """Lines of all launches but the last: those of a message that takes several are as long as each other, but for
    ``unit``. The trips to the peers and back take as long in a short one.
    """
    if message_lines <= most_lines:
        return most_lines
    launches = math.ceil(message_lines / most_lines)
    return min(most_lines, math.ceil(message_lines / (launches * unit)) * unit)


def slot_bytes(config: Config) -> int:
    """Bytes of each of the two slots of a workspace: whole lines."""
    return (config.workspace_bytes - HEADER_BYTES) // 2 // LINE_BYTES * LINE_BYTES


def max_lines_of_launch(algorithm: str, slot_lines: int, world_size: int) -> int:
    """Lines of the largest message that one launch can carry through a slot.

    One-shot keeps a copy of the message for each sender; two-shot a slice of it for each sender in both phases.
    """
    if algorithm == "one_shot":
        return slot_lines // world_size
    return slot_lines // (2 * world_size) * world_size


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


def load_table(path: Path | resources.abc.Traversable) -> tuple[str, int, TuningTable]:
    """Reads a tuning table: (device it is for, world size, table).

    Raises:
        ConfigError: The file cannot be read or a row is not valid.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"tuning table {path}: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"tuning table {path}: expected 'key: value' lines, found {type(content).__name__}")
    missing = [key for key in _TABLE_KEYS if key not in content]
    # A limit that is misspelt would not hold.
    unknown = [key for key in content if key not in (*_TABLE_KEYS, *_OPTIONAL_TABLE_KEYS)]
    if missing or unknown:
        what = f"it lacks {', '.join(missing)}" if missing else f"it has no such key as {', '.join(map(str, unknown))}"
        raise ConfigError(
            f"tuning table {path}: {what}; keys: {', '.join(_TABLE_KEYS)}; optional: {', '.join(_OPTIONAL_TABLE_KEYS)}"
        )
    for name in ("world_size", "max_message_bytes", *_TABLE_LIMITS):
        value = content.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"tuning table {path}: {name} is {value!r}; it must be a whole number of at least 0")
    try:
        rows = tuple(TuningRow(**row) for row in content["all_reduce"] or ())
        fused = tuple(FusedRow(**row) for row in content.get("fused") or ())
    except TypeError as error:  # not a list of mappings, or other keys
        raise ConfigError(f"tuning table {path}: a row of all_reduce or fused is not valid: {error}") from error
    _check_rows(str(path), rows)
    _check_fused_rows(str(path), fused)
    limits = {name: content[name] for name in _TABLE_LIMITS if name in content}
    table = TuningTable(path.name, rows, content["max_message_bytes"], fused, **limits)
    return str(content["device"]), content["world_size"], table


def _check_rows(path: str, rows: Sequence[TuningRow]) -> None:
    if not rows:
        raise ConfigError(f"tuning table {path}: no rows")
    previous = 0
    for row in rows:
        if not _is_valid(row) or row.up_to <= previous:
            raise ConfigError(
                f"tuning table {path}: {row} is not valid: algorithm is one of {', '.join(ALGORITHMS)}, blocks 1 to "
                "65535, tile_lines a power of two, depth 0 to 65535, and rows are sorted by up_to, in bytes"
            )
        previous = row.up_to


def _check_fused_rows(path: str, rows: Sequence[FusedRow]) -> None:
    previous = 0
    for row in rows:
        if not _is_valid_fused(row) or row.up_to <= previous:
            raise ConfigError(
                f"tuning table {path}: {row} is not valid: algorithm is one of {', '.join(ALGORITHMS)}, blocks 1 to "
                f"65535, threads 64 to {MAX_BLOCK_THREADS}, cluster 1, 2, 4, 8 or 16, depth 0 to 65535, and rows are "
                "sorted by up_to, in bytes"
            )
        previous = row.up_to


def _is_valid_fused(row: FusedRow) -> bool:
    return (
        all(type(number) is int for number in (row.up_to, row.blocks, row.threads, row.cluster, row.depth))
        and row.algorithm in ALGORITHMS
        and 0 < row.blocks < 65536
        and 64 <= row.threads <= MAX_BLOCK_THREADS
        and row.cluster in (1, 2, 4, 8, 16)
        and 0 <= row.depth < 65536
    )


def _is_valid(row: TuningRow) -> bool:
    numbers = (row.up_to, row.blocks, row.tile_lines, row.depth)
    return (
        all(type(number) is int for number in numbers)
        and row.algorithm in ALGORITHMS
        and 0 < row.blocks < 65536
        and row.tile_lines > 0
        and row.tile_lines & (row.tile_lines - 1) == 0
        and 0 <= row.depth < 65536
    )


def shipped_tables() -> Iterator[resources.abc.Traversable]:
    """The tuning tables that come with the package."""
    directory = resources.files("llm_comm") / "configs"
    if directory.is_dir():
        yield from sorted((f for f in directory.iterdir() if f.name.startswith("tune_")), key=lambda f: f.name)


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
    for path in shipped_tables():
        device, world, table = load_table(path)
        if device == device_name and world == world_size:
            return table
    if device_name == "emulated":
        return emulated_table()
    return general_table(world_size, sm_count)


def general_table(world_size: int, sm_count: int) -> TuningTable:
    """For devices without a table of their own.

    One-shot sends (N-1) x bytes in one hop, two-shot 2 (N-1)/N x bytes in two: by the H200 tables they break even near
    400 KiB / (N-1), which is the time of a hop on NVLink. Tiles and grids are the H200's too.
    """
    one_shot = 400 * 1024 // max(1, world_size - 1)
    rows = (
        TuningRow(one_shot, "one_shot", 2 * sm_count, 16, 0),
        TuningRow(512 * 1024, "two_shot", 4 * sm_count, 16, 0),
        TuningRow(64 * MIB, "two_shot", 8 * sm_count, 32, 0),
    )
    return TuningTable("general table", rows, 8 * MIB, fused_blocks=_FUSED_BLOCKS_PER_SM * sm_count)


def emulated_table() -> TuningTable:
    """Small blocks: an emulated GPU has few lanes, and what matters is that every path is taken."""
    rows = (
        TuningRow(8 * 1024, "one_shot", 2, 16, 0),
        TuningRow(64 * MIB, "two_shot", 4, 16, 1),
    )
    fused = (
        FusedRow(8 * 1024, "one_shot", 4, 128, 2, 0),
        FusedRow(64 * MIB, "two_shot", 4, 128, 2, 1),
    )
    return TuningTable("emulated", rows, 64 * MIB, fused, max_fused_bytes=64 * MIB)
