"""Kernels of one's own over `Communicator.channels`, compiled by cupy: every way of a channel, and CUDA graphs.

    torchrun --standalone --nproc-per-node 2 tests/gpu/channels.py
    torchrun --standalone --nproc-per-node 8 tests/gpu/channels.py

Ranks share a GPU where there are fewer. `examples/all_gather_channels.py` runs too, in the same ranks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from common import Recording, Session, parser, report, run, session

from llm_comm import Communicator, Config, PeerTimeout

REPOSITORY = Path(__file__).parents[2]
EXCHANGE = (REPOSITORY / "tests" / "channels" / "exchange.cuh").read_text(encoding="utf-8")
WAIT = """
#include "llm_comm/channels.cuh"
extern "C" LLM_COMM_KERNEL(32) wait(const llm_comm::Channels* channels, uint32_t peer, uint32_t* came) {
  *came = channels->memory_channel(peer).wait();
}
"""
THREADS = 128
TIMEOUT_S = 20.0


def load_example() -> ModuleType:
    path = REPOSITORY / "examples" / "all_gather_channels.py"
    spec = importlib.util.spec_from_file_location("all_gather_channels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = load_example()


def check_example(ranks: Session) -> int:
    """Results of the example's kernels that were right, which all are."""
    right = 0
    with communicator(ranks) as comm:
        for nbytes, calls in ((16, 2), (1 << 16, 5), (3 << 20, 3)):
            if nbytes > 1 << 16 and not ranks.on_gpu:
                continue
            right += EXAMPLE.gather(comm, nbytes, calls)
            if right % 2 != 0:
                raise AssertionError(f"{nbytes} bytes: a result is wrong")
            ranks.watchdog.progress(f"example, {nbytes} bytes")
        ranks.barrier()
    expected = 2 * (2 + 5 + 3 * ranks.on_gpu)
    if right != expected:
        raise AssertionError(f"the example: {right} of {expected} results are right")
    return right


def communicator(ranks: Session, **options: Any) -> Communicator:
    return Communicator(ranks.group, ranks.device, Config.load(**{"timeout_s": TIMEOUT_S, **options}))


def check_exchange(ranks: Session) -> int:
    """Rounds of exchange.cuh that were right."""
    kernel = EXAMPLE.compile_kernel(EXCHANGE, "exchange", ranks.device)
    return sum(exchange(ranks, kernel, lines) for lines in (1, 77, 2048))


def exchange(ranks: Session, kernel: Callable[..., None], lines: int) -> int:
    """Eager, and in a graph, whose replays go on counting signals where the calls before have ended."""
    comm = communicator(ranks)
    channels = comm.channels(comm.empty((comm.world_size, (5 * lines + 1) * 16), torch.uint8), semaphores=3)
    received = torch.zeros(lines * 16, dtype=torch.uint8, device=ranks.device)
    failures = torch.zeros(1, dtype=torch.int32, device=ranks.device)

    def call(first: int, count: int) -> None:
        buffers = (received.data_ptr(), failures.data_ptr())
        kernel((1,), (THREADS,), (channels.handle, lines, first, count, *buffers))

    def check(what: str) -> None:
        ranks.synchronize()
        comm.check()
        if failures.item() != 0:
            raise AssertionError(f"{what}, {lines} lines: failures {failures.item():#x}")
        ranks.watchdog.progress(f"{what}, {lines} lines")

    x = torch.ones(5000, device=ranks.device)
    for first in (0, 5):
        call(first, 5)
        check("eager")
        if not comm.all_reduce(x).eq(ranks.world).all():
            raise AssertionError("an all-reduce between kernels is wrong")

    def two_rounds() -> None:  # the flag of a packet is its round, and must differ from the one before
        call(10, 1)
        call(11, 1)

    recording = Recording(two_rounds, ranks.device)
    for _ in range(3):
        recording.replay()
        check("replay")
    call(12, 1)
    check("eager behind replays")
    ranks.barrier()
    del recording
    comm.close()
    return 17


def check_time_out(ranks: Session) -> str:
    """A wait for a rank that sends nothing ends, and names it."""
    kernel = EXAMPLE.compile_kernel(WAIT, "wait", ranks.device)
    ranks.barrier()
    comm = communicator(ranks, timeout_s=3.0)
    channels = comm.channels()
    came = torch.ones(1, dtype=torch.int32, device=ranks.device)
    said = ""
    if ranks.rank != 1:
        kernel((1,), (1,), (channels.handle, 1, came.data_ptr()))
        ranks.synchronize()
        try:
            comm.check()
        except PeerTimeout as error:
            said = str(error).partition("\n")[0]
        if came.item() != 0 or "nothing came from rank 1" not in said or "user kernel" not in said:
            raise AssertionError(f"came {came.item()}, error {said!r}")
    ranks.barrier()
    comm.close()
    return said


def main() -> int:
    arguments = parser((__doc__ or "").partition("\n")[0]).parse_args()
    with session(arguments) as ranks:
        if ranks.on_gpu and importlib.util.find_spec("cupy") is None:
            ranks.say("channels.py: skipped: cupy is not installed, which compiles the kernels")
            return 0
        figures = {
            "results of the example": check_example(ranks),
            "rounds of exchanges": check_exchange(ranks),
            "time-out": check_time_out(ranks),
        }
        table = [("check", "figure"), *((name, str(value)) for name, value in figures.items())]
        if ranks.rank == 0:
            report("channels", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 0


if __name__ == "__main__":
    run(main)
