"""Two communicators of the same ranks on two streams, in another order on each rank, as TP and EP overlap: both go on.

    torchrun --standalone --nproc-per-node 2 tests/gpu/overlap.py
    python tests/gpu/overlap.py --mps --world 8

Every rank replays a graph of ``CALLS`` all-reduces of one communicator, and a little later one of the other; odd ranks
begin with the other one. So the first graph of each rank waits for a graph that comes later on its peers. If more than
the next grid of a graph came to the device ahead of its turn, they would leave the second graph no room, and all waits
would expire (docs/experiments/progress.md).

With ``--mps`` this program starts the daemon of CUDA MPS and the ranks, and ends both. Kernels of ranks that share a
GPU run at once then, where they would take turns without: they need room beside each other, too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from common import SHARE_GPU, Ranks, Recording, Session, parser, report, run, session, wants_cuda
from values import Inputs, Sums, Values

from llm_comm import Communicator, Config

CALLS = 40
REPLAYS = 10
#: Elements of bf16: the larger, the fewer grids fill the device.
COUNTS = (512, 8192, 131_072)
#: Under MPS, where all ranks' grids of both communicators, and the next ones, need room beside each other.
COUNTS_UNDER_MPS = (512, 2048)
#: Long enough for all grids to come that may come.
HEAD_START_S = 0.02
TIMEOUT_S = 10.0
LIMIT_S = 120.0
PLAIN = Values("normal", 0, 1)


def mps_control_path() -> str | None:
    return shutil.which("nvidia-cuda-mps-control")


class Lane:
    """A communicator, a stream, and a graph of calls on both."""

    def __init__(self, ranks: Session, count: int, seed: int) -> None:
        self.communicator = Communicator(ranks.group, ranks.device, Config.load(timeout_s=TIMEOUT_S, log="error"))
        self._rows = Inputs(ranks.device, ranks.world).rows(PLAIN, count, torch.bfloat16, seed)
        self._x = self._rows[ranks.rank].clone()
        self._outputs = [torch.empty_like(self._x) for _ in range(CALLS)]
        self.stream = torch.cuda.Stream() if ranks.on_gpu else None
        with self.on_stream():
            self._recording = Recording(self._calls, ranks.device)

    def on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _calls(self) -> None:
        for out in self._outputs:
            self.communicator.all_reduce(self._x, out)

    def replay(self) -> None:
        with self.on_stream():
            self._recording.replay()

    def check(self, sums: Sums) -> None:
        self.communicator.check()
        for call, out in enumerate(self._outputs):
            sums.expect(out, self._rows, f"call {call} of {out.numel()} elements")
            out.fill_(-1)


def overlap(ranks: Session, count: int) -> int:
    """Replays of both graphs, in opposite orders. Returns the number of sums."""
    lanes = [Lane(ranks, count, seed) for seed in range(2)]
    # On emulated devices calls are synchronous: there the order must be the same.
    order = lanes[::-1] if ranks.on_gpu and ranks.rank % 2 else lanes
    sums = Sums()
    for _ in range(REPLAYS if ranks.on_gpu else 1):
        ranks.synchronize()
        ranks.barrier()
        for lane in order:
            lane.replay()
            time.sleep(HEAD_START_S)
        ranks.synchronize()
        for lane in lanes:
            lane.check(sums)
        sums.check()
        ranks.watchdog.progress(f"{count} elements")
    ranks.barrier()
    for lane in lanes:
        lane.communicator.close()
    return (REPLAYS if ranks.on_gpu else 1) * 2 * CALLS


def rank_main(arguments: argparse.Namespace) -> int:
    with session(arguments) as ranks:
        counts = COUNTS_UNDER_MPS if arguments.mps else COUNTS
        figures = {str(count): overlap(ranks, count) for count in counts}
        if ranks.rank == 0:
            table = [("elements", "right sums"), *((count, str(sums)) for count, sums in figures.items())]
            report("overlap", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 0


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """The daemon of CUDA MPS, of its own; yields the variables of processes that are to use it."""
    control = mps_control_path()
    if control is None:
        raise SystemExit("--mps: there is no nvidia-cuda-mps-control in PATH")
    with tempfile.TemporaryDirectory() as directory:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{directory}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{directory}/log"}
        for place in places.values():
            Path(place).mkdir()
        environment = {**os.environ, **places}
        subprocess.run([control, "-d"], env=environment, check=True, timeout=30)
        try:
            yield places
        finally:
            subprocess.run([control], input=b"quit\n", env=environment, check=False, timeout=60)


def main_with_mps(arguments: argparse.Namespace) -> int:
    """Starts the ranks under MPS: all on one GPU."""
    command = [sys.executable, "-u", __file__, "--mps", "--device", "cuda", "--watchdog", str(arguments.watchdog)]
    command += ["--json", str(arguments.json.absolute())] if arguments.json else []
    with mps() as places, tempfile.TemporaryDirectory() as directory:
        variables = {**places, "CUDA_VISIBLE_DEVICES": "0", SHARE_GPU: "1"}
        with Ranks(command, [variables] * arguments.world, Path(directory)) as ranks:
            ranks.wait(LIMIT_S)
            statuses = ranks.statuses
            for rank in range(arguments.world):
                if rank == 0 or statuses[rank] != 0:
                    print(ranks.output(rank)[-3000:], flush=True)
    if any(status != 0 for status in statuses):
        print(f"FAIL under MPS: statuses {statuses}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--mps", action="store_true", help="start the ranks under CUDA MPS, all on the first GPU")
    options.add_argument("--world", type=int, default=8, help="ranks, with --mps (%(default)s)")
    arguments = options.parse_args()
    if not arguments.mps or "RANK" in os.environ:
        return rank_main(arguments)
    if not wants_cuda(arguments.device):
        raise SystemExit("--mps needs a GPU")
    return main_with_mps(arguments)


if __name__ == "__main__":
    run(main)
