"""The benchmark of a tuning table: what it marks, and what it says of what the table declines."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tables import limits_of, plain_row

from llm_comm.bench import table, timing
from llm_comm.bench.choosing import Measured
from llm_comm.bench.table import Compared
from llm_comm.bench.tune_subjects import Bound, CollectiveSubject
from llm_comm.cli import commands, launch
from llm_comm.config import Config
from llm_comm.planning.multicast import NO_MULTICAST
from llm_comm.planning.selection import select
from llm_comm.planning.tables import ALL_REDUCE, TuningTable, by_operation

CONFIG = Config.load({})
ROW = plain_row(4096, "one_shot", 8, 16, 0)


def compared(us: float | None, best: float) -> Compared:
    return Compared(ALL_REDUCE, 4096, "two_shot LL, 4 blocks x 64 threads", us, Measured(ROW, best))


@pytest.mark.parametrize(
    ("us", "best", "is_marked"),
    [(1.05, 1.0, False), (1.0501, 1.0, True), (0.9, 1.0, False), (None, 1.0, False), (1.0, -0.1, False)],
)
def test_what_is_marked(us: float | None, best: float, is_marked: bool) -> None:
    assert compared(us, best).is_marked == is_marked


def test_what_is_printed() -> None:
    assert table.line(compared(2.2, 2.0), "") == (
        "        4K     2.20 us  two_shot LL, 4 blocks x 64 threads   "
        "best     2.00 us one_shot LL  blocks<=8 tile_lines=16 depth=0 * +10.0%"
    )
    assert table.line(compared(None, 2.0), "fused ").endswith("blocks<=8 tile_lines=16 depth=0")
    assert table.line(compared(None, 2.0), "fused ").startswith("        4K        - us  fused two_shot")
    assert table.summary([compared(2.0, 2.0)] * 3, "t.yaml") == (
        "t.yaml: its choice is within 5% of the best candidate at all 3 sizes"
    )
    assert table.summary([compared(2.0, 2.0), compared(2.2, 2.0)], "t.yaml").startswith("t.yaml: at 1 of 2 sizes ano")


class Comm(SimpleNamespace):
    rank, world_size, device, limits = 0, 2, torch.device("cpu"), limits_of(CONFIG)
    config, multicast = CONFIG, NO_MULTICAST

    def __init__(self) -> None:
        rows = by_operation([plain_row(8192, "two_shot", 528, 16, 0)])
        super().__init__(table=TuningTable("t.yaml", rows, 2048))

    def use_table(self, given: TuningTable) -> None:
        self.table = given


class Plain(CollectiveSubject):
    def bind(self, comm: Any, group: Any, size: int) -> Bound:
        return Bound(lambda: select(self.problem(size, 2), comm.table, CONFIG, comm.limits), lambda: None)


@pytest.mark.parametrize(
    ("tries", "is_marked"), [([1.5, 1.5], True), ([1.5, 1.02], False), ([1.04], False)], ids=["slow", "late", "good"]
)
def test_the_choice_of_the_table_is_timed_beside_the_candidates(
    tries: list[float],
    is_marked: bool,
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What would be marked has a second try. Of what the table declines nothing is timed."""
    comm: Any = Comm()
    shipped = comm.table
    of_table: list[float] = []

    def time_graph(*_: object) -> Any:
        us = 1.0
        if comm.table is shipped:
            us = tries[len(of_table) % len(tries)]
            of_table.append(us)
        return SimpleNamespace(us=us, min_us=us)

    monkeypatch.setattr(timing, "time_graph", time_graph)
    given = argparse.Namespace(min=1024, max=4096, reps=1, method="aligned", seconds=None)
    rows, left = table.compare(comm, group, [Plain(ALL_REDUCE)], given)
    assert left == 0
    assert comm.table is shipped
    assert of_table == tries * 3
    assert [row.size for row in rows] == [1024, 1536, 2048, 3072, 4096]
    assert [row.us for row in rows] == [min(tries)] * 3 + [None] * 2
    assert [row.is_marked for row in rows] == [is_marked] * 3 + [False] * 2
    assert rows[0].chosen == "two_shot LL, 2 blocks x 32 threads"
    assert rows[3].chosen == "declined: more than max_message_bytes=2048"
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


def test_what_the_file_says() -> None:
    found = compared(2.2, 2.0).as_dict()
    assert json.loads(json.dumps(found)) == {
        "operation": ALL_REDUCE,
        "bytes": 4096,
        "chosen": "two_shot LL, 4 blocks x 64 threads",
        "us": 2.2,
        "best": {"us": 2.0, **ROW.entry()},
        "lost": 0.1,
        "marked": True,
    }


def test_it_needs_gpus_and_options_that_name_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(launch, "in_rank", lambda: False)
    monkeypatch.setattr(launch, "spawn", lambda *call: started.append(call) or 0)
    monkeypatch.setattr(launch, "place", lambda *_, **__: launch.Placement(2, on_gpu=False, reason="there is none"))
    assert commands.main(["bench", "table"]) == 2
    assert "bench table measures GPUs: there is none" in capsys.readouterr().err
    monkeypatch.setattr(launch, "place", lambda *_, **__: launch.Placement(2, on_gpu=True))
    assert commands.main(["bench", "table", "--min", "2M", "--max", "1M"]) == 2
    assert not started
    assert commands.main(["bench", "table", "--operations", "all-gather,reduce-scatter"]) == 0
    assert len(started) == 1
