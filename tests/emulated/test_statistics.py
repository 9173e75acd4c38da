"""``Communicator.stats`` says what was called, on every rank."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from harness import RankPool, make_communicator
from tables import fused_row, plain_row

from llm_comm import Communicator, UnsupportedInputError
from llm_comm.runtime.statistics import Calls, Declined

BF16 = torch.bfloat16
HIDDEN = 128


def two_shot_above(comm: Communicator, nbytes: int) -> None:
    comm.use_table(
        comm.table.with_rows(
            plain_row(nbytes, "one_shot", 1, 4, 0),
            plain_row(1 << 30, "two_shot", 2, 4, 1),
            fused_row(1 << 30, "one_shot", 1, 64, 1, 0),
        )
    )


def check_sums(world: int) -> None:
    with make_communicator() as comm, make_communicator() as other:
        assert comm.stats().calls == ()
        two_shot_above(comm, 1024)
        for count in (100, 300, 300, 512, 513, 4000):
            comm.all_reduce(torch.ones(count, dtype=BF16))
        assert comm.try_all_reduce(torch.ones(50, dtype=BF16)) is not None
        comm.all_reduce(torch.ones(0, dtype=BF16))
        rows, weight = torch.ones(3, HIDDEN, dtype=BF16), torch.ones(HIDDEN, dtype=BF16)
        for _ in range(4):
            comm.all_reduce_add_rms_norm(rows, None, weight, 1e-5)
        comm.all_gather(torch.ones(24, dtype=torch.float32))
        comm.reduce_scatter(torch.ones(world * 8, dtype=BF16))
        other.all_reduce(torch.ones(7, dtype=BF16))

        stats = comm.stats()
        plain = [calls for calls in stats.calls if calls.operation == "all_reduce"]
        assert plain == [
            Calls("all_reduce", "none", "none", 0, 1, 0, 0, 0),
            Calls("all_reduce", "one_shot", "LL", 128, 1, 100, 0, 0),
            Calls("all_reduce", "one_shot", "LL", 256, 1, 200, 0, 0),
            Calls("all_reduce", "one_shot", "LL", 1024, 3, 600 + 600 + 1024, 0, 0),
            Calls("all_reduce", "two_shot", "LL", 2048, 1, 1026, 0, 0),
            Calls("all_reduce", "two_shot", "LL", 8192, 1, 8000, 0, 0),
        ]
        assert stats.by_operation() == {
            "all_reduce": (8, 2 * (100 + 300 + 300 + 512 + 513 + 4000 + 50), 0, 0),
            "all_reduce_add_rms_norm": (4, 4 * 3 * HIDDEN * 2, 0, 0),
            "all_gather": (1, 96, 0, 0),
            "reduce_scatter": (1, 16, 0, 0),
        }
        # All but the empty one, each of one launch; on emulated GPUs an operation has ended when its call returns.
        assert stats.progress.launches == stats.progress.operations_ended == 7 + 4 + 1 + 1
        assert stats.declined == ()
        assert stats.progress.error == ""
        assert other.stats().by_operation() == {"all_reduce": (1, 14, 0, 0)}
    closed = comm.stats()
    assert closed.calls == stats.calls
    assert closed.progress.operations_ended == stats.progress.operations_ended


@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_what_was_called(ranks: RankPool, world: int) -> None:
    ranks.run(world, check_sums, world)


def check_launches_of_a_long_message() -> None:
    with make_communicator(workspace_bytes=1 << 20) as comm:
        x = torch.ones(1 << 20, dtype=BF16)
        plan = comm.plan(x)
        assert plan.chunks > 1
        comm.all_reduce(x)
        progress, (calls,) = comm.stats().progress, comm.stats().calls
        assert (calls.calls, progress.launches, progress.operations_ended) == (1, plan.chunks, plan.chunks)


def test_a_long_message_is_one_call_of_several_launches(ranks: RankPool) -> None:
    ranks.run(2, check_launches_of_a_long_message)


def check_symmetric() -> None:
    with make_communicator() as comm:
        x, ordinary = comm.empty(4096, torch.float32).fill_(1), torch.ones(4096)
        plan = comm.plan(x)
        comm.all_reduce(x, out=x)
        comm.all_reduce(ordinary)
        by_algorithm = {(each.algorithm, each.protocol): each.calls for each in comm.stats().calls}
        assert by_algorithm == {("two_shot_pull_hb", "HB"): 1, (plan.algorithm, plan.protocol): 1}


def test_a_call_of_symmetric_tensors_is_one_of_the_algorithm_that_runs(ranks: RankPool) -> None:
    ranks.run(2, check_symmetric)


def check_threads() -> None:
    with make_communicator() as comm:
        x, calls = torch.ones(64, dtype=BF16), 300
        large = torch.ones(8, dtype=torch.float64)

        def call() -> None:
            for _ in range(calls):
                comm.all_reduce(x)
                assert comm.try_all_reduce(large) is None

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.001)
            assert comm.stats().by_operation().get("all_reduce", (0,))[0] <= 3 * calls
        stats = comm.stats()
        assert stats.by_operation() == {"all_reduce": (3 * calls, 3 * calls * 128, 0, 0)}
        assert [each.count for each in stats.declined] == [3 * calls]


def test_threads_lose_no_count(ranks: RankPool) -> None:
    ranks.run(2, check_threads)


def check_declined() -> None:
    with make_communicator(max_message_bytes=1024) as comm:
        large, wide = torch.ones(1000, dtype=BF16), torch.ones(8, dtype=torch.float64)
        weight = torch.ones(1000, dtype=BF16)
        assert comm.try_all_reduce(large) is None
        assert comm.try_all_reduce(torch.ones(2000, dtype=BF16)) is None
        assert not comm.accepts(large)
        with pytest.raises(UnsupportedInputError):
            comm.all_reduce(large)
        assert not comm.accepts(wide)
        assert not comm.accepts_all_reduce_add_rms_norm(large.view(1, -1), weight)
        with pytest.raises(UnsupportedInputError):
            comm.all_reduce_add_rms_norm(large.view(1, -1), None, weight, 1e-5)
        assert not comm.accepts_all_gather(torch.ones(8, dtype=BF16), 3)
        assert comm.try_reduce_scatter(torch.ones(5, dtype=BF16)) is None
        assert not comm.accepts_linear(torch.ones(2, 24, dtype=torch.float32), torch.ones(8, 24, dtype=torch.float32))
        stats = comm.stats()
        counts = {}
        for each in stats.declined:
            counts.setdefault(each.operation, []).append(each.count)
        assert counts == {
            "all_reduce": [4, 1],
            "all_reduce_add_rms_norm": [2],
            "all_gather": [1],
            "reduce_scatter": [1],
            "linear": [1],
        }
        why = comm.plan(wide).reason
        assert why in [each.reason for each in stats.declined]
        assert stats.calls == ()
        assert stats.progress.launches == 0
        assert stats.progress.idle_s is None
        # What was declined may be served by another table: the reason is not kept.
        comm.all_reduce(torch.ones(8, dtype=BF16))
        assert comm.stats().by_operation() == {"all_reduce": (1, 16, 0, 0)}


def test_what_is_declined_is_counted_with_its_reason(ranks: RankPool) -> None:
    ranks.run(2, check_declined)


def check_linear() -> None:
    with make_communicator() as comm:
        x, weight = torch.ones(2, 64, dtype=BF16), torch.ones(128, 64, dtype=BF16)
        comm.linear(x, weight)
        comm.linear_all_reduce(x, weight)
        by_operation = comm.stats().by_operation()
        assert by_operation == {"linear": (2, 2 * 2 * 128 * 2, 0, 0), "all_reduce": (1, 2 * 128 * 2, 0, 0)}
        assert not comm.accepts_linear_all_reduce(x[:, :24].contiguous(), weight[:, :24].contiguous())
    with make_communicator(max_message_bytes=256) as comm:
        norm_weight = torch.ones(128, dtype=BF16)
        assert not comm.accepts_linear_all_reduce(x, weight)
        assert not comm.accepts_linear_all_reduce_add_rms_norm(x, weight, norm_weight)
        with pytest.raises(UnsupportedInputError, match="max_message_bytes=256"):
            comm.linear_all_reduce(x, weight)
        with pytest.raises(UnsupportedInputError, match="max_message_bytes=256"):
            comm.linear_all_reduce_add_rms_norm(x, weight, None, norm_weight, 1e-5)
        why = "more than max_message_bytes=N"
        assert comm.stats().declined == (Declined("all_reduce", why, 2), Declined("all_reduce_add_rms_norm", why, 2))
        assert comm.stats().calls == ()


def test_a_layer_with_its_sum_counts_as_one_of_each(ranks: RankPool) -> None:
    ranks.run(2, check_linear)


def check_idle() -> None:
    with make_communicator() as comm:
        begin = time.monotonic()
        comm.all_reduce(torch.ones(8, dtype=BF16))
        first = comm.stats().progress.idle_s
        assert first is not None
        assert 0 <= first <= time.monotonic() - begin
        time.sleep(0.2)
        second = comm.stats().progress.idle_s
        assert second is not None
        assert second >= first + 0.2


def test_time_since_the_last_launch(ranks: RankPool) -> None:
    ranks.run(2, check_idle)


def check_error() -> None:
    with make_communicator(timeout_s=2.0) as comm:
        x = torch.ones(8, dtype=BF16) if comm.rank else torch.ones(64, dtype=BF16)
        with pytest.raises(Exception, match="rank"):
            comm.all_reduce(x)
        stats = comm.stats()
        assert stats.progress.error == "MismatchError"
        assert stats.calls == ()


def test_the_error_that_has_ended_it_and_no_call_that_failed(ranks: RankPool) -> None:
    ranks.run(2, check_error)


def check_one_rank() -> None:
    with make_communicator() as comm:
        comm.all_reduce(torch.ones(8, dtype=BF16))
        comm.all_gather(torch.ones(8, dtype=BF16))
        stats = comm.stats()
        assert stats.by_operation() == {"all_reduce": (1, 16, 0, 0), "all_gather": (1, 16, 0, 0)}
        assert {calls.algorithm for calls in stats.calls} == {"none"}
        assert stats.progress.launches == 0


def test_a_rank_alone_launches_nothing(ranks: RankPool) -> None:
    ranks.run(1, check_one_rank)
