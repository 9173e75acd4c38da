"""Random collectives over nodes, more of them than the tests make: emulated GPUs, gloo or UCX between the nodes.

    python tests/nodes_campaign.py --cases 500 --seed 7
    UCX_TLS=tcp python tests/nodes_campaign.py --transport ucx

Each layout of nodes_cases.py makes as many calls, each compared bitwise with what docs/operate/nodes.md promises.
"""

from __future__ import annotations

import argparse
import os
import time

from harness import RankPool
from nodes_cases import LAYOUTS, Layout, run_random_cases_over

from llm_comm.nodes import ucx

LIMIT_S = 3600.0
#: More ranks than the tests have.
LARGE = (Layout(2, 8), Layout(4, 4))


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--cases", type=int, default=500, help="of each layout; default: 500")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--most", type=int, default=30_000, metavar="ELEMENTS", help="of a tensor; default: 30000")
    options.add_argument("--transport", choices=("gloo", "ucx"), default="gloo", help="between nodes; default: gloo")
    options.add_argument(
        "--part-bytes", type=int, default=ucx.PART_BYTES, help="of UCX's kernel; small ones take several launches"
    )
    arguments = options.parse_args()
    os.environ["LLM_COMM_TABLE_DIR"] = os.devnull  # no tables of whoever runs it
    layouts = (*LAYOUTS, *LARGE)
    with RankPool(max(layout.world for layout in layouts)) as pool:
        for layout in layouts:
            begin = time.monotonic()
            of_call = arguments.seed, arguments.cases, arguments.most
            over = arguments.transport, arguments.part_bytes
            counts = pool.run(layout.world, run_random_cases_over, *over, layout, *of_call, time_limit_s=LIMIT_S)[0]
            said = ", ".join(f"{count} {name.lstrip('_')}" for name, count in sorted(counts.items()))
            print(f"{layout!s:16} {said}: all right, {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
