"""Programs by name: what is registered, what can be selected, and for which messages a program is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tables import limits_of, plain_row

from llm_comm import Config, ConfigError, _core, dsl
from llm_comm.dsl import library, programs
from llm_comm.dsl.programs import ProgramDefinition
from llm_comm.dsl.selected import digest, why_not_selectable
from llm_comm.integrations.descriptions import describe_plans
from llm_comm.planning import catalogue
from llm_comm.planning.catalogue import load_table, table_text
from llm_comm.planning.plan import Plan
from llm_comm.planning.planner import Planner
from llm_comm.planning.programs import DEFAULT_LAUNCH, LaunchParameters, named_by
from llm_comm.planning.tables import (
    ALL_GATHER,
    ALL_REDUCE,
    FUSED,
    Row,
    RunnerUp,
    TuningTable,
    by_operation,
    of_programs,
)
from llm_comm.registry import operations

WORLD = 4
CONFIG = Config.load({})
ANY_ORDER = Config.load({}, sum="any")


@pytest.fixture(autouse=True)
def _nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_registered", {})


def make(name: str = "mine", operation: str = "all_reduce", instances: int = 1) -> ProgramDefinition:
    """A correct one-shot all-reduce, or what is called one of another operation."""

    def text(p: dsl.Builder) -> None:
        x, y = p.input.chunks(1), p.output.chunks(1)
        received = p.packets(p.world, like=x)
        for peer in p.peers:
            p.put_packets(x[0], peer, received[p.rank])
        p.store(p.sum({p.rank: p.load(x[0]), **{q: p.read_packets(received[q]) for q in p.peers}}), y[0])

    text.__name__ = name
    return dsl.program(operation, instances=instances)(text)


# ---- Names -----------------------------------------------------------------------------------------------------------


def test_a_registered_program_is_found() -> None:
    program = make()
    assert dsl.register(program) is program
    assert dsl.register(program) is program, "the same again is no error"
    assert programs.find("dsl:mine") is program
    assert programs.registered() == ("dsl:mine",)


def test_an_unknown_name_is_told_with_what_is_registered() -> None:
    with pytest.raises(ConfigError, match=r"program is 'dsl:mine'; valid: none\. Option dsl=module:program registers"):
        programs.find("dsl:mine")
    dsl.register(make("two_shot"))
    dsl.register(make("one_shot"))
    with pytest.raises(ConfigError, match=r"'dsl:two_sot' \(did you mean dsl:two_shot\?\); valid: dsl:one_shot, dsl:t"):
        programs.find("dsl:two_sot")


def test_another_program_of_the_same_name_is_refused() -> None:
    first = dsl.register(make())
    with pytest.raises(ValueError, match="another program is registered as dsl:mine"):
        dsl.register(make())
    assert programs.find("dsl:mine") is first


@pytest.mark.parametrize("operation", ["broadcast", "all_to_all"])
def test_operations_that_communicators_do_not_select(operation: str) -> None:
    with pytest.raises(ValueError, match=f"'mine' is a {operation}; register takes all_reduce, all_gather, reduce_sca"):
        dsl.register(make(operation=operation))


def test_names_that_options_cannot_spell() -> None:
    with pytest.raises(ValueError, match=r"program 'a b' cannot be registered: .* letters, digits and _ of ASCII"):
        dsl.register(make("a b"))


def test_what_is_no_program() -> None:
    with pytest.raises(ValueError, match="not a function"):
        dsl.register(make)  # type: ignore[arg-type]


MODULE = """
from llm_comm import dsl

@dsl.program("all_reduce")
def first(p: dsl.Builder) -> None: ...

@dsl.program("broadcast")
def second(p: dsl.Builder) -> None: ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a module, and returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def write(text: str) -> str:
        made.append(f"programs_of_test_{len(made)}")
        (tmp_path / f"{made[-1]}.py").write_text(text, encoding="utf-8")
        return made[-1]

    yield write
    for name in made:
        sys.modules.pop(name, None)


def test_programs_of_modules(module: Callable[[str], str]) -> None:
    texts = programs.register_all(f"{module(MODULE)}:first, llm_comm.dsl.library:two_shot_ll")
    assert [text.name for text in texts] == ["first", "two_shot_ll"]
    assert programs.registered() == ("dsl:first", "dsl:two_shot_ll")
    assert programs.find("dsl:two_shot_ll") is library.two_shot_ll


@pytest.mark.parametrize(
    ("text", "name", "complaint"),
    [
        ("import there_is_no_such_module", "a", "cannot import {m}: ModuleNotFoundError: No module named 'there_is_no"),
        ("this is no Python", "a", "cannot import {m}: SyntaxError: "),
        ("raise SystemExit(3)", "a", "cannot import {m}: SystemExit: 3"),
        (MODULE, "frist", "program is 'frist' (did you mean first?); valid: first, second"),
        (MODULE, "dsl", "program is 'dsl'; valid: first, second"),
        (MODULE, "second", "program 'second' is a broadcast; register takes "),
    ],
)
def test_a_module_that_does_not_serve(module: Callable[[str], str], text: str, name: str, complaint: str) -> None:
    name_of_module = module(text)
    with pytest.raises(ConfigError) as error:
        programs.register_all(f"{name_of_module}:{name}")
    assert str(error.value).startswith(f"{name_of_module}:{name}: {complaint.format(m=name_of_module)}")
    assert programs.registered() == ()


# ---- What can be selected --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("name", ["one_shot_ll", "one_shot_hb", "two_shot_ll", "two_shot_hb"])
def test_programs_of_the_library_that_can_be_selected(name: str, world: int) -> None:
    program = getattr(library, name).build(world)
    assert program.sums_in_rank_order
    assert why_not_selectable(program, CONFIG) == ""


def test_sums_in_another_order_need_leave() -> None:
    ring = library.ring_ll.build(3)
    assert not ring.sums_in_rank_order
    assert "it adds up some ranks before others" in why_not_selectable(ring, CONFIG)
    assert "sum=any permits it" in why_not_selectable(ring, Config.load({}, sum="any", deterministic=True))
    assert why_not_selectable(ring, ANY_ORDER) == ""
    assert why_not_selectable(library.ring_ll.build(2), CONFIG) == "", "two ranks have one order"


@pytest.mark.parametrize("world", [2, 5])
@pytest.mark.parametrize("name", ["all_gather_ll", "reduce_scatter_ll"])
def test_gathers_and_scatters_can_be_selected(name: str, world: int) -> None:
    """Their input may be a part of the output, or the other way round."""
    assert why_not_selectable(getattr(library, name).build(world), CONFIG) == ""


@pytest.mark.parametrize("name", ["all_to_all_ll", "broadcast_ll"])
def test_operations_without_a_method_cannot_be_selected(name: str) -> None:
    program = getattr(library, name).build(2)
    assert why_not_selectable(program, CONFIG) == (
        f"it is a program of {program.operation.value}; those of all_reduce, all_gather, reduce_scatter can be selected"
    )


@dsl.program("all_gather")
def gathers_late(p: dsl.Builder) -> None:
    """Stores what it has received before it loads its own part, which may lie in the output."""
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.packets(p.world, like=x)
    for peer in p.peers:
        p.put_packets(x[0], peer, received[p.rank])
    for peer in p.peers:
        p.store(p.read_packets(received[peer]), y[peer])
    for peer in p.peers:
        p.signal(peer)
    for peer in p.peers:
        p.wait(peer)
    p.store(p.load(x[0]), y[p.rank])


def test_gathers_that_load_late_are_declined() -> None:
    program = gathers_late.build(2)
    dsl.check(program)
    assert why_not_selectable(program, CONFIG) == (
        "it loads its input after it has stored to the output, and one of the two may be this rank's part of the other "
        "in all_gather"
    )


@dsl.program("all_reduce")
def to_the_output_of_peers(p: dsl.Builder) -> None:
    x, y = p.input.chunks(p.world), p.output.chunks(p.world, symmetric=True)
    received = p.packets(p.world, like=x)
    for peer in p.peers:
        p.put_packets(x[peer], peer, received[p.rank])
    total = p.sum({p.rank: p.load(x[p.rank]), **{q: p.read_packets(received[q]) for q in p.peers}})
    p.store(total, y[p.rank])
    for peer in p.peers:
        p.put(total, peer, y[p.rank])
        p.signal(peer)
    for peer in p.peers:
        p.wait(peer)


@dsl.program("all_reduce")
def in_no_place(p: dsl.Builder) -> None:
    """Sums twice: the input is loaded again when the output has been stored, behind a wait."""
    x, y = p.input.chunks(1), p.output.chunks(1)
    received = p.packets(2 * p.world, like=x)
    for half in (0, p.world):
        for peer in p.peers:
            p.put_packets(x[0], peer, received[half + p.world - 1])
        others = {peer: p.read_packets(received[half + p.world - 1]) for peer in p.peers}
        p.store(p.sum({p.rank: p.load(x[0]), **others}), y[0])
        for peer in p.peers:
            p.signal(peer)
        for peer in p.peers:
            p.wait(peer)


def test_outputs_that_peers_write_are_declined() -> None:
    program = to_the_output_of_peers.build(2)
    dsl.check(program)
    assert why_not_selectable(program, CONFIG).startswith("peers use its output, which would have to lie in symmetric")


def test_programs_that_do_not_work_in_place_are_declined() -> None:
    program = in_no_place.build(2)
    dsl.check(program)
    assert why_not_selectable(program, CONFIG).startswith("it loads its input after it has stored to the output")


def test_the_digest_is_of_what_a_program_does() -> None:
    programs = [text.build(world) for text in library.PROGRAMS for world in (2, 4)]
    programs.append(make(instances=2).build(2))
    programs.append(make().build(2))
    assert len({digest(program) for program in programs}) == len(programs)
    assert digest(make().build(2)) == digest(make().build(2))


def test_the_digest_is_not_of_the_place(module: Callable[[str], str]) -> None:
    decorated = "@dsl.program('all_reduce')\ndef same(p):\n    p.store(p.input.chunks(1)[0], p.output.chunks(1)[0])\n"
    text = f"from llm_comm import dsl\n{decorated}"
    found = []
    for name in (module(text), module(f"# moved\n{text}")):
        found.append(programs.register_one(f"{name}:same").build(2))
        programs._registered.clear()
    assert found[0].where != found[1].where
    assert digest(found[0]) == digest(found[1])


# ---- For which messages ----------------------------------------------------------------------------------------------


COUNTER = _core.Counter(_core.CallStatistics(), 2048)


class Kernels:
    """Of bf16 and fp16, to 4096 bytes, in a block for each KiB, if a row does not allow fewer."""

    operation = ALL_REDUCE
    max_bytes = 4096
    data_types = ("bf16", "fp16")
    sums_in_rank_order = True

    def why_not(self, choice: LaunchParameters) -> str:
        return f"blocks is {choice.blocks}; it has too many" if choice.blocks in (7, 9) else ""

    def candidates(self, data_type: str, message_bytes: int) -> list[LaunchParameters]:
        raise AssertionError("nothing is tuned here")

    def grid(self, data_type: str, message_bytes: int, choice: LaunchParameters) -> tuple[int, int]:
        assert data_type in self.data_types
        return min(-(-message_bytes // 1024), choice.blocks or 1 << 16), choice.threads or 256

    def prepare(
        self, data_type: str, message_bytes: int, choice: LaunchParameters, counter: _core.Counter
    ) -> Callable[..., bool]:
        said = data_type, message_bytes, choice, counter
        return lambda x, out, stream: (*said, x, out, stream) == ("bf16", 2048, DEFAULT_LAUNCH, COUNTER, 1, 2, 3)

    def wait(self) -> None:
        raise AssertionError("nothing closes here")


class LargeKernels(Kernels):
    max_bytes = 1 << 30


ROWS = (plain_row(1024, "one_shot", 3, 8, 0), plain_row(1 << 20, "two_shot", 100, 16, 1))
TABLE = TuningTable("test table", by_operation(ROWS), 1 << 24)
ROW_OF_GATHERS = Row(1 << 20, ALL_GATHER, "one_shot", "LL", blocks=4, tile_lines=8)
TABLE_OF_GATHERS = TABLE._replace(rows=by_operation([*ROWS, ROW_OF_GATHERS]))


def program_row(up_to: int, name: str = "dsl:mine") -> Row:
    return Row(up_to, ALL_REDUCE, name, "DSL")


def with_rows(*rows: Row) -> TuningTable:
    return TABLE._replace(rows=by_operation([*ROWS, *rows]))


def planner_of(table: TuningTable, compiled: Kernels | None = None, **options: object) -> Planner:
    config = Config.load({}, **options)
    planner = Planner(WORLD, table, config, limits_of(config))
    if compiled is not None:
        planner.programs = {"dsl:mine": compiled}
    return planner


def plan(planner: Planner, message_bytes: int, data_type: str = "bf16") -> Plan:
    size = 4 if data_type == "fp32" else 2
    return planner.lay_out(ALL_REDUCE, message_bytes // size, 0, data_type).plan


def test_a_program_that_an_option_names() -> None:
    planner = planner_of(TABLE, Kernels(), algorithm="dsl:mine")
    found = planner.lay_out(ALL_REDUCE, 1024, 0, "bf16")
    assert found.plan == Plan(
        *(ALL_REDUCE, "dsl:mine", "DSL", 2, 256, 0, 0, 0, 1, 1024, 2048, "algorithm forced to dsl:mine")
    )
    assert found.launches is None
    assert found.program is not None
    assert found.program(COUNTER)(1, 2, 3)


@pytest.mark.parametrize(
    ("message_bytes", "data_type", "why"),
    [
        (4098, "bf16", "more than dsl_max_bytes=4096"),
        (4100, "fp32", "more than dsl_max_bytes=4096"),
        (512, "fp32", "not compiled for fp32"),
    ],
)
def test_what_it_does_not_serve_runs_as_before(message_bytes: int, data_type: str, why: str) -> None:
    native = planner_of(TABLE).lay_out(ALL_REDUCE, message_bytes // 2, 0, data_type)
    found = planner_of(TABLE, Kernels(), algorithm="dsl:mine").lay_out(ALL_REDUCE, message_bytes // 2, 0, data_type)
    assert found.plan.reason == f"{native.plan.reason}; dsl:mine: {why}"
    assert found.plan.algorithm == native.plan.algorithm in ("one_shot", "two_shot")
    assert (found.launches is None, found.program) == (False, None)


@pytest.mark.parametrize("message_bytes", [2, 4096])
def test_up_to_its_size_it_is_served(message_bytes: int) -> None:
    assert plan(planner_of(TABLE, Kernels(), algorithm="dsl:mine"), message_bytes).algorithm == "dsl:mine"


@pytest.mark.parametrize(("nbytes", "outcome"), [(0, "none"), ((1 << 24) + 2, "declined")])
def test_what_no_algorithm_serves_no_program_does(nbytes: int, outcome: str) -> None:
    assert plan(planner_of(TABLE, LargeKernels(), algorithm="dsl:mine"), nbytes).algorithm == outcome


class KernelsOfGathers(Kernels):
    """Of bytes, to 4096 of a part."""

    operation, data_types = ALL_GATHER, ("byte",)


def plan_of_gather(planner: Planner, rows: int, *sizes: int) -> Plan:
    return planner.lay_out(ALL_GATHER, rows * max(sizes), 0, "byte", (float(rows), *map(float, sizes))).plan


def test_a_program_of_gathers() -> None:
    """It changes nothing for other operations, nor do programs of those for gathers."""
    planner = planner_of(TABLE_OF_GATHERS, KernelsOfGathers(), algorithm="dsl:mine")
    assert plan_of_gather(planner, 1, *[2048] * WORLD).algorithm == "dsl:mine"
    assert plan(planner, 2048).algorithm == "two_shot"
    assert plan_of_gather(
        planner_of(TABLE_OF_GATHERS, Kernels(), algorithm="dsl:mine"), 1, *[2048] * WORLD
    ).algorithm == ("one_shot")


@pytest.mark.parametrize(
    ("rows", "sizes", "why"),
    [
        (2, [1024] * WORLD, "programs take shards of one size, along the first dimension"),
        (1, [2048] * (WORLD - 1) + [1024], "programs take shards of one size, along the first dimension"),
        (1, [4112] * WORLD, "more than 4096 bytes a shard: option dsl_max_bytes bounds all shards together"),
    ],
)
def test_gathers_that_a_program_does_not_serve(rows: int, sizes: list[int], why: str) -> None:
    planner = planner_of(TABLE_OF_GATHERS, KernelsOfGathers(), algorithm="dsl:mine")
    found = plan_of_gather(planner, rows, *sizes)
    assert (found.algorithm, found.reason.partition("; ")[2]) == ("one_shot", f"dsl:mine: {why}")


def test_rows_of_gathers_name_programs() -> None:
    row = Row(2048, ALL_GATHER, "dsl:mine", "DSL")
    table = TABLE._replace(rows=by_operation([*ROWS, ROW_OF_GATHERS, row]))
    planner = planner_of(table, KernelsOfGathers())
    assert plan_of_gather(planner, 1, *[2048] * WORLD).algorithm == "dsl:mine"
    assert plan_of_gather(planner, 1, *[2064] * WORLD).algorithm == "one_shot"
    planner.check_table(table)
    with pytest.raises(
        ConfigError, match="the row of dsl:mine up to 2048 bytes is of all_gather; the program is one of all_reduce"
    ):
        planner_of(table, Kernels()).check_table(table)


def test_max_blocks_holds() -> None:
    free, bound = (planner_of(TABLE, LargeKernels(), algorithm="dsl:mine", max_blocks=most) for most in (None, 64))
    assert plan(free, 1 << 20).blocks == plan(free, 1 << 20).message_bytes // 1024
    assert plan(bound, (1 << 20) - 2).blocks == 1024, "small messages are not bound"
    assert plan(bound, 1 << 20).blocks == 64
    assert plan(bound, 1 << 20).algorithm == "dsl:mine"
    refused = plan(planner_of(TABLE, LargeKernels(), algorithm="dsl:mine", max_blocks=9), 1 << 20)
    assert refused.algorithm != "dsl:mine"
    assert "dsl:mine: blocks is 9; it has too many" in refused.reason


@pytest.mark.parametrize(
    ("nbytes", "algorithm"),
    [(1024, "one_shot"), (1026, "dsl:mine"), (2048, "dsl:mine"), (2050, "two_shot"), (1 << 21, "two_shot")],
)
def test_rows_of_tables_name_programs(nbytes: int, algorithm: str) -> None:
    found = plan(planner_of(with_rows(program_row(2048)), Kernels()), nbytes)
    assert found.algorithm == algorithm
    assert found.reason.startswith("test table, up to ")


def test_the_last_row_serves_larger_messages_too() -> None:
    planner = planner_of(with_rows(program_row(1 << 21)), LargeKernels())
    assert plan(planner, 1 << 22).algorithm == "dsl:mine"
    assert plan(planner_of(with_rows(program_row(1 << 21)), Kernels()), 1 << 22).algorithm == "two_shot"


def test_of_rows_of_one_size_the_program_counts_where_it_serves() -> None:
    planner = planner_of(with_rows(program_row(1024)), Kernels())
    assert plan(planner, 1000).algorithm == "dsl:mine"
    assert plan(planner, 1000, "fp32").algorithm == "one_shot"


def test_a_forced_algorithm_passes_over_rows_of_programs() -> None:
    planner = planner_of(with_rows(program_row(1 << 22)), LargeKernels(), algorithm="one_shot")
    assert plan(planner, 2048).algorithm == "one_shot"


def test_rows_of_programs_change_nothing_for_fused_operations() -> None:
    with_program, without = planner_of(with_rows(program_row(1 << 22)), LargeKernels()), planner_of(TABLE)
    zeros = (0.0,) * len(operations()[FUSED].parameters)
    for tokens in (1, 40, 400):
        found, before = (p.lay_out(FUSED, tokens * 1024, 1024, "bf16", zeros).plan for p in (with_program, without))
        assert found == before
        assert found.algorithm in ("one_shot", "two_shot")


def test_other_rows_of_an_operation_take_the_place_of_programs_too() -> None:
    """As the tuner has it, which measures one row at a time."""
    table = with_rows(program_row(1 << 22))
    assert table.with_rows(ROWS[0]).rows == {ALL_REDUCE: ROWS[:1]}
    assert table.with_rows(program_row(64)).rows == {ALL_REDUCE: ROWS, of_programs(ALL_REDUCE): (program_row(64),)}
    gather = Row(64, "all_gather", "one_shot", "LL", blocks=1, tile_lines=1)
    assert table.with_rows(gather).rows == {**table.rows, "all_gather": (gather,)}


def test_who_names_programs() -> None:
    config = Config.load({"LLM_COMM_ALGORITHM": "dsl:other"})
    assert named_by(config, with_rows(program_row(2048))) == {
        "dsl:mine": "tuning table test table",
        "dsl:other": "option algorithm (LLM_COMM_ALGORITHM)",
    }
    assert named_by(CONFIG, TABLE) == {}


def test_tables_with_programs_that_are_not_compiled() -> None:
    planner = planner_of(TABLE, Kernels())
    planner.check_table(with_rows(program_row(2048)))
    with pytest.raises(ConfigError, match=r"no program dsl:other was compiled .*; compiled: dsl:mine\. Option dsl"):
        planner.check_table(with_rows(program_row(2048, "dsl:other")))


def test_rows_say_how_a_program_is_launched() -> None:
    """The ranks go by the same row, so the choice is the same on all."""
    rows = program_row(1024), program_row(2048)._replace(blocks=1), program_row(4096)._replace(blocks=3, threads=64)
    planner = planner_of(with_rows(*rows), Kernels())
    grids = [plan(planner, nbytes) for nbytes in (1024, 1026, 2048, 4096)]
    assert [(found.blocks, found.threads) for found in grids] == [(1, 256), (1, 256), (1, 256), (3, 64)]
    assert planner.lay_out(ALL_REDUCE, 2048, 0, "bf16").program(COUNTER) is not None  # type: ignore[misc]
    own = planner_of(with_rows(program_row(2048)), Kernels()).lay_out(ALL_REDUCE, 1024, 0, "bf16")
    chosen = planner.lay_out(ALL_REDUCE, 1024, 0, "bf16")
    assert own.program is not None
    assert chosen.program is not None
    launched = [layout.program(COUNTER)(1, 2, 3) for layout in (own, chosen)]
    assert launched == [True, False], "of the choice of its row"


def test_a_row_without_numbers_leaves_them_to_a_forced_program() -> None:
    table = with_rows(program_row(1 << 20)._replace(blocks=1))
    assert plan(planner_of(table, Kernels(), algorithm="dsl:mine"), 4096).blocks == 4


def test_a_row_with_a_launch_that_cannot_be() -> None:
    planner = planner_of(TABLE, Kernels())
    planner.check_table(with_rows(program_row(2048)._replace(blocks=8)))
    with pytest.raises(ConfigError) as error:
        planner.check_table(with_rows(program_row(2048)._replace(blocks=7)))
    assert str(error.value) == (
        "tuning table test table: the row of dsl:mine up to 2048 bytes: blocks is 7; it has too many. Without blocks "
        "and threads a row leaves both to the program"
    )


def test_max_blocks_goes_by_the_choice_of_the_row() -> None:
    table = with_rows(program_row(1 << 22)._replace(blocks=64))
    assert [plan(planner_of(table, LargeKernels(), max_blocks=most), 1 << 21).blocks for most in (65, 64, 63)] == [
        *(64, 64, 63)
    ]


@pytest.mark.parametrize(
    ("options", "rows", "words"),
    [
        ({"algorithm": "dsl:mine"}, (), "dsl:mine to 8 MiB, else "),
        ({"algorithm": "dsl:mine", "dsl_max_bytes": 4096}, (), "dsl:mine to 4 KiB, else "),
        ({"algorithm": "dsl:mine", "max_message_bytes": 2048}, (), "dsl:mine to 2 KiB, else "),
        ({}, (program_row(2048), program_row(8192, "dsl:other")), "dsl:mine to 2 KiB, dsl:other to 8 KiB, else "),
        ({"algorithm": "one_shot"}, (program_row(2048),), ""),
        ({}, (), ""),
    ],
)
def test_logs_of_engines_name_programs(options: dict[str, Any], rows: tuple[Row, ...], words: str) -> None:
    config = Config.load({}, **options)
    without = Config.load({}, **{k: v for k, v in options.items() if v != "dsl:mine"})
    assert describe_plans(with_rows(*rows), config, "its own") == words + describe_plans(TABLE, without, "its own")


# ---- Files of tables -------------------------------------------------------------------------------------------------


def table_file(path: Path, entries: list[dict[str, Any]]) -> Path:
    head = {"device": "test device", "world_size": 8, "max_message_bytes": 64 << 20}
    path.write_text(yaml.safe_dump({**head, "rows": entries}), encoding="utf-8")
    return path


def test_a_table_with_a_program_from_a_file(tmp_path: Path) -> None:
    entry = {"operation": ALL_REDUCE, "up_to": 2048, "algorithm": "dsl:mine"}
    runner_up = {"algorithm": "one_shot", "protocol": "LL", "us": 4.5}
    measured = {**entry, "up_to": 4096, "blocks": 132, "threads": 256, "us": 3.5, "runner_up": runner_up}
    other = {**ROWS[0].entry(), "up_to": 64, "runner_up": {"algorithm": "dsl:mine", "protocol": "DSL", "us": 4.5}}
    path = table_file(tmp_path / "a.yaml", [other, *(row.entry() for row in ROWS), entry, measured])
    table = load_table(path).table
    first = ROWS[0]._replace(up_to=64, runner_up=RunnerUp("dsl:mine", "DSL", 4.5))
    last = program_row(4096)._replace(blocks=132, threads=256, us=3.5, runner_up=RunnerUp("one_shot", "LL", 4.5))
    assert table.rows == {ALL_REDUCE: (first, *ROWS), of_programs(ALL_REDUCE): (program_row(2048), last)}
    assert (program_row(2048).tunables(), last.tunables()) == ({}, {"blocks": 132, "threads": 256})
    again = tmp_path / "again.yaml"
    again.write_text(table_text("test device", 8, table, {}), encoding="utf-8")
    assert load_table(again).table.rows == table.rows
    assert table.digest() != table._replace(rows={ALL_REDUCE: ROWS}).digest()
    assert catalogue.find_table("test device", 8, 1, Config.load({}, table=str(path))).rows == table.rows


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"operation": "all_reduce_add_rms_norm"},
            "operation is 'all_reduce_add_rms_norm'; programs are selected for all_reduce, all_gather, reduce_scatter",
        ),
        ({"protocol": "LL"}, "protocol is 'LL'; that of programs is DSL"),
        (
            {"tile_lines": 3},
            "no such key as tile_lines; keys: operation, up_to, algorithm; optional: protocol, blocks, thr",
        ),
        ({"blocks": 0}, "blocks is 0; it must be a whole number from 1 to 65535. Without it the program chooses"),
        ({"blocks": True}, "blocks is true; it must be"),
        ({"blocks": 1 << 16}, "blocks is 65536; it must be"),
        (
            {"threads": 1025},
            "threads is 1025; it must be a whole number from 1 to 1024. Without it the program",
        ),
        ({"threads": "64"}, "threads is '64'; it must be"),
        (
            {"runner_up": {"algorithm": "dsl:o", "protocol": "LL", "us": 1}},
            "runner_up is 'dsl:o LL'",
        ),
        ({"runner_up": {"algorithm": "ring", "protocol": "LL", "us": 1}}, "runner_up is 'ring LL'"),
        ({"up_to": 0}, "up_to is 0; it must be a number of bytes above 0"),
        ({"us": "fast"}, "us is 'fast'; it must be a number of microseconds"),
        ({"algorithm": "dsl:"}, "algorithm is 'dsl:'"),
    ],
)
def test_a_row_that_is_not_valid(tmp_path: Path, changes: dict[str, object], complaint: str) -> None:
    entry = {"operation": ALL_REDUCE, "up_to": 2048, "algorithm": "dsl:mine", "protocol": "DSL", "us": 1.5, **changes}
    with pytest.raises(ConfigError) as error:
        load_table(table_file(tmp_path / "a.yaml", [entry]))
    assert complaint in str(error.value)


def test_a_row_that_lacks_its_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it lacks up_to"):
        load_table(table_file(tmp_path / "a.yaml", [{"operation": ALL_REDUCE, "algorithm": "dsl:mine"}]))
