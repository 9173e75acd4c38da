"""Memory and cost: many calls of mixed sizes, eager and in graphs, with nothing growing.

    torchrun --standalone --nproc-per-node 8 tests/gpu/soak.py
    torchrun --standalone --nproc-per-node 8 tests/gpu/soak.py --calls 1000000 --eager-share 0.05

Every sum is compared on the device, those within graphs too, and inputs change with every turn. Prints the host time of
an eager call, too: microseconds to enqueue an all-reduce of 16 KiB while the stream is blocked, so that the GPU has no
part in it. (Not where ranks share a GPU. There, "device bytes" are those of all its ranks, so nothing else may run.)
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import Recording, Session, add_seconds, parser, report, run, session
from values import Inputs, Values, expect_sum

from llm_comm import Communicator, Config

MIB = 1 << 20
MOST_WORKSPACE_BYTES = 64 * MIB
#: What may grow by chance: the driver's and the C library's own pools, not a leak of even 1 KiB a call.
SLACK = {"device_bytes": 4 * MIB, "rss_bytes": 32 * MIB, "open_files": 0}

COUNTS = (1, 513, 1000, 2048, 8192, 10018, 16384, 40000, 131072, 262145)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FUSED_HIDDEN = 1024  # some of the counts are rows of it
CALLS_OF_A_GRAPH = 50
SYNCHRONIZE_EVERY, SYNCHRONIZE_EVERY_ON_SHARED_GPU = 1000, 200
CHECKPOINTS = 10

HOST_TIME_BYTES = 16 * 1024
# Fewer launches than a stream can hold, or enqueuing would wait for the GPU.
HOST_TIME_CALLS = 200
HOST_TIME_REPEATS = 25
BLOCK_CYCLES = 100_000_000  # about 50 ms


@dataclass(frozen=True)
class Usage:
    device_bytes: int
    rss_bytes: int
    open_files: int

    @staticmethod
    def now(ranks: Session) -> Usage:
        ranks.synchronize()
        device_bytes = 0
        if ranks.on_gpu:
            free, total = torch.cuda.mem_get_info()
            device_bytes = total - free
        with open("/proc/self/statm", encoding="ascii") as file:
            resident_pages = int(file.read().split()[1])
        rss = resident_pages * os.sysconf("SC_PAGE_SIZE")
        return Usage(device_bytes, rss, len(os.listdir("/proc/self/fd")))


@dataclass(frozen=True)
class Work:
    """A turn of ``CALLS_OF_A_GRAPH`` calls, eager or as a graph, and a look at what all turns so far have found."""

    eager: Callable[[], None]
    replay: Callable[[], None]
    check: Callable[[], None]


def make_work(ranks: Session, communicator: Communicator) -> Work:
    world, device = ranks.world, ranks.device
    # Small integers that depend on rank, position and turn: their sums are exact, also in bfloat16.
    ramps = [
        (torch.arange(count, device=device) % 13).to(dtype)
        for count in COUNTS
        for dtype in DTYPES
        if ranks.on_gpu or count <= 2048
    ]
    own = [ramp + ranks.rank for ramp in ramps]
    total = [ramp * world + world * (world - 1) // 2 for ramp in ramps]
    inputs, outputs, expected = ([torch.empty_like(ramp) for ramp in ramps] for _ in range(3))
    turn = torch.zeros((), device=device)
    bad_calls = torch.zeros((), dtype=torch.int64, device=device)
    fused = [
        (x.view(-1, FUSED_HIDDEN), sums.view(-1, FUSED_HIDDEN), torch.ones(FUSED_HIDDEN, dtype=x.dtype, device=device))
        for x, sums in zip(inputs, expected, strict=True)
        if x.numel() % FUSED_HIDDEN == 0 and x.dtype != torch.float32
    ]

    def count_bad(out: torch.Tensor, sums: torch.Tensor) -> None:
        bad_calls.add_((out != sums).any())

    def one_turn() -> None:
        turn.add_(1).remainder_(5)
        for i, x in enumerate(inputs):
            torch.add(own[i], turn, out=x)
            torch.add(total[i], turn * world, out=expected[i])
        for call in range(CALLS_OF_A_GRAPH):
            i = call % len(inputs)
            if call % 10 == 9:
                x, sums, weight = fused[call // 10 % len(fused)]
                _, residual = communicator.all_reduce_add_rms_norm(x, None, weight, 1e-5)
                count_bad(residual, sums)
            else:
                count_bad(communicator.all_reduce(inputs[i], outputs[i] if call % 3 else None), expected[i])

    def check() -> None:
        bad = int(bad_calls)
        if bad:
            raise AssertionError(f"{bad} calls had wrong sums")

    one_turn()
    check()
    return Work(one_turn, Recording(one_turn, device).replay, check)


def slack_of(ranks: Session) -> dict[str, int]:
    """What may grow. The memory of a shared GPU is that of all its ranks."""
    ranks_a_gpu = -(-ranks.world // torch.cuda.device_count()) if ranks.shares_gpu else 1
    return {**SLACK, "device_bytes": ranks_a_gpu * SLACK["device_bytes"]}


def soak(ranks: Session, communicator: Communicator, options: argparse.Namespace) -> tuple[int, list[Usage]]:
    """Makes calls. Returns their number, and the usage at every checkpoint, the first a tenth in."""
    calls, eager_share = options.calls, options.eager_share
    work = make_work(ranks, communicator)
    replays = max(1, round((1 - eager_share) / eager_share))
    checkpoints: list[Usage] = []
    synchronize_every = SYNCHRONIZE_EVERY_ON_SHARED_GPU if ranks.shares_gpu else SYNCHRONIZE_EVERY
    done = since_synchronized = 0
    while done < calls:
        work.eager()
        for _ in range(replays):
            work.replay()
        done += (1 + replays) * CALLS_OF_A_GRAPH
        since_synchronized += (1 + replays) * CALLS_OF_A_GRAPH
        if since_synchronized >= synchronize_every:
            since_synchronized = 0
            ranks.synchronize()
            communicator.check()
            ranks.watchdog.progress(f"{done} calls")
        if done * CHECKPOINTS >= calls * (len(checkpoints) + 1):
            work.check()
            checkpoints.append(Usage.now(ranks))
            ranks.say(f"{done} of {calls} calls, all sums right")
            if ranks.is_late(options):
                break
    work.check()
    return done, checkpoints


def host_time_us(ranks: Session, communicator: Communicator, with_out: bool) -> tuple[float, float]:
    """(median, minimum) over repeats of the host time of a call; on emulated devices the call's work is in it."""
    x = torch.ones(HOST_TIME_BYTES // 2, dtype=torch.bfloat16, device=ranks.device)
    out = torch.empty_like(x) if with_out else None
    calls = HOST_TIME_CALLS if ranks.on_gpu else 5
    times = []
    for _ in range(HOST_TIME_REPEATS):
        ranks.barrier()
        ranks.synchronize()
        if ranks.on_gpu:
            torch.cuda._sleep(BLOCK_CYCLES)
        begin = time.perf_counter()
        for _ in range(calls):
            communicator.all_reduce(x, out)
        times.append((time.perf_counter() - begin) / calls * 1e6)
    ranks.synchronize()
    return statistics.median(times), min(times)


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    add_seconds(options)
    options.add_argument(
        "--calls", type=int, help="default: 100000 on GPUs, 2000 on a shared one, 5000 on emulated ones"
    )
    options.add_argument("--eager-share", type=float, default=0.5, help="of the calls; the others are in graphs")
    arguments = options.parse_args()
    if not 0 < arguments.eager_share <= 0.5:
        options.error(f"--eager-share is {arguments.eager_share}: more than 0, at most 0.5")
    with session(arguments) as ranks:
        if arguments.calls is None:
            arguments.calls = 2_000 if ranks.shares_gpu else 100_000 if ranks.on_gpu else 5_000
        torch.zeros(1, device=ranks.device)  # the CUDA context is not the communicator's
        ranks.barrier()
        before = Usage.now(ranks)
        ranks.barrier()
        with Communicator(ranks.group, ranks.device, Config.load()) as communicator:
            ranks.barrier()
            made = Usage.now(ranks)
            ranks.barrier()
            workspace_bytes = communicator.workspace_bytes
            begin = time.monotonic()
            calls, checkpoints = soak(ranks, communicator, arguments)
            seconds = time.monotonic() - begin
            ways = () if ranks.shares_gpu else (("out_given", True), ("new_tensor", False))
            host_times = {
                f"host_us_{name}_{kind}": round(value, 2)
                for name, with_out in ways
                for kind, value in zip(("median", "min"), host_time_us(ranks, communicator, with_out), strict=True)
            }
            rows = Inputs(ranks.device, ranks.world).rows(Values("normal", 0, 1), 10018, torch.bfloat16, seed=1)
            expect_sum(communicator.all_reduce(rows[ranks.rank].contiguous()), rows, f"after {calls} calls")
            ranks.barrier()

        own_growth = {
            name: max(getattr(usage, name) for usage in checkpoints) - getattr(checkpoints[0], name) for name in SLACK
        }
        growth = ranks.gather(torch.tensor(list(own_growth.values()))).amax(0).tolist()
        figures = {
            "calls": calls,
            "eager_share": arguments.eager_share,
            "seconds": round(seconds, 2),
            "workspace_bytes": workspace_bytes,
            "device_bytes_for_communicator": made.device_bytes - before.device_bytes,
            **{f"{name}_growth": most for name, most in zip(SLACK, growth, strict=True)},
            **host_times,
        }
        problems = [
            f"{name} grew by {most} over {calls} calls (slack {slack})"
            for (name, slack), most in zip(slack_of(ranks).items(), growth, strict=True)
            if most > slack
        ]
        if workspace_bytes > MOST_WORKSPACE_BYTES:
            problems.append(f"the workspace has {workspace_bytes} bytes, more than {MOST_WORKSPACE_BYTES}")
        if ranks.rank == 0:
            table = [("figure", "value"), *((name.replace("_", " "), str(v)) for name, v in figures.items())]
            table.append(("verdict", "; ".join(problems) or "ok"))
            figures["checkpoints"] = [vars(usage) for usage in checkpoints]
            report("soak", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 1 if problems else 0


if __name__ == "__main__":
    run(main)
