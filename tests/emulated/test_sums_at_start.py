"""Sums that measure themselves at start: all ranks go by the same rows, up to what was measured, or by none."""

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

from llm_comm import Communicator
from llm_comm.bench.choosing import Measured
from llm_comm.bench.measuring import AtSize
from llm_comm.bench.tune_subjects import candidates_on
from llm_comm.config import Config, EngineOptions
from llm_comm.integrations import collective_tuning
from llm_comm.integrations.collective_tuning import TOKENS, over, tune
from llm_comm.planning.catalogue import find_table
from llm_comm.planning.models import Model, of_config
from llm_comm.planning.tables import ALL_REDUCE, FUSED, Origin

LOG = logging.getLogger("test")
HIDDEN = 64
SIZES = sorted(2 * HIDDEN * tokens for tokens in TOKENS)


def model_of(hidden: int) -> Model | None:
    """None for 0."""
    entries = {"num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 64, "hidden_size": hidden}
    return of_config(entries) if hidden else None


class StandIn:
    """In place of the benchmark, which needs GPUs: the last candidate is the fastest."""

    failing = False
    declining = False
    measured = 0

    def __init__(self, comm: Communicator, group: Any, subject: Any, size: int, schedule: Any) -> None:
        self._rows = list(candidates_on(comm, subject, size))
        self._size = size
        if StandIn.failing:
            raise RuntimeError("the GPU is busy")

    def candidates(self, show: Any, with_nccl: bool) -> AtSize:
        assert not with_nccl, "engines' groups are gloo's"
        StandIn.measured += 1
        found = [] if StandIn.declining else [Measured(row, 100.0 - n) for n, row in enumerate(self._rows)]
        return AtSize(self._size, found)


def start(
    directory: str, fails: bool = False, hidden_of_rank_1: int = HIDDEN, declines: bool = False
) -> dict[str, Any]:
    os.environ["LLM_COMM_TABLE_DIR"] = directory
    StandIn.failing, StandIn.declining, StandIn.measured = fails, declines, 0
    rank = dist.get_rank()
    with make_communicator() as comm, mock.patch.object(collective_tuning, "Bench", StandIn):
        with mock.patch.object(collective_tuning, "_budget_s", return_value=60.0):
            assert tune(comm, dist.group.WORLD, model_of(HIDDEN), LOG) == "", "a table is of this machine"
            assert StandIn.measured == 0
            before = comm.table._replace(origin=Origin("general", is_tuned=False))
            comm.use_table(before)
            about = tune(comm, dist.group.WORLD, model_of(hidden_of_rank_1 if rank == 1 else HIDDEN), LOG)
        rows = comm.table.rows
        x = torch.full((4, HIDDEN), rank + 1, dtype=torch.bfloat16)
        total = comm.world_size * (comm.world_size + 1) // 2
        assert comm.all_reduce(x).eq(total).all()
        normed, _ = comm.all_reduce_add_rms_norm(x, None, torch.ones(HIDDEN, dtype=torch.bfloat16), 1e-5)
        assert normed.eq(1).all()
        changed = {
            operation: [row.up_to for row in rows[operation] if row not in before.rows[operation]]
            for operation in (ALL_REDUCE, FUSED)
        }
        largest = max(SIZES)
        for operation in (ALL_REDUCE, FUSED):
            above = [row for row in before.rows[operation] if row.up_to > largest]
            assert [row for row in rows[operation] if row.up_to > largest] == above
    return {"about": about, "measured": StandIn.measured, "changed": changed, "digest": comm.table.digest()}


@pytest.mark.parametrize("world", [2, 3])
def test_measured_once_and_kept(ranks: RankPool, tmp_path: Path, world: int) -> None:
    first = ranks.run(world, start, str(tmp_path))
    for outcome in first:
        assert outcome["about"].startswith("; sums of decode batches measured in ")
        assert outcome["measured"] == 2 * len(TOKENS)
        assert all(set(sizes) <= set(SIZES) and max(sizes) == max(SIZES) for sizes in outcome["changed"].values())
    assert len({outcome["digest"] for outcome in first}) == 1
    again = ranks.run(world, start, str(tmp_path))
    for outcome in again:
        assert outcome["about"] == "; sums of decode batches measured at an earlier start"
        assert outcome["measured"] == 0
        assert outcome["digest"] == first[0]["digest"]


def start_quantized(directory: str) -> tuple[int, set[str]]:
    os.environ["LLM_COMM_TABLE_DIR"] = directory
    StandIn.failing, StandIn.declining, StandIn.measured = False, False, 0
    with make_communicator(wire="int8", wire_min_bytes=max(SIZES)) as comm:
        comm.use_table(comm.table._replace(origin=Origin("general", is_tuned=False)))
        stand_in = mock.patch.object(collective_tuning, "Bench", StandIn)
        with stand_in, mock.patch.object(collective_tuning, "_budget_s", return_value=60.0):
            assert tune(comm, dist.group.WORLD, model_of(HIDDEN), LOG).startswith("; sums of decode batches measured")
        return StandIn.measured, set(comm.table.rows)


def test_quantized_messages_are_not_measured(ranks: RankPool, tmp_path: Path) -> None:
    """Neither exactly, as that would not run, nor as they are: that the operator chose."""
    for measured, keys in ranks.run(2, start_quantized, str(tmp_path)):
        assert measured == 2 * len(TOKENS) - 1
        assert not any("wire" in key for key in keys)


def test_ranks_that_cannot_measure_go_by_the_table(ranks: RankPool, tmp_path: Path) -> None:
    for outcome in ranks.run(2, start, str(tmp_path), True):
        assert (outcome["about"], outcome["changed"]) == ("", {ALL_REDUCE: [], FUSED: []})
    assert not list(tmp_path.iterdir())


def test_messages_that_an_option_declines(ranks: RankPool, tmp_path: Path) -> None:
    for outcome in ranks.run(2, start, str(tmp_path), False, HIDDEN, True):
        assert (outcome["about"], outcome["changed"]) == ("", {ALL_REDUCE: [], FUSED: []})
    assert not list(tmp_path.iterdir())


def test_where_sums_are_measured() -> None:
    def seconds(is_emulated: bool, **options: Any) -> float:
        communicator: Any = mock.Mock(
            is_emulated=is_emulated, device=torch.device("cuda", 0), config=EngineOptions.load({}, **options)
        )
        return collective_tuning._budget_s(communicator)

    assert seconds(False) == 20.0
    assert seconds(False, tune_at_start=3) == seconds(False, tune_at_start=3, share_gpu=True) == 3.0
    assert seconds(True) == seconds(True, tune_at_start=3) == seconds(False, share_gpu=True) == 0.0
    assert seconds(False, tune_at_start=0) == seconds(False, algorithm="one_shot") == 0.0


def test_ranks_that_know_other_models(ranks: RankPool, tmp_path: Path) -> None:
    for hidden in (0, 2 * HIDDEN):
        for outcome in ranks.run(2, start, str(tmp_path), False, hidden):
            assert (outcome["about"], outcome["measured"]) == ("", 0)


def test_a_table_keeps_what_was_not_measured() -> None:
    table = find_table("NVIDIA H200", 4, 132, Config.load({}), 90)
    own = table.rows[ALL_REDUCE]
    small = [own[-1]._replace(up_to=100), own[-1]._replace(up_to=own[1].up_to)]
    found = over(table, small)
    assert list(found.rows[ALL_REDUCE]) == [*small, *(row for row in own if row.up_to > own[1].up_to)]
    assert {key: rows for key, rows in found.rows.items() if key != ALL_REDUCE} == {
        key: rows for key, rows in table.rows.items() if key != ALL_REDUCE
    }
