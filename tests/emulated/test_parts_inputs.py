"""What all-gather and reduce-scatter accept, and that all else is declined alike on all ranks, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from harness import RankPool, make_communicator
from shards_reference import assert_same_bits, drawn_bits
from test_all_reduce import python_calls
from test_arrays import Immutable

from llm_comm import Communicator, UnsupportedInputError

LIMIT = 4096
WORLD = 2


class Calls(NamedTuple):
    """Of one of the two operations."""

    run: Callable[..., Any]
    attempt: Callable[..., Any]
    accepts: Callable[..., bool]
    plan: Callable[..., Any]


def calls_of(comm: Communicator, name: str) -> Calls:
    return Calls(*(getattr(comm, prefix + name) for prefix in ("", "try_", "accepts_", "plan_")))


def check_right(comm: Communicator) -> None:
    whole = drawn_bits((comm.world_size, 50), torch.int32, 1)
    assert_same_bits(comm.all_gather(whole[comm.rank][None]), whole, "a call after an error")
    assert comm.reduce_scatter(torch.ones(comm.world_size, 3)).eq(comm.world_size).all()


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.quint8)


BOTH = ("all_gather", "reduce_scatter")
Case = tuple[tuple[str, ...], Callable[[], torch.Tensor], dict[str, Any], str]
#: Which operations, the input, the other arguments, and what the reason says.
DECLINED: dict[str, Case] = {
    "transposed": (BOTH, lambda: torch.ones(4, 6).t(), {}, "not contiguous: shape (6, 4), strides (1, 6)"),
    "expanded": (BOTH, lambda: torch.ones(1).expand(8), {}, "not contiguous"),
    "other device": (BOTH, lambda: torch.ones(8, device="meta"), {}, "is on meta, the communicator on cpu"),
    "negated view": (BOTH, lambda: torch.ones(8, dtype=torch.cfloat).conj().imag[:1], {}, "negated view"),
    "conjugated view": (BOTH, lambda: torch.ones(8, dtype=torch.cfloat).conj(), {}, "conjugated view"),
    "sparse": (BOTH, lambda: torch.ones(8).to_sparse(), {}, "the tensor is torch.sparse_coo"),
    "requires grad": (BOTH, lambda: torch.ones(8, requires_grad=True), {}, "requires grad"),
    "quantized": (("all_gather",), quantized, {}, "torch.quint8 is quantized: pass x.int_repr()"),
    "int32": (("reduce_scatter",), lambda: torch.ones(8, dtype=torch.int32), {}, "torch.int32 is not one of torch.bf"),
    "bool": (("reduce_scatter",), lambda: torch.ones(8, dtype=torch.bool), {}, "torch.bool is not one of"),
    "scalar": (BOTH, lambda: torch.tensor(1.0), {}, "dim is 0; x has 0 dimensions"),
    "dim": (BOTH, lambda: torch.ones(4, 6), {"dim": 2}, "dim is 2; x has 2 dimensions"),
    "dim below": (BOTH, lambda: torch.ones(4, 6), {"dim": -3}, "dim is -3; x has 2 dimensions"),
    "dim no number": (BOTH, lambda: torch.ones(4, 6), {"dim": "1"}, "dim is '1'; it must be an int"),
    "dim a list": (BOTH, lambda: torch.ones(4, 6), {"dim": [1]}, "dim is [1]; it must be an int"),
    "one size": (BOTH, lambda: torch.ones(4), {"sizes": 4}, "sizes is a int; it must be a list or tuple"),
    "short sizes": (BOTH, lambda: torch.ones(4), {"sizes": [4]}, "sizes has 1 numbers; there are 2 ranks"),
    "long sizes": (BOTH, lambda: torch.ones(4), {"sizes": [4, 0, 0]}, "sizes has 3 numbers; there are 2 ranks"),
    "size below 0": (
        BOTH,
        lambda: torch.ones(4),
        {"sizes": [5, -1]},
        "sizes[1] is -1; it must be an int from 0 to 2**48",
    ),
    "size no int": (BOTH, lambda: torch.ones(4), {"sizes": [2.0, 2.0]}, "sizes[0] is 2.0; it must be an int"),
    "huge size": (
        BOTH,
        lambda: torch.ones(4),
        {"sizes": [10**5000, 1]},
        "sizes[0] is a number of 16610 bits; it must be",
    ),
    "sum of sizes": (("reduce_scatter",), lambda: torch.ones(4), {"sizes": [2, 3]}, "sizes, [2, 3], add up to 5"),
    "odd": (
        ("reduce_scatter",),
        lambda: torch.ones(2, 5),
        {"dim": -1},
        "x has 5 along dim -1, of which 2 ranks cannot",
    ),
    "too large": (
        ("all_gather",),
        lambda: torch.ones(LIMIT // 8 + 1),
        {},
        f"the whole tensor has {LIMIT + 8} bytes, more than max_message_bytes={LIMIT}",
    ),
    "too large a sum": (
        ("reduce_scatter",),
        lambda: torch.ones(LIMIT // 4 + 2),
        {},
        f"the whole tensor has {LIMIT + 8} bytes, more than max_message_bytes={LIMIT}",
    ),
}


def decline(name: str) -> list[str]:
    operations, make, arguments, _ = DECLINED[name]
    reasons = []
    with make_communicator(max_message_bytes=LIMIT) as comm:
        for operation in operations:
            calls = calls_of(comm, operation)
            x = make()
            like_x = torch.ones(x.shape, dtype=torch.float32 if x.is_quantized else x.dtype)
            if calls.accepts(like_x):
                calls.run(like_x)  # its shape is known
            for _ in range(2):
                assert not calls.accepts(x, **arguments)
                plan = calls.plan(x, **arguments)
                assert (plan.operation, plan.algorithm) == (operation, "declined")
                with pytest.raises(UnsupportedInputError) as error:
                    calls.run(x, **arguments)
                assert str(error.value) == f"{operation}: {plan.reason}"
                assert calls.attempt(x, **arguments) is None
            reasons.append(plan.reason)
        check_right(comm)
    return reasons


@pytest.mark.parametrize("name", DECLINED)
def test_declined_input(ranks: RankPool, name: str) -> None:
    first, second = ranks.run(WORLD, decline, name)
    assert first == second
    for reason in first:
        assert DECLINED[name][3] in reason


def decline_own_size() -> list[str]:
    """The same sizes on both ranks, which fit neither's part."""
    with make_communicator() as comm:
        plan = comm.plan_all_gather(torch.ones(3, 4), -1, [5, 6])
        check_right(comm)
        return plan.reason


def test_a_part_of_another_size_than_this_rank_s(ranks: RankPool) -> None:
    assert ranks.run(WORLD, decline_own_size) == [
        f"x has 4 along dim -1; sizes[{rank}], of this rank, is {5 + rank}" for rank in range(WORLD)
    ]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
def decline_layouts() -> None:
    rows = [torch.ones(3), torch.ones(5)]
    with make_communicator() as comm:
        for x, what in (
            (torch.ones(2, 3).to_sparse_csr(), "torch.sparse_csr"),
            (torch.ones(2, 3).to_mkldnn(), "torch._mkldnn"),
            (torch.nested.nested_tensor(rows), "nested"),
            (torch.nested.nested_tensor(rows, layout=torch.jagged), "nested"),
        ):
            for name in BOTH:
                calls = calls_of(comm, name)
                assert not calls.accepts(x)
                assert calls.plan(x).reason == f"the tensor is {what}"
                assert calls.attempt(x) is None
                if type(x) is torch.Tensor:
                    with pytest.raises(UnsupportedInputError, match=what):
                        calls.run(x)
        check_right(comm)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
def test_layouts_without_one_block_of_memory_are_declined(ranks: RankPool) -> None:
    ranks.run(WORLD, decline_layouts)


def accept_up_to_the_limit() -> None:
    with make_communicator(max_message_bytes=LIMIT) as comm:
        for name, count in (("all_gather", LIMIT // 4 // WORLD), ("reduce_scatter", LIMIT // 4)):
            calls = calls_of(comm, name)
            x = torch.ones(count)
            assert calls.accepts(x)
            assert calls.plan(x).message_bytes == LIMIT // WORLD
            for sizes in (None, [count if name == "all_gather" else count // WORLD] * WORLD):
                results = calls.run(x, 0, sizes), calls.attempt(x, 0, sizes)
                assert all(result.eq(1 if name == "all_gather" else WORLD).all() for result in results)
            # Numbers that are none of Python's.
            assert calls.accepts(
                x, sizes=tuple(np.array([x.numel() if name == "all_gather" else count // WORLD] * WORLD))
            )
    with make_communicator(max_message_bytes=0) as comm:
        assert comm.accepts_all_gather(torch.ones(0))
        assert not comm.accepts_all_gather(torch.ones(1))
        assert comm.plan_all_gather(torch.ones(0, 3), 1).reason == "empty message"
        assert comm.all_gather(torch.ones(0, 3), 1).shape == (0, 3 * WORLD)
        assert comm.reduce_scatter(torch.ones(0, 4), 1).shape == (0, 4 // WORLD)


def test_accepted_up_to_the_limit(ranks: RankPool) -> None:
    ranks.run(WORLD, accept_up_to_the_limit)


# ---- Outputs ---------------------------------------------------------------------------------------------------------

PART, WHOLE = 10, 20
#: What an output of all-gather (of so many elements) may not be. The second makes it beside the whole of the input.
OUTPUTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "shorter": (
        lambda n: torch.ones(n - 1),
        r"out \(\(\d+,\), torch.float32, cpu\) must be contiguous and like the result",
    ),
    "longer": (lambda n: torch.ones(n + 1), "like the result"),
    "other dtype": (lambda n: torch.ones(n, dtype=torch.int32), "like the result"),
    "strided": (lambda n: torch.ones(2 * n)[::2], "like the result"),
    "other device": (lambda n: torch.ones(n, device="meta"), "like the result"),
    "requires grad": (lambda n: torch.ones(n, requires_grad=True), "out: the tensor requires grad"),
    "negated": (lambda n: torch._neg_view(torch.ones(n)), "out: the tensor is a negated view"),
    "array": (lambda n: np.ones(n, dtype=np.float32), "x is a tensor, out a ndarray"),
}


def refuse_outputs(name: str) -> None:
    make, message = OUTPUTS[name]
    with make_communicator() as comm:
        for _ in range(2):
            for operation, n_in, n_out in (
                ("all_gather", PART, PART * comm.world_size),
                ("reduce_scatter", PART * comm.world_size, PART),
            ):
                with pytest.raises(UnsupportedInputError, match=f"{operation}: .*{message}"):
                    getattr(comm, operation)(torch.ones(n_in), out=make(n_out))
                getattr(comm, operation)(torch.ones(n_in))
        check_right(comm)


@pytest.mark.parametrize("world", [1, WORLD])
@pytest.mark.parametrize("name", OUTPUTS)
def test_out_that_does_not_fit(ranks: RankPool, name: str, world: int) -> None:
    ranks.run(world, refuse_outputs, name)


def refuse_overlaps() -> None:
    """Every place of a part beside, and in, the whole tensor: only one is right, and those without a common element."""
    with make_communicator() as comm:
        world, rank = comm.world_size, comm.rank
        uneven = tuple(2 + r for r in range(world))
        for sizes in ((4,) * world, uneven):
            of_whole, own, before = sum(sizes), sizes[rank], sum(sizes[:rank])
            buffer = torch.ones(of_whole + 2 * own)
            whole = buffer[own : own + of_whole]
            # All ranks go through as many places.
            for place in [-own, before, of_whole, *(p for p in range(1 - own, of_whole) if p != before)]:
                part = buffer[own + place : 2 * own + place]
                if place in (-own, before, of_whole):
                    comm.all_gather(part, 0, sizes, whole)
                    comm.reduce_scatter(whole, 0, sizes, part)
                    continue
                with pytest.raises(UnsupportedInputError, match="out overlaps x"):
                    comm.all_gather(part, 0, sizes, whole)
                with pytest.raises(UnsupportedInputError, match="out overlaps x"):
                    comm.reduce_scatter(whole, 0, sizes, part)
        # A part of rows has gaps, which a contiguous tensor cannot have.
        rows = torch.ones(2, world)
        for place in range(2 * world - 1):
            part = rows.flatten()[place : place + 2].view(2, 1)
            with pytest.raises(UnsupportedInputError, match="out overlaps x"):
                comm.all_gather(part, 1, out=rows)
            with pytest.raises(UnsupportedInputError, match="out overlaps x"):
                comm.reduce_scatter(rows, 1, out=part)
        # What is empty shares nothing.
        sizes = (0, *(3,) * (world - 1))
        whole = torch.arange(3.0 * (world - 1))
        part = whole[1:1] if rank == 0 else whole[3 * rank - 3 : 3 * rank]
        assert comm.all_gather(part, 0, sizes, whole).equal(torch.arange(3.0 * (world - 1)))
        total = comm.reduce_scatter(whole, 0, sizes, part)
        assert total.equal(torch.arange(3.0 * (world - 1))[before_of(sizes, rank)] * world)


def before_of(sizes: tuple[int, ...], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


@pytest.mark.parametrize("world", [2, 3])
def test_out_that_overlaps(ranks: RankPool, world: int) -> None:
    ranks.run(world, refuse_overlaps)


def write_versions() -> None:
    with make_communicator() as comm:
        x, out = torch.ones(4), torch.ones(4 * comm.world_size)
        comm.all_gather(x, out=out)
        assert (x._version, out._version) == (0, 1)
        comm.reduce_scatter(out, out=x)
        assert (x._version, out._version) == (1, 1)
        assert comm.all_gather(x)._version == 0
        with torch.inference_mode():
            comm.all_gather(torch.ones(4), out=torch.ones(4 * comm.world_size))  # such tensors have no version


def test_a_written_tensor_has_another_version(ranks: RankPool) -> None:
    ranks.run(WORLD, write_versions)


def reuse_what_is_prepared() -> None:
    """One key each for what decides a call: the same elements in another shape, dim or division are another call."""
    with make_communicator() as comm:
        world, rank = comm.world_size, comm.rank
        for _ in range(2):
            whole = torch.arange(16.0 * world)
            for shape, dim in (((4 * world, 4), 0), ((4, 4 * world), 1), ((2, 2 * world, 4), 1), ((4, 4 * world), -1)):
                tensor = whole.view(shape)
                x = tensor.chunk(world, dim)[rank].contiguous()
                assert comm.all_gather(x, dim).equal(tensor)
                assert comm.reduce_scatter(tensor, dim).equal(x * world)
                for sizes in ([x.shape[dim]] * world, (x.shape[dim],) * world):
                    assert comm.all_gather(x, dim, sizes).equal(tensor)
            for sizes in ((1, 3, 0)[:world], (0, 1, 3)[:world]):
                tensor = whole[: sum(sizes)]
                x = tensor[before_of(sizes, rank)]
                assert comm.all_gather(x, 0, sizes).equal(tensor)
                assert comm.all_gather(x.int(), 0, sizes).equal(tensor.int())
                assert comm.reduce_scatter(tensor, 0, sizes).equal(x * world)


def test_what_is_prepared_is_of_one_call(ranks: RankPool) -> None:
    ranks.run(3, reuse_what_is_prepared)


def close_and_ask() -> None:
    comm = make_communicator()
    whole, part = torch.ones(2 * comm.world_size), torch.ones(2)
    comm.all_gather(part)
    comm.reduce_scatter(whole)
    comm.close()
    for call in (
        lambda: comm.all_gather(part),
        lambda: comm.reduce_scatter(whole),
        lambda: comm.plan_all_gather(part),
        lambda: comm.accepts_reduce_scatter(whole),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_closed_communicator(ranks: RankPool) -> None:
    ranks.run(WORLD, close_and_ask)


def count_python_calls() -> None:
    with make_communicator() as comm:
        x = torch.ones(64)
        is_compiling = ["is_compiling", *python_calls(torch.compiler.is_compiling)]
        for name in ("all_gather", "reduce_scatter", "try_all_gather", "try_reduce_scatter"):
            bound = getattr(comm, name)
            for sizes in (None, (64, 64) if "gather" in name else (32, 32)):
                bound(x, 0, sizes)
                found = python_calls(lambda bound=bound, sizes=sizes: bound(x, 0, sizes))
                assert found == [name, *is_compiling, "is_watched", "run", "_no_stream"]


def test_a_call_is_short_on_the_host(ranks: RankPool) -> None:
    """Host time is a bar: what is prepared takes no more Python calls than these (on a GPU, none for the stream)."""
    ranks.run(WORLD, count_python_calls)


# ---- Arrays ----------------------------------------------------------------------------------------------------------


def gather_arrays() -> None:
    with make_communicator() as comm:
        world, rank = comm.world_size, comm.rank
        for dtype in (np.bool_, np.int64, np.float16, np.complex64):
            whole = drawn_bits((world * 3, 5), torch.int64, 1).numpy().astype(dtype)
            x = whole[3 * rank : 3 * rank + 3].copy()
            assert comm.accepts_all_gather(x)
            assert comm.plan_all_gather(x).message_bytes == x.nbytes
            new = comm.all_gather(x)
            assert type(new) is np.ndarray
            assert new.tobytes() == whole.tobytes()
            assert new.shape == whole.shape
            out = np.zeros_like(whole)
            assert comm.all_gather(x, out=out) is out
            assert out.tobytes() == whole.tobytes()
            out[...] = 0
            part = out[3 * rank : 3 * rank + 3]
            part[...] = x
            assert comm.all_gather(part, out=out) is out
            assert out.tobytes() == whole.tobytes()
            sides = comm.all_gather(x, 1, [5] * world)
            assert (sides == np.concatenate(np.split(whole, world), axis=1)).all()


def scatter_arrays() -> None:
    with make_communicator() as comm:
        world, rank = comm.world_size, comm.rank
        x = np.arange(world * 6, dtype=np.float32).reshape(world * 2, 3)
        expected = x[2 * rank : 2 * rank + 2] * world
        assert comm.accepts_reduce_scatter(x)
        new = comm.reduce_scatter(x)
        assert type(new) is np.ndarray
        assert (new == expected).all()
        out = np.zeros((2, 3), dtype=np.float32)
        assert comm.reduce_scatter(x, out=out) is out
        assert (out == expected).all()
        assert not comm.accepts_reduce_scatter(x.astype(np.int64))
        with pytest.raises(UnsupportedInputError, match=r"torch\.int64 is not one of"):
            comm.reduce_scatter(x.astype(np.int64))


def refuse_arrays() -> None:
    with make_communicator() as comm:
        x = np.ones(4, dtype=np.float32)
        read_only = np.ones(4 * comm.world_size, dtype=np.float32)
        read_only.flags.writeable = False
        for out in (read_only, Immutable(read_only.copy())):
            with pytest.raises(UnsupportedInputError, match="read-only"):
                comm.all_gather(x, out=out)
        for call in (comm.all_gather, comm.reduce_scatter, comm.accepts_all_gather, comm.plan_reduce_scatter):
            with pytest.raises(UnsupportedInputError, match="cannot use a list"):
                call([1.0, 2.0])
        assert comm.all_gather(read_only).shape == (4 * comm.world_size**2,)
        check_right(comm)


@pytest.mark.parametrize("task", [gather_arrays, scatter_arrays, refuse_arrays])
def test_arrays(ranks: RankPool, task: Callable[[], None]) -> None:
    ranks.run(WORLD, task)
