"""Random test: all-reduces that are drawn from a seed, every result compared bit by bit.

    torchrun --standalone --nproc-per-node 8 tests/gpu/random_cases.py

A case is one eager message through every communicator, or a few CUDA graphs of several messages each, replayed with
new inputs in a drawn order with eager calls in between. All ranks draw the same cases and know all ranks' inputs, so
each compares its result with the fp32 sum in rank order and with the float64 sum; every 50 cases the ranks compare
digests of what they got. After a failure ``--only CASE`` runs that case alone and shows elements.

``--fused`` draws cases of the fused all-reduce + residual add + RMSNorm instead (``fused_cases.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from common import GraphPool, Recording, Session, parser, report, run, session
from fused_cases import FusedCase, FusedRunner, draw_fused_case
from values import DTYPES, Inputs, Values, beyond_bound, bits, describe, differs, draw_values, rank_order_sum
from verdicts import Guarded, Verdicts, Where, weights_of

from llm_comm import Communicator, Config

LINE_BYTES = 16
SETTLE_EVERY = 50
MOST_FAILURES = 10
COMMUNICATORS = ("one_shot", "two_shot", "auto", "odd_table")
# Grids and tiles that nobody would choose, so that blocks walk over many tiles with work in flight.
ODD_TABLE = """
device: any
world_size: 0
max_message_bytes: 1073741824
rows:
  - {operation: all_reduce, up_to: 2048, algorithm: one_shot, protocol: LL, blocks: 1, tile_lines: 1, depth: 2}
  - {operation: all_reduce, up_to: 6000, algorithm: two_shot, protocol: LL, blocks: 2, tile_lines: 2, depth: 0}
  - {operation: all_reduce, up_to: 30000, algorithm: one_shot, protocol: LL, blocks: 3, tile_lines: 8, depth: 1}
  - {operation: all_reduce, up_to: 200000, algorithm: two_shot, protocol: LL, blocks: 7, tile_lines: 16, depth: 3}
  - {operation: all_reduce, up_to: 1073741824, algorithm: two_shot, protocol: LL, blocks: 40, tile_lines: 64, depth: 1}
  - {operation: all_reduce_add_rms_norm, up_to: 2048, algorithm: two_shot, protocol: LL,
     blocks: 2, threads: 64, cluster: 2, depth: 1}
  - {operation: all_reduce_add_rms_norm, up_to: 20000, algorithm: one_shot, protocol: LL,
     blocks: 3, threads: 128, cluster: 1, depth: 2}
  - {operation: all_reduce_add_rms_norm, up_to: 70000, algorithm: one_shot, protocol: LL,
     blocks: 16, threads: 512, cluster: 4, depth: 1}
  - {operation: all_reduce_add_rms_norm, up_to: 300000, algorithm: two_shot, protocol: LL,
     blocks: 24, threads: 64, cluster: 8, depth: 3}
  - {operation: all_reduce_add_rms_norm, up_to: 1073741824, algorithm: two_shot, protocol: LL,
     blocks: 7, threads: 256, cluster: 1, depth: 0}
"""


# ---- Drawing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    count: int
    dtype: torch.dtype
    values: Values

    def __str__(self) -> str:
        size = self.count * self.dtype.itemsize
        return f"{self.count} {str(self.dtype).removeprefix('torch.')} ({size} bytes), {self.values}"


@dataclass(frozen=True)
class Call:
    """One all-reduce. Offsets are elements from a 16-byte boundary, by rank.

    ``placement`` is "in_place", "out" or "new". A chained call of a graph takes the result of the call before as input.
    """

    communicator: str
    placement: str
    input_offsets: tuple[int, ...]
    output_offsets: tuple[int, ...]
    chained: bool = False

    def __str__(self) -> str:
        offsets = f"offsets {self.input_offsets} -> {self.output_offsets}"
        return f"{self.communicator}, {self.placement}{', chained' if self.chained else ''}, {offsets}"


@dataclass(frozen=True)
class EagerStep:
    """One message through each of ``calls``."""

    message: Message
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class ReplayStep:
    """New inputs for a graph, then ``times`` replays of it."""

    graph: int
    times: int


@dataclass(frozen=True)
class Case:
    number: int
    graphs: tuple[tuple[tuple[Message, Call], ...], ...]
    steps: tuple[EagerStep | ReplayStep, ...]


def draw_case(number: int, options: argparse.Namespace, world: int) -> Case:
    rng = random.Random(f"{options.seed}/{number}")
    if rng.random() >= options.graph_share:
        calls = tuple(_draw_call(rng, name, world) for name in rng.sample(COMMUNICATORS, len(COMMUNICATORS)))
        return Case(number, (), (EagerStep(_draw_message(rng, options.max_count, world), calls),))
    graphs = tuple(_draw_graph(rng, options.max_count // 4, world) for _ in range(rng.randint(1, 3)))
    steps: list[EagerStep | ReplayStep] = []
    for _ in range(rng.randint(4, 10)):
        if rng.random() < 0.3:
            calls = (_draw_call(rng, rng.choice(COMMUNICATORS), world),)
            steps.append(EagerStep(_draw_message(rng, options.max_count // 16, world), calls))
        else:
            steps.append(ReplayStep(rng.randrange(len(graphs)), rng.choice((1, 1, 1, 2, 5, 17))))
    return Case(number, graphs, tuple(steps))


def _draw_graph(rng: random.Random, max_count: int, world: int) -> tuple[tuple[Message, Call], ...]:
    calls: list[tuple[Message, Call]] = []
    for _ in range(rng.randint(2, 6)):
        name = rng.choice(COMMUNICATORS)
        if calls and rng.random() < 0.2:
            calls.append((calls[-1][0], _draw_call(rng, name, world, chained=True)))
            continue
        message = _draw_message(rng, max_count, world)
        if not calls and message.count == 0:  # an empty graph is no test
            message = Message(1, message.dtype, message.values)
        calls.append((message, _draw_call(rng, name, world)))
    return tuple(calls)


def _draw_message(rng: random.Random, max_count: int, world: int) -> Message:
    dtype = rng.choice(DTYPES)
    per_line = LINE_BYTES // dtype.itemsize
    kind = rng.random()
    if kind < 0.55:
        count = int(2 ** rng.uniform(0, max_count.bit_length() - 1))
    elif kind < 0.62:
        count = rng.choice((0, 1, 2, 3, 5, 7, 9, 15, 17))
    elif kind < 0.72:
        count = rng.choice((1026, 20004, 20036)) // dtype.itemsize
    elif kind < 0.82:
        count = (1 << rng.randint(1, max_count.bit_length() - 1)) + rng.randint(-1, 1)
    else:  # lines, slices of lines, tiles, and tiles of slices, and one element less or more
        unit = rng.choice((1, world, 8, 16, 32, 16 * world, 32 * world))
        count = per_line * unit * rng.randint(1, 40) + rng.randint(-1, 1)
    return Message(min(count, max_count), dtype, draw_values(rng, dtype))


def _draw_call(rng: random.Random, communicator: str, world: int, chained: bool = False) -> Call:
    def offsets() -> tuple[int, ...]:
        kind = rng.random()
        if kind < 0.4:
            return (0,) * world
        if kind < 0.6:
            return (rng.randrange(8),) * world
        return tuple(rng.randrange(8) for _ in range(world))

    # A chained call in place would destroy the result that is to be compared.
    placement = rng.choice(("out", "new") if chained else ("in_place", "out", "new"))
    return Call(communicator, placement, offsets(), offsets(), chained)


# ---- Running ---------------------------------------------------------------------------------------------------


class Runner:
    def __init__(self, ranks: Session, communicators: dict[str, Communicator], options: argparse.Namespace):
        self._ranks = ranks
        self.communicators = communicators
        self._seed = options.seed
        self._shows_elements = options.only is not None
        self._inputs = Inputs(ranks.device, ranks.world)
        self._graph_pool = GraphPool(ranks.device)
        self._weights = weights_of(options.max_count, ranks.device)
        self.verdicts = Verdicts(ranks)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.replays = 0
        self.elements = 0

    def run(self, case: Case) -> None:
        recorded = [self._record(calls) for calls in case.graphs]
        for number, step in enumerate(case.steps):
            name = f"step {number}"
            if isinstance(step, EagerStep):
                self._run_eager(case, name, step)
            else:
                self._run_replay(case, name, step, recorded[step.graph])

    def _rows(self, case: Case, name: str, message: Message) -> torch.Tensor:
        seed = random.Random(f"{self._seed}/{case.number}/{name}").getrandbits(62)
        return self._inputs.rows(message.values, message.count, message.dtype, seed)

    def _run_eager(self, case: Case, name: str, step: EagerStep) -> None:
        message = step.message
        rows = self._rows(case, name, message)
        expected = rank_order_sum(rows)
        for call in step.calls:
            source, target = self._buffers(message, call)
            source.data.copy_(rows[self._ranks.rank])
            got = self._all_reduce(call, source.data, source if call.placement == "in_place" else target)
            self._verify(Where(case.number, f"{name}, eager", message, call), got, rows, expected, source, target)

    def _buffers(self, message: Message, call: Call) -> tuple[Guarded, Guarded | None]:
        rank, device = self._ranks.rank, self._ranks.device
        source = Guarded(message.count, message.dtype, call.input_offsets[rank], device)
        if call.placement != "out":
            return source, None
        return source, Guarded(message.count, message.dtype, call.output_offsets[rank], device)

    def _all_reduce(self, call: Call, x: torch.Tensor, out: Guarded | None) -> torch.Tensor:
        got = self.communicators[call.communicator].all_reduce(x, None if out is None else out.data)
        assert isinstance(got, torch.Tensor)
        return got

    def _record(self, calls: tuple[tuple[Message, Call], ...]) -> RecordedGraph:
        buffers = [self._buffers(message, call) for message, call in calls]
        # What a call in place overwrites is filled inside the graph, or a second replay would sum sums.
        stages = [torch.empty_like(source.data) for source, _ in buffers]

        def make_calls() -> list[torch.Tensor]:
            results: list[torch.Tensor] = []
            for (_, call), (source, target), stage in zip(calls, buffers, stages, strict=True):
                if call.chained:
                    results.append(self._all_reduce(call, results[-1], target))
                elif call.placement == "in_place":
                    source.data.copy_(stage)
                    results.append(self._all_reduce(call, source.data, source))
                else:
                    results.append(self._all_reduce(call, source.data, target))
            return results

        recording = Recording(make_calls, self._ranks.device, self._graph_pool.handle)
        return RecordedGraph(calls, buffers, stages, recording)

    def _run_replay(self, case: Case, name: str, step: ReplayStep, graph: RecordedGraph) -> None:
        rows: list[torch.Tensor] = []
        expected: list[torch.Tensor] = []
        for i, (message, call) in enumerate(graph.calls):
            source, target = graph.buffers[i]
            source.poison()
            if target is not None:
                target.poison()
            if call.chained:
                rows.append(expected[-1].expand(self._ranks.world, message.count))
            else:
                rows.append(self._rows(case, f"{name}/{i}", message))
                stage = graph.stages[i] if call.placement == "in_place" else source.data
                stage.copy_(rows[-1][self._ranks.rank])
            expected.append(rank_order_sum(rows[-1]))
        for _ in range(step.times):
            results = graph.recording.replay()
        self.replays += step.times
        for i, (message, call) in enumerate(graph.calls):
            where = Where(case.number, f"{name}, graph {step.graph} x {step.times}, call {i}", message, call)
            source, target = graph.buffers[i]
            self._verify(where, results[i], rows[i], expected[i], None if call.chained else source, target)

    def _verify(
        self,
        where: Where,
        got: torch.Tensor,
        rows: torch.Tensor,
        expected: torch.Tensor,
        source: Guarded | None,
        target: Guarded | None,
    ) -> None:
        """Enqueues the comparisons. ``source`` is the input buffer if it is this call's own."""
        message, call = where.message, where.call
        if got.dtype != message.dtype or got.shape != (message.count,):
            raise AssertionError(f"{where}: the result is {got.dtype} of shape {tuple(got.shape)}")
        wrong = differs(got, expected)
        nothing = torch.zeros((), dtype=torch.int64, device=got.device)
        damage = sum((buffer.damage() for buffer in (source, target) if buffer is not None), nothing)
        changed = nothing
        if source is not None and call.placement != "in_place":
            changed = (bits(source.data) != bits(rows[self._ranks.rank])).sum()
        digest = (bits(got).to(torch.int64) * self._weights[: message.count]).sum()
        self.verdicts.add(where, [wrong.sum(), beyond_bound(got, rows).sum(), damage, changed], digest)
        self.calls[call.communicator, "graph" if "graph" in where.result else "eager"] += 1
        self.elements += message.count
        if self._shows_elements and wrong.any():
            places = wrong.nonzero().flatten().tolist()
            shown = describe(got, expected, places[:8])
            print(f"rank {self._ranks.rank}, {where.result}: {len(places)} wrong: {shown}", flush=True)


@dataclass(frozen=True)
class RecordedGraph:
    calls: tuple[tuple[Message, Call], ...]
    buffers: list[tuple[Guarded, Guarded | None]]
    stages: list[torch.Tensor]
    recording: Recording[list[torch.Tensor]]


@contextlib.contextmanager
def open_communicators(ranks: Session) -> Iterator[dict[str, Communicator]]:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        table = Path(directory, "odd.yaml")
        table.write_text(ODD_TABLE, encoding="utf-8")

        def make(name: str) -> Communicator:
            config = Config.load(max_message_bytes=1 << 30)
            config = config.replace(table=str(table)) if name == "odd_table" else config.replace(algorithm=name)
            return Communicator(ranks.group, ranks.device, config)

        yield {name: stack.enter_context(make(name)) for name in COMMUNICATORS}


def run_cases(runner: Runner | FusedRunner, ranks: Session, options: argparse.Namespace) -> tuple[int, list[str]]:
    """Returns the number of cases run, and the failures."""
    numbers = range(options.cases) if options.only is None else [options.only]
    failures: list[str] = []
    done = 0
    shown = begin = time.monotonic()
    for number in numbers:
        case: Case | FusedCase
        case = (draw_fused_case if options.fused else draw_case)(number, options, ranks.world)
        ranks.watchdog.progress(f"case {number}")
        try:
            runner.run(case)
        except Exception as error:
            raise AssertionError(f"rank {ranks.rank}: {case} failed; again with --only {number}") from error
        done += 1
        if done % SETTLE_EVERY == 0 or done == len(numbers):
            failures += runner.verdicts.settle()
            for communicator in runner.communicators.values():
                communicator.check()
            if len(failures) > MOST_FAILURES:
                break
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                calls = runner.calls.total()
                ranks.say(f"{done} of {len(numbers)} cases, {calls} results compared, {shown - begin:.0f} s")
    return done, failures


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--fused", action="store_true", help="the fused all-reduce + residual add + RMSNorm")
    options.add_argument("--cases", type=int, help="default: 10000 (--fused 5000) on GPUs, 300 (50) on emulated ones")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", type=int, metavar="CASE", help="run this case alone and show wrong elements")
    options.add_argument("--max-count", type=int, help="elements; default: 2 Mi on GPUs, 20000 on emulated ones")
    options.add_argument("--graph-share", type=float, default=0.1, help="share of the cases that are graphs")
    arguments = options.parse_args()
    with session(arguments) as ranks:
        if arguments.cases is None:
            on_gpu, emulated = (5_000, 50) if arguments.fused else (10_000, 300)
            arguments.cases = on_gpu if ranks.on_gpu else emulated
        if arguments.max_count is None:
            arguments.max_count = 1 << 21 if ranks.on_gpu else 20_000
        with open_communicators(ranks) as communicators:
            runner = (FusedRunner if arguments.fused else Runner)(ranks, communicators, arguments)
            ranks.synchronize()
            begin = time.monotonic()
            done, failures = run_cases(runner, ranks, arguments)
            seconds = time.monotonic() - begin
        if ranks.rank == 0:
            _report(ranks, arguments, runner, done, failures, seconds)
    return 1 if failures else 0


def _report(
    ranks: Session,
    options: argparse.Namespace,
    runner: Runner | FusedRunner,
    cases: int,
    failures: list[str],
    seconds: float,
) -> None:
    for failure in failures[:MOST_FAILURES]:
        print(f"WRONG {failure}", file=sys.stderr)
    if failures:
        print(f"again with --seed {options.seed} --only CASE and the same number of ranks", file=sys.stderr)
    table = [("communicator", "eager results", "graph results")]
    table += [(n, str(runner.calls[n, "eager"]), str(runner.calls[n, "graph"])) for n in COMMUNICATORS]
    table += [("", "", "")]
    figures = {
        "seed": options.seed,
        "cases": cases,
        "results": runner.calls.total(),
        "graph_replays": runner.replays,
        "elements": runner.elements,
        "seconds": round(seconds, 1),
        "wrong_results": len(failures),
    }
    table += [(name.replace("_", " "), str(value), "") for name, value in figures.items()]
    calls = {f"{name}/{mode}": number for (name, mode), number in sorted(runner.calls.items())}
    report(
        "random fused cases" if options.fused else "random cases",
        ranks.device.type,
        ranks.world,
        table,
        {**figures, "calls": calls},
        options.json,
    )


if __name__ == "__main__":
    run(main)
