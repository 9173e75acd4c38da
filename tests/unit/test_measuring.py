"""How candidates are timed: a short look at all, then those that may be the best, and what is taken down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tables import limits_of

from llm_comm.bench import choosing, measuring, timing, tune_subjects
from llm_comm.bench.choosing import Measured
from llm_comm.bench.measuring import Bench, Pace, schedule_of
from llm_comm.bench.timing import Schedule
from llm_comm.bench.tune_subjects import (
    Bound,
    CollectiveSubject,
    SymmetricPool,
    candidates,
)
from llm_comm.config import Config
from llm_comm.options import MIB
from llm_comm.planning.multicast import NO_MULTICAST
from llm_comm.planning.plan import Problem
from llm_comm.planning.planner import Planner
from llm_comm.planning.tables import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Row, RunnerUp, TuningTable, by_operation

CONFIG = Config.load({})
WORLD = 2
GROUP: Any = None  # which it is not asked for

pytestmark = pytest.mark.usefixtures("group")
SIZE = 2 * MIB


class Comm:
    """Plans as a communicator of an imagined GPU does, and counts the symmetric memory that it gives."""

    world_size, device, limits = WORLD, torch.device("cpu"), limits_of(CONFIG)
    config, multicast = CONFIG, NO_MULTICAST

    def __init__(self) -> None:
        self.table = TuningTable("none", by_operation([]), 0)
        self.given: list[int] = []

    def use_table(self, table: TuningTable) -> None:
        self.table = table

    def plan_of(self, problem: Problem) -> Any:
        planner = Planner(WORLD, self.table, CONFIG, self.limits)
        planner.has_symmetric = bool(self.given)
        return planner.lay_out(problem.operation, problem.count, 0, problem.data_type, problem.parameters).plan

    def empty(self, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        self.given.append(nbytes)
        return torch.empty(nbytes, dtype=dtype)


class Subject(CollectiveSubject):
    """One whose calls do nothing."""

    def bind(self, comm: Any, group: Any, size: int) -> Bound:
        if self.is_symmetric:
            comm.empty(size, torch.uint8)
        return Bound(lambda: comm.plan_of(self.problem(size, WORLD)), lambda: None)


class Clock:
    """Stands for ``time_graph``: every row takes what the test says, and runs of looks are told from others."""

    def __init__(self, comm: Comm, us_of: Any) -> None:
        self._comm, self._us_of = comm, us_of
        self.looks: list[Row] = []
        self.at_length: list[Row] = []

    def __call__(self, call: Any, reset: Any, schedule: Schedule, group: Any) -> Any:
        ((row,),) = self._comm.table.rows.values()
        is_look = schedule.reps == 3 and schedule.warm_ups == 1
        (self.looks if is_look else self.at_length).append(row)
        us = self._us_of(row, is_look)
        return SimpleNamespace(us=us + (100 if is_look else 0), min_us=us)


def measured_by(monkeypatch: pytest.MonkeyPatch, us_of: Any, reps: int = 9) -> tuple[Clock, measuring.AtSize]:
    comm: Any = Comm()
    clock = Clock(comm, us_of)
    monkeypatch.setattr(timing, "time_graph", clock)
    return clock, Bench(comm, GROUP, Subject(ALL_REDUCE), SIZE, Schedule(20, reps, True)).candidates(lambda _: None)


def test_only_what_may_be_the_best_is_timed_at_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the best of every algorithm, of which one is the runner-up. A look goes by its fastest run."""

    def us_of(row: Row, is_look: bool) -> float:
        if row.algorithm == "two_shot":
            return {8: 10.0, 16: 10.9, 32: 11.1}.get(row.tile_lines, 12.0) + row.blocks * 1e-4 + row.depth * 1e-5
        return 30.0 + row.blocks * 1e-3 + row.depth + row.tile_lines * 1e-3

    clock, found = measured_by(monkeypatch, us_of)
    assert len(clock.looks) == len(set(clock.looks)) == len(found.measured)
    of_two_shot = {row.tile_lines for row in clock.at_length if row.algorithm == "two_shot"}
    assert of_two_shot == {8, 16}
    others = [row for row in clock.at_length if row.algorithm != "two_shot"]
    assert [(r.algorithm, r.protocol) for r in others] == [
        kind for kind in dict.fromkeys((r.algorithm, r.protocol) for r in clock.looks) if kind != ("two_shot", "LL")
    ]
    assert {m.row for m in found.measured if m.at_length} == set(clock.at_length)
    assert [m.row for m in found.measured] == clock.looks, "in the order of the registry"


def test_what_is_timed_at_length_is_chosen_by_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that was too good does not win."""

    def is_lucky(row: Row) -> bool:
        return (row.algorithm, row.blocks) == ("two_shot", 528)

    def us_of(row: Row, is_look: bool) -> float:
        if is_lucky(row):
            return 9.5 if is_look else 20.0
        return 10.0 + row.blocks * 1e-6

    _, found = measured_by(monkeypatch, us_of)
    assert any(m.at_length and is_lucky(m.row) for m in found.measured)
    assert not is_lucky(choosing.choose(found.measured, SIZE, []).row)
    only_looks = [Measured(m.row, 1.0, at_length=False) for m in found.measured]
    again = [*only_looks, found.measured[3]._replace(at_length=True)]
    assert choosing.choose(again, SIZE, []) == again[-1]


def test_few_runs_are_not_looked_at_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, found = measured_by(monkeypatch, lambda row, is_look: float(row.blocks), reps=2)
    assert clock.looks == []
    assert clock.at_length == [m.row for m in found.measured]
    assert all(m.at_length for m in found.measured)


def test_spaced_looks_have_slack_for_what_is_taken_off() -> None:
    rows = [Row(1, ALL_REDUCE, "one_shot", "LL", blocks=n) for n in range(4)]
    looks = [Measured(row, us) for row, us in zip(rows, (0.5, -0.2, 0.7, 0.9), strict=True)]
    assert choosing.worth_timing(looks) == rows[1:2]
    assert choosing.worth_timing(looks, 1.0) == rows[:3]


@pytest.mark.parametrize(("us", "is_timed"), [(1.0999, True), (1.1001, False)])
def test_looks_within_ten_percent_count(us: float, is_timed: bool) -> None:
    rows = [Row(1, ALL_REDUCE, "one_shot", "LL", blocks=n) for n in (1, 2)]
    assert (rows[1] in choosing.worth_timing([Measured(rows[0], 1.0), Measured(rows[1], us)])) == is_timed


def test_symmetric_candidates_run_on_symmetric_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    comm: Any = Comm()
    subject = Subject(ALL_REDUCE, SymmetricPool(0))
    clock = Clock(comm, lambda row, is_look: 1.0)
    monkeypatch.setattr(timing, "time_graph", clock)
    found = Bench(comm, GROUP, subject, SIZE, Schedule(20, 1, True)).candidates(lambda _: None)
    assert {m.row.algorithm for m in found.measured} == {"two_shot_pull_hb", "two_shot_ce"}
    expected = candidates(subject.problem(SIZE, WORLD), comm.limits, is_symmetric=True)
    assert clock.at_length == list(dict.fromkeys(expected))
    assert comm.table.min_symmetric_bytes == 0


def test_the_figures_of_a_row() -> None:
    one, two = (Row(64, ALL_REDUCE, name, "LL", blocks=8) for name in ("one_shot", "two_shot"))
    other = Row(64, ALL_REDUCE, "two_shot_hb", "HB", blocks=8)
    measured = [
        Measured(one, 2.0),
        Measured(one._replace(blocks=9), 2.1),
        Measured(two, 1.0, at_length=False),  # a look is no time
        Measured(two._replace(blocks=9), 3.5),
        Measured(other, 3.0),
    ]
    figured = choosing.with_figures(measured[0], measured).row
    assert (figured.us, figured.runner_up) == (2.0, RunnerUp("two_shot_hb", "HB", 3.0))
    alone = choosing.with_figures(measured[0], measured[:2]).row
    assert (alone.us, alone.runner_up) == (2.0, None)


def test_merged_rows_have_the_figures_of_their_largest_size() -> None:
    row = Row(64, ALL_REDUCE, "one_shot", "LL", blocks=8, us=2.0, runner_up=RunnerUp("two_shot", "LL", 3.0))
    larger = row._replace(up_to=128, us=2.5, runner_up=None)
    assert choosing.merge([[Measured(row, 2.0)], [Measured(larger, 2.5)]]) == [larger]
    other = larger._replace(up_to=256, blocks=9)
    assert choosing.merge([[Measured(larger, 2.5)], [Measured(other, 2.5)]]) == [larger, other]


@pytest.mark.parametrize(
    ("whole_bytes", "calls"), [(0, 20), (1024, 20), (16 * MIB, 20), (32 * MIB, 10), (64 * MIB, 5), (256 * MIB, 4)]
)
def test_large_messages_take_fewer_calls(whole_bytes: int, calls: int) -> None:
    assert schedule_of("aligned", 9, whole_bytes) == Schedule(calls, 9, aligned=True)


def test_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(measuring.time, "monotonic", lambda: now)
    found = Pace(100)
    assert found.text() == "0 of 100 in all"
    found.advance(10)
    now = 108.0
    assert found.text() == "10 of 100 in all, about 72 s left"
    now = 400.0
    assert found.text() == "10 of 100 in all, about 45 min left"
    now = 4100.0
    assert found.text() == "10 of 100 in all, about 10.0 h left"
    found.advance(100)
    assert found.text() == "110 of 100 in all, about 0 s left"


# ---- Operations on parts -------------------------------------------------------------------------------------------


class PartsComm:
    """Notes what is asked for."""

    device = torch.device("cpu")

    def __init__(self, world_size: int = WORLD) -> None:
        self.world_size = world_size
        self.made: list[int] = []

    def empty(self, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        self.made.append(nbytes)
        return torch.empty(nbytes, dtype=dtype)

    def plan_all_gather(self, x: torch.Tensor) -> Any:
        return x.nbytes

    plan = plan_reduce_scatter = plan_all_gather

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> Any:
        return x, out

    all_reduce = reduce_scatter = all_gather


PARTS = [CollectiveSubject(ALL_GATHER), CollectiveSubject(REDUCE_SCATTER)]


@pytest.mark.parametrize("subject", PARTS, ids=lambda s: s.operation)
def test_sizes_of_parts(subject: Any) -> None:
    """As rows of tables have them: bytes of the largest shard."""
    problem = subject.problem(4096, WORLD)
    assert (problem.message_bytes(), problem.whole_bytes()) == (4096, 8192)
    assert {row.up_to for row in candidates(problem, limits_of(CONFIG))} == {4096}
    bound = subject.bind(PartsComm(), GROUP, 4096)
    x, out = bound.call()
    part, whole = (x, out) if subject.operation == "all_gather" else (out, x)
    assert (part.nbytes, whole.nbytes) == (4096, 8192)
    assert bound.plan() == x.nbytes
    assert bound.nccl is None
    assert subject.bind(PartsComm(), GROUP, 65536 - 2).nccl is None
    assert subject.bind(PartsComm(), GROUP, 65536).nccl is not None


@pytest.mark.parametrize("subject", PARTS, ids=lambda s: s.operation)
def test_every_protocol_is_a_candidate_for_parts(subject: Any) -> None:
    found = {row.protocol for row in candidates(subject.problem(16 * MIB, WORLD), limits_of(CONFIG))}
    assert found == {"LL", "HB"}, "copies by the host are chosen by nobody but who names them"


def test_a_pool_is_made_once_and_cut_into_tensors_apart() -> None:
    comm: Any = PartsComm()
    pool = SymmetricPool(1000)
    a, b = pool.tensors(comm, 3, 5)
    again, _ = pool.tensors(comm, 4, 1)
    assert [a.numel(), b.numel(), again.numel()] == [3, 5, 4]
    assert b.data_ptr() - a.data_ptr() == 256
    assert again.data_ptr() == a.data_ptr()
    assert comm.made == [1000 + 256]


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("names", [["all-reduce"], ["all-gather"], ["all-reduce", "all-gather"]])
def test_the_pool_of_a_run_has_room_for_its_largest_message(world: int, names: list[str]) -> None:
    subjects = [s for s in tune_subjects.subjects_of(names, 8192, MIB, world) if s.is_symmetric]
    assert len(subjects) == len(names)
    for subject in subjects:
        comm: Any = PartsComm(world)
        bound = subject.bind(comm, GROUP, MIB)
        _, out = bound.call()  # type: ignore[misc]
        assert out.nbytes == MIB * (world if subject.operation == "all_gather" else 1)
        assert bound.nccl is None


def test_symmetric_tensors_are_measured_from_64_kib_in_whole_lines() -> None:
    pool = SymmetricPool(0)
    assert list(CollectiveSubject(ALL_REDUCE, pool).sizes(1024, 128 << 10)) == [64 << 10, 96 << 10, 128 << 10]
    assert all(size % 16 == 0 for size in CollectiveSubject(ALL_GATHER, pool).sizes(100_002, MIB))
    assert list(CollectiveSubject(ALL_GATHER, pool).sizes(1024, 32 << 10)) == []


@pytest.mark.parametrize("smallest", [2, 3, 6, 1025])
def test_sizes_are_whole_elements_and_rise(smallest: int) -> None:
    found = list(tune_subjects.doubling_sizes(smallest, 4096))
    assert all(size % 2 == 0 for size in found)
    assert found == sorted(set(found))
