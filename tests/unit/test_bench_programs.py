"""Programs of llm_comm.dsl as what is measured: as candidates of the tuner, and beside other libraries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tables import limits_of, plain_row

from llm_comm.bench import choosing, comparison, programs, tune, tune_subjects
from llm_comm.bench.choosing import Measured
from llm_comm.bench.collectives import COLLECTIVES
from llm_comm.bench.measuring import AtSize, Bench, count_candidates, schedule_of
from llm_comm.bench.tune_record import Record
from llm_comm.bench.tune_subjects import Bound, CollectiveSubject, SymmetricPool, candidates_on
from llm_comm.config import Config
from llm_comm.dsl import programs as dsl_programs
from llm_comm.errors import ConfigError
from llm_comm.planning.multicast import NO_MULTICAST
from llm_comm.planning.plan import Plan, Problem
from llm_comm.planning.planner import Planner
from llm_comm.planning.programs import DEFAULT_LAUNCH, LaunchParameters
from llm_comm.planning.tables import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Row,
    RunnerUp,
    TuningTable,
    by_operation,
    of_programs,
)

pytestmark = pytest.mark.usefixtures("group")

LIBRARY = "llm_comm.dsl.library"
CONFIG = Config.load({}, dsl=f"{LIBRARY}:two_shot_ll,{LIBRARY}:ring_ll")
ANY_ORDER = Config.load({}, dsl=CONFIG.dsl, sum="any")
SIZE, WORLD = 2048, 4


class Kernels:
    """Of one group, compiled for 8 blocks of 64 threads."""

    operation, max_bytes, data_types = ALL_REDUCE, 4096, ("bf16",)

    def __init__(self, sums_in_rank_order: bool = True) -> None:
        self.sums_in_rank_order = sums_in_rank_order

    def why_not(self, choice: LaunchParameters) -> str:
        return ""

    def candidates(self, data_type: str, message_bytes: int) -> list[LaunchParameters]:
        assert data_type in self.data_types
        assert message_bytes <= self.max_bytes
        return [DEFAULT_LAUNCH, LaunchParameters(4, 64), LaunchParameters(4, 32)]

    def grid(self, data_type: str, message_bytes: int, choice: LaunchParameters) -> tuple[int, int]:
        return choice.blocks or 8, choice.threads or 64


class OfGathers(Kernels):
    operation, data_types = ALL_GATHER, ("byte",)


class Comm(SimpleNamespace):
    """Plans as a communicator with two programs."""

    rank, world_size, device, limits, is_emulated = 0, WORLD, torch.device("cpu"), limits_of(CONFIG), True
    multicast = NO_MULTICAST

    def __init__(self, config: Config = CONFIG) -> None:
        super().__init__(config=config, given=[])
        self.programs = {"dsl:ring_ll": Kernels(False), "dsl:two_shot_ll": Kernels()}
        self.use_table(TuningTable("none", by_operation([plain_row(1 << 20, "one_shot", 8, 16, 0)]), 1 << 20))

    def use_table(self, table: TuningTable) -> None:
        self.table = table

    def plan(self, x: torch.Tensor) -> Plan:
        planner = Planner(WORLD, self.table, self.config, self.limits)
        planner.programs = self.programs
        return planner.lay_out(ALL_REDUCE, x.numel(), 0, "bf16").plan

    def accepts(self, x: torch.Tensor) -> bool:
        return self.plan(x).algorithm != "declined"

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self.given.append(self.plan(x).algorithm)
        return out


def program_row(blocks: int = 0, threads: int = 0, name: str = "dsl:two_shot_ll", size: int = SIZE) -> Row:
    return Row(size, ALL_REDUCE, name, "DSL", blocks=blocks, threads=threads)


@pytest.fixture(autouse=True)
def _nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dsl_programs, "_registered", {})


# ---- Candidates ------------------------------------------------------------------------------------------------------


def test_programs_that_sum_in_another_order_are_for_those_who_permit_it() -> None:
    comm: Any = Comm(ANY_ORDER)  # as `tune --multicast` makes it, whatever the options say
    assert list(programs.to_measure(comm, CONFIG)) == ["dsl:two_shot_ll"]
    assert list(programs.to_measure(comm, ANY_ORDER)) == ["dsl:ring_ll", "dsl:two_shot_ll"]


def test_what_is_said_of_programs(capsys: pytest.CaptureFixture[str]) -> None:
    measured: Any = {"dsl:two_shot_ll": Kernels()}
    programs.print_remarks(measured, CONFIG, WORLD, ["all-reduce"], 4096)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("dsl:ring_ll is not measured: it adds up some ranks before others")
    programs.print_remarks(measured, CONFIG, WORLD, ["all-reduce", "fused"], 4098)
    assert capsys.readouterr().out.splitlines() == [
        line,
        "dsl:two_shot_ll is measured up to 4K (option dsl_max_bytes)",
    ]
    programs.print_remarks(measured, CONFIG, WORLD, ["fused"], 4098)
    assert capsys.readouterr().out == ""


def test_candidates_of_programs_come_behind_those_of_algorithms() -> None:
    comm: Any = Comm()
    with_programs, without = CollectiveSubject(ALL_REDUCE, programs=comm.programs), CollectiveSubject(ALL_REDUCE)
    plain = list(candidates_on(comm, without, SIZE))
    rows = [program_row(*grid, name=name) for name in comm.programs for grid in ((0, 0), (4, 64), (4, 32))]
    assert list(candidates_on(comm, with_programs, SIZE)) == [*plain, *rows]
    assert count_candidates(with_programs, [SIZE, 8192], comm) == count_candidates(without, [SIZE, 8192], comm) + 6
    assert not any(row.algorithm.startswith("dsl:") for row in candidates_on(comm, with_programs, 8192))


def test_only_ordinary_tensors_have_candidates_of_programs() -> None:
    found = tune_subjects.subjects_of(tune_subjects.OPERATIONS, 8192, 4096, WORLD, Comm().programs)
    assert [subject.key for subject in found if subject.programs] == [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER]
    assert not CollectiveSubject(ALL_REDUCE, SymmetricPool(64)).programs
    gather = Problem(ALL_GATHER, SIZE, 0, "byte", WORLD, (1.0, *[float(SIZE)] * WORLD))
    fp32 = Problem(ALL_REDUCE, SIZE // 4, 0, "fp32", WORLD)
    assert [list(programs.rows_for(problem, Comm().programs)) for problem in (gather, fp32)] == [[], []]
    rows = list(programs.rows_for(gather, {"dsl:all_gather_ll": OfGathers()}))
    assert [(row.operation, row.algorithm, row.up_to) for row in rows] == [(ALL_GATHER, "dsl:all_gather_ll", SIZE)] * 3


class Subject(CollectiveSubject):
    """One whose calls do nothing."""

    def bind(self, comm: Any, group: Any, size: int) -> Bound:
        x = torch.empty(size // 2, dtype=torch.bfloat16)
        return Bound(lambda: comm.plan(x), lambda: None)


def rows_that_run(comm: Any) -> tuple[list[Row], list[str]]:
    bench = Bench(comm, None, Subject(ALL_REDUCE, programs=comm.programs), SIZE, schedule_of("aligned", 3, SIZE))  # type: ignore[arg-type]
    refusals: list[str] = []
    return [row for row in bench._that_run(refusals) if row.algorithm.startswith("dsl:")], refusals


def test_programs_are_run_as_their_rows_say() -> None:
    comm = Comm()
    rows, refusals = rows_that_run(comm)
    assert rows == [program_row(*grid, name=name) for name in comm.programs for grid in ((0, 0), (4, 64), (4, 32))]
    assert refusals == []


def test_what_a_program_does_not_serve_is_not_measured_as_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An algorithm would run in its place, and be measured under its name."""
    comm = Comm()
    monkeypatch.setattr(tune_subjects, "rows_for", lambda *_: iter([program_row()]))
    monkeypatch.setattr(Kernels, "max_bytes", SIZE - 2)
    assert rows_that_run(comm) == ([], [f"dsl:two_shot_ll: more than dsl_max_bytes={SIZE - 2}"])


# ---- The table -------------------------------------------------------------------------------------------------------

ONE = plain_row(SIZE, "one_shot", 8, 16, 0)
TWO = plain_row(SIZE, "two_shot", 8, 16, 0)
LIKE_SWITCH = TWO._replace(algorithm="two_shot_ld_reduce", protocol="Switch")
STORES = TWO._replace(algorithm="two_shot_switch")


def test_where_a_program_is_the_best_it_has_a_row_before_that_of_an_algorithm() -> None:
    measured = [Measured(ONE, 5.0), Measured(TWO, 6.0), Measured(program_row(4, 64), 3.0), Measured(program_row(), 4.0)]
    first, second = choosing.choose_by_means(measured, SIZE, [])
    assert first.row == program_row(4, 64)._replace(us=3.0, runner_up=RunnerUp("one_shot", "LL", 5.0))
    assert second.row == ONE._replace(us=5.0, runner_up=RunnerUp("two_shot", "LL", 6.0))


@pytest.mark.parametrize("us", [5.5, 4.96])
def test_where_it_is_not_it_is_what_came_next(us: float) -> None:
    (only,) = choosing.choose_by_means([Measured(ONE, 5.0), Measured(program_row(), us)], SIZE, [])
    assert only.row == ONE._replace(us=5.0, runner_up=RunnerUp("dsl:two_shot_ll", "DSL", us))


def test_a_row_of_a_program_does_not_hide_what_the_switch_does_faster() -> None:
    measured = [Measured(row, us) for row, us in ((ONE, 5.0), (STORES, 4.0), (LIKE_SWITCH, 2.0), (program_row(), 3.0))]
    names = [m.row.algorithm for m in choosing.choose_by_means(measured, SIZE, [])]
    assert names == ["two_shot_ld_reduce", "two_shot_switch", "one_shot"]
    faster = [*measured[:3], Measured(program_row(), 1.0)]
    names = [m.row.algorithm for m in choosing.choose_by_means(faster, SIZE, [])]
    assert names == ["dsl:two_shot_ll", "two_shot_ld_reduce", "two_shot_switch", "one_shot"]


def test_without_an_algorithm_there_is_nothing_for_what_a_program_does_not_serve() -> None:
    with pytest.raises(ConfigError, match="no kernel can be measured at 2K: too plain"):
        choosing.choose_by_means([Measured(program_row(), 1.0)], SIZE, ["too plain"])


def test_the_table_of_a_tuned_program_selects_it() -> None:
    found = tune.Found([], {1 << 20: 1.0})
    for size, us in ((1024, 9.0), (2048, 1.0), (3072, 1.0), (4096, 9.0)):
        at_size = [(ONE, 5.0), (program_row(4, 64), us)]
        best, *lesser = choosing.choose_by_means([Measured(r._replace(up_to=size), t) for r, t in at_size], size, [])
        found.best.append(best)
        found = found._replace(lesser={**found.lesser, size: lesser})
    assert [m.row.algorithm for m in found.in_rank_order()] == ["one_shot", *["dsl:two_shot_ll"] * 2, "one_shot"]
    comm = Comm()
    table = tune.tuned(comm.table, {ALL_REDUCE: found})
    assert table.max_message_bytes == 4096
    assert [row.up_to for row in table.rows[ALL_REDUCE]] == [1024, 3072, 4096]
    assert [row.up_to for row in table.rows[of_programs(ALL_REDUCE)]] == [3072]
    comm.use_table(table)
    plans = [comm.plan(torch.empty(nbytes // 2)) for nbytes in (1024, 1026, 3072, 3074)]
    assert [plan.algorithm for plan in plans] == ["one_shot", "dsl:two_shot_ll", "dsl:two_shot_ll", "one_shot"]
    assert (plans[1].blocks, plans[1].threads) == (4, 64)


def test_what_is_printed_of_a_program() -> None:
    assert tune.choice_text(program_row(4, 64)) == "dsl:two_shot_ll DSL  blocks<=4 threads<=64"
    assert tune.choice_text(program_row()) == "dsl:two_shot_ll DSL"


def test_a_run_goes_on_behind_rows_of_programs(tmp_path: Any) -> None:
    path = tmp_path / "found.json"
    head = {"date": "", "ranks": {"world": 4, "device": "x"}, "versions": {}, "variables": {}}

    def record(config: Config) -> Record:
        return Record(path, head, {"dsl": programs.digests(config, WORLD)})

    measured = [Measured(ONE, 5.0), Measured(program_row(4, 64), 3.0), Measured(program_row(), 4.0, at_length=False)]
    record(CONFIG).add(ALL_REDUCE, AtSize(SIZE, measured), writes=True)
    assert record(CONFIG).sizes(ALL_REDUCE)[SIZE].measured == measured
    assert programs.digests(Config.load({}), WORLD) == []
    with pytest.raises(
        ConfigError, match=r"another run: --dsl is \['dsl:two_shot_ll \(\w+\)', 'dsl:ring_ll \(\w+\)'\] th"
    ):
        record(Config.load({}, dsl=f"{LIBRARY}:two_shot_ll"))


# ---- Beside other libraries ------------------------------------------------------------------------------------------


def test_each_program_is_a_library_of_the_benchmark() -> None:
    comm: Any = Comm()
    comm.programs["dsl:all_gather_ll"] = OfGathers()
    ring, two_shot = comparison.programs_of(COLLECTIVES["all-reduce"], comm, torch.bfloat16)
    (gather,) = comparison.programs_of(COLLECTIVES["all-gather"], comm, torch.bfloat16)
    assert (gather.name, gather.rounds_once) == ("dsl:all_gather_ll", True)
    assert comparison.programs_of(COLLECTIVES["reduce-scatter"], comm, torch.bfloat16) == []
    assert (ring.name, ring.in_place, ring.rounds_once) == ("dsl:ring_ll", False, False)
    assert (two_shot.name, two_shot.in_place, two_shot.rounds_once) == ("dsl:two_shot_ll", False, True)
    for library in (two_shot, ring, two_shot):
        bound = library.bind(SIZE // 2)
        assert (bound.x.numel(), bound.x.dtype) == (SIZE // 2, torch.bfloat16)
        bound.call()
    assert comm.given == ["dsl:two_shot_ll", "dsl:ring_ll", "dsl:two_shot_ll"]
    with pytest.raises(RuntimeError, match=r"^more than dsl_max_bytes=4096$"):
        two_shot.bind(4098 // 2)
