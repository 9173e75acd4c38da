"""All-gathers and reduce-scatters among other calls: nothing of one may reach another; and ranks that disagree."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool, make_communicator, unnamed
from reference import DTYPES, assert_bitwise_equal, assert_is_sum, contributions, rank_order_sum
from shards_reference import ANY_DTYPES, assert_same_bits, drawn_bits, drawn_division, placed
from tables import table_of_parts

from llm_comm import Communicator, LaunchError, MismatchError

#: Elements. Most calls are small; some take several launches, or several chunks.
MOST = (20, 300, 5_000, 40_000)


def gather_once(comm: Communicator, draw: random.Random, number: int) -> None:
    division = drawn_division(draw, comm.world_size, draw.choice(MOST))
    dtype = draw.choice(ANY_DTYPES)
    whole = drawn_bits(division.shape, dtype, number)
    x, _ = placed(division.part_of(whole, comm.rank).contiguous(), draw.randrange(8) * comm.rank % 8)
    sizes = None if division.is_even and draw.random() < 0.5 else division.sizes
    result = comm.all_gather(x, division.dim, sizes, draw.choice([None, torch.empty_like(whole)]))
    assert_same_bits(result, whole, f"call {number}, all_gather of {division}, {dtype}")


def scatter_once(comm: Communicator, draw: random.Random, number: int) -> None:
    division = drawn_division(draw, comm.world_size, draw.choice(MOST))
    dtype = draw.choice(DTYPES)
    count = torch.Size(division.shape).numel()
    inputs = [t.view(division.shape) for t in contributions(comm.world_size, count, dtype, number)]
    x, _ = placed(inputs[comm.rank], draw.randrange(8) * comm.rank % 8)
    sizes = None if division.is_even and draw.random() < 0.5 else division.sizes
    own = division.part_of(x, comm.rank)
    in_place = draw.random() < 0.3 and torch.Size(division.shape[: division.dim % x.dim()]).numel() == 1
    result = comm.reduce_scatter(x, division.dim, sizes, own if in_place else None)
    expected = division.part_of(rank_order_sum(inputs), comm.rank)
    assert_bitwise_equal(result, expected, f"call {number}, reduce_scatter of {division}, {dtype}")


def exchange_once(comm: Communicator, draw: random.Random, number: int) -> None:
    dtype, part = draw.choice(ANY_DTYPES), draw.randrange(draw.choice(MOST) // comm.world_size)
    sent = [drawn_bits((comm.world_size, part), dtype, number + 1000 * rank) for rank in range(comm.world_size)]
    expected = torch.stack([of_rank[comm.rank] for of_rank in sent])
    result = comm.all_to_all(sent[comm.rank], out=draw.choice([None, torch.empty_like(expected)]))
    assert_same_bits(result, expected, f"call {number}, all_to_all of {part} {dtype}")


def reduce_once(comm: Communicator, draw: random.Random, number: int) -> None:
    dtype = draw.choice(DTYPES)
    inputs = contributions(comm.world_size, draw.randrange(draw.choice(MOST)), dtype, number)
    assert_is_sum(comm.all_reduce(inputs[comm.rank]), inputs, f"call {number}, all_reduce of {dtype}")


def norm_once(comm: Communicator, draw: random.Random, number: int) -> None:
    x = torch.full((draw.randint(1, 9), 64), float(number % 7), dtype=torch.bfloat16)
    _, total = comm.all_reduce_add_rms_norm(x, None, torch.ones(64, dtype=x.dtype), 1e-5)
    assert total.equal(x * comm.world_size), f"call {number}, all_reduce_add_rms_norm"


def mix(table: Path | None, seed: int, calls: int, **options: Any) -> None:
    draw = random.Random(seed)  # the same on all ranks
    table_option = {} if table is None else {"table": str(table)}
    with make_communicator(**table_option, **options) as comm:
        for number in range(calls):
            once: Callable[[Communicator, random.Random, int], None] = draw.choice(
                [gather_once, gather_once, scatter_once, scatter_once, exchange_once, reduce_once, norm_once]
            )
            once(comm, draw, seed * 10_000 + number)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_random_calls(ranks: RankPool, world: int, seed: int, tmp_path: Path) -> None:
    """Operations, divisions, types, algorithms, grids and pointers change from one call to the next."""
    ranks.run(world, mix, table_of_parts(tmp_path / "parts.yaml"), seed, 150)


@pytest.mark.parametrize("algorithm", ["one_shot", "push_hb"])
def test_random_calls_in_a_small_workspace(ranks: RankPool, algorithm: str) -> None:
    ranks.run(3, mix_in_small_workspace, algorithm)


def mix_in_small_workspace(algorithm: str) -> None:
    mix(None, 3, 100, algorithm=algorithm, workspace_bytes=1 << 20)


def pause_at_times_of_its_own() -> None:
    """So that the fast ranks run ahead as far as they can."""
    with make_communicator() as comm:
        pauses = random.Random(comm.rank)
        wholes = [drawn_bits((comm.world_size, 3000), torch.uint8, seed) for seed in range(4)]
        inputs = [contributions(comm.world_size, comm.world_size * 40, torch.float32, seed) for seed in range(4)]
        for call in range(300):
            if pauses.random() < 0.1:
                torch.randn(200_000)
            whole, summed = wholes[call % 4], inputs[call % 4]
            count = 10 if call % 5 else 3000
            out = comm.all_gather(whole[comm.rank, :count])
            assert_same_bits(out.view(-1, count), whole[:, :count], f"call {call}")
            part = comm.reduce_scatter(summed[comm.rank])
            assert_bitwise_equal(part, rank_order_sum(summed).chunk(comm.world_size)[comm.rank], f"call {call}")


def test_ranks_out_of_step(ranks: RankPool) -> None:
    ranks.run(3, pause_at_times_of_its_own)


# ---- Ranks that disagree ---------------------------------------------------------------------------------------------


def sizes_differ(comm: Communicator, is_odd: bool) -> None:
    comm.all_gather(torch.ones(4, 2), 0, [4, 4, 3] if is_odd else [4, 4, 4])


def lengths_differ(comm: Communicator, is_odd: bool) -> None:
    comm.all_gather(torch.ones(5 if is_odd else 4, 2))


def dims_differ(comm: Communicator, is_odd: bool) -> None:
    comm.reduce_scatter(torch.ones(6, 6), 1 if is_odd else 0)


def divisions_differ(comm: Communicator, is_odd: bool) -> None:
    comm.reduce_scatter(torch.ones(1_500_000), 0, [1_000_000, 500_000, 0] if is_odd else [1_000_000, 0, 500_000])


def operations_differ(comm: Communicator, is_odd: bool) -> None:
    x = torch.ones(6)
    comm.reduce_scatter(x) if is_odd else comm.all_gather(x)


def sums_differ(comm: Communicator, is_odd: bool) -> None:
    x = torch.ones(6)
    comm.reduce_scatter(x) if is_odd else comm.all_reduce(x)


def algorithms_differ(comm: Communicator, is_odd: bool) -> None:
    comm.all_gather(torch.ones(3000 if is_odd else 4))


GATHER, SCATTER = "one-shot all-gather of", "one-shot reduce-scatter of"
#: By what the odd rank does: how the error words the calls of the others, and its own.
DISAGREEMENTS: dict[Callable[[Communicator, bool], None], tuple[str, str]] = {
    sizes_differ: (
        f"{GATHER} 32 bytes, shards of a row: 32, 32, 32 bytes",
        f"{GATHER} 32 bytes, shards of a row: 32, 32, 24 bytes",
    ),
    lengths_differ: (
        f"{GATHER} 32 bytes, shards of a row: 32, 32, 32 bytes",
        f"{GATHER} 40 bytes, shards of a row: 40, 40, 40 bytes",
    ),
    dims_differ: (
        f"{SCATTER} 12 fp32, rows before dim: 1, shards of a row: 12, 12, 12 elements",
        f"{SCATTER} 12 fp32, rows before dim: 6, shards of a row: 2, 2, 2 elements",
    ),
    divisions_differ: (
        "reduce-scatter by push (HB) of 1000000 fp32, shards of a row: 1000000, 0, 500000 elements",
        "reduce-scatter by push (HB) of 1000000 fp32, shards of a row: 1000000, 500000, 0 elements",
    ),
    operations_differ: (f"{GATHER} 24 bytes", f"{SCATTER} 2 fp32"),
    sums_differ: ("one-shot all-reduce of 6 fp32", f"{SCATTER} 2 fp32"),
    algorithms_differ: (f"{GATHER} 16 bytes", "all-gather by push (HB) of 12000 bytes"),
}


def disagree(call: Callable[[Communicator, bool], None]) -> str:
    with make_communicator() as comm:
        comm.all_gather(torch.ones(2))
        with pytest.raises(MismatchError) as caught:
            call(comm, comm.rank == 1)
        for refuse in (
            lambda: comm.all_gather(torch.ones(5)),
            lambda: comm.all_gather(torch.ones(0)),
            lambda: comm.reduce_scatter(torch.ones(6)),
        ):
            with pytest.raises(MismatchError):
                refuse()
    return unnamed(str(caught.value))


@pytest.mark.parametrize("call", DISAGREEMENTS, ids=lambda call: call.__name__)
def test_one_rank_calls_something_else(ranks: RankPool, call: Callable[[Communicator, bool], None]) -> None:
    usual, odd = DISAGREEMENTS[call]
    for rank, text in enumerate(ranks.run(3, disagree, call)):
        assert f"rank {rank}: the ranks disagree about operation 2 of this communicator" in text
        assert f"ranks 0, 2: {usual}" in text
        assert f"; rank 1: {odd}" in text


def launch_without_memory() -> None:
    """As where the device has no memory left for a launch: the communicator ends, and says why."""
    with make_communicator() as comm:
        whole, part = torch.ones(2 * comm.world_size), torch.ones(2)
        comm.all_gather(part)
        comm.reduce_scatter(whole)

        def fail(*_: int) -> bool:
            raise RuntimeError("out of memory")

        for operation in (comm._operations.all_gather, comm._operations.reduce_scatter):
            for key, prepared in operation._prepared.items():
                operation._prepared[key] = prepared._replace(run=fail)
        with pytest.raises(LaunchError, match="out of memory"):
            comm.all_gather(part)
        with pytest.raises(LaunchError, match="out of memory"):
            comm.reduce_scatter(whole)


def test_a_launch_that_fails(ranks: RankPool) -> None:
    ranks.run(2, launch_without_memory)
