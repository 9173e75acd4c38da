"""Tuning tables written for a test, and cores that judge the plans made from tables."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import yaml

from llm_comm import Config, _core
from llm_comm.planning import selection
from llm_comm.planning.selection import ALGORITHMS, FusedRow, TuningRow

#: Every way to run a message that differs in code path: grids of one block and of several, one tile and many, sent
#: ahead or not.
VARIANTS = tuple(itertools.product(ALGORITHMS, (1, 2, 5), (1, 4, 32), (0, 1, 3)))

#: By how much a message grows from one row of `table_of_all_variants` to the next.
STEP_BYTES = 992


def write_table(path: Path, rows: list[TuningRow], **fields: Any) -> Path:
    """A table of ``rows`` in the format of ``configs/``; ``fields`` replace its other entries."""
    content = {"device": "test device", "world_size": 8, "max_message_bytes": 64 << 20}
    content |= {"all_reduce": [row._asdict() for row in rows], **fields}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def table_of_all_variants(path: Path) -> Path:
    """A table with a row for every variant, in a shuffled order."""
    order = random.Random(0).sample(VARIANTS, len(VARIANTS))
    return write_table(path, [TuningRow(STEP_BYTES * n, *variant) for n, variant in enumerate(order, start=1)])


def write_fused_table(path: Path, rows: list[FusedRow]) -> Path:
    """A table of all variants whose rows for fused operations are ``rows``."""
    plain = [TuningRow(STEP_BYTES * n, *variant) for n, variant in enumerate(VARIANTS, start=1)]
    return write_table(path, plain, fused=[row._asdict() for row in rows])


def core_of(world: int, config: Config) -> _core.Core:
    """An emulated core, which refuses plans that do not fit."""
    return _core.make_emulated_core(
        _core.CoreOptions(
            rank=0,
            world_size=world,
            slot_bytes=selection.slot_bytes(config),
            timeout_s=1.0,
            dependent_launch=False,
            check_calls=False,
        )
    )
