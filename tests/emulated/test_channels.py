"""``Communicator.channels``: a kernel of somebody's own between emulated ranks, and the same errors on all ranks."""

from __future__ import annotations

import re
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator, nothing_leaked, store
from programs import run_as_ranks
from reference import assert_is_sum, contributions

from llm_comm import Channels, Communicator, LaunchError, PeerTimeout, RendezvousError, UnsupportedInputError, emulated
from llm_comm.errors import MissingRankError
from llm_comm.planning.tables import ALL_REDUCE, Row

REPOSITORY = Path(__file__).parents[2]
EXCHANGE = (REPOSITORY / "tests" / "channels" / "exchange.cuh").read_text(encoding="utf-8")
LINES = 77
THREADS = 40

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def part_bytes() -> int:
    """Of a rank's tensor for each other one: see exchange.cuh."""
    return (5 * LINES + 1) * 16


class Exchange:
    """The kernel of exchange.cuh on one rank."""

    def __init__(self, kernel: emulated.RawKernel, comm: Communicator, channels: Channels) -> None:
        self._kernel, self._comm, self._channels = kernel, comm, channels
        self._received = torch.zeros(LINES * 16, dtype=torch.uint8)
        self._failures = torch.zeros(1, dtype=torch.int32)
        self._rounds = 0

    def run(self, rounds: int) -> None:
        buffers = (self._received.data_ptr(), self._failures.data_ptr())
        self._kernel((1,), (THREADS,), (self._channels.handle, LINES, self._rounds, rounds, *buffers))
        self._rounds += rounds
        self._comm.check()
        assert self._failures.item() == 0


def exchange_in_every_way() -> None:
    kernel = emulated.RawKernel(EXCHANGE, "exchange")
    make_communicator().close()
    with nothing_leaked():
        comm = make_communicator()
        comm.use_table(comm.table.with_rows(Row(1 << 30, ALL_REDUCE, "port", "Port", blocks=2, tile_lines=16, depth=1)))
        tensor = comm.empty((comm.world_size, part_bytes()), torch.uint8)
        # Their semaphores are their own, the memory too.
        parties = [Exchange(kernel, comm, comm.channels(tensor, semaphores=3)), Exchange(kernel, comm, comm.channels())]
        for call in range(3):
            for party in parties:
                party.run(rounds=call + 1)
                inputs = contributions(comm.world_size, 3000, torch.bfloat16, call)
                assert_is_sum(comm.all_reduce(inputs[comm.rank].clone()), inputs, "by ports, between kernels")
        dist.barrier()
        handle = parties[0]._channels
        comm.close()
        with pytest.raises(RuntimeError, match="closed"):
            handle.handle  # noqa: B018
        del party, parties, tensor, comm, handle


@pytest.mark.parametrize("world", [2, 3])
def test_every_way_of_a_channel(ranks: RankPool, world: int) -> None:
    ranks.run(world, exchange_in_every_way)


# ---- The example ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_example(world: int) -> None:
    program, options = REPOSITORY / "examples" / "all_gather_channels.py", ("--emulated", "--bytes", "5008")
    printed = run_as_ranks(program, *options, world=world, timeout_s=240, LLM_COMM_TIMEOUT_S="60")
    for rank in range(world):
        assert f"rank {rank} of {world} on cpu: 10 of 10 results are right" in printed


def test_kernels_of_the_example_are_short() -> None:
    source = (REPOSITORY / "examples" / "all_gather_channels.py").read_text(encoding="utf-8")
    kernels = re.findall(r'r"""(.*?)"""', source, flags=re.DOTALL)
    assert len(kernels) == 2
    assert all(len(kernel.strip().splitlines()) <= 32 for kernel in kernels)


# ---- What goes wrong -----------------------------------------------------------------------------------------------


def ask_for_different_channels() -> None:
    with make_communicator() as comm:
        tensor = comm.empty(4096, torch.uint8)
        with pytest.raises(RendezvousError, match="different channels"):
            comm.channels(tensor, semaphores=4 + comm.rank)
        with pytest.raises(RendezvousError, match="different channels"):
            comm.channels(tensor[: 4096 - 16 * comm.rank])
        with pytest.raises(
            RendezvousError, match=r"different kernel code for channels: \w{12} on rank 0 .*, \w{12} on rank 1 "
        ):
            comm.channels(tensor, code=EXCHANGE + "\n" * comm.rank)
        with pytest.raises(UnsupportedInputError, match="channels: code is 3"):
            comm.channels(tensor, code=3)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedInputError, match=r"must be a contiguous tensor of Communicator\.empty"):
            comm.channels(torch.zeros(4096, dtype=torch.uint8) if comm.rank == 1 else tensor)
        for semaphores in (0, 1 << 20, "2"):
            with pytest.raises(UnsupportedInputError, match="semaphores is"):
                comm.channels(tensor, semaphores=semaphores)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedInputError, match="multiple of 16"):
            comm.channels(tensor[8:])
        with pytest.raises(UnsupportedInputError, match="must be a tensor"):
            comm.channels("memory")  # type: ignore[arg-type]
        channels = comm.channels(tensor[16:], semaphores=2, code=EXCHANGE)
        assert channels.memory.data_ptr() == tensor.data_ptr() + 16
        assert channels.semaphores == 2
        dist.barrier()


def test_different_channels_are_refused(ranks: RankPool) -> None:
    ranks.run(2, ask_for_different_channels)


def ask_without_one_rank() -> None:
    comm = make_communicator(timeout_s=2.0)
    if comm.rank == 1:
        store().wait(["rank 0 gave up", "rank 2 gave up"], timedelta(seconds=60))
    else:
        with pytest.raises(MissingRankError, match=r"not all 3 ranks came .* within 2 s"):
            comm.channels()
        store().set(f"rank {comm.rank} gave up", "")
    comm.close()
    with pytest.raises(RuntimeError, match="closed"):
        comm.channels()


def test_a_rank_does_not_ask(ranks: RankPool) -> None:
    ranks.run(3, ask_without_one_rank)


WAIT = """
#include "llm_comm/channels.cuh"
extern "C" LLM_COMM_KERNEL(32)
    wait(const llm_comm::Channels* channels, uint32_t peer, uint32_t by_port, uint32_t* came) {
  if (by_port) *came = channels->port_channel(peer).wait();
  else *came = channels->memory_channel(peer).wait();
}
"""


def wait_for_a_silent_rank(by_port: bool) -> None:
    kernel = emulated.RawKernel(WAIT, "wait")  # of libc there is a function of that name
    dist.barrier()
    comm = make_communicator(timeout_s=3.0)
    channels = comm.channels()
    came = torch.ones(1, dtype=torch.int32)
    if comm.rank != 1:
        kernel((1,), (1,), (channels.handle, 1, int(by_port), came.data_ptr()))
        assert came.item() == 0
        with pytest.raises(PeerTimeout, match=r"nothing came from rank 1 .* in a user kernel\."):
            comm.check()
    dist.barrier()
    comm.close()


@pytest.mark.parametrize("by_port", [False, True])
def test_a_silent_rank_is_named(ranks: RankPool, by_port: bool) -> None:
    ranks.run(3, wait_for_a_silent_rank, by_port)


ASK = """
#include "llm_comm/channels.cuh"
extern "C" LLM_COMM_KERNEL(32)
    ask(const llm_comm::Channels* channels, uint32_t peer, uint32_t semaphore, uint32_t by_port, uint32_t* came) {
  if (by_port) {
    const auto channel = channels->port_channel(peer, semaphore);
    *came = channel.put_with_signal(0, channels->local(), 16) && channel.wait();
  } else {
    const auto channel = channels->memory_channel(peer, semaphore);
    channel.signal();
    *came = channel.wait();
  }
}
"""


def ask_for_no_channel(by_port: bool) -> None:
    kernel = emulated.RawKernel(ASK, "ask")
    for peer, semaphore in ((2, 0), (1, 4), (0, 1 << 31)):
        comm = make_communicator()
        tensor = comm.empty(4096, torch.uint8).zero_()
        channels = comm.channels(tensor, semaphores=4)
        dist.barrier()
        came = torch.ones(1, dtype=torch.int32)
        if comm.rank == 0:
            kernel((1,), (1,), (channels.handle, peer, semaphore, int(by_port), came.data_ptr()))
            with pytest.raises(
                LaunchError, match=rf"rank 0 .*: a user kernel .* to rank {peer} .*by semaphore {semaphore},"
            ):
                comm.check()
            kernel((1,), (1,), (channels.handle, 1, 0, int(by_port), came.data_ptr()))
            assert came.item() == 0  # it has failed: a wait for what does not come ends at once
        dist.barrier()
        assert tensor.eq(0).all()
        comm.close()


@pytest.mark.parametrize("by_port", [False, True])
def test_a_channel_that_is_not_there_is_refused(ranks: RankPool, by_port: bool) -> None:
    ranks.run(2, ask_for_no_channel, by_port)


PUT_BEYOND = """
#include "llm_comm/channels.cuh"
extern "C" LLM_COMM_KERNEL(32) put(const llm_comm::Channels* channels, uint64_t offset, uint32_t* done) {
  const auto channel = channels->port_channel(channels->peer(0));
  *done = channel.put(offset, channels->local(), 64) && channel.flush();
}
"""


def put_beyond_the_heap() -> None:
    kernel = emulated.RawKernel(PUT_BEYOND, "put")
    comm = make_communicator()
    channels = comm.channels()
    done = torch.zeros(1, dtype=torch.int32)
    kernel((1,), (1,), (channels.handle, 0, done.data_ptr()))
    assert done.item() == 1
    kernel((1,), (1,), (channels.handle, 1 << 40, done.data_ptr()))
    assert done.item() == 0
    with pytest.raises(LaunchError, match=f"64 bytes to offset {1 << 40} of window 0.*symmetric heap"):
        comm.check()
    dist.barrier()
    comm.close()


def test_a_put_beyond_the_heap_is_refused(ranks: RankPool) -> None:
    ranks.run(2, put_beyond_the_heap)
