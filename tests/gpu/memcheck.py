"""Every kernel, on small messages, under compute-sanitizer: accesses out of bounds or misaligned.

    python tests/gpu/memcheck.py --world 2

Each rank is a process of its own under the tool; --tool picks another one. On emulated devices, which the tool does not
know, only the sums are checked.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from common import Ranks, Recording, Session, parser, report, run, session, wants_cuda
from values import DTYPES, Inputs, Sums, Values

from llm_comm import Communicator, Config
from llm_comm.planning.tables import ALL_REDUCE, FUSED, Row, TuningTable, by_operation

MIB = 1 << 20
ALGORITHMS = ("one_shot", "two_shot")
COUNTS = (1, 7, 513, 4096, 10018)
#: (blocks, tile lines, depth): a block for every tile, and blocks of many tiles.
GRIDS = ((4096, 16, 0), (2, 8, 1))
#: Rows and hidden size of what is normed.
SHAPES = ((1, 64), (3, 1032), (9, 4096))
GROUPS = ("group", "group_column_major_tma_ue8m0")
#: Elements with a scale of one byte.
BLOCKS = {"nvfp4": 16, "mxfp8": 32}
QUANTIZATIONS = (None, "static", "dynamic", *GROUPS, *BLOCKS)
#: (blocks, threads, cluster, depth): a cluster for every row, blocks of many tiles, and clusters of such.
FUSED_GRIDS = ((1056, 512, 8, 0), (2, 128, 1, 1), (8, 128, 4, 1))
#: Exit status of the tool where it has found something.
FOUND = 9
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PLAIN = Values("normal", 0, 1)


def check_kernels(ranks: Session, communicator: Communicator) -> int:
    """All algorithms, types, grids and alignments, eager and in a graph. Returns the number of calls."""
    inputs = Inputs(ranks.device, ranks.world)
    sums = Sums()
    calls = 0
    for algorithm, grid, dtype in itertools.product(ALGORITHMS, GRIDS, DTYPES):
        blocks, tile_lines, depth = grid
        tunables = {"blocks": blocks, "tile_lines": tile_lines, "depth": depth}
        row = Row(64 * MIB, ALL_REDUCE, algorithm, "LL", **tunables)
        communicator.use_table(TuningTable("memcheck", by_operation([row]), 64 * MIB))
        for count, offset in itertools.product(COUNTS, (0, 1)):
            rows = inputs.rows(PLAIN, count, dtype, seed=count)
            x = torch.empty(count + offset, dtype=dtype, device=ranks.device)[offset:].copy_(rows[ranks.rank])
            what = f"{algorithm} {grid} {dtype} {count}+{offset}"
            sums.expect(communicator.all_reduce(x), rows, what)
            calls += 1
        recording = Recording(lambda x=x: communicator.all_reduce(x), ranks.device)
        sums.expect(recording.replay(), rows, f"{what}, graph")
        sums.check()
        calls += 1
        ranks.watchdog.progress(what)
    return calls


def check_fused_kernels(ranks: Session, communicator: Communicator) -> int:
    """The same of the kernels that norm too. Checks the new residual, which is the sum; the norm is not looked at."""
    inputs = Inputs(ranks.device, ranks.world)
    sums = Sums()
    calls = 0
    scale = torch.ones(1, device=ranks.device)
    for algorithm, grid, dtype in itertools.product(ALGORITHMS, FUSED_GRIDS, (torch.bfloat16, torch.float16)):
        blocks, threads, cluster, depth = grid
        tunables = {"blocks": blocks, "threads": threads, "cluster": cluster, "depth": depth}
        row = Row(64 * MIB, FUSED, algorithm, "LL", **tunables)
        communicator.use_table(TuningTable("memcheck", by_operation([row]), 64 * MIB))
        for (rows, hidden), quantize in itertools.product(SHAPES, QUANTIZATIONS):
            if (quantize in GROUPS and hidden % 128 != 0) or hidden % BLOCKS.get(quantize or "", 1) != 0:
                continue
            values = inputs.rows(PLAIN, rows * hidden, dtype, seed=hidden)
            x = values[ranks.rank].reshape(rows, hidden).contiguous()
            weight = torch.ones(hidden, dtype=dtype, device=ranks.device)
            given = scale if quantize == "static" else None
            what = f"fused {algorithm} {grid} {dtype} {rows}x{hidden} {quantize}"
            results = communicator.all_reduce_add_rms_norm(
                *(x, None, weight, 1e-5),
                quantize=quantize,
                scale=given,
                global_scale=scale if quantize == "nvfp4" else None,
            )
            sums.expect(results[1].flatten(), values, what)
            calls += 1
        sums.check()
        ranks.watchdog.progress(what)
    return calls


def rank_main(arguments: argparse.Namespace) -> int:
    with session(arguments) as ranks:
        for debug in (False, True):
            config = Config.load(timeout_s=arguments.watchdog, workspace_bytes=8 * MIB, debug=debug)
            with Communicator(ranks.group, ranks.device, config) as communicator:
                calls = check_kernels(ranks, communicator) + check_fused_kernels(ranks, communicator)
                ranks.synchronize()
                communicator.check()
                ranks.barrier()
            print(f"{calls} calls right, debug {debug}", flush=True)
    return 0


# ---- The parent ----------------------------------------------------------------------------------------------------


def sanitizer_path() -> str | None:
    """The toolkit's directory is often not on the PATH."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def sanitizer(tool: str) -> list[str]:
    """The command in front of a rank's."""
    found = sanitizer_path()
    if found is None:
        raise SystemExit("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    # The driver's answers to what torch and this library ask it on purpose are no errors.
    options = ["--target-processes", "all", "--report-api-errors", "no", "--error-exitcode", str(FOUND)]
    return [found, "--tool", tool, *options]


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--world", type=int, default=2)
    options.add_argument("--tool", choices=TOOLS, default="memcheck")
    options.add_argument("--limit-s", type=float, default=300, help="for all ranks to end (%(default)s)")
    options.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.rank:
        return rank_main(arguments)

    on_gpu = wants_cuda(arguments.device)
    command = [sys.executable, __file__, "--rank", "--device", arguments.device]
    command += ["--watchdog", str(max(arguments.watchdog, 120))]
    if on_gpu:
        command = sanitizer(arguments.tool) + command
    with (
        tempfile.TemporaryDirectory() as temporary,
        Ranks(command, [{}] * arguments.world, Path(temporary)) as ranks,
    ):
        ranks.wait(arguments.limit_s)
        statuses = ranks.statuses
        outputs = [ranks.output(rank) for rank in range(arguments.world)]
    table = [("rank", "status", "summary")]
    figures = []
    failed = False
    for rank, (status, output) in enumerate(zip(statuses, outputs, strict=True)):
        summaries = re.findall(r"ERROR SUMMARY: .*|\d+ calls right.*", output)
        # A process that the tool has not got hold of would end well too.
        missing = [] if not on_gpu or "ERROR SUMMARY: 0 errors" in summaries else ["the tool's summary of 0 errors"]
        missing += ["calls with and without debug"] * (sum("calls right" in text for text in summaries) != 2)
        table.append((str(rank), str(status), "; ".join(summaries)))
        figures.append({"rank": rank, "status": status, "summaries": summaries})
        if status != 0 or missing:
            failed = True
            lacks = f", without {' and '.join(missing)}" * bool(missing)
            print(f"FAIL rank {rank}: status {status}{lacks}\n{output[-4000:]}", file=sys.stderr, flush=True)
    name = f"compute-sanitizer {arguments.tool}" if on_gpu else "memcheck without the tool"
    report(name, "cuda" if on_gpu else "cpu", arguments.world, table, figures, arguments.json)
    return 1 if failed else 0


if __name__ == "__main__":
    run(main)
