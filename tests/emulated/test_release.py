"""``Communicator.release`` and ``restore``: memory goes and comes, and what was prepared before is good afterwards."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator, nothing_leaked, store
from programs import run_as_ranks
from reference import assert_is_sum, contributions

from llm_comm import Communicator, CommunicatorError, RendezvousError, UnsupportedInputError, emulated
from llm_comm.errors import MissingRankError
from llm_comm.planning.multicast import Multicast
from llm_comm.runtime.release import why_not_releasable

ALGORITHMS = ("one_shot", "two_shot", "one_shot_hb", "two_shot_hb", "port")
#: More than a slot of the workspace takes at once, and less than a line.
COUNTS = (1, 1000, 400_003)
X = torch.ones(1000)
ROWS = torch.ones(2, 64, dtype=torch.bfloat16)
USES: dict[str, Callable[[Communicator], object]] = {
    "all_reduce": lambda comm: comm.all_reduce(X),
    "all_reduce of one element": lambda comm: comm.all_reduce(X[:1]),
    "all_reduce of nothing": lambda comm: comm.all_reduce(X[:0]),
    "all_reduce of a new size": lambda comm: comm.all_reduce(X[:77]),
    "all_reduce_add_rms_norm": lambda comm: comm.all_reduce_add_rms_norm(ROWS, ROWS, ROWS[0], 1e-5),
    "all_gather": lambda comm: comm.all_gather(X),
    "reduce_scatter": lambda comm: comm.reduce_scatter(X[: 24 * comm.world_size]),
    "empty": lambda comm: comm.empty(8, torch.float32),
    "channels": lambda comm: comm.channels(),
    "check": lambda comm: comm.check(),
}


def mapped_workspaces() -> int:
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        return sum("llm_comm_workspace" in line for line in maps)


def assert_sums(comm: Communicator, call: int, what: str) -> None:
    for count in COUNTS:
        inputs = contributions(comm.world_size, count, torch.bfloat16, seed=call)
        assert_is_sum(comm.all_reduce(inputs[comm.rank]), inputs, f"{what}, {count} elements")


# ---- What is right afterwards ----------------------------------------------------------------------------------------


def sum_before_and_after(algorithm: str, calls_before: int) -> None:
    make_communicator(algorithm=algorithm).close()
    with nothing_leaked(), make_communicator(algorithm=algorithm) as comm:
        whole = comm.workspace_bytes
        for call in range(calls_before):
            comm.all_reduce(torch.ones(3))
            assert_sums(comm, call, "before")
        for cycle in range(3):
            comm.release()
            assert comm.is_released
            assert comm.workspace_bytes == 0
            assert mapped_workspaces() == 0
            comm.restore()
            assert not comm.is_released
            assert comm.workspace_bytes == whole
            assert mapped_workspaces() == comm.world_size
            assert_sums(comm, cycle, f"after cycle {cycle}")
            comm.all_reduce(torch.ones(3))  # so that both slots are the next one in turn


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_are_right_afterwards(ranks: RankPool, algorithm: str) -> None:
    """Calls before prepare those after: the number of the operation, signals and requests go on where they were."""
    ranks.run(3, sum_before_and_after, algorithm, 1)


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("calls_before", [0, 2])
def test_worlds_and_no_call_before(ranks: RankPool, world: int, calls_before: int) -> None:
    ranks.run(world, sum_before_and_after, "auto", calls_before)


def run_what_was_prepared() -> None:
    """What stands for a CUDA graph here: the core's call, which holds addresses and is made without Python's checks."""
    with make_communicator() as comm:
        inputs = contributions(comm.world_size, 5000, torch.bfloat16)
        x, out = inputs[comm.rank].clone(), torch.empty_like(inputs[comm.rank])
        comm.all_reduce(x, out=out)
        prepared = comm._operations.all_reduce._prepared[(x.numel(), x.dtype)].run
        assert prepared is not None
        comm.release()
        out.fill_(-1)
        assert not prepared(x.data_ptr(), out.data_ptr(), 0)
        assert bool((out == -1).all())
        comm.restore()
        for call in range(3):
            out.zero_()
            assert prepared(x.data_ptr(), out.data_ptr(), 0)
            assert_is_sum(out, inputs, f"call {call}")
        comm.check()


def test_prepared_calls_run_right_after_and_not_in_between(ranks: RankPool) -> None:
    ranks.run(3, run_what_was_prepared)


def keep_the_heap() -> None:
    with make_communicator() as comm:
        tensor = comm.empty(4096, torch.float32)
        tensor.fill_(comm.rank + 1)
        comm.all_gather(tensor)
        comm.release()
        assert bool((tensor == comm.rank + 1).all())
        comm.restore()
        gathered = comm.all_gather(tensor)
        expected = torch.arange(1.0, comm.world_size + 1).repeat_interleave(4096)
        assert torch.equal(gathered, expected)
        total = comm.all_reduce(tensor)
        assert bool((total == sum(range(1, comm.world_size + 1))).all())
        assert comm._heap.symmetric_offset_of(comm.empty(16, torch.float32)) is not None


def test_symmetric_tensors_stay(ranks: RankPool) -> None:
    ranks.run(3, keep_the_heap)


def use_channels_afterwards() -> None:
    from test_channels import EXCHANGE, Exchange

    kernel = emulated.RawKernel(EXCHANGE, "exchange")
    with make_communicator() as comm:
        exchange = Exchange(kernel, comm, comm.channels())
        exchange.run(3)
        comm.release()
        with pytest.raises(RuntimeError, match="released"):
            exchange.run(1)
        comm.restore()
        exchange.run(3)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_channels_go_on(ranks: RankPool) -> None:
    """Semaphores of port channels count on, and the proxy runs again."""
    ranks.run(2, use_channels_afterwards)


def ask_while_released() -> None:
    with make_communicator() as comm:
        for _ in range(3):
            comm.all_reduce(X)
        before = comm.stats().progress
        comm.release()
        time.sleep(0.2)  # the watchdog looks meanwhile
        assert comm.stats().progress.operations_ended == before.operations_ended
        comm.restore()
        comm.all_reduce(X)
        assert comm.stats().progress.operations_ended == before.operations_ended + 1


def test_statistics_and_the_watchdog_go_on(ranks: RankPool) -> None:
    ranks.run(2, ask_while_released)


# ---- What is refused -------------------------------------------------------------------------------------------------


def use_while_released(use: str) -> None:
    with make_communicator() as comm:
        USES[use](comm)
        comm.release()
        comm.release()  # again: no error
        with pytest.raises(RuntimeError, match=r"released: its workspace has no memory\. Call restore\(\) first"):
            USES[use](comm)
        comm.restore()
        comm.restore()
        USES[use](comm)


@pytest.mark.parametrize("use", USES)
def test_calls_while_released_say_so(ranks: RankPool, use: str) -> None:
    ranks.run(2, use_while_released, use)


def refuse_on_one_rank() -> None:
    with make_communicator() as comm:
        core = mock.Mock(wraps=comm._handle.core())
        core.begin_release.side_effect = RuntimeError("the device does not answer")
        patched = mock.patch.object(comm._handle, "_core", core) if comm.rank == 1 else mock.MagicMock()
        with patched, pytest.raises(RendezvousError, match=r"rank 1 .*: RuntimeError: the device does not answer"):
            comm.release()
        assert not comm.is_released
        assert_sums(comm, 0, "after a refusal")
        comm.release()
        comm.restore()
        assert_sums(comm, 1, "after a release that all could")


def test_one_rank_refuses(ranks: RankPool) -> None:
    ranks.run(3, refuse_on_one_rank)


def restore_without_memory(step: str) -> None:
    make_communicator().close()
    with nothing_leaked(), make_communicator() as comm:
        comm.all_reduce(X)
        comm.release()
        core = mock.Mock(wraps=comm._handle.core_of_released())
        getattr(core, step).side_effect = RuntimeError("out of memory")
        patched = mock.patch.object(comm._handle, "_core", core) if comm.rank == 0 else mock.MagicMock()
        with patched, pytest.raises(RendezvousError, match=r"rank 0 .*: RuntimeError: out of memory"):
            comm.restore()
        del core, patched
        assert comm.is_released
        assert mapped_workspaces() == 0
        comm.restore()
        assert_sums(comm, 0, "after the second try")


@pytest.mark.parametrize("step", ["restore_workspace", "restore_peer"])
def test_no_memory_to_restore(ranks: RankPool, step: str) -> None:
    ranks.run(3, restore_without_memory, step)


def release_fails_half_way() -> None:
    with make_communicator(timeout_s=10.0) as comm:
        comm.all_reduce(X)
        core = mock.Mock(wraps=comm._handle.core())
        core.release_workspaces.side_effect = RuntimeError("the driver is gone")
        patched = mock.patch.object(comm._handle, "_core", core) if comm.rank == 1 else mock.MagicMock()
        with patched, pytest.raises(RendezvousError, match="the driver is gone"):
            comm.release()
        with pytest.raises(CommunicatorError, match="could not be released on all ranks"):
            comm.all_reduce(X)


def test_half_a_release_ends_the_communicator(ranks: RankPool) -> None:
    ranks.run(2, release_fails_half_way)


def refuse_when_failed() -> None:
    with make_communicator(timeout_s=10.0) as comm:
        comm.all_reduce(X)
        if comm.rank == 0:
            comm._handle.core().abort()
            comm._handle._watchdog.end("a test")  # type: ignore[union-attr]
        dist.barrier()
        with pytest.raises(RendezvousError, match="release: waiting for the operations failed on"):
            comm.release()
        assert not comm.is_released


def test_a_failed_communicator_is_not_released(ranks: RankPool) -> None:
    ranks.run(2, refuse_when_failed)


def one_does_not_come() -> None:
    with make_communicator(timeout_s=2.0) as comm:
        assert_sums(comm, 0, "before")
        if comm.rank == 0:
            with pytest.raises(MissingRankError):
                comm.release()
            assert not comm.is_released
            store().set("gave up", "")
        else:
            store().wait(["gave up"])
        assert_sums(comm, 1, "after a release that one rank did not make")


def test_a_rank_that_does_not_come(mortal_ranks: RankPool) -> None:
    """The group is lost, the communicator is not."""
    mortal_ranks.run(2, one_does_not_come)


def close_while_released(drops: bool) -> None:
    make_communicator().close()
    with nothing_leaked():
        comm = make_communicator()
        comm.all_reduce(X)
        comm.release()
        if drops:
            del comm
        else:
            comm.close()
            for use in (comm.release, comm.restore, comm.check):
                with pytest.raises(RuntimeError, match="communicator is closed"):
                    use()
        dist.barrier()
    with make_communicator() as another:
        assert_sums(another, 0, "another communicator")


@pytest.mark.parametrize("drops", [False, True])
def test_close_while_released(ranks: RankPool, drops: bool) -> None:
    ranks.run(2, close_while_released, drops)


def decline_cuda_ipc() -> None:
    with make_communicator() as comm:
        comm.memory_kind = "cudaIpc"
        assert "cudaIpc" in comm.why_not_releasable
        with pytest.raises(UnsupportedInputError, match=r"release: the workspaces are shared by cudaIpc"):
            comm.release()
        assert_sums(comm, 0, "after it was declined")


def test_cuda_ipc_is_declined(ranks: RankPool) -> None:
    ranks.run(2, decline_cuda_ipc)


def test_why_not() -> None:
    assert why_not_releasable("VMM", Multicast(False, "off")) == ""
    assert why_not_releasable("POSIX shared memory", Multicast(False, "off")) == ""
    assert "multicast" in why_not_releasable("VMM", Multicast(True, ""))


def release_out_of_order() -> None:
    """The core alone: what the steps say when they come at the wrong time."""
    with make_communicator() as comm:
        with pytest.raises(RuntimeError, match="is not released"):
            comm._handle.core().restore_workspace()
        with pytest.raises(ValueError, match="restore_peer"):
            comm._handle.core().restore_peer(comm.rank, -1, b"")
        assert_sums(comm, 0, "afterwards")


def test_steps_out_of_order(ranks: RankPool) -> None:
    ranks.run(2, release_out_of_order)


# ---- The program for GPUs --------------------------------------------------------------------------------------------


def test_the_program_for_gpus(tmp_path: Path) -> None:
    """On emulated ones."""
    results = tmp_path / "results.json"
    program = Path(__file__).parents[1] / "gpu" / "release.py"
    run_as_ranks(program, "--device", "emulated", "--cycles", "1", "--json", str(results))
    parts = {"one_shot", "two_shot_hb", "port", "symmetric tensors, auto", "symmetric tensors, two_shot_ce"}
    assert parts < set(json.loads(results.read_text())["figures"])
