"""What a build costs: the bound of every wait, a change to the kernels, the comparison of calls with LLM_COMM_DEBUG=1.

    torchrun --standalone --nproc-per-node 4 tests/gpu/overhead.py --json after1.json --label after

measures this build: `aligned` (llm_comm.bench.timing), microseconds a call in a graph; all-reduces without and with
debug, and fused ones. What is compiled in takes a second build, and runs of both in turn. Of a change to the kernels,
with the sources before it in ../before:

    pip install --no-build-isolation --no-deps --target /tmp/before -C build-dir=/tmp/before_build ../before
    PYTHONPATH=/tmp/before torchrun --standalone --nproc-per-node 4 tests/gpu/overhead.py --json before1.json \\
        --label before
    python tests/gpu/overhead.py --compare after*.json before*.json

says what the build of the first file costs. (The commit in a file is that of this program; only the label tells the
build.) Of the bound of the waits: the same with a build of these sources with
`-C cmake.define.LLM_COMM_UNBOUNDED_WAITS=ON`, which needs no label, in any order.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from common import Session, parser, report, run, session

from llm_comm import Communicator, Config, _core
from llm_comm.bench.timing import Schedule, time_eager, time_graph

SIZES = (*(1024 << i for i in range(15)), *(3 << i for i in range(20, 23)))  # bytes: 1 KiB to 16 MiB
HIDDEN = 8192
FUSED_ROWS = tuple(1 << i for i in range(7))  # 16 KiB to 1 MiB
CALLS = 20
#: What bounded waits, or a change, may cost at any size.
BAR_PERCENT = 1.0


def compare(files: list[Path]) -> int:
    """Prints medians over the files of each build, and what that of the first file costs. 1 if it is above the bar."""
    builds: dict[str, list[dict[str, dict[str, float]]]] = {}
    for file in files:
        figures = json.loads(file.read_text())["figures"]
        builds.setdefault(figures.get("label") or _waits(figures["bounded_waits"]), []).append(figures)
    if len(builds) != 2:
        raise SystemExit(f"--compare needs results of two builds, told apart by --label, not of {', '.join(builds)}")
    if set(builds) == {_waits(True), _waits(False)}:
        builds = {label: builds[label] for label in (_waits(True), _waits(False))}
    (label, runs), (reference, reference_runs) = builds.items()
    print(f"{len(runs)} runs of {label}, {len(reference_runs)} of {reference}: us a call, medians")
    costs = []
    for kind, name in (("us", "all-reduce"), ("us_fused", "fused")):
        if any(kind not in one for one in (*runs, *reference_runs)):
            print(f"{name}: not in all of the files")  # those of before 2026-11-22 have no fused ones
            continue
        for size in runs[0][kind]:
            us, before = (statistics.median(one[kind][size] for one in of) for of in (runs, reference_runs))
            costs.append((us / before - 1) * 100)
            print(f"{name:10}  {size:>8}  {us:7.3f}  {before:7.3f}  {costs[-1]:+5.1f} %")
    is_met = max(costs) <= BAR_PERCENT
    print(f"at most {max(costs):+.1f} %: {'within' if is_met else 'ABOVE'} the bar of {BAR_PERCENT:g} %")
    return 0 if is_met else 1


def _waits(are_bounded: bool) -> str:
    return "bounded waits" if are_bounded else "UNBOUNDED waits"


class Clock:
    """Microseconds a call of what the ranks do together."""

    def __init__(self, ranks: Session, reps: int) -> None:
        self._ranks = ranks
        self._schedule = Schedule(CALLS, reps, True) if ranks.on_gpu else Schedule(2, 3, True)

    def us(self, call: Callable[[], object], what: str) -> float:
        call()
        ranks = self._ranks
        if ranks.on_gpu:
            timing = time_graph(call, lambda: None, self._schedule, ranks.control)
        else:
            timing = time_eager(call, lambda: None, self._schedule, ranks.device, ranks.control)
        ranks.watchdog.progress(what)
        return round(timing.us, 3)


def plain(communicator: Communicator, clock: Clock, device: torch.device) -> dict[str, float]:
    """{bytes: us} of all-reduces, bf16."""
    us = {}
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        out = torch.empty_like(x)
        us[str(size)] = clock.us(partial(communicator.all_reduce, x, out), f"{size} bytes")
    return us


def fused(communicator: Communicator, clock: Clock, device: torch.device) -> dict[str, float]:
    """{bytes: us} of all-reduces with residual add and RMSNorm, rows of HIDDEN, bf16."""
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    us = {}
    for rows in FUSED_ROWS:
        x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        residual = torch.zeros_like(x)
        given = {"out": torch.empty_like(x), "residual_out": torch.empty_like(x)}
        call = partial(communicator.all_reduce_add_rms_norm, x, residual, weight, 1e-6, **given)
        us[str(x.nbytes)] = clock.us(call, f"{rows} rows, fused")
    return us


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--reps", type=int, default=200, help="timed replays of each case")
    options.add_argument("--label", help="of the build, for --compare; default: whether its waits are bounded")
    options.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="of two builds: what that of the first file costs; runs nothing",
    )
    arguments = options.parse_args()
    if arguments.compare:
        return compare(arguments.compare)
    with session(arguments, measures=True) as ranks:
        clock = Clock(ranks, arguments.reps)
        with Communicator(ranks.group, ranks.device, Config.load(debug=False)) as communicator:
            us = plain(communicator, clock, ranks.device)
            us_fused = fused(communicator, clock, ranks.device)
            ranks.barrier()
        with Communicator(ranks.group, ranks.device, Config.load(debug=True)) as communicator:
            us_debug = plain(communicator, clock, ranks.device)
            ranks.barrier()
        if ranks.rank == 0:
            label = arguments.label or _waits(_core.bounded_waits)
            table = [("bytes", "us", "us with debug", "debug adds", "us fused")]
            for size, alone in us.items():
                in_one = f"{us_fused[size]:.3f}" if size in us_fused else ""
                table.append((size, f"{alone:.3f}", f"{us_debug[size]:.3f}", f"{us_debug[size] - alone:.3f}", in_one))
            figures = {
                "label": label,
                "bounded_waits": _core.bounded_waits,
                "us": us,
                "us_debug": us_debug,
                "us_fused": us_fused,
            }
            report(f"overhead, {label}", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 0


if __name__ == "__main__":
    run(main)
