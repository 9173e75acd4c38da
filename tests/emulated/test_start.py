"""What engines measure at their start, on several ranks: all go by the same rows, or by none."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator

from llm_comm.integrations.layer_tuning import LayerBench, tune
from llm_comm.planning.layers import LayerKey
from llm_comm.planning.models import Layer

LOG = logging.getLogger("test")
LAYERS = [Layer("o_proj", "linear", 64, 128), Layer("down_proj", "linear_fp8", 64, 256)]
Outcome = tuple[str, list[tuple[Any, ...]], str]


def _plain(rows: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in rows]


def start(directory: str, layers: list[Layer] = LAYERS, **options: Any) -> Outcome:
    """What a start of an engine logs, its rows, and what ranks compare of their tables."""
    os.environ["LLM_COMM_TABLE_DIR"] = directory
    with make_communicator(tune_at_start=60, **options) as comm:
        about = tune(comm, dist.group.WORLD, layers, LOG)
        found = about, _plain(comm.table.layers), comm.table.digest()
        assert comm.all_reduce(torch.ones(5)).eq(comm.world_size).all()
        x, weight = torch.ones(3, 128, dtype=torch.bfloat16), torch.ones(64, 128, dtype=torch.bfloat16)
        assert comm.linear(x, weight).eq(128).all()
    return found


def with_times_of_rank(directory: str) -> Outcome:
    rank = dist.get_rank()
    times = [(10.0 - rank, [(8, 2, 1, 5.0 + rank), (16, 2, 1, 6.0)])] * 2
    with mock.patch.object(LayerBench, "times", return_value=times):
        return start(directory)


def with_one_out_of_memory(directory: str) -> Outcome:
    def times(bench: LayerBench, layer: LayerKey) -> Any:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [(10.0, [(8, 2, 1, 5.0)])] * 2

    with mock.patch.object(LayerBench, "times", times):
        return start(directory)


def with_a_model_that_one_cannot_read(directory: str) -> Outcome:
    return start(directory, LAYERS if dist.get_rank() else [])


def with_a_directory_of_rank(directory: str) -> Outcome:
    """Another machine's: what rank 0 has kept counts."""
    return start(f"{directory}/{dist.get_rank()}")


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_go_by_the_same_rows(ranks: RankPool, tmp_path: Path, world: int) -> None:
    outcomes = ranks.run(world, start, str(tmp_path))
    assert len({repr(outcome[1:]) for outcome in outcomes}) == 1
    assert all("2 measured in" in about for about, _, _ in outcomes)
    assert len(outcomes[0][1]) == 4
    again = ranks.run(world, start, str(tmp_path))
    assert all("0 measured in" in about for about, _, _ in again)
    assert [outcome[1:] for outcome in again] == [outcome[1:] for outcome in outcomes]


def test_the_slowest_rank_counts(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run(3, with_times_of_rank, str(tmp_path))
    for _, rows, _ in outcomes:
        assert [row[4:] for row in rows] == [(tokens, True, 16, 2, 1, 6.0, 10.0) for tokens in (1, 16)] * 2


def test_one_rank_that_cannot_measure(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run(3, with_one_out_of_memory, str(tmp_path))
    assert [(about, rows) for about, rows, _ in outcomes] == [("", [])] * 3
    assert not list(tmp_path.iterdir()), "nothing is kept"


def test_a_rank_without_the_model(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run(2, with_a_model_that_one_cannot_read, str(tmp_path))
    assert [(about, rows) for about, rows, _ in outcomes] == [("", [])] * 2


def test_directories_of_several_machines(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, with_a_directory_of_rank, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    outcomes = ranks.run(2, with_a_directory_of_rank, str(tmp_path))
    assert all("0 measured" in about for about, _, _ in outcomes)
