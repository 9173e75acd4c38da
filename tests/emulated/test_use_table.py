"""What a communicator has prepared and planned: by all that it depends on, and by no table but the present one."""

from __future__ import annotations

import pytest
import torch
from fused_reference import check_call, operands_of, quantized, rows_of
from harness import RankPool, make_communicator
from reference import assert_is_sum, contributions
from tables import fused_row, plain_row

from llm_comm import Communicator, UnsupportedInputError

EPS = 1e-5
HIDDEN = 128


def ran_by(calls: object) -> set[tuple[str, int, int]]:
    """What is prepared, and so what has run."""
    plans = [prepared.plan for prepared in calls._prepared.values()]  # type: ignore[attr-defined]
    return {(plan.algorithm, plan.blocks, plan.depth) for plan in plans}


def call_all(comm: Communicator, x: torch.Tensor, weight: torch.Tensor) -> None:
    """All that keeps plans."""
    inputs = contributions(comm.world_size, x.numel(), x.dtype)
    assert_is_sum(comm.all_reduce(inputs[comm.rank].view_as(x)), [t.view_as(x) for t in inputs], "plain")
    rows = rows_of(comm.world_size, *x.shape, x.dtype)
    check_call(comm, rows, None, weight, "fused")
    assert comm.accepts(x)
    assert comm.accepts_all_reduce_add_rms_norm(x, weight)


def check_another_table() -> None:
    with make_communicator() as comm:
        x, weight = torch.ones(3, HIDDEN, dtype=torch.bfloat16), operands_of(3, HIDDEN, torch.bfloat16)[1]
        found = []
        for algorithm, blocks, depth in (("one_shot", 1, 0), ("two_shot", 2, 3), ("one_shot", 2, 1)):
            rows = plain_row(1 << 30, algorithm, blocks, 4, depth), fused_row(1 << 30, algorithm, 1, 64, 1, depth)
            comm.use_table(comm.table.with_rows(*rows))
            call_all(comm, x, weight)
            assert ran_by(comm._operations.all_reduce) == {(algorithm, blocks, depth)}
            assert ran_by(comm._operations.all_reduce_add_rms_norm) == {(algorithm, 1, depth)}
            plans = comm.plan(x), comm.plan_all_reduce_add_rms_norm(x, weight)
            assert [(plan.algorithm, plan.depth) for plan in plans] == [(algorithm, depth)] * 2
            found.append(plans)
        assert len(set(found)) == len(found)


def test_another_table_counts_from_the_next_call_on(ranks: RankPool) -> None:
    ranks.run(2, check_another_table)


def check_other_limits() -> None:
    with make_communicator() as comm:
        x, weight = torch.ones(3, HIDDEN, dtype=torch.bfloat16), torch.ones(HIDDEN, dtype=torch.bfloat16)
        usual = comm.table
        call_all(comm, x, weight)
        comm.use_table(usual._replace(max_fused_bytes=x.nbytes - 1))
        assert comm.accepts(x)
        assert not comm.accepts_all_reduce_add_rms_norm(x, weight)
        with pytest.raises(UnsupportedInputError, match="more than max_fused_bytes"):
            comm.all_reduce_add_rms_norm(x, None, weight, EPS)
        comm.use_table(usual._replace(max_message_bytes=x.nbytes - 1))
        assert not comm.accepts(x)
        assert not comm.accepts_all_reduce_add_rms_norm(x, weight)
        assert comm.try_all_reduce(x) is None
        with pytest.raises(UnsupportedInputError, match="more than max_message_bytes"):
            comm.all_reduce(x)
        with pytest.raises(UnsupportedInputError, match="more than max_message_bytes"):
            comm.all_reduce_add_rms_norm(x, None, weight, EPS)
        comm.use_table(usual)
        call_all(comm, x, weight)


def test_another_table_s_limits_count_for_sizes_that_were_served(ranks: RankPool) -> None:
    ranks.run(2, check_other_limits)


def check_traced_limits() -> None:
    """torch.compile asks another function."""
    with make_communicator() as comm:
        calls = comm._operations.all_reduce_add_rms_norm
        x, weight = torch.ones(4, HIDDEN, dtype=torch.bfloat16), torch.ones(HIDDEN, dtype=torch.bfloat16)
        usual = comm.table
        for fused, message, expected in (
            (x.nbytes, 1 << 20, True),
            (x.nbytes - 1, 1 << 20, False),
            (1 << 20, x.nbytes, True),
            (1 << 20, x.nbytes - 1, False),
        ):
            comm.use_table(usual._replace(max_fused_bytes=fused, max_message_bytes=message))
            assert calls.accepts_traced(x, weight, None) == comm.accepts_all_reduce_add_rms_norm(x, weight) == expected
            assert comm._operations.all_reduce.accepts_traced(x) == comm.accepts(x) == (message >= x.nbytes)
        comm.use_table(usual)
        for hidden in (8, 12, 16384, 16392):
            x, weight = torch.ones(2, hidden, dtype=torch.bfloat16), torch.ones(hidden, dtype=torch.bfloat16)
            assert (
                calls.accepts_traced(x, weight, None)
                == comm.accepts_all_reduce_add_rms_norm(x, weight)
                == (hidden in (8, 16384))
            )


def test_what_is_traced_keeps_the_same_limits(ranks: RankPool) -> None:
    ranks.run(2, check_traced_limits)


def check_fp8(comm: Communicator, x: torch.Tensor, weight: torch.Tensor, normed: torch.Tensor) -> None:
    """Both quantizations of rows whose norm is ``normed``."""
    scale = torch.tensor([0.25])
    found, _ = comm.all_reduce_add_rms_norm(x, None, weight, EPS, quantize="static", scale=scale)
    assert torch.equal(found.float(), quantized(normed, "static", scale).float())
    found, _, scales = comm.all_reduce_add_rms_norm(x, None, weight, EPS, quantize="dynamic")
    assert torch.equal(found.float(), quantized(normed, "dynamic", scales).float())


def check_keys() -> None:
    """Calls of as many elements that differ in one thing alone, in turn."""
    with make_communicator() as comm:
        for _ in range(2):
            for rows, hidden in ((6, 64), (3, 128), (2, 192), (1, 384)):
                for eps, weight_bias in ((1e-5, 0.0), (0.5, 0.0), (0.5, 1.0), (0.5, -0.25), (4.0, 0.0)):
                    for dtype in (torch.bfloat16, torch.float16):
                        inputs = rows_of(comm.world_size, rows, hidden, dtype)
                        residual, weight = operands_of(rows, hidden, dtype)
                        what = f"{rows} x {hidden}, {eps}, {weight_bias}"
                        check_call(comm, inputs, residual, weight, what, eps, weight_bias)
            for rows, hidden in ((1, 64), (7, 64), (2, 64), (3, 128), (6, 64)):
                x = rows_of(comm.world_size, rows, hidden, torch.bfloat16)[comm.rank]
                weight = operands_of(rows, hidden, torch.bfloat16)[1]
                plan = comm.plan_all_reduce_add_rms_norm(x, weight)
                assert (plan.row, plan.message_bytes) == (hidden, x.nbytes)
                normed, total = comm.all_reduce_add_rms_norm(x, None, weight, EPS)
                check_fp8(comm, x, weight, normed)
                again = comm.all_reduce_add_rms_norm(x, None, weight, EPS)
                assert torch.equal(again[0], normed)
                assert torch.equal(again[1], total)
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                inputs = contributions(comm.world_size, 384, dtype)
                assert_is_sum(comm.all_reduce(inputs[comm.rank]), inputs, f"plain, {dtype}")


def test_rows_of_another_length_and_another_eps_are_another_call(ranks: RankPool) -> None:
    ranks.run(2, check_keys)
