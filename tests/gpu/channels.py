"""Kernels of one's own over `Communicator.channels`, compiled at run time: every way of a channel, and CUDA graphs.

    torchrun --standalone --nproc-per-node 2 tests/gpu/channels.py
    torchrun --standalone --nproc-per-node 8 tests/gpu/channels.py

Ranks share a GPU where there are fewer. `examples/all_gather_channels.py` runs too, in the same ranks. cupy compiles
the kernels, or where it is missing NVRTC or nvcc does; `--compiler all` tries each of them that is there.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from common import Recording, Session, parser, report, run, session
from raw_kernel import COMPILERS, compile_kernel, usable_compilers

from llm_comm import Communicator, Config, LaunchError, PeerTimeout

Compile = Callable[[str, str, torch.device], Callable[..., None]]

REPOSITORY = Path(__file__).parents[2]
EXCHANGE = (REPOSITORY / "tests" / "channels" / "exchange.cuh").read_text(encoding="utf-8")
WAIT = """
#include "llm_comm/channels.cuh"
using namespace llm_comm;
extern "C" LLM_COMM_KERNEL(32) wait(const Channels* channels, uint32_t peer, uint32_t semaphore, uint32_t* came) {
  *came = channels->memory_channel(peer, semaphore).wait();
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


def check_example(ranks: Session, compiler: Compile) -> int:
    """Results of the example's kernels that were right, which all are."""
    right = 0
    with communicator(ranks) as comm:
        for nbytes, calls in ((16, 2), (1 << 16, 5), (3 << 20, 3)):
            if nbytes > 1 << 16 and not ranks.on_gpu:
                continue
            right += EXAMPLE.gather(comm, nbytes, calls, compiler)
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


def check_exchange(ranks: Session, compiler: Compile) -> int:
    """Rounds of exchange.cuh that were right."""
    kernel = compiler(EXCHANGE, "exchange", ranks.device)
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


def check_time_out(ranks: Session, compiler: Compile) -> str:
    """A wait for a rank that sends nothing ends, and names it."""
    kernel = compiler(WAIT, "wait", ranks.device)
    ranks.barrier()
    comm = communicator(ranks, timeout_s=3.0)
    channels = comm.channels()
    came = torch.ones(1, dtype=torch.int32, device=ranks.device)
    said = ""
    if ranks.rank != 1:
        kernel((1,), (1,), (channels.handle, 1, 0, came.data_ptr()))
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


def check_no_channel(ranks: Session, compiler: Compile) -> str:
    """A kernel that asks for a semaphore which is not there fails its communicator, and does no harm."""
    kernel = compiler(WAIT, "wait", ranks.device)
    ranks.barrier()
    comm = communicator(ranks, timeout_s=3.0)
    channels = comm.channels(semaphores=4)
    came = torch.ones(1, dtype=torch.int32, device=ranks.device)
    kernel((1,), (1,), (channels.handle, ranks.rank ^ 1, 4, came.data_ptr()))
    ranks.synchronize()
    said = ""
    try:
        comm.check()
    except LaunchError as error:
        said = str(error).partition("\n")[0]
    if came.item() != 0 or "by semaphore 4" not in said:
        raise AssertionError(f"came {came.item()}, error {said!r}")
    ranks.barrier()
    comm.close()
    return said


def compilers(ranks: Session, wanted: str) -> list[str]:
    if not ranks.on_gpu:
        return ["g++"]
    usable = usable_compilers()
    found = {"all": usable, "auto": usable[:1]}.get(wanted, [name for name in usable if name == wanted])
    if not found:
        raise SystemExit(f"--compiler {wanted}: of {', '.join(COMPILERS)} there is {', '.join(usable) or 'none'}")
    return found


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--compiler", choices=("auto", "all", *COMPILERS), default="auto", help="of kernels for GPUs")
    arguments = options.parse_args()
    with session(arguments) as ranks:
        figures: dict[str, object] = {}
        for name in compilers(ranks, arguments.compiler):
            compiler = functools.partial(compile_kernel, name)
            figures |= {
                f"results of the example, {name}": check_example(ranks, compiler),
                f"rounds of exchanges, {name}": check_exchange(ranks, compiler),
                f"time-out, {name}": check_time_out(ranks, compiler),
                f"no channel, {name}": check_no_channel(ranks, compiler),
            }
        table = [("check", "figure"), *((name, str(value)) for name, value in figures.items())]
        if ranks.rank == 0:
            report("channels", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 0


if __name__ == "__main__":
    run(main)
