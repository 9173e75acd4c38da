"""Each option on one rank alone: an error on all ranks, or right sums, as the table of the options says."""

from __future__ import annotations

from pathlib import Path

from harness import RankPool
from options_on_one_rank import OTHERS, WORLD, try_all, write_tables

from llm_comm.options import OPTIONS


def test_each_option_on_one_rank_alone(ranks: RankPool, tmp_path: Path) -> None:
    assert OTHERS.keys() == OPTIONS.keys()
    first, *others = ranks.run(WORLD, try_all, write_tables(tmp_path), (1 << 10, 128 << 10), False)
    assert others == [first] * (WORLD - 1)
