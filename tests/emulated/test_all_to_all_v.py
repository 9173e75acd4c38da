"""All-to-all of unequal parts on emulated GPUs: sizes in device memory, and what happens if they are wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cores import connected, number_of, tiling_of, together
from harness import RankPool, make_communicator, names_of_world, unnamed
from nodes_cases import Layout
from nodes_cases import make as make_over_nodes
from shards_reference import (
    ANY_DTYPES,
    SHARD_ALGORITHMS,
    assert_same_bits,
    assert_untouched_outside,
    drawn_bits,
    placed,
)

from llm_comm import Communicator, MismatchError, UnsupportedInputError, _core, registry
from llm_comm.runtime.failures import explain

some_worlds = pytest.mark.parametrize("world", [2, 3, 5, 8])
#: Rows that each rank sends to each other one, by sender and receiver.
Matrix = Sequence[Sequence[int]]


def drawn_matrix(world: int, most: int, seed: int) -> Matrix:
    """Sizes from 0 to ``most``; or skewed to one rank; or all empty but one part."""
    draw = random.Random(seed)
    kind = seed % 4
    if kind == 2:
        full = draw.randrange(world)
        return [[most if receiver == full else 0 for receiver in range(world)] for _ in range(world)]
    if kind == 3:
        alone = draw.randrange(world), draw.randrange(world)
        return [[most if (s, r) == alone else 0 for r in range(world)] for s in range(world)]
    return [[draw.choice([0, 1, most, draw.randint(0, most)]) for _ in range(world)] for _ in range(world)]


def sent(matrix: Matrix, rank: int, row: Sequence[int], dtype: torch.dtype, seed: int, spare: int = 0) -> torch.Tensor:
    """Rows that a rank has for all ranks, and ``spare`` more."""
    return drawn_bits((sum(matrix[rank]) + spare, *row), dtype, 100 * seed + rank)


def expected(matrix: Matrix, rank: int, row: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    parts = []
    for sender, sizes in enumerate(matrix):
        parts.append(sent(matrix, sender, row, dtype, seed).split(list(sizes))[rank])
    return torch.cat(parts)


def sizes_of(matrix: Matrix, rank: int, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    """Sizes that a rank sends and receives."""
    return torch.tensor(matrix[rank], dtype=dtype), torch.tensor([sizes[rank] for sizes in matrix], dtype=dtype)


def exchange(
    comm: Communicator, matrix: Matrix, most: int, row: Sequence[int], dtype: torch.dtype, seed: int, what: str
) -> None:
    size_dtype = (torch.int64, torch.int32)[seed % 2]
    x = sent(matrix, comm.rank, row, dtype, seed)
    before = x.clone()
    send_sizes, recv_sizes = sizes_of(matrix, comm.rank, size_dtype)
    wanted = expected(matrix, comm.rank, row, dtype, seed)
    result = comm.all_to_all(x, send_sizes, recv_sizes, most)
    assert result.shape == (comm.world_size * most, *row)
    assert_same_bits(result[: len(wanted)], wanted, what)
    assert_same_bits(x, before, f"{what}: the input")
    out = drawn_bits((len(wanted) + seed % 3, *row), dtype, 7)
    behind = out[len(wanted) :].clone()
    assert comm.all_to_all(x, send_sizes, recv_sizes, most, out) is out
    assert_same_bits(out[: len(wanted)], wanted, f"{what}: out")
    assert_same_bits(out[len(wanted) :], behind, f"{what}: behind the last row of out")


#: Largest part in rows, and the shape of a row: of odd numbers of bytes, of lines, and more than a tile.
SHAPES = ((1, ()), (3, (1,)), (16, ()), (130, (3,)), (7, (16,)), (33, (2, 5)), (2, (64, 3)), (500, (8,)))


def exchange_shapes_and_types() -> None:
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            cases = [(most, row, ANY_DTYPES[n % len(ANY_DTYPES)]) for n, (most, row) in enumerate(SHAPES)]
            cases += [(13, (), dtype) for dtype in ANY_DTYPES]
            for seed, (most, row, dtype) in enumerate(cases):
                what = f"{algorithm}, up to {most} rows of {row} {dtype}"
                exchange(comm, drawn_matrix(comm.world_size, most, seed), most, row, dtype, seed, what)
            plan = comm.plan_all_to_all(torch.ones(4, 3), *sizes_of([[1] * comm.world_size] * comm.world_size, 0), 2)
            assert (plan.operation, plan.algorithm, plan.message_bytes) == ("all_to_all_v", algorithm, 2 * 12)


@some_worlds
def test_shapes_and_types(ranks: RankPool, world: int) -> None:
    ranks.run(world, exchange_shapes_and_types)


def exchange_in_large_world() -> None:
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            for seed in (0, 2):
                exchange(comm, drawn_matrix(comm.world_size, 21, seed), 21, (3,), torch.int16, seed, algorithm)
            refused = wrong_sizes("disagree", comm, 15, 3)
            assert f"rank 15 sends 4 rows to rank 3, which expects 5: {TITLES[algorithm]}" in refused


def test_a_world_whose_size_kernels_take_at_run_time(ranks: RankPool) -> None:
    ranks.run(16, exchange_in_large_world)


def exchange_replayed() -> None:
    """The same tensors with other sizes at each call, as a replayed graph has them. Both slots are used again."""
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            most, world, rank = 40, comm.world_size, comm.rank
            x = torch.zeros(world * most, 3, dtype=torch.int16)
            out = torch.zeros_like(x)
            send_sizes, recv_sizes = torch.zeros(world, dtype=torch.int32), torch.zeros(world, dtype=torch.int32)
            for seed in range(9):
                matrix = [[0] * world] * world if seed == 5 else drawn_matrix(world, most, seed)
                mine = sent(matrix, rank, (3,), torch.int16, seed)
                x[: len(mine)] = mine
                for sizes, values in zip((send_sizes, recv_sizes), sizes_of(matrix, rank), strict=True):
                    sizes.copy_(values)
                wanted = expected(matrix, rank, (3,), torch.int16, seed)
                behind = out[len(wanted) :].clone()
                comm.all_to_all(x, send_sizes, recv_sizes, most, out)
                assert_same_bits(out[: len(wanted)], wanted, f"{algorithm}, call {seed}")
                assert_same_bits(out[len(wanted) :], behind, f"{algorithm}, call {seed}: behind the last row")
                assert comm.all_to_all(torch.full((world,), rank)).tolist() == list(range(world))
            assert len(comm._operations.all_to_all_v._prepared) == 1


@some_worlds
def test_other_sizes_at_each_call(ranks: RankPool, world: int) -> None:
    ranks.run(world, exchange_replayed)


def exchange_sentinels() -> None:
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            world = comm.world_size
            sizes = torch.full((world,), 700)
            for sender in range(world):
                x = torch.full((world * 700,), 0xFF if comm.rank == sender else comm.rank, dtype=torch.uint8)
                for _ in range(3):
                    out = comm.all_to_all(x, sizes, sizes, 700).view(world, 700)
                    for rank in range(world):
                        assert out[rank].eq(0xFF if rank == sender else rank).all(), f"{algorithm}, from {rank}"


def test_bits_that_look_like_an_empty_slot(ranks: RankPool) -> None:
    ranks.run(3, exchange_sentinels)


def exchange_unaligned() -> None:
    for algorithm in SHARD_ALGORITHMS:
        with make_communicator(algorithm=algorithm) as comm:
            rank = comm.rank
            for dtype in (torch.bool, torch.int16, torch.int64):
                for step in range(16 // dtype.itemsize):
                    what = f"{algorithm}, {dtype}, step {step}"
                    matrix = drawn_matrix(comm.world_size, 57, 4 * step)
                    x, _ = placed(sent(matrix, rank, (), dtype, step), (step + 3 * rank) % 16)
                    wanted = expected(matrix, rank, (), dtype, step)
                    out, buffer = placed(torch.zeros_like(wanted), (3 * step + rank) % 16)
                    comm.all_to_all(x, *sizes_of(matrix, rank), 57, out=out)
                    assert_same_bits(out, wanted, what)
                    assert_untouched_outside(buffer, out, what)


@pytest.mark.parametrize("world", [2, 5])
def test_pointers_unaligned_differently_on_every_rank(ranks: RankPool, world: int) -> None:
    ranks.run(world, exchange_unaligned)


def exchange_in_launches() -> None:
    """More than a slot holds."""
    with make_communicator(workspace_bytes=1 << 20, algorithm="one_shot") as comm:
        most = 100_001
        matrix = [[most - 37_000 * abs(s - r) if abs(s - r) < 3 else 5 for r in range(5)] for s in range(5)]
        matrix = [sizes[: comm.world_size] for sizes in matrix[: comm.world_size]]
        sizes = sizes_of(matrix, comm.rank)
        x = sent(matrix, comm.rank, (3,), torch.bool, 9)
        assert comm.plan_all_to_all(x, *sizes, most).chunks > 1
        wanted = expected(matrix, comm.rank, (3,), torch.bool, 9)
        assert_same_bits(comm.all_to_all(x, *sizes, most)[: len(wanted)], wanted, "in launches")


@pytest.mark.parametrize("world", [2, 5])
def test_parts_larger_than_a_slot(ranks: RankPool, world: int) -> None:
    ranks.run(world, exchange_in_launches)


def choose() -> None:
    """The rows of all_to_all count, by the bytes of the largest possible part."""
    with make_communicator() as comm:
        sizes = sizes_of([[1] * 3] * 3, 0)
        for most, algorithm in ((8192, "one_shot"), (8193, "push_hb")):
            plan = comm.plan_all_to_all(torch.ones(3, dtype=torch.uint8), *sizes, most)
            assert (plan.algorithm, plan.message_bytes) == (algorithm, most)
        assert comm.plan_all_to_all(torch.ones(5, dtype=torch.uint8), *sizes).message_bytes == 5
        large = torch.ones(2, dtype=torch.uint8).expand(2)
        plan = comm.plan_all_to_all(large.clone(), *sizes, (64 << 20) + 1)
        assert plan.algorithm == "declined"
        assert "the largest shard has 67108865 bytes" in plan.reason
    with make_communicator(max_message_bytes=300) as comm:
        x = torch.ones(3, dtype=torch.uint8)
        assert comm.accepts_all_to_all(x, *sizes, 100)
        assert not comm.accepts_all_to_all(x, *sizes, 101), "parts of 101 bytes are 303 together"
        asks = torch.compile(lambda most: comm.accepts_all_to_all(x, *sizes, most), backend="eager")
        assert asks(100)
        assert not asks(101)


def test_choice_by_the_largest_part(ranks: RankPool) -> None:
    ranks.run(3, choose)


def exchange_other_types() -> None:
    with make_communicator() as comm:
        for seed in (0, 1, 0, 1):  # int64 and int32, with the same tensors
            exchange(comm, [[2] * 3] * 3, 2, (5,), torch.int16, seed, f"call {seed}")


def test_sizes_of_another_type(ranks: RankPool) -> None:
    ranks.run(3, exchange_other_types)


# ---- Wrong sizes -----------------------------------------------------------------------------------------------------

TITLES = {
    "one_shot": "one-shot all-to-all of unequal parts of ",
    "push_hb": "all-to-all of unequal parts by push (HB) of ",
}
#: What rank ``odd`` does, and what all ranks are told.
WRONG = {
    "disagree": "rank {odd} sends 4 rows to rank {peer}, which expects 5",
    "disagree the other way": "rank {peer} sends 5 rows to rank {odd}, which expects 6",
    "empty instead": "rank {odd} sends 0 rows to rank {peer}, which expects 5",
    "disagrees with itself": "rank {odd} sends 4 rows to rank {odd}, which expects 5",
    "sends too many": "send_sizes[{peer}] of rank {odd} is 9 rows, and max_rows is 8",
    "expects too many": "recv_sizes[{peer}] of rank {odd} is 9 rows, and max_rows is 8",
    "input too short": "send_sizes of rank {odd} add up to {all} rows, and x has {less}",
    "output too short": "recv_sizes of rank {odd} add up to {all} rows, and out has {less}",
    "negative": "send_sizes[{peer}] of rank {odd} is a negative or very large number of rows, and max_rows is 8",
}


def exchange_and_wait(comm: Communicator, *tensors: torch.Tensor) -> None:
    """Exchange parts of up to 8 rows, and wait for the error of another rank."""
    *operands, out = tensors
    comm.all_to_all(*operands, 8, out)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        time.sleep(0.01)
        comm.check()


def wrong_sizes(name: str, comm: Communicator, odd: int, peer: int) -> str:
    """Make a call in which the sizes of one rank are wrong. Return the error, which comes at once or soon after."""
    world = comm.world_size
    # Unmapped memory does not lie behind tensors. What they must not read or write shows in the bits around them.
    rows, send_sizes, recv_sizes = 5 * world, torch.full((world,), 5), torch.full((world,), 5)
    if comm.rank == odd:
        if name in ("disagree", "disagrees with itself"):
            send_sizes[odd if name == "disagrees with itself" else peer] = 4
        if name == "disagree the other way":
            recv_sizes[peer] = 6
        if name == "empty instead":
            send_sizes[peer] = 0
        if name in ("sends too many", "expects too many"):
            (send_sizes if name == "sends too many" else recv_sizes)[peer] = 9
        if name == "negative":
            send_sizes[peer] = -1
    x = torch.full((rows - (name == "input too short" and comm.rank == odd), 70), comm.rank, dtype=torch.int32)
    more = 1 if name == "disagree the other way" else 4 if name == "expects too many" else 0
    out_rows = rows + more - (name == "output too short" and comm.rank == odd)
    out, buffer = placed(torch.full((out_rows, 70), -1, dtype=torch.int32), 4)
    begin = time.monotonic()
    with pytest.raises(MismatchError) as caught:
        exchange_and_wait(comm, x, send_sizes, recv_sizes, out)
    assert time.monotonic() < begin + 20, "it waited for the time-out"
    assert_untouched_outside(buffer, out, name)
    with pytest.raises(MismatchError):
        comm.all_to_all(torch.ones(world))
    return unnamed(str(caught.value))


def disagree(name: str, algorithm: str) -> None:
    for odd, peer in ((0, 1), (2, 0)):
        with make_communicator(algorithm=algorithm) as comm:
            world = comm.world_size
            for _ in range(odd // 2):
                exchange(comm, drawn_matrix(world, 8, 1), 8, (70,), torch.int32, 1, "before")
            text = wrong_sizes(name, comm, odd, peer)
            words = WRONG[name].format(odd=odd, peer=peer, all=5 * world, less=5 * world - 1)
            assert f"{words}: {TITLES[algorithm]}{8 * 280} bytes" in text, text
    with make_communicator(algorithm=algorithm) as fresh:
        exchange(fresh, drawn_matrix(fresh.world_size, 8, 1), 8, (70,), torch.int32, 1, "a new communicator")


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("algorithm", SHARD_ALGORITHMS)
def test_wrong_sizes_end_all_ranks(ranks: RankPool, name: str, algorithm: str) -> None:
    ranks.run(4, disagree, name, algorithm)


@pytest.mark.parametrize(("world", "odd", "rows"), [(2, 1, 12), (3, 0, 12), (3, 1, 12), (4, 1, 400)])
@pytest.mark.parametrize("algorithm", SHARD_ALGORITHMS)
def test_another_bound_on_one_rank(world: int, odd: int, rows: int, algorithm: str) -> None:
    """Where nobody compares calls, as on GPUs. Some ranks find out, and no rank ends without an error."""
    cores = connected(world, timeout_s=2)
    calls, kept = [], []
    for rank, core in enumerate(cores):
        most = 900 if rank == odd else 400
        byte = tuple(registry.data_types()).index("byte")
        problem = _core.Problem(count=most * 16, row=0, data_type=byte, world_size=world, parameters=(16, 0))
        tiling = tiling_of(most * 16, blocks=2, tile_lines=16, depth=2)
        run = core.prepare(number_of("all_to_all_v", algorithm), problem, tiling)
        x, out, sizes = torch.ones(world * rows, 4), torch.ones(world * rows, 4), torch.full((world,), rows)
        kept += [x, out, sizes]
        addresses = [one.data_ptr() for one in (x, out, sizes, sizes)]
        addresses += [one.data_ptr() + one.nbytes for one in (x, out)]
        calls.append(lambda run=run, addresses=addresses: run(*addresses, 0))
    together(*calls)
    causes = [error.cause for core in cores if (error := core.error()) is not None]
    assert "sizes" in causes
    assert set(causes) <= {"sizes", "timeout"}
    assert len(causes) == world
    (error,) = [found for core in cores if (found := core.error()) and found.cause == "sizes"][:1]
    assert error.sizes.fault == "other call"
    text = unnamed(explain(error, 1.0, names_of_world(world)).text)
    assert "max_rows, the bytes of a row or the dtype of sizes differ between rank" in text, text


# ---- Operands --------------------------------------------------------------------------------------------------------


def exchange_arrays() -> None:
    with make_communicator() as comm:
        matrix = drawn_matrix(3, 6, 1)
        x = sent(matrix, comm.rank, (3,), torch.float32, 1).numpy()
        sizes = [of.numpy() for of in sizes_of(matrix, comm.rank)]
        wanted = expected(matrix, comm.rank, (3,), torch.float32, 1)
        for result in (comm.all_to_all(x, *sizes, 6), comm.try_all_to_all(x, *sizes, 6)):
            assert isinstance(result, np.ndarray)
            assert_same_bits(torch.from_numpy(result)[: len(wanted)], wanted, "an array")
        out = np.zeros((18, 3), dtype=np.float32)
        assert comm.all_to_all(x, *sizes, 6, out) is out
        assert_same_bits(torch.from_numpy(out)[: len(wanted)], wanted, "an array as out")
        assert comm.accepts_all_to_all(x, *sizes, 6)
        assert comm.plan_all_to_all(x, *sizes, 6).algorithm == "one_shot"


def test_arrays(ranks: RankPool) -> None:
    ranks.run(3, exchange_arrays)


def exchange_compiled() -> None:
    with make_communicator() as comm:

        @torch.compile(fullgraph=True, backend="aot_eager")
        def compiled(x: torch.Tensor, send: torch.Tensor, recv: torch.Tensor) -> torch.Tensor:
            return comm.all_to_all(x + 1, send, recv, 8) * 2 if comm.accepts_all_to_all(x, send, recv, 8) else x

        @torch.compile(fullgraph=True, backend="aot_eager")
        def compiled_into(x: torch.Tensor, send: torch.Tensor, recv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return comm.all_to_all(x, send, recv, 8, out) + 0

        for seed in (0, 1, 4):
            matrix = drawn_matrix(3, 8, seed)
            sizes = sizes_of(matrix, comm.rank)
            x = torch.arange(float(sum(matrix[comm.rank]))) + 100 * comm.rank
            of_ranks = [torch.arange(float(sum(of_rank))) + 100 * rank for rank, of_rank in enumerate(matrix)]
            parts = [whole.split(list(of_rank)) for whole, of_rank in zip(of_ranks, matrix, strict=True)]
            wanted = torch.cat([of_rank[comm.rank] for of_rank in parts])
            found = compiled(x, *sizes)
            assert found.shape == (24,)
            assert torch.equal(found[: len(wanted)], (wanted + 1) * 2)
            out = torch.full((24,), -1.0)
            found = compiled_into(x, *sizes, out)
            assert torch.equal(found, torch.cat([wanted, torch.full((24 - len(wanted),), -1.0)]))
            assert torch.equal(out, found)
        assert compiled(torch.ones(4), torch.ones(3), torch.ones(3)).equal(torch.ones(4)), "sizes of another dtype"


def test_compiled(ranks: RankPool) -> None:
    ranks.run(3, exchange_compiled)


def refuse() -> None:
    with make_communicator() as comm:
        sizes = torch.ones(3, dtype=torch.int64)
        x = torch.ones(3, 2)
        cases: tuple[tuple[str, Any, Any, Any, Any, Any], ...] = (
            ("recv_sizes is missing", x, sizes, None, None, None),
            ("send_sizes is missing", x, None, None, 2, None),
            ("send_sizes is of torch.int16; it must be int64 or int32", x, sizes.short(), sizes, None, None),
            ("recv_sizes of torch.int32; they must be alike", x, sizes, sizes.int(), None, None),
            ("send_sizes has shape (2,); it must have 3 sizes, one for each rank", x, sizes[:2], sizes, None, None),
            ("recv_sizes has shape (3, 1)", x, sizes, sizes[:, None], None, None),
            ("recv_sizes: the tensor is not contiguous", x, sizes, torch.ones(6, dtype=torch.int64)[::2], None, None),
            ("send_sizes is a list, not a tensor", x, [1, 1, 1], sizes, None, None),
            ("the tensor is not contiguous", torch.ones(6, 2).t().contiguous().t(), sizes, sizes, None, None),
            ("x has 0 dimensions", torch.ones(()), sizes, sizes, None, None),
            ("max_rows is -1", x, sizes, sizes, -1, None),
            ("max_rows is 4294967295; it must be an int from 0 to", x, sizes, sizes, (1 << 32) - 1, None),
            ("max_rows is True", x, sizes, sizes, True, None),
            ("max_rows is 1.0", x, sizes, sizes, 1.0, None),
            ("requires grad", torch.ones(3, 2, requires_grad=True), sizes, sizes, None, None),
            ("rows like those of x", x, sizes, sizes, None, torch.ones(9, 3)),
            ("rows like those of x", x, sizes, sizes, None, torch.ones(9, 2, dtype=torch.int32)),
            ("rows like those of x", x, sizes, sizes, None, torch.ones(2, 9).t()),
            ("out overlaps x", x, sizes, sizes, None, x),
            ("out a ndarray", x, sizes, sizes, None, np.ones((9, 2), dtype=np.float32)),
        )
        for words, operand, send_sizes, recv_sizes, max_rows, out in cases:
            with pytest.raises(UnsupportedInputError, match="all_to_all: ") as caught:
                comm.all_to_all(operand, send_sizes, recv_sizes, max_rows, out)
            assert words in str(caught.value), str(caught.value)
            if out is None:
                assert comm.try_all_to_all(operand, send_sizes, recv_sizes, max_rows) is None
                assert not comm.accepts_all_to_all(operand, send_sizes, recv_sizes, max_rows)
                assert comm.plan_all_to_all(operand, send_sizes, recv_sizes, max_rows).algorithm == "declined"
        memory = torch.ones(9, dtype=torch.int64)
        with pytest.raises(UnsupportedInputError, match="out overlaps recv_sizes"):
            comm.all_to_all(torch.ones(3, dtype=torch.int64), sizes, memory[:3], 3, memory)
        with pytest.raises(UnsupportedInputError, match=r"call Communicator\.all_to_all$"):
            comm.run("all_to_all_v", {"input": x, "output": x})
        # Nothing is left over.
        found = comm.all_to_all(torch.full((3,), float(comm.rank)), sizes, sizes)
        assert found[:3].tolist() == [0, 1, 2]


def test_what_is_refused(ranks: RankPool) -> None:
    ranks.run(3, refuse)


def exchange_nothing() -> None:
    with make_communicator() as comm:
        nothing = torch.zeros(2, dtype=torch.int64)
        cases = ((torch.ones(0, 4), None, (0, 4)), (torch.ones(5, 0), 3, (6, 0)), (torch.ones(5), 0, (0,)))
        for x, max_rows, shape in cases:
            assert comm.all_to_all(x, nothing, nothing, max_rows).shape == shape
            assert comm.plan_all_to_all(x, nothing, nothing, max_rows).algorithm == "none"
        # Parts may be empty though the bound is not, and so may tensors.
        out = torch.full((3,), 5.0)
        assert comm.all_to_all(torch.ones(0), nothing, nothing, 4, out).eq(5).all()
        if comm.rank == 0:
            comm.all_to_all(torch.full((4,), 7.0), torch.tensor([0, 4]), nothing, 4, torch.ones(0))
        else:
            found = comm.all_to_all(torch.ones(0), nothing, torch.tensor([4, 0]), 4, out.new_zeros(5))
            assert found.tolist() == [7, 7, 7, 7, 0]


def exchange_alone() -> None:
    with make_communicator() as comm:
        x = drawn_bits((3, 4), torch.float8_e4m3fn, 1)
        out = drawn_bits((5, 4), torch.float8_e4m3fn, 2)
        behind = out[2:].clone()
        two = torch.tensor([2])
        comm.all_to_all(x, two, two, 3, out)
        assert_same_bits(out[:2], x[:2], "a copy")
        assert_same_bits(out[2:], behind, "behind it")
        assert comm.all_to_all(x, two, two).shape == x.shape


def test_nothing_to_send_and_a_world_of_one(ranks: RankPool) -> None:
    ranks.run(2, exchange_nothing)
    ranks.run(1, exchange_alone)


def decline_over_nodes() -> None:
    with make_over_nodes(Layout(2, 1)) as comm:
        arguments = torch.ones(4), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
        assert not comm.accepts_all_to_all(*arguments)
        assert comm.try_all_to_all(*arguments) is None
        assert comm.plan_all_to_all(*arguments).algorithm == "declined"
        with pytest.raises(UnsupportedInputError, match="within a node"):
            comm.all_to_all(*arguments)


def test_ranks_on_several_nodes_decline(ranks: RankPool) -> None:
    ranks.run(2, decline_over_nodes)
