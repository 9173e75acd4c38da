"""Communicators that are made, used once and closed, again and again, with nothing left of them.

    torchrun --standalone --nproc-per-node 8 tests/gpu/cycles.py --cycles 1000

Each makes one all-reduce, of which every element is compared. What a process holds afterwards (device memory, resident
memory, open files, threads) is compared with what it held after a tenth of the cycles.
"""

from __future__ import annotations

import threading
import time

import torch
from common import Session, add_seconds, parser, report, run, session
from soak import Usage, slack_of

from llm_comm import Communicator, Config

COUNTS = (1, 1000, 4096, 40_001, 131_072)


def cycle(ranks: Session, number: int, wrong: torch.Tensor) -> None:
    """One communicator, of which every other is closed by leaving a ``with`` block."""
    # Small integers that depend on rank, position and cycle: their sums are exact.
    ramp = torch.arange(COUNTS[number % len(COUNTS)], device=ranks.device) % 13 + number % 5
    x = (ramp + ranks.rank).to(torch.bfloat16)
    expected = (ramp * ranks.world + ranks.world * (ranks.world - 1) // 2).to(torch.bfloat16)
    # Where ranks share a GPU, each communicator would say so.
    communicator = Communicator(ranks.group, ranks.device, Config.load(log="error"))
    if number % 2:
        with communicator:
            out = communicator.all_reduce(x)
    else:
        out = communicator.all_reduce(x)
        communicator.close()
    wrong.add_((out != expected).any())


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    add_seconds(options)
    options.add_argument("--cycles", type=int, help="default: 1000 on GPUs, 100 on a shared one, 50 on emulated ones")
    arguments = options.parse_args()
    with session(arguments) as ranks:
        cycles = arguments.cycles or (100 if ranks.shares_gpu else 1000 if ranks.on_gpu else 50)
        wrong = torch.zeros((), dtype=torch.int64, device=ranks.device)
        held: list[tuple[int, ...]] = []
        begin = time.monotonic()
        for number in range(cycles):
            cycle(ranks, number, wrong)
            ranks.watchdog.progress(f"cycle {number}")
            if (number + 1) % max(1, cycles // 10) == 0:
                ranks.barrier()  # until all have closed theirs: ranks may share a GPU
                usage = Usage.now(ranks)
                held.append((*(getattr(usage, name) for name in slack_of(ranks)), threading.active_count()))
                ranks.barrier()
                ranks.say(f"{number + 1} of {cycles} cycles, {time.monotonic() - begin:.0f} s")
                if ranks.is_late(arguments):
                    break
        seconds = time.monotonic() - begin
        own_growth = [max(values) - values[0] for values in zip(*held, strict=True)]
        growth = ranks.gather(torch.tensor(own_growth)).amax(0).tolist()
        bad = int(ranks.gather(wrong.cpu()).sum())
        slack = {**slack_of(ranks), "threads": 0}
        figures = {
            "cycles": number + 1,
            "seconds": round(seconds, 2),
            "wrong_results": bad,
            **{f"{name}_growth": most for name, most in zip(slack, growth, strict=True)},
        }
        problems = [f"{bad} sums were wrong"] if bad else []
        for (name, allowed), most in zip(slack.items(), growth, strict=True):
            if most > allowed:
                problems.append(f"{name} grew by {most} over {cycles} cycles (slack {allowed})")
        if ranks.rank == 0:
            table = [("figure", "value"), *((name.replace("_", " "), str(v)) for name, v in figures.items())]
            table.append(("verdict", "; ".join(problems) or "ok"))
            report("cycles", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 1 if problems else 0


if __name__ == "__main__":
    run(main)
