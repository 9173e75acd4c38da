"""Ranks that make different calls: an error that names both sides, on all of them, and never a sum."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from harness import RankPool, make_communicator, unnamed
from reference import assert_is_sum, contributions

from llm_comm import Communicator, MismatchError


class Case(NamedTuple):
    """What the odd rank calls where the others sum 2048 bf16, and how the error words it."""

    count: int
    dtype: torch.dtype
    words: str


CASES = {
    "size": Case(2049, torch.bfloat16, "one-shot all-reduce of 2049 bf16"),
    "one element": Case(1, torch.bfloat16, "one-shot all-reduce of 1 bf16"),
    "type": Case(2048, torch.float16, "one-shot all-reduce of 2048 fp16"),
    "type of as many bytes": Case(1024, torch.float32, "one-shot all-reduce of 1024 fp32"),
    "algorithm": Case(200_000, torch.bfloat16, "two-shot all-reduce of 200000 bf16"),
    # Of several launches, which are as long as each other, the first one differs.
    "launches": Case(5_000_000, torch.float32, "two-shot all-reduce of 227328 fp32"),
}
USUAL = "one-shot all-reduce of 2048 bf16"


class Report(NamedTuple):
    rank: int
    peer: int
    text: str


def disagree(case: Case, odd_rank: int, calls_before: int) -> Report:
    usual = torch.ones(2048, dtype=torch.bfloat16)
    with make_communicator() as comm:
        for _ in range(calls_before):
            assert comm.all_reduce(usual).eq(comm.world_size).all()
        x = torch.ones(case.count, dtype=case.dtype) if comm.rank == odd_rank else usual
        out = torch.full_like(x, -1)
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(x, out)
        assert out.eq(-1).all(), "something was written"
        check_refusal(comm, str(caught.value))
    with make_communicator() as fresh:
        inputs = contributions(fresh.world_size, 1000, torch.bfloat16)
        assert_is_sum(fresh.all_reduce(inputs[fresh.rank]), inputs, "the sum of a new communicator")
    return Report(caught.value.rank, caught.value.peer, unnamed(str(caught.value)))


def check_refusal(comm: Communicator, text: str) -> None:
    rows = torch.ones(0, 64, dtype=torch.bfloat16)
    for refuse in (
        lambda: comm.all_reduce(torch.ones(5)),
        lambda: comm.all_reduce(torch.ones(0)),
        lambda: comm.all_reduce_add_rms_norm(rows, None, rows.new_ones(64), 1e-5),
        comm.check,
    ):
        with pytest.raises(MismatchError) as again:
            refuse()
        assert str(again.value) == text


@pytest.mark.parametrize("name", CASES)
def test_one_rank_calls_something_else(ranks: RankPool, name: str) -> None:
    reports = ranks.run(3, disagree, CASES[name], 1, 2)
    for rank, report in enumerate(reports):
        assert (report.rank, report.peer) == (rank, 1)
        assert report.text.startswith(
            f"rank {rank}: the ranks disagree about operation 3 of this communicator, replays counted: "
            f"ranks 0, 2: {USUAL} (call 3); rank 1: {CASES[name].words} (call 3)."
        )


@pytest.mark.parametrize(("world", "odd_rank"), [(2, 0), (5, 4), (8, 0)])
def test_whichever_rank_it_is(ranks: RankPool, world: int, odd_rank: int) -> None:
    for report in ranks.run(world, disagree, CASES["size"], odd_rank, 0):
        assert f"rank {odd_rank}: {CASES['size'].words} (call 1)" in report.text
        assert report.peer == (odd_rank or 1)


def call_in_another_order() -> str:
    small, large = torch.ones(10), torch.ones(400_000)
    with make_communicator() as comm:
        first, second = (small, large) if comm.rank == 0 else (large, small)
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(first)
        with pytest.raises(MismatchError):
            comm.all_reduce(second)
        return unnamed(str(caught.value))


def test_calls_in_another_order(ranks: RankPool) -> None:
    for text in ranks.run(2, call_in_another_order):
        assert "operation 1 " in text
        assert "rank 0: one-shot all-reduce of 10 fp32 (call 1)" in text
        assert "rank 1: two-shot all-reduce of 200064 fp32 (call 1)" in text


def disagree_when_fused(odd_one: str) -> str:
    """Rank 1 norms other rows of as many elements, or otherwise, or does not norm."""
    with make_communicator() as comm:
        odd = odd_one if comm.rank == 1 else None
        hidden = 128 if odd == "rows" else 64
        x = torch.ones(512 // hidden, hidden, dtype=torch.bfloat16)
        options: dict[str, Any] = {"quantize": "static", "scale": torch.ones(1)}
        if odd == "quantization":
            options = {"quantize": "dynamic"}
        elif odd == "no quantization":
            options = {}
        residual = None if odd == "residual" else x
        epsilon = 1.0 if odd == "epsilon" else 1e-5
        options["weight_bias"] = 1.0 if odd == "weight_bias" else 0.0
        fused = partial(comm.all_reduce_add_rms_norm, x, residual, x[0].clone(), epsilon, **options)
        call = partial(comm.all_reduce, x) if odd == "operation" else fused
        with pytest.raises(MismatchError) as caught:
            call()
        return unnamed(str(caught.value))


FUSED = "one-shot all-reduce + RMSNorm of 512 bf16 in rows of 64"


@pytest.mark.parametrize(
    ("odd_one", "usual", "odd"),
    [
        ("rows", FUSED, "one-shot all-reduce + RMSNorm of 512 bf16 in rows of 128"),
        ("operation", FUSED, "one-shot all-reduce of 512 bf16"),
        ("epsilon", f"{FUSED}, epsilon 1e-05", f"{FUSED}, epsilon 1"),
        ("weight_bias", f"{FUSED}, weight_bias 0", f"{FUSED}, weight_bias 1"),
        ("residual", f"{FUSED}, with residual", f"{FUSED}, without residual"),
        ("quantization", f"{FUSED}, quantization static", f"{FUSED}, quantization dynamic"),
        (
            "no quantization",
            f"{FUSED}, quantization static, with scale",
            f"{FUSED}, quantization none, without scale",
        ),
    ],
    ids=["rows", "operation", "epsilon", "weight_bias", "residual", "quantization", "no quantization"],
)
def test_fused_calls(ranks: RankPool, odd_one: str, usual: str, odd: str) -> None:
    for text in ranks.run(2, disagree_when_fused, odd_one):
        assert f"rank 0: {usual} (call 1); rank 1: {odd} (call 1). " in text
