"""Communicators made and closed many times: no growth of memory, descriptors, threads, mappings or sockets.

    torchrun --standalone --nproc-per-node 2 tests/gpu/cycles.py --cycles 1000
    torchrun --standalone --nproc-per-node 2 tests/gpu/cycles.py --cycles 40 --device emulated

Each cycle makes one, sums, sums and norms, sums in symmetric memory, and closes it. One in five is dropped instead, and
before one in ten another set-up fails, because of a wrong option on the last rank. One symmetric tensor in three
outlives its communicator.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Session, add_seconds, parser, report, run, session

from llm_comm import Communicator, Config, ConfigError

MIB = 1 << 20
CHECKPOINTS = 10
WORKSPACE_BYTES = 4 * MIB
WRONG_OPTION = {"LLM_COMM_TIMEOUT_S": "5s"}
#: What may grow by chance from the first checkpoint to the last: pools of the driver, of the C library and of Python. A
#: thousand cycles that leave one small object or 4 KiB each exceed it.
SLACK = {"device_bytes": 4 * MIB, "rss_bytes": 4 * MIB, "python_objects": 500}


@dataclass(frozen=True)
class Usage:
    """What this process holds."""

    device_bytes: int
    rss_bytes: int
    python_objects: int
    descriptors: int
    threads: int
    mappings: int
    abstract_sockets: int

    @staticmethod
    def now(ranks: Session) -> Usage:
        ranks.synchronize()
        gc.collect()
        device_bytes = 0
        if ranks.on_gpu:
            free, total = torch.cuda.mem_get_info()
            device_bytes = total - free
        resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        links = [link_of(name) for name in os.listdir("/proc/self/fd")]
        own_sockets = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
        abstract = re.findall(r"(\d+) @llm_comm", Path("/proc/net/unix").read_text(errors="replace"))
        maps = Path("/proc/self/maps").read_text(errors="replace")
        return Usage(
            device_bytes=device_bytes,
            rss_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
            python_objects=len(gc.get_objects()),
            descriptors=len(links),
            threads=len(os.listdir("/proc/self/task")),
            mappings=sum("llm_comm" in line for line in maps.splitlines() if ".so" not in line),
            abstract_sockets=len(own_sockets & set(abstract)),
        )


def link_of(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # that of the listing itself
        return ""


def cycle(ranks: Session, number: int, x: torch.Tensor, weight: torch.Tensor) -> None:
    if number % 10 == 0:
        fail_to_make_one(ranks)
    # Where ranks share a GPU, each communicator would say so.
    config = Config.load({}, workspace_bytes=WORKSPACE_BYTES, share_gpu=ranks.shares_gpu, log="error")
    communicator = Communicator(ranks.group, ranks.device, config)
    sums = communicator.all_reduce(x)
    _, residual = communicator.all_reduce_add_rms_norm(x, None, weight, 1e-5)
    symmetric = communicator.empty(x.shape, x.dtype).copy_(x)
    communicator.all_reduce(symmetric, out=symmetric)
    if not (sums.eq(x * ranks.world).all() and residual.eq(sums).all() and symmetric.eq(sums).all()):
        raise AssertionError(f"wrong sums in cycle {number}")
    if number % 3:
        del symmetric
    if number % 5:
        communicator.close()
    else:
        ranks.synchronize()
        del communicator
        gc.collect()


def fail_to_make_one(ranks: Session) -> None:
    is_wrong = ranks.rank == ranks.world - 1
    os.environ.update(WRONG_OPTION if is_wrong else {})
    try:
        Communicator(ranks.group, ranks.device)
    except ConfigError:
        return
    finally:
        for name in WRONG_OPTION:
            os.environ.pop(name, None)
    raise AssertionError("a communicator was made though an option is wrong")


def growth_of(checkpoints: list[Usage]) -> dict[str, int]:
    first, last = dataclasses.asdict(checkpoints[0]), dataclasses.asdict(checkpoints[-1])
    return {name: last[name] - first[name] for name in first}


def main() -> int:
    options = parser("Make and close communicators, and look for what they leave.")
    add_seconds(options)
    options.add_argument("--cycles", type=int, default=1000)
    options.add_argument(
        "--rss-slack", type=int, default=SLACK["rss_bytes"], help="bytes; the pools of the first 100 cycles take 16 MiB"
    )
    args = options.parse_args()
    with session(args) as ranks:
        x = torch.ones(4, 1024, dtype=torch.bfloat16, device=ranks.device)
        weight = torch.ones(1024, dtype=torch.bfloat16, device=ranks.device)
        checkpoints: list[Usage] = []
        start = time.monotonic()
        for number in range(args.cycles):
            cycle(ranks, number, x, weight)
            ranks.watchdog.progress(f"{number + 1} cycles")
            if (number + 1) * CHECKPOINTS >= args.cycles * (len(checkpoints) + 1):
                ranks.barrier()
                checkpoints.append(Usage.now(ranks))
                ranks.barrier()  # the memory of a shared GPU is that of all its ranks
                if ranks.is_late(args):
                    break
        seconds = time.monotonic() - start
        growth = growth_of(checkpoints)
        worst = ranks.gather(torch.tensor(list(growth.values()), dtype=torch.int64)).amax(dim=0).tolist()
        most = dict(zip(growth, worst, strict=True))
        ranks_a_gpu = ranks.world if ranks.shares_gpu else 1
        slack = {**SLACK, "rss_bytes": args.rss_slack, "device_bytes": ranks_a_gpu * SLACK["device_bytes"]}
        grown = {name: value for name, value in most.items() if value > slack.get(name, 0)}
        if ranks.rank == 0:
            head = ["", *growth]
            rows = [
                [label, *(str(v) for v in dataclasses.asdict(c).values())]
                for label, c in zip(("a tenth in", "at the end"), (checkpoints[0], checkpoints[-1]), strict=True)
            ]
            rows.append(["growth, worst rank", *map(str, worst)])
            figures = {
                "cycles": number + 1,
                "seconds": round(seconds, 1),
                "growth_of_the_worst_rank": most,
                "slack": slack,
                "checkpoints_of_rank_0": [dataclasses.asdict(c) for c in checkpoints],
            }
            report("cycles", ranks.device.type, ranks.world, [head, *rows], figures, args.json)
        if grown:
            print(f"rank {ranks.rank}: grown: {grown}", file=sys.stderr, flush=True)
        return int(bool(grown))


if __name__ == "__main__":
    run(main)
