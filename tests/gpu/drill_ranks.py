"""What the ranks of drill.py do: faults after which all go on (those that lose a rank: drill_losses.py)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Recording, Session

from llm_comm import (
    Communicator,
    CommunicatorError,
    ConcurrentUseError,
    Config,
    LaunchError,
    MismatchError,
)

STALL_S = 3.0


@dataclass(frozen=True)
class Pace:
    """How long things go on.

    Attributes:
        loop_s: until the fault.
        turns_before_away: turns of the loop that a rank makes which makes no more calls after them.
        calls_of_groups: of two halves and of all ranks.
    """

    loop_s: float
    turns_before_away: int
    calls_on_streams: int
    calls_of_groups: tuple[int, int, int]


PACE = Pace(0.5, 20, 200, (300, 120, 170))
#: Where an operation takes a time slice of every rank.
PACE_OF_SHARED_GPU = Pace(2.0, 5, 40, (30, 12, 17))
DTYPE = torch.bfloat16


def message(rank: int, count: int, device: torch.device) -> torch.Tensor:
    """Small integers that depend on rank and position: their sums are exact."""
    return (torch.arange(count, device=device) % 13 + rank).to(DTYPE)


def expect_sum(out: torch.Tensor, members: list[int], what: str) -> None:
    expected = sum(message(rank, out.numel(), out.device) for rank in members)
    assert isinstance(expected, torch.Tensor)
    if not torch.equal(out, expected):
        raise AssertionError(f"{what}: {int((out != expected).sum())} of {out.numel()} sums are wrong")


def write(path: Path, content: Any) -> None:
    """As a whole, for a reader that waits for the file."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text(json.dumps(content), encoding="utf-8")
    unfinished.rename(path)


class Drill:
    """One rank of the drills that all ranks survive. Every drill makes communicators of its own."""

    def __init__(self, ranks: Session, timeout_s: float) -> None:
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.pace = PACE_OF_SHARED_GPU if ranks.shares_gpu else PACE

    def communicator(self, group: dist.ProcessGroup | None = None, **options: Any) -> Communicator:
        config = Config.load(**{"timeout_s": self.timeout_s, **options})
        return Communicator(group or self.ranks.group, self.ranks.device, config)

    def message(self, count: int) -> torch.Tensor:
        return message(self.ranks.rank, count, self.ranks.device)

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """A stream of its own for what is called within, behind what has been called before."""
        if not self.ranks.on_gpu:
            return contextlib.nullcontext()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def expect(
        self, kind: type[CommunicatorError], communicator: Communicator, calls: Callable[[], Any], words: str
    ) -> str:
        """Fails unless ``calls`` end in an error of this kind that holds ``words``. Returns its first line."""
        try:
            calls()
            self.ranks.synchronize()
            communicator.check()
        except CommunicatorError as error:
            if type(error) is not kind or words not in str(error):
                raise AssertionError(f"expected {kind.__name__} with {words!r}, got {error!r}") from error
            return f"{kind.__name__}: {str(error).splitlines()[0]}"
        raise AssertionError(f"no {kind.__name__}")

    def checked(self, communicator: Communicator, count: int, members: list[int]) -> tuple[Callable[[], None], Any]:
        """A call that sums into a poisoned tensor and compares there and then, and the number of its wrong elements."""
        x = self.message(count)
        out = torch.full_like(x, -1)
        expected = sum(message(rank, count, self.ranks.device) for rank in members)
        wrong = torch.zeros((), dtype=torch.int64, device=self.ranks.device)

        def call() -> None:
            communicator.all_reduce(x, out)
            wrong.add_((out != expected).sum())
            out.fill_(-1)

        return call, wrong

    # ---- The drills: each returns what happened ----------------------------------------------------------------

    def stall(self, in_graph: bool) -> str:
        """A rank that comes late is waited for."""
        count = 8192
        with self.communicator(timeout_s=self.timeout_s + 3 * STALL_S) as communicator:
            x = self.message(count)
            out = torch.empty_like(x)
            calls: Callable[[], Any] = partial(communicator.all_reduce, x, out)
            calls()
            replay = Recording(calls, self.ranks.device).replay if in_graph else calls
            self.ranks.synchronize()
            self.ranks.barrier()
            if self.ranks.rank == 1:
                time.sleep(STALL_S)
            out.zero_()
            replay()
            self.ranks.synchronize()
            communicator.check()
            expect_sum(out, list(range(self.ranks.world)), "after the stall")
            self.ranks.barrier()
        return "right sums"

    def sizes_disagree(self, in_graph: bool) -> str:
        odd_rank = self.ranks.world - 1
        with self.communicator(debug=True) as communicator:
            x = self.message(4096 if self.ranks.rank != odd_rank else 5000)
            out = torch.full_like(x, -1)
            calls: Callable[[], Any] = partial(communicator.all_reduce, x, out)
            replay = Recording(calls, self.ranks.device).replay if in_graph and self.ranks.on_gpu else calls
            words = f"of 4096 bf16 (call 1); rank {odd_rank} ("
            text = self.expect(MismatchError, communicator, replay, words)
            assert out.eq(-1).all(), "something was written"
            self.ranks.barrier()
        return text

    def order_disagrees(self, in_graph: bool) -> str:
        """Equal calls but for their order: on GPUs two graphs, which only their numbers tell apart."""
        in_graph &= self.ranks.on_gpu
        counts = (4096, 4096) if in_graph else (4096, 2048)
        with self.communicator(debug=True) as communicator:
            calls = [partial(communicator.all_reduce, self.message(count)) for count in counts]
            turns = [Recording(call, self.ranks.device).replay if in_graph else call for call in calls]
            if self.ranks.rank == 0:
                turns.reverse()

            def run() -> None:
                for turn in turns:
                    turn()

            text = self.expect(MismatchError, communicator, run, "rank 0 (")
            self.ranks.barrier()
        return text

    def streams(self, in_graph: bool) -> str:
        """Eager calls on two streams are put in order; graphs that wait for each other are right."""
        everyone = list(range(self.ranks.world))
        with self.communicator() as communicator:
            counts = (1000, 300_000) if self.ranks.on_gpu else (1000, 3000)
            calls, wrong = zip(*(self.checked(communicator, count, everyone) for count in counts), strict=True)
            calls[0]()
            turns = [Recording(call, self.ranks.device).replay if in_graph else call for call in calls]
            streams = [torch.cuda.Stream() for _ in turns] if self.ranks.on_gpu else []
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
            for i in range(self.pace.calls_on_streams):
                turn = i % 2
                if not streams:
                    turns[turn]()
                    continue
                if in_graph:
                    streams[turn].wait_stream(streams[1 - turn])
                with torch.cuda.stream(streams[turn]):
                    turns[turn]()
            self.ranks.synchronize()
            communicator.check()
            for count, found in zip(counts, wrong, strict=True):
                assert int(found) == 0, f"{int(found)} sums of messages of {count} elements are wrong"
            self.ranks.barrier()
        return "right sums"

    def graphs_at_once(self, in_graph: bool) -> str | None:
        """Rank 0 replays a graph on a second stream while the one on the first waits for the others."""
        if not self.ranks.on_gpu:
            return None
        with self.communicator(debug=True) as communicator:
            x = self.message(4096)
            graphs = [Recording(partial(communicator.all_reduce, x), self.ranks.device) for _ in range(2)]
            self.ranks.synchronize()
            self.ranks.barrier()

            def run() -> None:
                if self.ranks.rank != 0:
                    time.sleep(self.timeout_s / 4)
                    graphs[0].replay()
                    return
                graphs[0].replay()
                time.sleep(self.timeout_s / 8)
                with torch.cuda.stream(torch.cuda.Stream()):
                    graphs[1].replay()

            text = self.expect(ConcurrentUseError, communicator, run, "): a one-shot all-reduce of 8192 bytes")
            self.ranks.barrier()
        return text

    def fresh_thread(self) -> str:
        """A call from a thread that has used no CUDA, whose device is 0 and which has no context there."""
        with self.communicator() as communicator:
            x = self.message(4096)
            out = torch.empty_like(x)
            communicator.all_reduce(x, out)
            self.ranks.synchronize()
            out.fill_(-1)
            self.ranks.synchronize()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(communicator.all_reduce, x, out).result()
            self.ranks.synchronize()
            communicator.check()
            expect_sum(out, list(range(self.ranks.world)), "from a fresh thread")
            self.ranks.barrier()
        return "right sums"

    def not_launched(self) -> str | None:
        """Rank 0's call would have to wait for its last one, whose stream is being captured; the others make theirs."""
        if not self.ranks.on_gpu:
            return None
        with self.communicator() as communicator:
            x = self.message(4096)
            out = torch.empty_like(x)
            captured, other = torch.cuda.Stream(), torch.cuda.Stream()
            self.ranks.synchronize()
            with torch.cuda.stream(captured):
                communicator.all_reduce(x, out)
            self.ranks.synchronize()
            self.ranks.barrier()

            def run() -> None:
                if self.ranks.rank != 0:
                    communicator.all_reduce(x, out)
                    return
                capture = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=captured, capture_error_mode="thread_local")
                with capture, torch.cuda.stream(other):
                    communicator.all_reduce(x, out)

            text = self.expect(LaunchError, communicator, run, "): an operation could not be launched")
            self.ranks.barrier()
        return text

    def no_memory(self) -> str | None:
        """Rank 0 has no memory for the sum; the others make their calls."""
        if not self.ranks.on_gpu:
            return None
        device = self.ranks.device
        with self.communicator() as communicator:
            x = self.message(16 << 20)
            total = torch.cuda.get_device_properties(device).total_memory
            fillers: list[torch.Tensor] = []
            self.ranks.synchronize()
            self.ranks.barrier()
            try:
                if self.ranks.rank == 0:
                    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(device) / total, device)
                    with contextlib.suppress(torch.OutOfMemoryError):  # what torch keeps for later goes too
                        while True:
                            fillers.append(torch.empty_like(x))
                call = partial(communicator.all_reduce, x)
                text = self.expect(LaunchError, communicator, call, "): an operation could not be launched")
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0, device)
            self.ranks.barrier()
        return text

    def overlapping_groups(self, in_graph: bool) -> str:
        """Tensor parallel halves and an expert parallel group of all, at once, with unequal numbers of calls.

        Fewer than four ranks have no halves: then both groups are of all.
        """
        world = self.ranks.world
        everyone = list(range(world))
        halves = [everyone[: world // 2], everyone[world // 2 :]] if world >= 4 else [everyone]
        memberships = [*halves, everyone]
        calls_of = self.pace.calls_of_groups
        groups = [dist.new_group(members, backend="gloo") for members in memberships]
        mine = [n for n, members in enumerate(memberships) if self.ranks.rank in members]
        with contextlib.ExitStack() as stack:
            communicators = {n: stack.enter_context(self.communicator(groups[n])) for n in mine}
            checked = {n: self.checked(communicators[n], 700 * (n + 1), memberships[n]) for n in mine}
            calls = {n: call for n, (call, _) in checked.items()}
            for n in mine:
                calls[n]()
            turns = {n: Recording(calls[n], self.ranks.device).replay if in_graph else calls[n] for n in mine}
            streams = {n: self.stream() for n in mine}
            for i in range(max(calls_of)):
                for n in mine:
                    with streams[n] if self.ranks.on_gpu else contextlib.nullcontext():
                        if i < calls_of[n]:
                            turns[n]()
            self.ranks.synchronize()
            for n in mine:
                communicators[n].check()
                wrong = int(checked[n][1])
                assert wrong == 0, f"{wrong} sums of group {memberships[n]} are wrong"
            self.ranks.barrier()
        return "right sums"

    def all(self) -> Iterator[tuple[str, str, Callable[[], str | None]]]:
        """(name, what is expected, drill)."""
        drills = (
            (f"stalled {STALL_S:g} s", "right sums", self.stall),
            ("sizes disagree, debug", "MismatchError", self.sizes_disagree),
            ("order disagrees, debug", "MismatchError", self.order_disagrees),
            ("two streams", "right sums", self.streams),
            ("overlapping groups", "right sums", self.overlapping_groups),
        )
        for name, expected, drill in drills:
            yield name, expected, partial(drill, False)
            yield f"{name}, graph", expected, partial(drill, True)
        yield "two graphs at once, debug", "ConcurrentUseError", partial(self.graphs_at_once, True)
        yield "fresh thread", "right sums", self.fresh_thread
        yield "not launched", "LaunchError", self.not_launched
        yield "no memory", "LaunchError", self.no_memory


def survive(ranks: Session, timeout_s: float, directory: Path) -> None:
    """Runs all drills. Rank 0 writes what happened: {"name", "expected", "outcome" by rank, "seconds", "is_right"}."""
    outcomes: list[dict[str, Any]] = []
    for name, expected, drill in Drill(ranks, timeout_s).all():
        ranks.watchdog.progress(name)
        begin = time.monotonic()
        try:
            outcome: Any = drill()
            is_right = outcome is None or outcome.startswith(expected)
        except Exception as error:
            outcome, is_right = f"{type(error).__name__}: {error}", False
        everyone: list[Any] = [None] * ranks.world
        dist.all_gather_object(everyone, (outcome, is_right), group=ranks.control)
        seconds = round(time.monotonic() - begin, 2)
        texts = [text for text, _ in everyone]
        right = all(verdict for _, verdict in everyone)
        outcomes.append({"name": name, "expected": expected, "outcome": texts, "seconds": seconds, "is_right": right})
        if ranks.rank == 0:
            write(directory / "survived", outcomes)
