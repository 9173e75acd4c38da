"""Each option on one rank alone: an error on all ranks, or right sums, as the table of the options says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import RankPool, make_communicator, new_groups
from options_on_one_rank import OTHERS, WORLD, try_all, write_tables

from llm_comm import RendezvousError
from llm_comm.options import OPTIONS
from llm_comm.runtime.rank_names import name_group


def test_each_option_on_one_rank_alone(ranks: RankPool, tmp_path: Path) -> None:
    assert OTHERS.keys() == OPTIONS.keys()
    first, *others = ranks.run(WORLD, try_all, write_tables(tmp_path), (1 << 10, 128 << 10), False)
    assert others == [first] * (WORLD - 1)


def differ_in_a_group() -> tuple[str, int]:
    """Ranks 1 and 2 of three are a group, as those of an engine. Returns what the last one is told, and its process."""
    group = new_groups([[1, 2]])[0]
    if dist.get_rank() > 0:
        name_group(group, "tp:1")
        with pytest.raises(RendezvousError) as caught:
            make_communicator(group, max_blocks=8 if dist.get_rank() == 2 else None)
        return str(caught.value), os.getpid()
    return "", 0


def test_a_rank_of_a_group_is_named_by_its_global_rank_and_process(ranks: RankPool) -> None:
    _, (text, _), (same, pid) = ranks.run(WORLD, differ_in_a_group)
    assert text == same
    assert text.startswith("the ranks of group tp:1 have different options: max_blocks is ")
    assert re.search(rf" 8 on rank 1 \(global rank 2, pid {pid} on [^)]+\)", text), text
    assert " on rank 0 (global rank 1, pid " in text
