"""Set-up cost of a communicator: seconds, and device memory of its kernels.

    torchrun --standalone --nproc-per-node 8 tests/gpu/setup_cost.py --json after.json

Two communicators are made after each other. The first loads kernels, which the process keeps; the second finds them
loaded. The device memory of the first, less that of the second, is that of kernels of all ranks. To compare builds, run
the program with each (tests/gpu/overhead.py says how).

    torchrun --standalone --nproc-per-node 2 tests/gpu/setup_cost.py --first-call-in-graph

A graph captures the first call of kernels that set-up has left out.
"""

from __future__ import annotations

import time

import torch
from common import Recording, Session, parser, report, run, session

from llm_comm import Communicator, Config

MIB = 1 << 20


def used_bytes(ranks: Session) -> int:
    """Bytes in use on the device of this rank, by all processes; 0 where it is emulated."""
    ranks.synchronize()
    ranks.barrier()
    used = 0
    if ranks.on_gpu:
        free, total = torch.cuda.mem_get_info()
        used = total - free
    ranks.barrier()
    return used


def measure(ranks: Session) -> dict[str, dict[str, float]]:
    """Seconds of set-up, the most of all ranks, and MiB that it took of the device of rank 0, by communicator."""
    figures: dict[str, dict[str, float]] = {}
    communicators = []
    before = used_bytes(ranks)
    for which in ("first", "second"):
        begin = time.perf_counter()
        communicators.append(Communicator(ranks.group, ranks.device, Config.load(timeout_s=60.0)))
        seconds = ranks.gather(torch.tensor([time.perf_counter() - begin])).max().item()
        after = used_bytes(ranks)
        figures[which] = {"seconds": round(seconds, 3), "device_mib": (after - before) / MIB}
        before = after
    for communicator in communicators:
        communicator.close()
    return figures


def check_first_call_in_graph(ranks: Session) -> dict[str, dict[str, float]]:
    """Raises AssertionError unless a graph captures an all-reduce, and a linear layer whose kernel is not loaded."""
    x = torch.ones(4096, dtype=torch.bfloat16, device=ranks.device)
    square = torch.ones(64, 64, dtype=torch.bfloat16, device=ranks.device)
    with Communicator(ranks.group, ranks.device, Config.load(timeout_s=60.0)) as communicator:

        def calls() -> tuple[torch.Tensor, torch.Tensor]:
            return communicator.all_reduce(x), communicator.linear(square[:1], square)

        total, product = Recording(calls, ranks.device).replay()
        ranks.synchronize()
        communicator.check()
        assert total.eq(ranks.world).all()
        assert product.eq(64).all()
        ranks.barrier()
    return {}


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--first-call-in-graph", action="store_true", help="check that such a call works instead")
    arguments = options.parse_args()
    with session(arguments) as ranks:
        figures = (check_first_call_in_graph if arguments.first_call_in_graph else measure)(ranks)
        if ranks.rank == 0:
            rows = [(which, str(one["seconds"]), f"{one['device_mib']:.1f}") for which, one in figures.items()]
            table = [("communicator", "seconds", "device MiB"), *rows]
            report("setup_cost", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 0


if __name__ == "__main__":
    run(main)
