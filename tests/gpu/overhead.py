"""What two safeguards cost: the bound of every wait, and the comparison of calls with LLM_COMM_DEBUG=1.

    torchrun --standalone --nproc-per-node 4 tests/gpu/overhead.py --json bounded.json

measures this build: `aligned` (llm_comm.bench.timing), microseconds a call in a graph, without and with debug. The
bound of the waits is compiled in, so its cost takes a second build, and runs of both in turn:

    pip install --no-build-isolation --no-deps --target /tmp/unbounded -C build-dir=/tmp/unbounded_build \\
        -C cmake.define.LLM_COMM_UNBOUNDED_WAITS=ON .
    PYTHONPATH=/tmp/unbounded torchrun --standalone --nproc-per-node 4 tests/gpu/overhead.py --json unbounded.json
    python tests/gpu/overhead.py --compare bounded*.json unbounded*.json
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch
from common import parser, report, run, session

from llm_comm import Communicator, Config, _core
from llm_comm.bench.timing import Schedule, time_eager, time_graph

SIZES = tuple(1024 << i for i in range(11))  # bytes: 1 KiB to 1 MiB
CALLS = 20
#: What bounded waits may cost at any size.
BAR_PERCENT = 1.0


def compare(files: list[Path]) -> int:
    """Prints the medians over the files of each kind, and what bounded waits cost. 1 if that is above the bar."""
    runs: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for file in files:
        figures = json.loads(file.read_text())["figures"]
        runs[figures["bounded_waits"]].append(figures["us"])
    if not all(runs.values()):
        raise SystemExit("--compare needs results of both builds: with bounded waits and without")
    print(f"{len(runs[True])} runs with bounded waits, {len(runs[False])} without: us a call, medians")
    costs = []
    for size in map(str, SIZES):
        with_bound, without = (statistics.median(one[size] for one in runs[kind]) for kind in (True, False))
        costs.append((with_bound / without - 1) * 100)
        print(f"{size:>8}  {with_bound:7.3f}  {without:7.3f}  {costs[-1]:+5.1f} %")
    is_met = max(costs) <= BAR_PERCENT
    print(f"at most {max(costs):+.1f} %: {'within' if is_met else 'ABOVE'} the bar of {BAR_PERCENT:g} %")
    return 0 if is_met else 1


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--reps", type=int, default=200, help="timed replays of each case")
    options.add_argument("--compare", type=Path, nargs="+", metavar="FILE", help="results to compare; runs nothing")
    arguments = options.parse_args()
    if arguments.compare:
        return compare(arguments.compare)
    with session(arguments) as ranks:
        us: dict[bool, dict[str, float]] = {False: {}, True: {}}
        for debug, us_of in us.items():
            with Communicator(ranks.group, ranks.device, Config.load(debug=debug)) as communicator:
                for size in SIZES:
                    x = torch.zeros(size // 2, dtype=torch.bfloat16, device=ranks.device)
                    out = torch.empty_like(x)
                    communicator.all_reduce(x, out)

                    def call(communicator: Communicator = communicator, x: Any = x, out: Any = out) -> None:
                        communicator.all_reduce(x, out)

                    schedule = Schedule(CALLS if ranks.on_gpu else 2, arguments.reps if ranks.on_gpu else 3, True)
                    if ranks.on_gpu:
                        timing = time_graph(call, lambda: None, schedule, ranks.control)
                    else:
                        timing = time_eager(call, lambda: None, schedule, ranks.device, ranks.control)
                    us_of[str(size)] = round(timing.us, 3)
                    ranks.watchdog.progress(f"{size} bytes, debug {debug}")
                ranks.barrier()
        if ranks.rank == 0:
            table = [("bytes", "us", "us with debug", "debug adds")]
            for size in map(str, SIZES):
                plain, checked = us[False][size], us[True][size]
                table.append((size, f"{plain:.3f}", f"{checked:.3f}", f"{checked - plain:.3f}"))
            figures = {"bounded_waits": _core.bounded_waits, "us": us[False], "us_debug": us[True]}
            name = f"overhead, {'bounded' if _core.bounded_waits else 'UNBOUNDED'} waits"
            report(name, ranks.device.type, ranks.world, table, figures, arguments.json)
    return 0


if __name__ == "__main__":
    run(main)
