"""That a late rank costs what it is late by, and no more: calls behind one take as long as any.

    torchrun --standalone --nproc-per-node 4 tests/gpu/late_rank.py

Two measurements. In the first, rank 0 is late for a call by some milliseconds; the time of the two calls that follow on
rank 0 contains how long the others need until they go on. In the second, ranks that have left a host barrier replay a
graph of 20 calls, again and again: most replays begin with a late rank, by less than a millisecond. The grids are of
many small blocks, so of many waits. Fails where a replay takes ten times as long as the fastest, and where calls behind
a late rank take twice as long as behind one in time.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from common import Session, parser, report, run, session

from llm_comm import Communicator
from llm_comm.bench import timing
from llm_comm.planning.tables import ALL_REDUCE, Row, TuningTable, by_operation

CALLS = 20
LATE_MS = (0, 1, 3, 10)
LATE_SIZES = (1 << 10, 64 << 10, 128 << 10, 512 << 10, 1 << 20)
#: Bytes, and the table's row for the replays: up to 1024 blocks of one or two warps.
GRIDS = tuple(
    (size, Row(1 << 40, ALL_REDUCE, algorithm, "LL", blocks=1056, tile_lines=tile_lines))
    for size, algorithm, tile_lines in (
        (64 << 10, "one_shot", 8),
        (96 << 10, "one_shot", 8),
        (128 << 10, "one_shot", 8),
        (128 << 10, "one_shot", 16),
        (512 << 10, "two_shot", 8),
    )
)
CYCLES_OF_A_MS = 1_900_000
#: Times the fastest replay; times the calls behind a rank in time.
SLOW, MOST_BEHIND_A_LATE_ONE = 10, 2


def after_a_late_rank(communicator: Communicator, ranks: Session, size: int, late_ms: int, reps: int) -> list[float]:
    """Microseconds of two calls behind the one for which rank 0 was late, by rank 0's clock."""
    x = torch.ones(size // 2, dtype=torch.bfloat16, device=ranks.device)
    out = torch.empty_like(x)
    communicator.all_reduce(x, out)

    def come() -> None:
        late_cycles = late_ms * CYCLES_OF_A_MS if ranks.rank == 0 else 0
        torch.cuda._sleep(timing.ALIGNING_DELAY_CYCLES + late_cycles)
        communicator.all_reduce(x, out)

    def call_twice() -> None:
        communicator.all_reduce(x, out)
        communicator.all_reduce(x, out)

    return times_us(call_twice, come, ranks, reps)


def replays(communicator: Communicator, ranks: Session, size: int, reps: int) -> list[float]:
    """Microseconds a call of each replay, on this rank."""
    x = torch.ones(size // 2, dtype=torch.bfloat16, device=ranks.device)
    out = torch.empty_like(x)
    communicator.all_reduce(x, out)
    graph = timing.capture(lambda: communicator.all_reduce(x, out), CALLS)

    def come() -> None:
        torch.cuda._sleep(timing.ALIGNING_DELAY_CYCLES)
        communicator.all_reduce(x, out)

    return [us / CALLS for us in times_us(graph.replay, come, ranks, reps)]


def times_us(run: timing.Call, come: timing.Call, ranks: Session, reps: int) -> list[float]:
    """Of each run behind ``come``, in microseconds of this rank's GPU."""
    clock = timing.CudaClock()
    return [timing.timed_run(run, come, clock, ranks.control)[0] * 1e6 for _ in range(reps)]


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--reps", type=int, default=40, help="replays of each case")
    arguments = options.parse_args()
    late: list[dict[str, Any]] = []
    replayed: list[dict[str, Any]] = []
    with session(arguments, measures=True) as ranks:
        if not ranks.on_gpu:
            raise SystemExit("late_rank.py measures GPUs; on emulated ones nothing reads from the host")
        with Communicator(ranks.group, ranks.device) as communicator:
            for size in LATE_SIZES:
                for late_ms in LATE_MS:
                    times = after_a_late_rank(communicator, ranks, size, late_ms, arguments.reps)
                    late.append({"bytes": size, "late_ms": late_ms, **_summary(times)})
                    ranks.watchdog.progress(f"{size} bytes, {late_ms} ms late")
            for size, row in GRIDS:
                communicator.use_table(TuningTable("late_rank", by_operation([row]), 1 << 40))
                times = replays(communicator, ranks, size, arguments.reps)
                # A slow replay is slow on all ranks, give or take one.
                slowest = ranks.gather(torch.tensor(times)).max(dim=0).values.tolist()
                replayed.append({"bytes": size, **row.entry(), **_summary(slowest)})
                ranks.watchdog.progress(f"{size} bytes, {row}")
            ranks.barrier()
        slow = sum(int(case["slow"]) for case in replayed)
        in_time = {case["bytes"]: case["median_us"] for case in late if case["late_ms"] == 0}
        slow += sum(case["median_us"] > MOST_BEHIND_A_LATE_ONE * in_time[case["bytes"]] for case in late)
        if ranks.rank == 0:
            table = [("bytes", "case", "median us", "longest us", "slow")]
            for case in late:
                table.append(_row(case, f"two calls behind a rank {case['late_ms']} ms late"))
            for case in replayed:
                table.append(_row(case, f"a call of replays, {case['algorithm']}, tiles of {case['tile_lines']} lines"))
            figures = {"late": late, "replays": replayed}
            report("late_rank", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 1 if slow else 0


def _summary(times: list[float]) -> dict[str, Any]:
    return {
        "median_us": round(statistics.median(times), 2),
        "longest_us": round(max(times), 2),
        # Of the fastest: most of them may be slow.
        "slow": sum(us > SLOW * min(times) for us in times),
        "of": len(times),
    }


def _row(case: dict[str, Any], what: str) -> tuple[str, ...]:
    return (
        str(case["bytes"]),
        what,
        f"{case['median_us']:.2f}",
        f"{case['longest_us']:.2f}",
        f"{case['slow']} of {case['of']}",
    )


if __name__ == "__main__":
    run(main)
