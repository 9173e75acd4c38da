"""CUDA graphs that outlive their communicator: a replay does nothing, and says so by ``check()``, not by a CUDA error.

    python tests/gpu/graph_outlives.py

Each case runs on two ranks of its own, which share a GPU where there is only one: a graph with all-reduces is captured
and replayed, its communicator is closed or dropped, and the graph is replayed again. After that

- the replay has ended without a CUDA error, and the context can be used: new communicators give right sums;
- the replay has sent nothing and waited for nobody: it ends at once, also on a rank that replays alone;
- a communicator that was dropped or closed after a capture has failed, and `check()` says why.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Ranks, Session, parser, report, run, session, wants_cuda
from values import DTYPES, Inputs, Sums, Values

from llm_comm import Communicator, CommunicatorError, Config

WORLD = 2
COUNTS = (1, 4096, 10018, 262_145)
PLAIN = Values("normal", 0, 1)
#: Of waits. A replay that waited for a peer would take as long.
TIMEOUT_S = 10.0
AT_ONCE_S = TIMEOUT_S / 4
LIMIT_S = 120.0


class Captured:
    """A graph of one all-reduce of each count and type, and what it gives while its communicator lives."""

    def __init__(self, ranks: Session, communicator: Communicator) -> None:
        self._ranks = ranks
        inputs = Inputs(ranks.device, ranks.world)
        shapes = [(count, dtype) for count in COUNTS for dtype in DTYPES]
        self._rows = [inputs.rows(PLAIN, count, dtype, seed) for seed, (count, dtype) in enumerate(shapes)]
        self._x = [rows[ranks.rank].clone() for rows in self._rows]
        self.outputs = [torch.empty_like(x) for x in self._x]
        self.graph = torch.cuda.CUDAGraph()
        self._reduce(communicator)  # not in a capture
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self._reduce(communicator)

    def _reduce(self, communicator: Communicator) -> None:
        for x, out in zip(self._x, self.outputs, strict=True):
            communicator.all_reduce(x, out)

    def replay_rightly(self) -> None:
        """A replay with a living communicator, and a look at its sums."""
        for out in self.outputs:
            out.fill_(-1)
        self.graph.replay()
        self.expect_sums("replayed")

    def expect_sums(self, how: str) -> None:
        sums = Sums()
        for rows, out in zip(self._rows, self.outputs, strict=True):
            sums.expect(out, rows, f"{how}, {out.numel()} {out.dtype}")
        sums.check()

    def replay_in_vain(self) -> None:
        """A replay without a communicator: it ends at once, without a CUDA error."""
        begin = time.monotonic()
        for _ in range(3):
            self.graph.replay()
        torch.cuda.synchronize()
        seconds = time.monotonic() - begin
        if seconds > AT_ONCE_S:
            raise AssertionError(f"replays without a communicator took {seconds:.1f} s: something waited")


def make(ranks: Session) -> Communicator:
    return Communicator(ranks.group, ranks.device, Config.load(timeout_s=TIMEOUT_S))


def expect_failure(communicator: Communicator) -> str:
    """What `check()` says of a communicator that a graph has outlived."""
    try:
        communicator.check()
    except (CommunicatorError, RuntimeError) as error:
        text = str(error)
        if not any(word in text for word in ("graph", "captur")):
            raise AssertionError(f"check() does not name the graph: {error!r}") from error
        return text
    raise AssertionError("check() of a communicator whose graph was replayed after close() raises nothing")


def go_on(ranks: Session) -> None:
    """The context still works: a new communicator, a graph of it, right sums."""
    ranks.barrier()
    with make(ranks) as communicator:
        Captured(ranks, communicator).replay_rightly()
        communicator.check()
        ranks.barrier()


# ---- The cases -----------------------------------------------------------------------------------------------------


def closed(ranks: Session) -> str:
    communicator = make(ranks)
    captured = Captured(ranks, communicator)
    captured.replay_rightly()
    ranks.barrier()
    communicator.close()
    captured.replay_in_vain()
    text = expect_failure(communicator)
    go_on(ranks)
    return text


def closed_replayed_by_one(ranks: Session) -> str:
    """Rank 0 replays alone: nothing of it may reach rank 1, which makes a new communicator meanwhile."""
    communicator = make(ranks)
    captured = Captured(ranks, communicator)
    captured.replay_rightly()
    ranks.barrier()
    communicator.close()
    if ranks.rank == 0:
        captured.replay_in_vain()
        expect_failure(communicator)
    go_on(ranks)
    return ""


def replayed_while_the_other_has_closed(ranks: Session) -> str:
    """Rank 1 closes; rank 0, which has not, replays. It may fail or time out, but without a CUDA error."""
    communicator = make(ranks)
    captured = Captured(ranks, communicator)
    captured.replay_rightly()
    ranks.barrier()
    if ranks.rank == 1:
        communicator.close()
    ranks.barrier()
    text = ""
    if ranks.rank == 0:
        captured.graph.replay()
        torch.cuda.synchronize()
        try:
            communicator.check()
        except CommunicatorError as error:
            text = str(error)
        communicator.close()
    go_on(ranks)
    return text


def dropped(ranks: Session) -> str:
    communicator = make(ranks)
    captured = Captured(ranks, communicator)
    captured.replay_rightly()
    ranks.barrier()
    del communicator
    gc.collect()
    captured.replay_in_vain()
    go_on(ranks)
    return ""


def while_another_thread_captures(ranks: Session, what: Callable[[], object]) -> None:
    """Does something while another stream is captured, in another thread, as torch does it unless told otherwise: no
    thread may then make calls that CUDA holds for unsafe. The capture stays whole."""
    other = torch.zeros(1000, device=ranks.device)
    torch.cuda.synchronize()
    ranks.barrier()
    capturing, has_ended = threading.Event(), threading.Event()
    problems: list[str] = []
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        try:
            torch.cuda.set_device(ranks.device)
            stream = torch.cuda.Stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="global"):
                other.add_(1)
                capturing.set()
                has_ended.wait(LIMIT_S)
                other.add_(1)
        except Exception as error:
            problems.append(repr(error))
        finally:
            capturing.set()

    thread = threading.Thread(target=capture)
    thread.start()
    capturing.wait(TIMEOUT_S)
    try:
        what()
    except Exception as error:
        problems.append(f"beside the capture: {error!r}")
    has_ended.set()
    thread.join()
    if problems:
        raise AssertionError("; ".join(problems))
    graph.replay()
    torch.cuda.synchronize()
    if not bool((other == 2).all()):
        raise AssertionError("the graph does not do what was captured")


def closed_during_a_capture(ranks: Session) -> str:
    communicator = make(ranks)
    captured = Captured(ranks, communicator)
    captured.replay_rightly()
    while_another_thread_captures(ranks, communicator.close)
    captured.replay_in_vain()
    text = expect_failure(communicator)
    go_on(ranks)
    return text


def made_during_a_capture(ranks: Session) -> str:
    """And closed, before it has made a call."""
    while_another_thread_captures(ranks, lambda: make(ranks).close())
    go_on(ranks)
    return ""


def never_captured(ranks: Session) -> str:
    """Without a capture nothing is kept: close() gives the workspace back."""
    x = torch.ones(1000, device=ranks.device)

    def use_one() -> int:
        communicator = make(ranks)
        communicator.all_reduce(x)
        communicator.close()
        ranks.barrier()  # until all have let go of what they had mapped
        free = torch.cuda.mem_get_info()[0]
        ranks.barrier()
        return free

    free_before = use_one()  # the driver keeps something of the first call
    use_one()
    kept = free_before - torch.cuda.mem_get_info()[0]
    if kept > 8 << 20:
        raise AssertionError(f"{kept} bytes were kept though nothing was captured")
    return f"{kept} bytes kept"


CASES: dict[str, Callable[[Session], str]] = {
    "closed": closed,
    "closed, one replays": closed_replayed_by_one,
    "the other has closed": replayed_while_the_other_has_closed,
    "dropped": dropped,
    "closed during a capture": closed_during_a_capture,
    "made during a capture": made_during_a_capture,
    "never captured": never_captured,
}
ALONE = "never captured"


# ---- The parent ----------------------------------------------------------------------------------------------------


def rank_main(arguments: argparse.Namespace) -> int:
    with session(arguments) as ranks:
        print(CASES[arguments.case](ranks), flush=True)
    return 0


@dataclass(frozen=True)
class Outcome:
    seconds: float
    statuses: list[int | None]
    outputs: list[str]

    @property
    def is_right(self) -> bool:
        return self.statuses == [0] * WORLD


def run_cases(names: Sequence[str], arguments: argparse.Namespace) -> dict[str, Outcome]:
    """All at once."""
    outcomes = {}
    with contextlib.ExitStack() as stack:
        begin = time.monotonic()
        running = {}
        for name in names:
            command = [sys.executable, __file__, "--case", name, "--device", arguments.device]
            command += ["--watchdog", str(arguments.watchdog)]
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            running[name] = stack.enter_context(Ranks(command, [{}] * WORLD, directory))
        for name, ranks in running.items():
            ranks.wait(max(0.0, begin + LIMIT_S - time.monotonic()))
            outputs = [ranks.output(rank) for rank in range(WORLD)]
            outcomes[name] = Outcome(round(time.monotonic() - begin, 1), ranks.statuses, outputs)
    return outcomes


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--only", choices=tuple(CASES), action="append", help="run this case; may be repeated")
    options.add_argument("--case", choices=tuple(CASES), help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.case is not None:
        return rank_main(arguments)
    if not wants_cuda(arguments.device):
        raise SystemExit("graph_outlives.py needs a GPU: emulated ones have no graphs")
    names = arguments.only or list(CASES)
    # What is measured of the GPU's memory is measured alone.
    together = [name for name in names if name != ALONE]
    outcomes = run_cases(together, arguments) | run_cases([name for name in names if name == ALONE], arguments)
    table = [("case", "seconds", "outcome", "what check() said")]
    figures = {}
    for name in names:
        outcome = outcomes[name]
        for rank, (status, output) in enumerate(zip(outcome.statuses, outcome.outputs, strict=True)):
            if status != 0:
                print(f"FAIL {name}: rank {rank}: status {status}\n{output[-3000:]}", file=sys.stderr, flush=True)
        said = " ".join(outcome.outputs[0].split())
        table.append((name, f"{outcome.seconds:.1f}", "ok" if outcome.is_right else "FAIL", said[-80:]))
        figures[name] = {"seconds": outcome.seconds, "statuses": outcome.statuses, "said": said[-1000:]}
    report("graph_outlives", "cuda", WORLD, table, figures, arguments.json)
    return 0 if all(outcome.is_right for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    run(main)
