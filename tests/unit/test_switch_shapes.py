"""Launches of algorithms by SwitchChannel: what they need of the device and of the workspace."""

from __future__ import annotations

import pytest

from llm_comm import _core, registry

LINE = 16
HIDDEN = 1024
CHUNK = 8
SEMAPHORE_BLOCKS = 384
BF16 = tuple(registry.data_types()).index("bf16")
BYTE = tuple(registry.data_types()).index("byte")
BY_SWITCH = [a for o in registry.operations().values() for a in o.algorithms if a.uses_multimem]
by_switch = pytest.mark.parametrize("algorithm", BY_SWITCH, ids=lambda a: f"{a.operation}/{a.name}")
IN_CHUNKS = [a for a in BY_SWITCH if a.protocol == "Switch" and a.operation != "all_reduce_add_rms_norm"]
FUSED_SUMS = next(a for a in BY_SWITCH if (a.operation, a.name) == ("all_reduce_add_rms_norm", "two_shot_ld_reduce"))


def limits_of(**changes: int) -> _core.Limits:
    usual = {
        "slot_bytes": 1 << 24,
        "sm_count": 132,
        "max_cluster": 16,
        "compute_capability": 90,
        "staging_bytes": 1 << 24,
    }
    return _core.Limits(**{**usual, **changes})


def problem_of(algorithm: registry.Algorithm, rows: int, world: int) -> _core.Problem:
    count = rows * HIDDEN
    if algorithm.operation == "all_reduce_add_rms_norm":
        return _core.Problem(count=count, row=HIDDEN, data_type=BF16, world_size=world, parameters=(1e-5, 0))
    parameters = (1.0, *[float(count)] * world) if algorithm.operation in ("all_gather", "reduce_scatter") else ()
    data_type = BYTE if algorithm.operation == "all_gather" else BF16
    return _core.Problem(count=count, row=0, data_type=data_type, world_size=world, parameters=parameters)


CHOICE = _core.TuningParameters(blocks=8, threads=256, tile_lines=8, cluster=1, depth=2)


def test_names() -> None:
    assert [(a.operation, a.name, a.protocol) for a in BY_SWITCH] == [
        ("all_reduce", "two_shot_switch", "LL"),
        ("all_reduce", "two_shot_ld_reduce", "Switch"),
        ("all_reduce", "one_shot_ld_reduce", "Switch"),
        ("all_reduce_add_rms_norm", "two_shot_switch", "LL"),
        ("all_reduce_add_rms_norm", "two_shot_ld_reduce", "Switch"),
        ("all_gather", "push_switch", "Switch"),
        ("reduce_scatter", "ld_reduce", "Switch"),
    ]
    assert [a.name for a in BY_SWITCH if a.sums_in_switch] == [a.name for a in BY_SWITCH if "ld_reduce" in a.name]
    assert [a.name for a in BY_SWITCH if a.ranks_may_differ] == ["one_shot_ld_reduce"]


@by_switch
def test_devices_without_multicast_are_refused(algorithm: registry.Algorithm) -> None:
    problem = problem_of(algorithm, 4, 4)
    for capability in (90, 100, 0):  # 0: emulated
        _core.shape(algorithm.number, problem, CHOICE, limits_of(compute_capability=capability))
    for capability in (80, 89):
        with pytest.raises(ValueError, match=f"needs compute capability 9.0; this device has 8.{capability % 10}"):
            _core.shape(algorithm.number, problem, CHOICE, limits_of(compute_capability=capability))


@pytest.mark.parametrize("algorithm", IN_CHUNKS, ids=lambda a: f"{a.operation}/{a.name}")
@pytest.mark.parametrize("world", [2, 3, 8])
def test_staging_holds_a_chunk_of_every_rank(algorithm: registry.Algorithm, world: int) -> None:
    """The own one too, at the same place of all ranks. One-shot has one for the whole message."""
    parts = 1 if algorithm.name == "one_shot_ld_reduce" else world
    needed = 2 * 2 * CHOICE.depth * CHOICE.blocks * parts * 8 * LINE
    problem = problem_of(algorithm, 64, world)
    for staging, chunk in ((needed, 8), (needed - 1, 7)):
        shape = _core.shape(algorithm.number, problem, CHOICE, limits_of(staging_bytes=staging))
        assert shape.tiling.tile_lines == chunk


@pytest.mark.parametrize("world", [2, 3, 8])
def test_rows_that_are_staged_fit_into_both(world: int) -> None:
    """As many lines of a slot as of half of the staging memory: a segment of each owner."""
    segment = -(-(HIDDEN * 2 // LINE) // (CHUNK * world)) * CHUNK
    row = world * segment * LINE
    problem = problem_of(FUSED_SUMS, 64, world)
    for slot, staging, rows in ((5 * row, 64 * row, 5), (64 * row, 10 * row, 5), (64 * row, 10 * row - 1, 4)):
        shape = _core.shape(FUSED_SUMS.number, problem, CHOICE, limits_of(slot_bytes=slot, staging_bytes=staging))
        assert shape.tiling.launch_units == rows


def test_blocks_that_signal_have_words() -> None:
    problem = problem_of(FUSED_SUMS, 4096, 2)
    limits = limits_of(sm_count=4096, slot_bytes=1 << 30, staging_bytes=1 << 31)
    shape = _core.shape(FUSED_SUMS.number, problem, _core.TuningParameters(blocks=4096, threads=64, cluster=1), limits)
    assert shape.whole.blocks == SEMAPHORE_BLOCKS
