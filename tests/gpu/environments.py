"""All-reduces in the surroundings that users have: visible devices, allocators, groups, streams, CuPy, torch.compile.

    python tests/gpu/environments.py

Each case runs in processes of its own; several at once if they need different GPUs. Prints ok, FAIL or skipped a case.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from common import SHARE_GPU, Ranks, Recording, Session, gpus_or, parser, report, run, session
from values import DTYPES, Inputs, Values, expect_sum, rank_order_sum

from llm_comm import Communicator, Config
from llm_comm.runtime import connect

#: Exit status of a rank that cannot run its case here; its last line says why.
SKIPPED = 77
COUNTS = (0, 1, 513, 4096, 10018, 65536, 262145)
PLAIN = Values("normal", 0, 1)


# ---- What the ranks of a case do -------------------------------------------------------------------------------


def check_sums(ranks: Session, communicator: Communicator, counts: Sequence[int] = COUNTS) -> None:
    """Every dtype, in place, with `out` and without."""
    inputs = Inputs(ranks.device, communicator.world_size)
    for seed, count in enumerate(counts):
        for dtype in DTYPES:
            rows = inputs.rows(PLAIN, count, dtype, seed)
            x = rows[communicator.rank].clone()
            what = f"{count} {dtype}"
            expect_sum(communicator.all_reduce(x), rows, f"{what}, new")
            expect_sum(communicator.all_reduce(x, torch.empty_like(x)), rows, f"{what}, out")
            expect_sum(communicator.all_reduce(x, x), rows, f"{what}, in place")
    communicator.check()


def plain(ranks: Session) -> None:
    with Communicator(ranks.group, ranks.device, Config.load()) as communicator:
        check_sums(ranks, communicator)
        ranks.barrier()


def expandable_segments(ranks: Session) -> None:
    """A graph whose tensors lie in such segments."""
    with Communicator(ranks.group, ranks.device, Config.load()) as communicator:
        inputs = Inputs(ranks.device, ranks.world)
        sizes = [(count, dtype) for count in (1, 4096, 65536, 262145) for dtype in DTYPES]
        buffers = [torch.empty(count, dtype=dtype, device=ranks.device) for count, dtype in sizes]
        recording = Recording(lambda: [communicator.all_reduce(x) for x in buffers], ranks.device)
        for replay in range(5):
            all_rows = [inputs.rows(PLAIN, count, dtype, replay) for count, dtype in sizes]
            for x, rows in zip(buffers, all_rows, strict=True):
                x.copy_(rows[ranks.rank])
            for got, rows in zip(recording.replay(), all_rows, strict=True):
                expect_sum(got, rows, f"replay {replay} of {got.numel()} {got.dtype}")
            check_sums(ranks, communicator, (1000,))
        if ranks.on_gpu and not any(s.get("is_expandable", True) for s in torch.cuda.memory_snapshot()):
            raise AssertionError("torch allocated no expandable segments: the variable has no effect")
        ranks.barrier()


def cuda_ipc(ranks: Session) -> None:
    """As on a machine that does not permit virtual memory management."""

    with (
        mock.patch.object(connect, "ways_to_share", return_value=("VMM fabric", "cudaIpc")),
        Communicator(ranks.group, ranks.device, Config.load()) as communicator,
    ):
        if communicator.memory_kind != "cudaIpc":
            raise AssertionError(f"the communicator uses {communicator.memory_kind}")
        check_sums(ranks, communicator)
        ranks.barrier()


def two_streams(ranks: Session) -> None:
    """Eager calls on two streams in turn: each waits for the call before."""
    with Communicator(ranks.group, ranks.device, Config.load()) as communicator:
        inputs = Inputs(ranks.device, ranks.world)
        streams = [torch.cuda.Stream() for _ in range(2)]
        calls = []
        ranks.synchronize()  # the tables of `inputs` were made on another stream
        for i in range(200):
            with torch.cuda.stream(streams[i % 2]):
                rows = inputs.rows(PLAIN, COUNTS[1 + i % (len(COUNTS) - 1)], DTYPES[i % len(DTYPES)], seed=i)
                calls.append((communicator.all_reduce(rows[ranks.rank].clone()), rows))
        ranks.synchronize()
        for i, (got, rows) in enumerate(calls):
            expect_sum(got, rows, f"call {i}")
        communicator.check()
        ranks.barrier()


def tensor_parallel_groups(ranks: Session) -> None:
    """Two groups at once, neither of which is WORLD, beside a communicator of all ranks."""
    halves = [dist.new_group(list(range(first, ranks.world, 2)), backend="gloo") for first in range(2)]
    own = halves[ranks.rank % 2]
    with (
        Communicator(own, ranks.device, Config.load()) as part,
        Communicator(ranks.group, ranks.device, Config.load()) as whole,
    ):
        for _ in range(3 + ranks.rank % 2 * 4):  # not as often in one group as in the other
            check_sums(ranks, part, (513, 65536))
        check_sums(ranks, whole, (513, 65536))
        check_sums(ranks, part, (10018,))
        ranks.barrier()


def cupy_arrays(ranks: Session) -> None:
    try:
        import cupy
    except ImportError:
        skip("cupy is not installed")
    # CuPy enqueues on its own current stream; torch's is not the default one here.
    with (
        cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream),
        Communicator(ranks.group, ranks.device, Config.load()) as communicator,
    ):
        inputs = Inputs(ranks.device, ranks.world)
        for count in (1, 1000, 65536):
            for dtype in (torch.float16, torch.float32):
                rows = inputs.rows(PLAIN, count, dtype, seed=count)
                x = cupy.from_dlpack(rows[ranks.rank].clone())
                out = cupy.empty_like(x)
                results = {"new": communicator.all_reduce(x), "out": communicator.all_reduce(x, out)}
                if not all(isinstance(result, cupy.ndarray) for result in results.values()):
                    raise AssertionError(f"not CuPy arrays: {results}")
                for how, result in results.items():
                    expect_sum(torch.from_dlpack(result), rows, f"{count} {dtype}, {how}")
                if results["out"] is not out:
                    raise AssertionError("the result is not out itself")
        ranks.barrier()


class Block(torch.nn.Module):
    """Element by element, so that compiled and eager results have the same bits."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        super().__init__()
        self.communicator = communicator
        self.register_buffer("shift", torch.full((64,), 0.5, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once: torch.Tensor = self.communicator.all_reduce(x * 2 + self.shift)
        twice: torch.Tensor = self.communicator.all_reduce(once * 0.25)
        return twice - 1


def compiled(ranks: Session) -> None:
    """torch.compile(fullgraph=True) with Inductor, in CUDA graphs where there is CUDA."""
    from torch._dynamo.utils import counters

    # Ranks may end compiling at different times: within the time limit.
    with Communicator(ranks.group, ranks.device, Config.load(timeout_s=90)) as communicator:
        inputs = Inputs(ranks.device, ranks.world)
        block = Block(communicator, ranks.device)
        fast = torch.compile(block, fullgraph=True, mode="reduce-overhead")
        with torch.inference_mode():
            for i in range(8):
                rows = inputs.rows(PLAIN, 32 * 64, torch.float32, seed=i)
                torch.compiler.cudagraph_mark_step_begin()
                got = fast(rows[ranks.rank].reshape(32, 64).clone())
                pattern = block.shift.repeat(32)
                once = rank_order_sum(rows * 2 + pattern)
                expected = rank_order_sum((once * 0.25).expand(ranks.world, -1)) - 1
                if not torch.equal(got.flatten(), expected):
                    wrong = (got.flatten() != expected).sum().item()
                    raise AssertionError(f"call {i}: {wrong} of {expected.numel()} elements are wrong")
                ranks.watchdog.progress(f"compiled call {i}")
        skips = counters["inductor"]["cudagraph_skips"]
        if ranks.on_gpu and skips:
            raise AssertionError(f"Inductor did not use CUDA graphs: {skips} skips")
        ranks.barrier()


def skip(why: str) -> NoReturn:
    """Ends this rank; all ranks of the case must come here."""
    print(why, flush=True)
    os._exit(SKIPPED)


# ---- The cases -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """``body`` on ``world`` ranks.

    Attributes:
        world: ranks, given the number of GPUs; the case is skipped if there are fewer GPUs or it is below 2.
        needs_gpus: skipped on emulated devices.
        shares_gpu: whether it also runs where ranks share a GPU.
        own_gpu_only: every rank sees its own GPU alone, as device 0.
        reversed_gpus: the highest GPU comes first.
        backend: of the group that the communicator is made from.
    """

    body: Callable[[Session], None]
    world: Callable[[int], int]
    needs_gpus: bool = True
    shares_gpu: bool = True
    own_gpu_only: bool = False
    reversed_gpus: bool = False
    backend: str = "gloo"
    variables: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 70


def _all(gpus: int) -> int:
    return gpus


def _half(gpus: int) -> int:
    return gpus // 2


def _exactly(world: int) -> Callable[[int], int]:
    return lambda gpus: world


# In the order in which they get GPUs: so that the long ones start early and pairs fill 8 GPUs.
CASES = {
    "own GPU only": Case(plain, _all, own_gpu_only=True, shares_gpu=False),
    "torch.compile": Case(compiled, _exactly(2), needs_gpus=False, timeout_s=110),
    "6 ranks": Case(plain, _exactly(6), needs_gpus=False),
    "5 ranks": Case(plain, _exactly(5), needs_gpus=False),
    "3 ranks": Case(plain, _exactly(3), needs_gpus=False),
    "subset of the GPUs": Case(plain, _half, shares_gpu=False),
    "subset, reversed": Case(plain, _half, reversed_gpus=True, shares_gpu=False),
    "cudaIpc": Case(cuda_ipc, _half),
    "NCCL group": Case(plain, _half, backend="nccl", shares_gpu=False),  # NCCL takes no two ranks on a GPU
    "groups beside WORLD": Case(tensor_parallel_groups, _exactly(4), needs_gpus=False),
    "expandable segments": Case(
        expandable_segments,
        _exactly(2),
        needs_gpus=False,
        variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    "two streams": Case(two_streams, _exactly(2)),
    "CuPy arrays": Case(cupy_arrays, _exactly(2)),
    "7 ranks": Case(plain, _exactly(7), needs_gpus=False),
}


# ---- The parent ------------------------------------------------------------------------------------------------


@dataclass
class Running:
    name: str
    gpus: list[int]
    directory: tempfile.TemporaryDirectory[str]
    ranks: Ranks
    begin: float


@dataclass(frozen=True)
class Outcome:
    verdict: str  # ok, FAIL, skipped
    reason: str = ""
    gpus: str = ""
    seconds: float = 0.0


class Parent:
    """Starts cases as GPUs become free. On emulated devices a number stands for each.

    Args:
        gpus: numbers; where there are fewer GPUs, several stand for the same one.
    """

    def __init__(self, gpus: int, on_gpu: bool, arguments: argparse.Namespace) -> None:
        self._gpus = gpus
        self._on_gpu = on_gpu
        self._device = arguments.device
        # Numbers are those that this process sees, which may itself be confined to some GPUs.
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") if on_gpu else None
        found = torch.cuda.device_count() if on_gpu else gpus
        names = (seen or ",".join(map(str, range(found)))).split(",")
        self._names = [names[gpu % found] for gpu in range(gpus)]
        self._shares_gpu = found < gpus
        self._patience = 2.0 if self._shares_gpu else 1.0
        self._free = set(range(gpus))
        self.outcomes: dict[str, Outcome] = {}

    def run(self, names: Sequence[str]) -> None:
        waiting = [name for name in names if not self._is_skipped(name)]
        running: list[Running] = []
        try:
            while waiting or running:
                for name in [name for name in waiting if CASES[name].world(self._gpus) <= len(self._free)]:
                    # The free ones change as cases start.
                    if CASES[name].world(self._gpus) <= len(self._free):
                        waiting.remove(name)
                        running.append(self._start(name))
                time.sleep(0.05)
                running = [case for case in running if not self._has_ended(case)]
        finally:
            for case in running:
                case.ranks.kill()
                case.directory.cleanup()

    def _is_skipped(self, name: str) -> bool:
        case, world = CASES[name], CASES[name].world(self._gpus)
        if case.needs_gpus and not self._on_gpu:
            self._end(name, Outcome("skipped", "needs GPUs"))
        elif self._shares_gpu and not case.shares_gpu:
            self._end(name, Outcome("skipped", "needs a GPU for each rank"))
        elif not 2 <= world <= self._gpus:
            self._end(name, Outcome("skipped", f"too few GPUs: {self._gpus}"))
        return name in self.outcomes

    def _start(self, name: str) -> Running:
        case = CASES[name]
        # From the top, so that a case for few GPUs does not have GPU 0 if it can be avoided.
        gpus = sorted(self._free)[-case.world(self._gpus) :]
        self._free -= set(gpus)
        if case.reversed_gpus:
            gpus.reverse()
        names = [self._names[gpu] for gpu in gpus]
        visible = ",".join(dict.fromkeys(names))
        variables = {**case.variables, **({SHARE_GPU: "1"} if self._shares_gpu else {})}
        environments = [{**variables, "CUDA_VISIBLE_DEVICES": own if case.own_gpu_only else visible} for own in names]
        directory = tempfile.TemporaryDirectory()
        command = [sys.executable, __file__, "--case", name, "--device", self._device]
        command += ["--watchdog", str(case.timeout_s * self._patience - 10)]  # so that a rank that hangs says where
        ranks = Ranks(command, environments, Path(directory.name))
        return Running(name, gpus, directory, ranks, time.monotonic())

    def _has_ended(self, running: Running) -> bool:
        statuses = running.ranks.statuses
        seconds = time.monotonic() - running.begin
        failed = [rank for rank, status in enumerate(statuses) if status not in (None, 0, SKIPPED)]
        timed_out = None in statuses and seconds > CASES[running.name].timeout_s * self._patience
        if None in statuses and not failed and not timed_out:
            return False
        running.ranks.kill()
        if failed or timed_out:
            speaker = failed[0] if failed else statuses.index(None)
            how = f"rank {speaker} " + (f"ended with {statuses[speaker]}" if failed else "timed out")
            print(f"---- {running.name}: {how}\n{running.ranks.output(speaker)[-4000:]}", file=sys.stderr)
            outcome = Outcome("FAIL", f"{how}: {_last_line(running.ranks.output(speaker))}")
        elif SKIPPED in statuses:
            outcome = Outcome("skipped", _last_line(running.ranks.output(statuses.index(SKIPPED))))
        else:
            outcome = Outcome("ok")
        running.directory.cleanup()
        self._free |= set(running.gpus)
        gpus = ",".join(map(str, running.gpus)) if self._on_gpu else f"{len(running.gpus)} emulated"
        self._end(running.name, Outcome(outcome.verdict, outcome.reason, gpus, round(seconds, 1)))
        return True

    def _end(self, name: str, outcome: Outcome) -> None:
        self.outcomes[name] = outcome
        print(f"{name}: {outcome.verdict} {outcome.reason}".rstrip(), flush=True)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else "printed nothing"


def rank_main(arguments: argparse.Namespace) -> int:
    case = CASES[arguments.case]
    index = 0 if case.own_gpu_only else None
    if case.own_gpu_only and torch.cuda.device_count() != 1:
        raise AssertionError(f"this rank sees {torch.cuda.device_count()} GPUs")
    with session(arguments, case.backend, index) as ranks:
        case.body(ranks)
    return 0


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument(
        "--gpus", type=int, help="use so many; default: all, up to 8; 8 ranks share the only one; 8 emulated ones"
    )
    options.add_argument("--only", choices=tuple(CASES), action="append", help="run this case; may be repeated")
    options.add_argument("--case", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.case is not None:
        return rank_main(arguments)

    on_gpu, default_gpus = gpus_or(arguments.device, emulated=8)
    gpus = arguments.gpus or default_gpus
    begin = time.monotonic()
    parent = Parent(gpus, on_gpu, arguments)
    parent.run(arguments.only or list(CASES))
    seconds = round(time.monotonic() - begin, 1)

    table = [("case", "verdict", "seconds", "GPUs", "reason")]
    for name, outcome in sorted(parent.outcomes.items(), key=lambda item: list(CASES).index(item[0])):
        table.append((name, outcome.verdict, f"{outcome.seconds:.1f}", outcome.gpus, outcome.reason))
    table.append(("all", "", f"{seconds:.1f}", "", ""))
    figures = {"seconds": seconds, "cases": {name: vars(o) for name, o in parent.outcomes.items()}}
    report("environments", "cuda" if on_gpu else "cpu", gpus, table, figures, arguments.json)
    return 1 if any(outcome.verdict == "FAIL" for outcome in parent.outcomes.values()) else 0


if __name__ == "__main__":
    run(main)
