"""Programs of the DSL under seeded schedules: those of the library pass, kernels with a protection taken out do not,
and a seed says all of a schedule."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_comm import dsl
from llm_comm.dsl import Fault, ScheduleError, library
from llm_comm.dsl.library import PROGRAMS
from llm_comm.dsl.schedules.explore import explore_plan
from llm_comm.dsl.schedules.plan import plan_of, schedules_for

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

WORLDS = [
    (text, world)
    for text in PROGRAMS
    for world in (2, 3, 5, 8)
    if text is not library.hierarchical_ll or world % 2 == 0
]
#: Enough to find each of CONTROLS many times over.
FEW = 12


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Where the kernels are that the tests of this file compile."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("kernels")
        patch.setenv("LLM_COMM_CACHE_DIR", str(directory))
        yield directory


# ---- What passes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "world"), WORLDS, ids=lambda value: getattr(value, "name", value))
def test_programs_of_the_library_pass(text: dsl.ProgramDefinition, world: int) -> None:
    schedules = FEW if world < 8 else 4
    explored = dsl.explore(text.build(world), schedules)
    assert explored.schedules == schedules
    assert explored.steps > 100


def gather_by_proxies(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.scratch(p.world, like=x)
    for peer in p.peers:
        p.port_put(x[0], peer, received[p.rank])
        p.signal(peer, through_port=True)
    p.copy(x[0], y[p.rank])
    for peer in p.peers:
        p.wait(peer, through_port=True)
        p.copy(received[peer], y[peer])


@dsl.program("all_gather")
def by_proxies(p: dsl.Builder) -> None:
    """Proxies copy, with the caller's tensor as the source."""
    gather_by_proxies(p)
    for peer in p.peers:
        p.flush(peer)


@dsl.program("all_gather")
def by_proxies_without_a_flush(p: dsl.Builder) -> None:
    """The same, in which the caller may change the source while proxies still copy it."""
    gather_by_proxies(p)


def test_proxies_are_actors_of_the_schedule() -> None:
    program = by_proxies.build(3)
    dsl.check(program)
    dsl.explore(program, 40)


def test_what_proxies_do_late_is_found() -> None:
    with pytest.raises(dsl.ProgramError, match="flush"):
        dsl.check(by_proxies_without_a_flush.build(2))
    with pytest.raises(ScheduleError, match="of its output is"):
        dsl.explore(by_proxies_without_a_flush.build(2))


# ---- What does not ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Control:
    """A kernel with a protection taken out, of a program that is correct.

    Attributes:
        name: What is taken out.
        text, world: The program.
        edit: Of the kernel's source.
        failure: What is said of it.
    """

    name: str
    text: dsl.ProgramDefinition
    world: int
    edit: Callable[[str], str]
    failure: str


def in_place_of(old: str, new: str) -> Callable[[str], str]:
    """Edits all places that hold a text."""

    def edit(source: str) -> str:
        assert old in source, f"the kernel has no {old!r} any more: think this control through again"
        return source.replace(old, new)

    return edit


def without_barriers_before_signals(source: str) -> str:
    barrier = "block_sync();\n *if (*incomplete != 0) return;\n"
    pattern = re.escape(barrier).replace(r"\ \*", " *") + r"( *\{\n(?:[^\n]*\n){3}[^\n]*// p\.signal\()"
    edited, count = re.subn(pattern, r"\1", source)
    assert count > 0, "no signal has a barrier before it any more: think this control through again"
    return edited


WRONG = r"element \d+ of its output is (0|0x[0-9a-f]+)(, as before the call)?; it must be "
CONTROLS = [
    Control(
        "a signal is no release",
        library.one_shot_hb,
        3,
        in_place_of("store_release(at, value);", "store_relaxed(at, value);"),
        WRONG,
    ),
    Control(
        "a wait is no acquire",
        library.two_shot_hb,
        2,
        in_place_of("return load_acquire(word) >= expected;", "return load_relaxed(word) >= expected;"),
        WRONG,
    ),
    Control("no barrier before a signal", library.one_shot_hb, 3, without_barriers_before_signals, WRONG),
    Control(
        "packets are not reset to the sentinel", library.one_shot_ll, 2, in_place_of("reset_line(", "(void)("), WRONG
    ),
    Control(
        "packets are read before they have come",
        library.two_shot_ll,
        2,
        in_place_of("return poll_lines(from, line);", "return poll_lines(from, line), true;"),
        WRONG,
    ),
    Control(
        "packets are taken for whole by their first word",
        library.all_gather_ll,
        2,
        in_place_of("return poll_lines(from, line);", "return poll_lines(from, line), line[0].word[0] != kSentinel;"),
        WRONG,
    ),
    Control(
        "masks are not reset to the sentinel",
        library.all_to_all_ll,
        2,
        in_place_of("store_relaxed(from[i], kSentinel);", ""),
        f"is not reset to the sentinel when all calls have ended|{WRONG}",
    ),
    Control(
        "both halves are one",
        library.ring_ll,
        3,
        in_place_of("call.is_odd() ?", "false ?"),
        rf"its wait for rank \d never ends|{WRONG}",
    ),
    Control(
        "the number of the call is not counted",
        library.broadcast_ll,
        3,
        in_place_of("if (thread_index() == 0) call.arrive();", ""),
        rf"its wait for rank \d never ends|{WRONG}",
    ),
    Control(
        "the call does not wait for grids before it",
        library.reduce_scatter_ll,
        2,
        in_place_of("grid_dependency_wait_after((op_.precomputed() + ... + precomputed));", ""),
        rf"its wait for rank \d never ends|{WRONG}",
    ),
]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_a_kernel_without_a_protection_is_refused(control: Control) -> None:
    program = control.text.build(control.world)
    dsl.check(program)
    plan = plan_of(program)
    broken = dataclasses.replace(plan, source=control.edit(plan.source))
    with pytest.raises(ScheduleError, match=control.failure) as caught:
        explore_plan(broken, schedules_for(program), 0)
    error = caught.value
    assert error.fault is Fault.SCHEDULE
    assert f"schedule {error.seed} of the deterministic emulator, at step {error.step}: rank {error.rank}" in str(error)
    assert error.where.file == library.__file__
    for _ in range(2):
        with pytest.raises(ScheduleError) as again:
            explore_plan(broken, 1, error.seed)
        assert str(again.value) == str(error)


def test_a_wait_that_never_ends_names_its_line() -> None:
    """In this program each wait for a peer stands in one line."""
    program = library.broadcast_ll.build(3)
    plan = plan_of(program)
    silent = plan.source.replace("if (at != nullptr) store_release(at, value);", "")
    assert silent != plan.source
    with pytest.raises(ScheduleError, match=r"its wait for rank \d never ends") as caught:
        explore_plan(dataclasses.replace(plan, source=silent), 1, 0)
    assert caught.value.where.text == "p.wait(peer)"


def test_a_wrong_result_names_its_line() -> None:
    program = library.all_gather_ll.build(2)
    plan = plan_of(program)
    lost = plan.source.replace("output_lines.store(rank, ", "if (false) output_lines.store(rank, ")
    assert lost != plan.source
    with pytest.raises(ScheduleError, match="of its output is 0x5a5a5a5a, as before the call; it must be") as caught:
        explore_plan(dataclasses.replace(plan, source=lost), 1, 0)
    assert caught.value.where.text == "p.copy(x[0], y[p.rank])"


# ---- Seeds -----------------------------------------------------------------------------------------------------------


def test_a_seed_says_all_of_a_schedule(tmp_path: Path) -> None:
    program = library.one_shot_ll.build(2)
    traces = [tmp_path / "once", tmp_path / "again", tmp_path / "another"]
    once, again, another = (dsl.explore(program, 1, seed, trace=traces[i]) for i, seed in enumerate((7, 7, 8)))
    assert once == again != another
    assert traces[0].read_bytes() == traces[1].read_bytes() != traces[2].read_bytes()
    assert len(traces[0].read_text().splitlines()) > 100
    # The last one of several is what it is alone.
    assert dsl.explore(program, 8, 0)[1:] == once[1:]


def test_what_is_asked_for_has_to_fit() -> None:
    program = library.one_shot_ll.build(2)
    with pytest.raises(ValueError, match="schedules is 0; there is 1 at least"):
        dsl.explore(program, 0)
    with pytest.raises(ValueError, match="seed is -1; it is 0 at least"):
        dsl.explore(program, 1, -1)
    with pytest.raises(ValueError, match="seed is 18446744073709551615; it is 0 at least, and all"):
        dsl.explore(program, 2, 2**64 - 1)


def test_larger_programs_get_fewer_schedules() -> None:
    counts = [schedules_for(library.two_shot_hb.build(world)) for world in range(2, 9)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] >= 12


def test_messages_have_all_kinds_of_sizes() -> None:
    for text in PROGRAMS:
        for world in (2, 4, 8):
            plan = plan_of(text.build(world))
            sizes = [size.part_bytes for size in plan.sizes]
            assert len(set(sizes)) >= 3
            assert sizes[0] == 4
            assert all(size % 16 for size in sizes)  # their last line is not full


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(RuntimeError, match="there is no C\\+\\+ compiler '/nowhere/g\\+\\+'; CXX names another"):
        dsl.explore(library.one_shot_ll.build(2), 1)
