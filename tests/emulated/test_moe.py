"""Dispatch and combine of tokens on emulated GPUs, by a plain reference: every rank draws what all ranks have."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from harness import RankPool, make_communicator
from nodes_cases import Layout
from nodes_cases import make as make_over_nodes
from shards_reference import assert_same_bits, assert_untouched_outside, drawn_bits, placed
from test_experts import layer_of

from llm_comm import Communicator, MismatchError, PeerTimeout, UnsupportedInputError

some_worlds = pytest.mark.parametrize("world", [2, 3, 5, 8])
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


class Tokens(NamedTuple):
    """Tokens of a rank."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor


class Received(NamedTuple):
    """Expected results of a dispatch."""

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor


class Case(NamedTuple):
    """A call, equal on all ranks but for its tensors."""

    tokens: tuple[int, ...]  # of each rank
    hidden: int
    top_k: int
    rank_experts: int
    dtype: torch.dtype = BF16
    max_tokens: int | None = None
    groups: int = 0  # 0: without scales

    @property
    def world(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.rank_experts * self.world

    @property
    def most(self) -> int:
        return max(self.tokens) if self.max_tokens is None else self.max_tokens


def choices(case: Case, kind: str, rank: int, generator: torch.Generator) -> torch.Tensor:
    """The experts of a rank's tokens."""
    shape = case.tokens[rank], case.top_k
    if kind == "all to one expert":
        return torch.full(shape, case.experts - 1)
    if kind == "no expert":
        return (
            torch.tensor([-1, case.experts, -(2**31), 2**31 - 1])
            .repeat(case.top_k * shape[0])[: shape[0] * shape[1]]
            .view(shape)
        )
    if kind == "experts of the first rank":
        return torch.randint(0, case.rank_experts, shape, generator=generator)
    ids = torch.randint(0, case.experts, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.2, torch.tensor(-1), ids)


def tokens_of(case: Case, rank: int, seed: int, kind: str = "any") -> Tokens:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    ids = choices(case, kind, rank, generator).int()
    return Tokens(
        drawn_bits((case.tokens[rank], case.hidden), case.dtype, 100 * seed + rank),
        ids,
        torch.rand(ids.shape, generator=generator),
        drawn_bits((case.tokens[rank], case.groups), torch.float32, 300 * seed + rank),
    )


def expected_of(case: Case, rank: int, everyone: list[Tokens]) -> Received:
    """Rows that nobody sends are zeros here."""
    rows = torch.zeros(case.world * case.most, case.hidden, dtype=case.dtype)
    ids = torch.full((case.world * case.most, case.top_k), -1, dtype=torch.int32)
    weights = torch.zeros(ids.shape)
    scales = torch.zeros(len(rows), case.groups)
    for source, own in enumerate(everyone):
        for token in range(case.tokens[source]):
            place = source * case.most + token
            local = own.ids[token].long() - rank * case.rank_experts
            is_here = (local >= 0) & (local < case.rank_experts)
            ids[place] = torch.where(is_here, local, -1).int()
            weights[place] = torch.where(is_here, own.weights[token], 0.0)
            if is_here.any():
                rows[place] = own.x[token]
                scales[place] = own.scales[token]
    return Received(rows, ids, weights, scales)


def dispatch(comm: Communicator, case: Case, own: Tokens) -> Received:
    scales = own.scales if case.groups else None
    received = comm.moe_dispatch(own.x, own.ids, own.weights, case.experts, case.max_tokens, scales)
    assert len(received) == (4 if case.groups else 3)
    return Received(*received, *(() if case.groups else (torch.zeros(len(received[0]), 0),)))


def check_dispatch(comm: Communicator, case: Case, everyone: list[Tokens], what: str) -> Received:
    own = everyone[comm.rank]
    before = [tensor.clone() for tensor in own]
    received = dispatch(comm, case, own)
    expected = expected_of(case, comm.rank, everyone)
    assert torch.equal(received.ids, expected.ids), what
    assert_same_bits(received.weights, expected.weights, f"{what}: weights")
    is_here = expected.ids.ge(0).any(1)
    assert_same_bits(received.rows[is_here], expected.rows[is_here], f"{what}: rows")
    assert_same_bits(received.scales[is_here], expected.scales[is_here], f"{what}: scales")
    for tensor, old in zip(own, before, strict=True):
        assert_same_bits(tensor, old, f"{what}: an input")
    return received


def made_of(case: Case, rank: int, ids: torch.Tensor, seed: int) -> torch.Tensor:
    """Rows that a rank's experts make. Rows without an expert are NaN: nobody may read them."""
    generator = torch.Generator().manual_seed(77 * seed + rank)
    made = torch.randn(case.world * case.most, case.hidden, generator=generator).to(case.dtype)
    made[ids.lt(0).all(1)] = torch.nan
    return made


def sum_of(case: Case, source: int, everyone: list[Tokens], seed: int) -> torch.Tensor:
    """Sums of a rank's tokens, in rank order."""
    total = torch.zeros(case.tokens[source], case.hidden)
    is_first = torch.ones(case.tokens[source], dtype=torch.bool)
    for rank in range(case.world):
        ids = expected_of(case, rank, everyone).ids
        places = slice(source * case.most, source * case.most + case.tokens[source])
        is_there = ids[places].ge(0).any(1)
        made = made_of(case, rank, ids, seed)[places].float()
        total = torch.where((is_there & is_first)[:, None], made, total)
        total = torch.where((is_there & ~is_first)[:, None], total + made, total)
        is_first &= ~is_there
    return total.to(case.dtype)


def check_combine(comm: Communicator, case: Case, everyone: list[Tokens], seed: int, what: str) -> None:
    own = everyone[comm.rank]
    ids = expected_of(case, comm.rank, everyone).ids
    y = made_of(case, comm.rank, ids, seed)
    result = comm.moe_combine(y, ids, own.ids, case.experts)
    assert result.shape == (case.tokens[comm.rank], case.hidden)
    assert_same_bits(result, sum_of(case, comm.rank, everyone, seed), f"{what}: sums")


def cases_of(world: int) -> list[Case]:
    some = tuple((3 * rank + 2) % 7 for rank in range(world))  # ranks without tokens among them
    return [
        Case((1,) * world, 8, 1, 1),
        Case((4,) * world, 64, 2, 3, FP16),
        Case(some, 136, 8, 4, max_tokens=9, groups=3),
        Case((3,) * world, 256, 4, 2, torch.float8_e4m3fn, groups=2),
        Case((0,) * (world - 1) + (2,), 1032, 3, 2, max_tokens=2),
        Case((0,) * world, 16, 5, 1, max_tokens=3),
        Case((2,) * world, 8192, 16, 2, groups=64),
        Case((0,) * world, 8, 2, 2),
    ]


def exchange_all_kinds() -> None:
    with make_communicator() as comm:
        for seed, case in enumerate(cases_of(comm.world_size)):
            for kind in ("any", "all to one expert", "no expert", "experts of the first rank"):
                everyone = [tokens_of(case, rank, seed, kind) for rank in range(case.world)]
                check_dispatch(comm, case, everyone, f"{case}, {kind}")
                summed = case._replace(dtype=FP16 if case.dtype == FP16 else BF16)
                check_combine(comm, summed, everyone, seed, f"{case}, {kind}")
        # Slots are reset.
        assert comm.all_reduce(torch.full((5000,), 1.0)).eq(comm.world_size).all()


@some_worlds
def test_rows_ids_weights_and_sums(ranks: RankPool, world: int) -> None:
    ranks.run(world, exchange_all_kinds)


def test_sixteen_ranks(ranks: RankPool) -> None:
    ranks.run(16, exchange_once)


def exchange_once() -> None:
    with make_communicator() as comm:
        case = Case((3,) * comm.world_size, 72, 4, 2)
        everyone = [tokens_of(case, rank, 5) for rank in range(case.world)]
        check_dispatch(comm, case, everyone, "once")
        check_combine(comm, case, everyone, 5, "once")


def exchange_repeatedly() -> None:
    """Other choices, tokens and sizes at each call, as in the replays of a decode step: slots are used again."""
    with make_communicator() as comm:
        for seed in range(12):
            generator = torch.Generator().manual_seed(seed)
            counts = tuple(torch.randint(0, 6, (comm.world_size,), generator=generator).tolist())
            case = Case(counts, 128 if seed % 3 else 24, 4, 2 + seed % 2, BF16, 5)
            everyone = [tokens_of(case, rank, seed) for rank in range(case.world)]
            check_dispatch(comm, case, everyone, f"call {seed}")
            check_combine(comm, case, everyone, seed, f"call {seed}")


def test_calls_with_other_choices(ranks: RankPool) -> None:
    ranks.run(3, exchange_repeatedly)


def exchange_bytes() -> None:
    """Bits that look like a slot where nothing has arrived yet, NaN and infinity."""
    with make_communicator() as comm:
        for dtype in (torch.int8, torch.uint8, FP8, torch.float8_e5m2, torch.float32):
            case = Case((3,) * comm.world_size, 48, 4, 2, dtype, groups=5)
            everyone = [tokens_of(case, rank, 3) for rank in range(case.world)]
            for sender in range(comm.world_size):
                everyone[sender].x.view(torch.uint8)[1:] = 0xFF
                everyone[sender].weights.view(torch.uint8)[0] = 0xFF
                everyone[sender].weights[1] = torch.inf
                everyone[sender].scales.view(torch.uint8)[1] = 0xFF
                for _ in range(3):
                    check_dispatch(comm, case, everyone, f"{dtype}, from {sender}")
        for value in (torch.nan, torch.inf, -0.0):
            case = Case((2,) * comm.world_size, 64, 2, 2)
            everyone = [tokens_of(case, rank, 4) for rank in range(case.world)]
            ids = expected_of(case, comm.rank, everyone).ids
            y = torch.full((case.world * case.most, 64), value, dtype=BF16)
            if value != value:
                y.view(torch.int16)[:] = -1  # a NaN that looks like a slot
            result = comm.moe_combine(y, ids, everyone[comm.rank].ids, case.experts)
            served = everyone[comm.rank].ids.ge(0).any(1)
            assert torch.equal(torch.isnan(result[served]), torch.isnan(torch.full_like(result[served], value)))
            if value == value:
                assert_same_bits(result[served], torch.full_like(result[served], value), f"sums of {value}")
            assert_same_bits(result[~served], torch.zeros_like(result[~served]), "no expert")


@pytest.mark.parametrize("world", [2, 5])
def test_bits_that_look_like_an_empty_slot(ranks: RankPool, world: int) -> None:
    ranks.run(world, exchange_bytes)


def exchange_unaligned() -> None:
    with make_communicator() as comm:
        case = Case((3,) * comm.world_size, 72, 4, 2)
        everyone = [tokens_of(case, rank, 5) for rank in range(case.world)]
        own = everyone[comm.rank]
        for offset in range(0, 16, 2):
            everyone[comm.rank] = own._replace(x=placed(own.x, offset)[0])
            received = check_dispatch(comm, case, everyone, f"offset {offset}")
            y, _ = placed(made_of(case, comm.rank, received.ids, 1), offset)
            out, buffer = placed(torch.zeros(3, 72, dtype=BF16), 16 - offset)
            assert comm.moe_combine(y, received.ids, own.ids, case.experts, out) is out
            assert_same_bits(out, sum_of(case, comm.rank, everyone, 1), f"offset {offset}")
            assert_untouched_outside(buffer, out, f"offset {offset}")


def test_tensors_that_begin_anywhere(ranks: RankPool) -> None:
    ranks.run(3, exchange_unaligned)


def exchange_in_launches() -> None:
    """More than a slot holds."""
    with make_communicator(workspace_bytes=1 << 20) as comm:
        case = Case((60, 3, 64), 1024, 2, 2, max_tokens=64)
        everyone = [tokens_of(case, rank, 9) for rank in range(case.world)]
        for _ in range(2):
            check_dispatch(comm, case, everyone, "in launches")
            check_combine(comm, case, everyone, 9, "in launches")


def exchange_long_rows() -> None:
    """The longest rows, a token at a time in the smallest workspace."""
    with make_communicator(workspace_bytes=1 << 20) as comm:
        case = Case((4,) * comm.world_size, 8192, 16, 2)
        everyone = [tokens_of(case, rank, 1) for rank in range(case.world)]
        if comm.world_size < 16:
            check_dispatch(comm, case, everyone, "long rows")
        else:
            with pytest.raises(UnsupportedInputError, match="holds no part of the message: raise workspace_bytes"):
                dispatch(comm, case, everyone[comm.rank])


def test_more_tokens_than_a_slot_holds(ranks: RankPool) -> None:
    ranks.run(3, exchange_in_launches)
    ranks.run(8, exchange_long_rows)
    ranks.run(16, exchange_long_rows)


def experts_between() -> None:
    """The pair around fused_experts is as fused_experts with all experts on one rank, but for roundings."""
    torch.manual_seed(7)
    with make_communicator() as comm:
        case = Case((4, 2, 0, 3), 128, 3, 2, max_tokens=4)
        whole = layer_of(case.experts, case.hidden, 64)[:2]
        everyone = [
            tokens_of(case, rank, 11)._replace(x=torch.randn(case.tokens[rank], 128).to(BF16)) for rank in range(4)
        ]
        own = everyone[comm.rank]
        first = comm.rank * case.rank_experts
        layer = [weight[first : first + case.rank_experts].contiguous() for weight in whole]
        for _ in range(2):
            rows, ids, weights, _ = dispatch(comm, case, own)
            rows[ids.lt(0).all(1)] = torch.nan  # what nobody sends is not read
            y = comm.fused_experts(rows, *layer, weights, ids)
            result = comm.moe_combine(y, ids, own.ids, case.experts)
            if len(own.x):
                expected = comm.fused_experts(own.x, *whole, own.weights, own.ids)
                torch.testing.assert_close(result.float(), expected.float(), atol=0.03, rtol=0.02)
        # A token alone has the same bits.
        one = (
            Tokens(*(tensor[:1].contiguous() for tensor in everyone[0]))
            if comm.rank == 0
            else Tokens(*(t[:0] for t in own))
        )
        rows, ids, weights, _ = dispatch(comm, case, one)
        again = comm.moe_combine(comm.fused_experts(rows, *layer, weights, ids), ids, one.ids, case.experts)
        if comm.rank == 0:
            assert_same_bits(again, result[:1], "a token alone")


def test_around_fused_experts(ranks: RankPool) -> None:
    ranks.run(4, experts_between)


def combine_until_an_error(comm: Communicator, y: torch.Tensor, *arguments: Any) -> None:
    """Rank 0 alone finds out at once; the others when they next wait for it."""
    comm.moe_combine(y, *arguments)
    comm.all_reduce(y)


def disagree(which: str) -> None:
    with make_communicator(timeout_s=1.0) as comm:
        case = Case((2,) * comm.world_size, 64, 2, 2)
        everyone = [tokens_of(case, rank, 5, "all to one expert") for rank in range(case.world)]
        ids = expected_of(case, comm.rank, everyone).ids
        if which == "a row is missing" and comm.rank == comm.world_size - 1:
            ids[0] = -1
        if which == "a row too many" and comm.rank == 1:
            ids[0] = 0
        y = torch.zeros(len(ids), 64, dtype=BF16)
        with pytest.raises(PeerTimeout):
            combine_until_an_error(comm, y, ids, everyone[comm.rank].ids, case.experts)


@pytest.mark.parametrize("which", ["a row is missing", "a row too many"])
def test_ranks_that_disagree_about_rows(ranks: RankPool, which: str) -> None:
    ranks.run(3, disagree, which)


def disagree_about_places() -> None:
    with make_communicator() as comm:
        tokens = tokens_of(Case((2,) * comm.world_size, 64, 2, 2), comm.rank, 1)
        with pytest.raises(MismatchError, match="one-shot dispatch of tokens"):
            comm.moe_dispatch(*tokens[:3], 6, max_tokens=3 + comm.rank)


def test_ranks_that_disagree_about_max_tokens(ranks: RankPool) -> None:
    ranks.run(3, disagree_about_places)


def refusals(comm: Communicator) -> list[tuple[str, dict[str, Any], str]]:
    world = comm.world_size
    x, ids, weights, _ = tokens_of(Case((2,) * world, 64, 2, 2), comm.rank, 1)
    dispatch = {"x": x, "topk_ids": ids, "topk_weights": weights, "num_experts": 2 * world}
    places = torch.full((2 * world, 2), -1, dtype=torch.int32)
    combine = {"y": torch.zeros(2 * world, 64, dtype=BF16), "ids": places, "topk_ids": ids, "num_experts": 2 * world}
    many = {"x": x.repeat(65, 1), "topk_ids": ids.repeat(65, 1), "topk_weights": weights.repeat(65, 1)}
    wide = {"topk_ids": ids.repeat(1, 9), "topk_weights": weights.repeat(1, 9)}
    return [
        (
            "moe_dispatch",
            {**dispatch, "num_experts": 2 * world + 1},
            "7 experts cannot be divided evenly among 3 ranks",
        ),
        (
            "moe_dispatch",
            {**dispatch, "num_experts": 0},
            "num_experts is 0; it must be an int from 1 to 2**31",
        ),
        ("moe_dispatch", {**dispatch, "num_experts": 6.0}, "num_experts is 6.0; it must be an int"),
        ("moe_dispatch", {**dispatch, "num_experts": 1 << 20}, "it must be a whole number from 1 to 65536"),
        ("moe_dispatch", {**dispatch, "num_experts": 10**400}, "it must be an int from 1 to 2**31"),
        ("moe_dispatch", {**dispatch, "max_tokens": 1}, "max_tokens is 1; it must be an int from 2, the tokens of x"),
        ("moe_dispatch", {**dispatch, "max_tokens": 129}, "129 tokens a rank: it takes up to 128"),
        ("moe_dispatch", {**dispatch, **many}, "130 tokens a rank: it takes up to 128"),
        ("moe_dispatch", {**dispatch, **wide}, "top_k is 18.000000; it must be a whole number from 1 to 16"),
        ("moe_dispatch", {**dispatch, "topk_ids": ids.long()}, "topk_ids is torch.int64; it must be torch.int32"),
        ("moe_dispatch", {**dispatch, "topk_weights": weights.half()}, "topk_weights is torch.float16"),
        ("moe_dispatch", {**dispatch, "topk_weights": weights[:1]}, "topk_weights the shape of topk_ids"),
        ("moe_dispatch", {**dispatch, "x": x.double()}, "x is torch.float64, which is not one of"),
        ("moe_dispatch", {**dispatch, "x": x[:, :3].contiguous()}, "rows of x have 6 bytes: it takes multiples of 16"),
        ("moe_dispatch", {**dispatch, "x_scales": torch.ones(3, 2)}, "must have as many rows"),
        ("moe_dispatch", {**dispatch, "x_scales": torch.ones(2, 0)}, "x_scales has shape (2, 0)"),
        ("moe_dispatch", {**dispatch, "x_scales": torch.ones(2, 513)}, "groups is 513.000000"),
        ("moe_dispatch", {**dispatch, "x_scales": torch.ones(2, 2).half()}, "x_scales is torch.float16"),
        ("moe_dispatch", {**dispatch, "x": x[0]}, "x has shape (64,); it must have 2 sizes"),
        ("moe_dispatch", {**dispatch, "x": x.t().contiguous().t()}, "not contiguous"),
        ("moe_dispatch", {**dispatch, "x": x.clone().requires_grad_()}, "requires grad"),
        ("moe_dispatch", {**dispatch, "x": [1]}, "x: a list is not a tensor"),
        ("moe_combine", {**combine, "ids": places[:3]}, "ids has shape (3, 2)"),
        ("moe_combine", {**combine, "y": combine["y"].float()}, "torch.float32 is not one of"),
        ("moe_combine", {**combine, "y": torch.zeros(4, 64, dtype=BF16), "ids": places[:4]}, "y has 4 rows"),
        ("moe_combine", {**combine, "y": torch.zeros(3, 64, dtype=BF16), "ids": places[:3]}, "topk_ids has 2 tokens"),
        ("moe_combine", {**combine, "num_experts": 5}, "5 experts cannot be divided evenly"),
        ("moe_combine", {**combine, "y": torch.zeros(6, 8200, dtype=BF16)}, "up to 8192"),
    ]


def refuse() -> None:
    with make_communicator() as comm:
        for name, arguments, words in refusals(comm):
            with pytest.raises(UnsupportedInputError, match=f"{name}: ") as caught:
                getattr(comm, name)(**arguments)
            assert words in str(caught.value), str(caught.value)
            assert getattr(comm, f"try_{name}")(**arguments) is None
            assert not getattr(comm, f"accepts_{name}")(**arguments)
        case = Case((2,) * comm.world_size, 64, 2, 2)
        everyone = [tokens_of(case, rank, 1) for rank in range(case.world)]
        ids = expected_of(case, comm.rank, everyone).ids
        y = made_of(case, comm.rank, ids, 1)
        for out, words in (
            (torch.zeros(3, 64, dtype=BF16), "like the result"),
            (torch.zeros(2, 64), "like the result"),
            (y[:2], "out overlaps y"),
        ):
            with pytest.raises(UnsupportedInputError, match=words):
                comm.moe_combine(y, ids, everyone[comm.rank].ids, case.experts, out)
        with pytest.raises(UnsupportedInputError, match=r"call Communicator\.moe_combine"):
            comm.run("moe_combine", {"y": y})
        # Nothing is left over, and the other forms work.
        check_dispatch(comm, case, everyone, "after refusals")
        received = comm.try_moe_dispatch(*everyone[comm.rank][:3], case.experts)
        assert received is not None
        assert torch.equal(received[1], ids)
        assert comm.accepts_moe_combine(y, ids, everyone[comm.rank].ids, case.experts)
        out = torch.zeros(2, 64, dtype=BF16)
        written = out._version
        comm.moe_combine(y, ids, everyone[comm.rank].ids, case.experts, out)
        assert out._version > written
        assert_same_bits(out, sum_of(case, comm.rank, everyone, 1), "out")
        assert_same_bits(comm.try_moe_combine(y, ids, everyone[comm.rank].ids, case.experts), out, "try_")


def test_what_is_refused(ranks: RankPool) -> None:
    ranks.run(3, refuse)


def decline_alone() -> None:
    with make_communicator() as comm:
        tokens = tokens_of(Case((2,), 64, 2, 2), 0, 1)
        assert not comm.accepts_moe_dispatch(*tokens[:3], 2)
        with pytest.raises(UnsupportedInputError, match="one rank"):
            comm.moe_dispatch(*tokens[:3], 2)


def decline_over_nodes() -> None:
    with make_over_nodes(Layout(2, 1)) as comm:
        tokens = tokens_of(Case((2, 2), 64, 2, 2), comm.rank, 1)
        assert comm.try_moe_dispatch(*tokens[:3], 4) is None
        with pytest.raises(UnsupportedInputError, match="within a node"):
            comm.moe_dispatch(*tokens[:3], 4)


def test_one_rank_and_several_nodes_decline(ranks: RankPool) -> None:
    ranks.run(1, decline_alone)
    ranks.run(2, decline_over_nodes)
