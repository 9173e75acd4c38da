"""What the core refuses to launch: anything beyond a bound, and nothing up to it. In this process, without peers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from llm_comm import _core, registry
from llm_comm.config import MULTICAST_OFF_VARIABLES
from llm_comm.planning.tables import ALL_REDUCE, FUSED

LINE = 16
HIDDEN = 1024
MAX_CLUSTER = 16
CHUNK_LINES = 8
BF16 = tuple(registry.data_types()).index("bf16")
#: Those of LL.
ALGORITHMS = [
    (a.operation, a.name)
    for name in (ALL_REDUCE, FUSED)
    for a in registry.operations()[name].algorithms
    if a.protocol == "LL"
]
every_algorithm = pytest.mark.parametrize(("operation", "algorithm"), ALGORITHMS)
some_worlds = pytest.mark.parametrize("world", [2, 3, 8])


@pytest.fixture(autouse=True)
def _multicast_is_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MULTICAST_OFF_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def core_of(world: int, slot_bytes: int, rank: int = 0, multicast: bool = False) -> _core.Core:
    options = _core.CoreOptions(
        rank=rank,
        world_size=world,
        slot_bytes=slot_bytes,
        timeout_s=1.0,
        dependent_launch=False,
        check_calls=False,
        multicast=multicast,
    )
    core = _core.make_emulated_core(options)
    if multicast:
        os.close(core.create_multicast())
        core.bind_multicast()
    return core


def algorithm_of(operation: str, name: str) -> registry.Algorithm:
    return next(a for a in registry.operations()[operation].algorithms if a.name == name)


def number_of(operation: str, algorithm: str) -> int:
    return algorithm_of(operation, algorithm).number


def problem_of(operation: str, units: int, world: int, **changes: int) -> _core.Problem:
    """Of so many elements, or rows."""
    is_fused = operation == FUSED
    usual = {"count": units * (HIDDEN if is_fused else 1), "row": HIDDEN if is_fused else 0}
    parameters = (1e-5, 0) if is_fused else ()
    return _core.Problem(**{**usual, "data_type": BF16, "world_size": world, **changes}, parameters=parameters)


def prepare(operation: str, algorithm: str, slot_bytes: int, units: int, world: int, **changes: int) -> None:
    """One launch that takes all, with a tiling that is usual but for ``changes``."""
    usual = {"blocks": 2, "tile_lines": 8, "cluster": 1, "depth": 0, "launch_units": units}
    problem = problem_of(operation, units, world)
    core = core_of(world, slot_bytes, multicast=algorithm_of(operation, algorithm).uses_multimem)
    core.prepare(number_of(operation, algorithm), problem, _core.Tiling(**{**usual, **changes}))


def slot_lines(operation: str, algorithm: str, units: int, world: int) -> int:
    """What a launch needs, as docs and headers say: of one-shot the message for each of the other ranks, of two-shot a
    share of it in two phases. With a norm, or by a switch, a rank keeps its own share, too, in the second."""
    if operation == ALL_REDUCE:
        lines = -(-units * 2 // LINE)
        shares = 2 * world - (1 if algorithm == "two_shot_switch" else 2)
        return (world - 1) * lines if algorithm == "one_shot" else shares * -(-lines // world)
    row_lines = HIDDEN * 2 // LINE
    segment = -(-row_lines // (CHUNK_LINES * world)) * CHUNK_LINES
    return units * ((world - 1) * row_lines if algorithm == "one_shot" else (2 * world - 1) * segment)


@every_algorithm
@some_worlds
@pytest.mark.parametrize("units", [1, 7, 40])
def test_a_slot_is_as_large_as_its_message_needs(operation: str, algorithm: str, world: int, units: int) -> None:
    lines = slot_lines(operation, algorithm, units, world)
    prepare(operation, algorithm, lines * LINE, units, world)
    prepare(operation, algorithm, (lines + 1) * LINE, units, world)
    if lines > 1:
        with pytest.raises(ValueError, match="lower launch_units or raise workspace_bytes"):
            prepare(operation, algorithm, (lines - 1) * LINE, units, world)


@every_algorithm
@some_worlds
@pytest.mark.parametrize("spare_lines", [0, 1, -1])
def test_a_shape_takes_all_that_fits(operation: str, algorithm: str, world: int, spare_lines: int) -> None:
    """As many rows as a slot holds; of a message that is cut, no launch needs more than the slot has."""
    rows_that_fit = 5
    slot = slot_lines(operation, algorithm, 5 * world * 8, world) + spare_lines
    if operation == FUSED:
        slot = slot_lines(operation, algorithm, rows_that_fit, world) + spare_lines
    limits = _core.Limits(slot_bytes=slot * LINE, sm_count=132, max_cluster=MAX_CLUSTER, compute_capability=90)
    problem = problem_of(operation, 4000, world)
    number = number_of(operation, algorithm)
    choice = _core.TuningParameters(blocks=64, threads=256, tile_lines=8, cluster=1)
    units = _core.shape(number, problem, choice, limits).tiling.launch_units
    assert slot_lines(operation, algorithm, units, world) <= slot
    if operation == FUSED:
        assert units == rows_that_fit - (spare_lines < 0)


@every_algorithm
def test_blocks(operation: str, algorithm: str) -> None:
    """65536 would turn the operation's number over at once: blocks count in its low half."""
    units = 65537 if operation == FUSED else 65537 * 8 * 8 * 2
    slot_bytes = slot_lines(operation, algorithm, units, 2) * LINE
    prepare(operation, algorithm, slot_bytes, units, 2, blocks=65535)
    for blocks in (0, 65536):
        with pytest.raises(ValueError, match=f"blocks is {blocks}; it must be 1 to 65535"):
            prepare(operation, algorithm, slot_bytes, units, 2, blocks=blocks)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_clusters(algorithm: str) -> None:
    """Of a row that has a share for every block."""
    slot_bytes = slot_lines(FUSED, algorithm, 4, 2) * LINE
    rows = {"blocks": 4 * MAX_CLUSTER, "tile_lines": 8}
    prepare(FUSED, algorithm, slot_bytes, 4, 2, cluster=8, **rows)
    prepare(FUSED, algorithm, slot_bytes, 4, 2, cluster=MAX_CLUSTER, **rows)
    for cluster in (0, MAX_CLUSTER + 1):
        with pytest.raises(ValueError, match=f"cluster is {cluster}; this device takes 1 to 16"):
            prepare(FUSED, algorithm, slot_bytes, 4, 2, cluster=cluster, **{**rows, "blocks": 4 * (MAX_CLUSTER + 1)})
    with pytest.raises(ValueError, match="blocks is 8, less than a cluster of 16"):
        prepare(FUSED, algorithm, slot_bytes, 4, 2, cluster=MAX_CLUSTER, tile_lines=8, blocks=8)


@every_algorithm
@some_worlds
def test_threads(operation: str, algorithm: str, world: int) -> None:
    """A thread for each line of a tile and each peer, no more than a block may have: two-shot with a norm has half."""
    most = 512 if operation == FUSED and algorithm.startswith("two_shot") else 1024
    slot_bytes = slot_lines(operation, algorithm, 8, world) * LINE
    fitting = 8
    while world * fitting * 2 <= most:
        fitting *= 2
    tiles = {"blocks": 8}
    prepare(operation, algorithm, slot_bytes, 8, world, tile_lines=fitting, **tiles)
    too_many = fitting * 2
    if operation == FUSED:
        too_many = (most // world // CHUNK_LINES + 1) * CHUNK_LINES
        prepare(operation, algorithm, slot_bytes, 8, world, tile_lines=too_many - CHUNK_LINES, **tiles)
    for tile_lines in (0, too_many, fitting + 1):
        with pytest.raises(ValueError, match=f"tile_lines is {tile_lines}; it must be"):
            prepare(operation, algorithm, slot_bytes, 8, world, tile_lines=tile_lines, **tiles)


@pytest.mark.parametrize(
    ("row", "count", "why"),
    [
        (16384, 16384, ""),
        (8, 8, ""),
        (16392, 16392, "a multiple of 8 up to 16384"),
        (12, 12, "a multiple of 8 up to 16384"),
        (0, 8, "a multiple of 8 up to 16384"),
        (16, 24, "24 elements are not rows of 16"),
        (16, 0, "there are no elements"),
    ],
)
def test_rows(row: int, count: int, why: str) -> None:
    problem = problem_of(FUSED, 1, 2, row=row, count=count)
    tiling = _core.Tiling(blocks=2, tile_lines=8, cluster=1, depth=0, launch_units=1)
    core = core_of(2, 1 << 20)
    if not why:
        core.prepare(number_of(FUSED, "one_shot"), problem, tiling)
        return
    with pytest.raises(ValueError, match=why):
        core.prepare(number_of(FUSED, "one_shot"), problem, tiling)


@every_algorithm
def test_walks_over_several_tiles(operation: str, algorithm: str) -> None:
    """A grid that has fewer clusters than rows: blocks of half the threads, each with a share of every row."""
    if operation == ALL_REDUCE:
        return
    row_lines = HIDDEN * 2 // LINE
    span = row_lines if algorithm == "one_shot" else row_lines // 2
    slot_bytes = slot_lines(operation, algorithm, 8, 2) * LINE
    prepare(operation, algorithm, slot_bytes, 8, 2, blocks=4, tile_lines=256)
    prepare(operation, algorithm, slot_bytes, 8, 2, blocks=4, tile_lines=span - CHUNK_LINES, cluster=2)
    prepare(operation, algorithm, slot_bytes, 8, 2, blocks=16, tile_lines=span, cluster=2)
    with pytest.raises(ValueError, match="no share of a row"):
        prepare(operation, algorithm, slot_bytes, 8, 2, blocks=4, tile_lines=span, cluster=2)
    if algorithm == "one_shot":
        prepare(operation, algorithm, slot_bytes, 8, 2, blocks=8, tile_lines=512)
        with pytest.raises(ValueError, match="cannot walk over rows of 2048 bytes: they have more than 512 threads"):
            prepare(operation, algorithm, slot_bytes, 8, 2, blocks=4, tile_lines=264)


@every_algorithm
def test_a_launch_counts_in_32_bits(operation: str, algorithm: str) -> None:
    """Elements, or of rows lines."""
    most = (1 << 32) // (HIDDEN * 2 // LINE) if operation == FUSED else 1 << 32
    slot_bytes = slot_lines(operation, algorithm, most, 2) * LINE
    prepare(operation, algorithm, slot_bytes, most - 1, 2)
    with pytest.raises(ValueError, match=r"a launch must have fewer than 2\^32 "):
        prepare(operation, algorithm, slot_bytes, most, 2)


@every_algorithm
@pytest.mark.parametrize(
    ("world", "why"), [(1, "a world of 1; it takes 2 to 16"), (17, "a world of 17"), (16, ""), (9, ""), (2, "")]
)
def test_worlds(operation: str, algorithm: str, world: int, why: str) -> None:
    limits = _core.Limits(slot_bytes=1 << 20, sm_count=132, max_cluster=MAX_CLUSTER, compute_capability=90)
    choice = _core.TuningParameters(blocks=64, threads=256, tile_lines=8, cluster=1)
    number, problem = number_of(operation, algorithm), problem_of(operation, 8, world)
    if not why:
        assert _core.shape(number, problem, choice, limits).launches == 1
        return
    with pytest.raises(ValueError, match=why):
        _core.shape(number, problem, choice, limits)


def test_an_all_reduce_knows_no_rows() -> None:
    tiling = _core.Tiling(blocks=2, tile_lines=8, cluster=1, depth=0, launch_units=8)
    with pytest.raises(ValueError, match="64 elements are not rows of 8"):
        core_of(2, 1 << 20).prepare(number_of(ALL_REDUCE, "one_shot"), problem_of(ALL_REDUCE, 64, 2, row=8), tiling)


@pytest.mark.parametrize(
    ("workspace", "slot", "staging"),
    [
        (0, 0, 0),
        (131071, 0, 0),
        (131072 + 31, 0, 0),
        (131072 + 32, 16, 0),
        (131072 + 95, 16, 32),
        (131072 + 96, 32, 32),
        (64 << 20, (64 << 20) // 16 * 5 - 40960, (64 << 20) // 8 * 3 - 49152),
    ],
)
def test_how_a_workspace_is_divided(workspace: int, slot: int, staging: int) -> None:
    """Behind 128 KiB: three eighths for staging, the rest for two slots, in whole lines."""
    assert (_core.slot_bytes(workspace), _core.staging_bytes(workspace)) == (slot, staging)


def test_a_call_for_another_world() -> None:
    tiling = _core.Tiling(blocks=2, tile_lines=8, cluster=1, depth=0, launch_units=8)
    with pytest.raises(ValueError, match="a call for 3 ranks of a communicator of 2"):
        core_of(2, 1 << 20).prepare(number_of(ALL_REDUCE, "one_shot"), problem_of(ALL_REDUCE, 8, 3), tiling)


@pytest.mark.parametrize("slot_bytes", [0, 8, 24, (1 << 20) + 1])
def test_slots_are_whole_lines(slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="it must be a positive multiple of 16"):
        core_of(2, slot_bytes)


@pytest.mark.parametrize(
    ("rank", "world", "timeout_s", "why"),
    [
        (7, 8, 1e-3, ""),
        (0, 1, 1.0, ""),
        (2, 2, 1.0, "rank 2 of 2: the world size must be 1 to 16 and the rank below it"),
        (-1, 2, 1.0, "rank -1 of 2"),
        (0, 17, 1.0, "rank 0 of 17"),
        (0, 0, 1.0, "rank 0 of 0"),
        (0, 2, 0.0, "timeout_s must be positive"),
        (0, 2, -1.0, "timeout_s must be positive"),
        (0, 2, float("nan"), "timeout_s must be positive"),
    ],
)
def test_options_of_a_core(rank: int, world: int, timeout_s: float, why: str) -> None:
    options = _core.CoreOptions(
        rank=rank, world_size=world, slot_bytes=16, timeout_s=timeout_s, dependent_launch=False, check_calls=False
    )
    if not why:
        _core.make_emulated_core(options)
        return
    with pytest.raises(ValueError, match=why):
        _core.make_emulated_core(options)


def test_memory_of_nobody_is_not_mapped() -> None:
    core = core_of(3, 1 << 16, rank=1)
    descriptor, _ = core.create_workspace("descriptor")
    for peer in (-1, 1, 3):
        with pytest.raises(ValueError, match=f"map_peer: {peer} is not a peer of rank 1"):
            core.map_peer(peer, descriptor, b"")
    core.map_peer(2, descriptor, b"")
    os.close(descriptor)


@pytest.mark.parametrize("given", [1, 2, 4])
def test_addresses_of_a_call(given: int) -> None:
    """As many as the operation has buffers, and a stream; memory behind each."""
    core = core_of(2, 1 << 20)
    tiling = _core.Tiling(blocks=1, tile_lines=1, cluster=1, depth=0, launch_units=8)
    run = core.prepare(number_of(ALL_REDUCE, "one_shot"), problem_of(ALL_REDUCE, 8, 2), tiling)
    x = torch.ones(8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=f"run.. takes 2 addresses and a stream; {given} arguments given"):
        run(*[x.data_ptr()] * given)
    for addresses in ((0, x.data_ptr()), (x.data_ptr(), 0)):
        with pytest.raises(ValueError, match="a tensor has no memory"):
            run(*addresses, 0)


def test_addresses_are_numbers() -> None:
    core = core_of(2, 1 << 20)
    tiling = _core.Tiling(blocks=1, tile_lines=1, cluster=1, depth=0, launch_units=8)
    run = core.prepare(number_of(ALL_REDUCE, "one_shot"), problem_of(ALL_REDUCE, 8, 2), tiling)
    for wrong, kind in (("x", TypeError), (None, TypeError), (1 << 64, OverflowError), (-1, OverflowError)):
        with pytest.raises(kind):
            run(wrong, 16, 0)
        with pytest.raises(kind):
            run(16, 16, wrong)


def test_numbers_that_stand_for_nothing() -> None:
    number, problem = len(_core.algorithms()), problem_of(ALL_REDUCE, 8, 2)
    limits = _core.Limits(slot_bytes=1 << 20, sm_count=132, max_cluster=MAX_CLUSTER, compute_capability=90)
    tiling = _core.Tiling(blocks=1, tile_lines=1, cluster=1, depth=0, launch_units=8)
    for ask in (
        lambda: core_of(2, 1 << 20).prepare(number, problem, tiling),
        lambda: _core.shape(number, problem, _core.TuningParameters(blocks=1), limits),
        lambda: _core.candidates(number, problem, limits),
    ):
        with pytest.raises(ValueError, match=f"there is no algorithm number {number}"):
            ask()
    with pytest.raises(ValueError, match="there is no data type 4"):
        problem_of(ALL_REDUCE, 8, 2, data_type=4)
    with pytest.raises(ValueError, match="too many parameters"):
        _core.Problem(count=8, row=0, data_type=BF16, world_size=2, parameters=(1.0,) * 18)


# ---- The proof that mappings carry stores ---------------------------------------------------------------------------


def connected(world: int, swapped: tuple[int, int] | None) -> list[_core.Core]:
    """Cores of which rank 0 takes the workspaces of two peers for each other's."""
    cores = [core_of(world, 1 << 16, rank) for rank in range(world)]
    handles = [core.create_workspace("descriptor") for core in cores]
    for rank, core in enumerate(cores):
        for peer in range(world):
            if peer == rank:
                continue
            real = peer
            if rank == 0 and swapped is not None and peer in swapped:
                real = swapped[1 - swapped.index(peer)]
            core.map_peer(peer, *handles[real])
    for fd, _ in handles:
        os.close(fd)
    return cores


def test_marks_arrive() -> None:
    cores = connected(3, None)
    for core in cores[:2]:
        core.send_marks()
    assert [core.peers_unseen() for core in cores] == [[2], [2], [2]]
    cores[2].send_marks()
    assert [core.peers_unseen() for core in cores] == [[], [], []]


def test_marks_that_were_meant_for_another_rank_prove_nothing() -> None:
    cores = connected(3, (1, 2))
    for core in cores:
        core.send_marks()
    assert [core.peers_unseen() for core in cores] == [[], [0], [0]]


# ---- Regions of a workspace -----------------------------------------------------------------------------------------

INCLUDE = Path(__file__).parents[2] / "csrc" / "include"
LAYOUT = "llm_comm/workspace_layout.h"


def why_not_compiled(directory: Path, program: str, old: str = "", new: str = "") -> str:
    """What the compiler says of a program that sees the layout with ``new`` in place of ``old``; "": nothing."""
    layout = (INCLUDE / LAYOUT).read_text()
    assert old in layout
    edited = directory / LAYOUT
    edited.parent.mkdir(exist_ok=True)
    edited.write_text(layout.replace(old, new))
    flags = ["-std=c++20", "-fsyntax-only", "-DLLM_COMM_EMULATOR", f"-I{directory}", f"-I{INCLUDE}"]
    done = subprocess.run(["g++", *flags, "-xc++", "-"], input=program, capture_output=True, text=True, check=False)
    return done.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("SignalRange<CommonSignals::kFirst + CommonSignals::kBlocks, 224>", "SignalRange<383, 224>"),
        ("CommonSignals = SignalRange<0, 384>", "CommonSignals = SignalRange<0, 385>"),
        ("kOutputOffsetsOffset = 20480", "kOutputOffsetsOffset = 32768"),
        ("kFaultReportsOffset = 10240", "kFaultReportsOffset = 12296"),
    ],
    ids=["as it is", "one range in another", "a row too many", "places among signals", "notes among calls"],
)
def test_regions_that_overlap_do_not_compile(tmp_path: Path, old: str, new: str) -> None:
    why = why_not_compiled(tmp_path, f'#include "{LAYOUT}"\n', old, new)
    assert ("regions overlap, or leave a gap" in why) == bool(old), why


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_signals_are_named_by_the_range_that_owns_them(tmp_path: Path) -> None:
    """A session takes a row of a range, no number."""
    program = """#include "llm_comm/hb_session.cuh"
        using namespace llm_comm;
        void use(const DeviceComm& comm, Line* line) { HBSession session(comm, OperationKind{1}, 0, ROW, line); }
    """
    assert why_not_compiled(tmp_path, program.replace("ROW", "SignalRow::of<DirectSignals>(7)")) == ""
    assert "no matching function for call to" in why_not_compiled(tmp_path, program.replace("ROW", "7u"))
    assert "is private within this context" in why_not_compiled(tmp_path, program.replace("ROW", "SignalRow(7)"))
