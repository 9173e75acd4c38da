"""What the GPU programs share: ranks under a watchdog, CUDA graphs, and the report at the end.

Every program runs on GPUs, where there are fewer of them than ranks on shared ones, and where there is none, with fewer
cases, on emulated ones.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import torch
import torch.distributed as dist

import llm_comm
from llm_comm import Config
from llm_comm.cli import launch

T = TypeVar("T")

#: Exit status of a rank that its watchdog ended.
HUNG = 3
#: Set for ranks that were started by `Ranks`: they meet through a file, which no port and no dying rank can spoil.
_MEETING_POINT = "LLM_COMM_TEST_MEETING_POINT"
#: Set for ranks that share a GPU.
SHARE_GPU = "LLM_COMM_SHARE_GPU"


# ---- Command line ----------------------------------------------------------------------------------------------


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all programs have."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--device", choices=("auto", "cuda", "emulated"), default="auto")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file too")
    options.add_argument(
        "--watchdog", type=float, default=60, metavar="S", help="end a rank that makes no progress for so long"
    )
    return options


def add_seconds(options: argparse.ArgumentParser) -> None:
    """For programs that can stop early (`Session.is_late`)."""
    options.add_argument(
        "--seconds", type=float, metavar="S", help="stop after so many, and report what has been done; default: never"
    )


def wants_cuda(device: str) -> bool:
    """Whether ``--device`` means GPUs: where there is one at all. Creates no CUDA context."""
    gpus, why_none = launch.usable_gpus()
    if device == "cuda" and gpus == 0:
        raise SystemExit(f"--device cuda: {why_none}")
    return device != "emulated" and gpus > 0


def gpus_or(device: str, emulated: int) -> tuple[bool, int]:
    """Whether ``--device`` means GPUs, and the ranks that a program starts by default: one a GPU, up to 8, but 8 that
    share the only GPU; ``emulated`` ones without GPUs."""
    if not wants_cuda(device):
        return False, emulated
    gpus = torch.cuda.device_count()
    return True, min(8, gpus) if gpus > 1 else 8


# ---- One rank --------------------------------------------------------------------------------------------------


class Watchdog:
    """Ends this process when it makes no progress for ``limit_s``, with a message and every thread's stack."""

    def __init__(self, rank: int, limit_s: float) -> None:
        self._rank = rank
        self._limit_s = limit_s
        self.progress("started")
        threading.Thread(target=self._watch, daemon=True).start()

    def progress(self, what: str) -> None:
        self._last = (time.monotonic(), what)

    def _watch(self) -> None:
        while True:
            # This thread needs the interpreter, which whoever hangs may hold; faulthandler's own thread does not.
            faulthandler.dump_traceback_later(self._limit_s, exit=True)
            time.sleep(1)
            since, what = self._last
            if time.monotonic() - since > self._limit_s:
                faulthandler.dump_traceback()
                message = f"rank {self._rank}: no progress for {self._limit_s:g} s; last: {what}"
                print(message, file=sys.stderr, flush=True)
                os._exit(HUNG)


@dataclass(frozen=True)
class Session:
    """One rank of a running program. ``control`` is a gloo group for what the ranks tell each other."""

    rank: int
    world: int
    device: torch.device
    group: dist.ProcessGroup
    control: dist.ProcessGroup
    watchdog: Watchdog
    #: Ranks take turns on a GPU: an operation takes milliseconds, and fewer of them have to do.
    shares_gpu: bool
    begin: float = field(default_factory=time.monotonic)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def say(self, line: str) -> None:
        """Prints on rank 0 only."""
        if self.rank == 0:
            print(line, flush=True)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """[world, ...] from every rank's CPU tensor, all of one shape. Waits for all ranks, not for the GPU."""
        everyone = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(everyone, values.contiguous(), group=self.control)
        return torch.stack(everyone)

    def barrier(self) -> None:
        self.gather(torch.zeros(1))

    def is_late(self, options: argparse.Namespace) -> bool:
        """Whether ``--seconds`` have passed: the same on all ranks, which it waits for."""
        if options.seconds is None:
            return False
        is_late = time.monotonic() - self.begin > options.seconds
        return bool(self.gather(torch.tensor([is_late])).any())

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def end_with_launcher() -> None:
    """From now on this rank does not outlive its launcher, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def session(
    options: argparse.Namespace, backend: str = "gloo", device_index: int | None = None, measures: bool = False
) -> Iterator[Session]:
    """Opens the process group of this rank, which torchrun or `Ranks` has started, on a CUDA stream of its own.

    Args:
        options: of `parser`.
        backend: of the default group.
        device_index: GPU of this rank; None takes its local rank, and shares one where there are fewer GPUs than ranks.
        measures: the program measures time, which says nothing where ranks share a GPU.
    """
    end_with_launcher()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # containers often cannot resolve their own name
    if "RANK" not in os.environ:
        raise SystemExit(f"start it as ranks: torchrun --standalone --nproc-per-node N {sys.argv[0]} ...")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    watchdog = Watchdog(rank, options.watchdog)
    if wants_cuda(options.device):
        gpus = torch.cuda.device_count()
        if device_index is None:
            device_index = int(os.environ["LOCAL_RANK"]) % gpus
            if gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
                os.environ[SHARE_GPU] = "1"
        if measures and Config.load().share_gpu:
            raise SystemExit(f"{Path(sys.argv[0]).name} measures time: each rank needs a GPU of its own; found {gpus}")
        device = torch.device("cuda", device_index)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=os.environ.get(_MEETING_POINT, "env://"),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=options.watchdog),
    )
    default = dist.group.WORLD
    assert default is not None
    control = default if backend == "gloo" else dist.new_group(backend="gloo")
    stream = torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext()
    with stream:
        shares_gpu = device.type == "cuda" and Config.load().share_gpu
        yield Session(rank, world, device, default, control, watchdog, shares_gpu)
    # Not after an error: the peers may never come.
    dist.destroy_process_group()


def run(main: Callable[[], int]) -> None:
    """Ends the process with the status of ``main``; after an error at once, whatever the GPU still waits for."""
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    # The last references to groups: their threads end with them. One that drops a tensor of Python's while the
    # interpreter ends would abort the process.
    gc.collect()
    sys.exit(status)


# ---- Graphs ----------------------------------------------------------------------------------------------------


class Recording(Generic[T]):
    """Calls that can be replayed: a CUDA graph, or on emulated devices the calls themselves, made again.

    Args:
        calls: what to record; returns what `replay` is to return.
        pool: of `GraphPool.handle`.
    """

    def __init__(self, calls: Callable[[], T], device: torch.device, pool: Any = None) -> None:
        self._calls = calls
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            return
        # Not torch.cuda.graph(), which collects garbage and empties the allocator's cache at every capture.
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self._results = calls()
        finally:
            self._graph.capture_end()

    def replay(self) -> T:
        """Enqueues the calls again. The results of a graph lie where those of the last replay did."""
        if self._graph is None:
            return self._calls()
        self._graph.replay()
        return self._results


class GraphPool:
    """Memory for the graphs of a program: many short-lived graphs with a pool each would never give theirs back."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        # A pool ends with its last graph and its handle with it.
        kept = torch.zeros(1, device=device)
        self._keeper = Recording(kept.zero_, device, self.handle)


# ---- Ranks as processes ----------------------------------------------------------------------------------------


class Ranks:
    """Processes that are the ranks of one group. Unlike torchrun's, they outlive a dead peer, and can differ.

    None outlives a ``with`` block. Start them from the main thread: they end with the thread that started them.

    Args:
        command: of every rank.
        environments: by rank, variables to set.
        directory: for the outputs; must exist and belong to these ranks alone.
    """

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._files: list[IO[bytes]] = []
        world = len(environments)
        try:
            for rank, extra in enumerate(environments):
                environment = {
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    _MEETING_POINT: f"file://{directory / 'meeting_point'}",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(world),
                    **extra,
                }
                output = (directory / f"output.{rank}").open("wb")
                self._files.append(output)
                self._processes.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
                )
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def statuses(self) -> list[int | None]:
        """Exit status by rank: None while it runs, -n where signal n ended it."""
        return [process.poll() for process in self._processes]

    def wait(self, timeout_s: float) -> bool:
        """Whether all ranks ended within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while None in self.statuses:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for file in self._files:
            file.close()

    def output(self, rank: int) -> str:
        """What the rank printed, to stdout and stderr."""
        return (self._directory / f"output.{rank}").read_text(errors="replace")


# ---- Report ----------------------------------------------------------------------------------------------------


def expect(holds: bool, what: str) -> None:
    """AssertionError that says what is not so, unless it holds."""
    if not holds:
        raise AssertionError(what)


def error_of(kind: type[BaseException], call: Callable[[], object]) -> str:
    """The text of the error of this kind that the call raises; AssertionError if it raises none."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def report(
    program: str, device: str, world: int, table: Sequence[Sequence[str]], figures: Any, json_file: Path | None
) -> None:
    """Prints ``table`` (its first row is the head) under a line that says what ran where; writes the JSON file.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        figures: what goes into the JSON file beside the description of the environment.
    """
    facts = environment(device, world)
    print(
        f"\n{program}: {world} x {facts['device']}, driver {facts['driver']}, CUDA {facts['cuda']}, "
        f"torch {facts['torch']}, llm_comm {facts['llm_comm']} ({facts['commit']}), {facts['date']}"
    )
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    sys.stdout.flush()
    if json_file is not None:
        content = {"program": program, **facts, "figures": figures}
        json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def environment(device: str, world: int) -> dict[str, Any]:
    """Where and with what this runs. Creates no CUDA context."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    name, _, driver = _first_line_of(query).partition(", ") if device == "cuda" else ("", "", "")
    here = Path(__file__).parent
    commit = _first_line_of(["git", "-C", str(here), "rev-parse", "--short", "HEAD"])
    changed = commit and _first_line_of(["git", "-C", str(here), "status", "--porcelain"])
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": (name or "unknown GPU") if device == "cuda" else f"emulated GPU on {platform.machine()}",
        "world": world,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "driver": driver or "none",
        "llm_comm": llm_comm.__version__,
        "commit": (commit or "no commit") + (" with changes" if changed else ""),
    }


def _first_line_of(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0].strip()
