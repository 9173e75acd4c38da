"""Tuning tables written for a test, and cores that judge the plans made from tables."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import yaml
from reference import ALGORITHMS

from llm_comm import Config, _core
from llm_comm.planning import catalogue
from llm_comm.planning.tables import ALL_GATHER, ALL_REDUCE, FUSED, REDUCE_SCATTER, Origin, Row, TuningTable

#: Every way to run a message that differs in code path: grids of one block and of several, one tile and many, sent
#: ahead or not.
VARIANTS = tuple(itertools.product(ALGORITHMS, (1, 2, 5), (1, 4, 32), (0, 1, 3)))

#: Launches of the fused LL kernels, as (blocks, threads, cluster, depth): blocks that take a row in one tile and in
#: several, alone and in clusters, with tiles sent ahead or not.
FUSED_LAUNCHES = (
    (1, 64, 1, 3),
    (2, 512, 1, 1),
    (8, 64, 2, 0),
    (16, 256, 16, 3),
    (24, 1024, 8, 0),
    (64, 128, 4, 0),
)

#: By how much a message grows from one row of `table_of_all_variants` to the next.
STEP_BYTES = 992


def general_table(world_size: int, sm_count: int) -> TuningTable:
    """The table of a device that nobody has measured."""
    return _found("a device that nobody tuned for", world_size, sm_count)


def emulated_table() -> TuningTable:
    """The table of emulated GPUs."""
    return _found("emulated", 2, 1)


def _found(device: str, world_size: int, sm_count: int) -> TuningTable:
    return catalogue.find_table(device, world_size, sm_count, Config.load({}))._replace(origin=Origin())


def plain_row(up_to: int, algorithm: str, blocks: int, tile_lines: int, depth: int) -> Row:
    """A row of the LL all-reduce."""
    return Row(up_to, ALL_REDUCE, algorithm, "LL", blocks=blocks, tile_lines=tile_lines, depth=depth)


def fused_row(up_to: int, algorithm: str, blocks: int, threads: int, cluster: int, depth: int) -> Row:
    """A row of the LL all-reduce + RMSNorm."""
    return Row(up_to, FUSED, algorithm, "LL", blocks=blocks, threads=threads, cluster=cluster, depth=depth)


def fused_rows() -> tuple[Row, ...]:
    """A row for every algorithm and launch of ``FUSED_LAUNCHES``."""
    return tuple(fused_row(1, algorithm, *launch) for algorithm in ALGORITHMS for launch in FUSED_LAUNCHES)


def write_table(path: Path, rows: list[Row], **fields: Any) -> Path:
    """A table of ``rows`` in the format of ``configs/``; ``fields`` replace its other entries."""
    content = {"device": "test device", "world_size": 8, "max_message_bytes": 64 << 20}
    # Of a row that is not valid, everything but zeros.
    entries = [
        row.entry() if is_known(row) else {k: v for k, v in row._asdict().items() if v not in (0, None)} for row in rows
    ]
    path.write_text(yaml.safe_dump({**content, "rows": entries, **fields}), encoding="utf-8")
    return path


def is_known(row: Row) -> bool:
    """Whether the registry has the row's algorithm."""
    by_switch = (("two_shot_switch", "LL"), ("two_shot_ld_reduce", "Switch"))
    known = (*((name, "LL") for name in ALGORITHMS), *by_switch)
    return row.operation in (ALL_REDUCE, FUSED) and (row.algorithm, row.protocol) in known


def table_of_all_variants(path: Path) -> Path:
    """A table with a row for every variant, in a shuffled order."""
    order = random.Random(0).sample(VARIANTS, len(VARIANTS))
    return write_table(path, [plain_row(STEP_BYTES * n, *variant) for n, variant in enumerate(order, start=1)])


def table_of_parts(path: Path) -> Path:
    """A table with rows of both algorithms for operations on parts: grids of one block and of several, one tile and
    many, ahead by one step or more."""
    rows = []
    for operation in (ALL_GATHER, REDUCE_SCATTER):
        of_operation = [
            Row(0, operation, "one_shot", "LL", blocks=blocks, tile_lines=tile_lines)
            for blocks, tile_lines in ((1, 1), (2, 4), (5, 32))
        ] + [
            Row(0, operation, "push_hb", "HB", blocks=blocks, tile_lines=tile_lines, depth=depth)
            for blocks, tile_lines, depth in ((1, 3, 2), (2, 32, 3), (5, 7, 8))
        ]
        order = random.Random(operation).sample(of_operation * 6, 36)
        rows += [row._replace(up_to=STEP_BYTES * number) for number, row in enumerate(order, start=1)]
    entries = [row.entry() for row in rows]
    content = {"device": "test device", "world_size": 8, "max_message_bytes": 64 << 20, "rows": entries}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def write_fused_table(path: Path, rows: list[Row]) -> Path:
    """A table of all variants whose rows for fused operations are ``rows``."""
    plain = [plain_row(STEP_BYTES * n, *variant) for n, variant in enumerate(VARIANTS, start=1)]
    return write_table(path, [*plain, *rows])


def limits_of(config: Config, sm_count: int = 132, max_cluster: int = 16, compute_capability: int = 90) -> _core.Limits:
    """Of an H200, unless said otherwise."""
    return _core.Limits(
        slot_bytes=_core.slot_bytes(config.workspace_bytes),
        staging_bytes=_core.staging_bytes(config.workspace_bytes),
        sm_count=sm_count,
        max_cluster=max_cluster,
        compute_capability=compute_capability,
    )


def core_of(world: int, config: Config) -> _core.Core:
    """An emulated core, which refuses plans that do not fit."""
    return _core.make_emulated_core(
        _core.CoreOptions(
            rank=0,
            world_size=world,
            slot_bytes=_core.slot_bytes(config.workspace_bytes),
            staging_bytes=_core.staging_bytes(config.workspace_bytes),
            timeout_s=1.0,
            dependent_launch=False,
            check_calls=False,
        )
    )
