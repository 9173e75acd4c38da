"""Random test: all-reduces that are drawn from a seed, every result compared bit by bit.

    torchrun --standalone --nproc-per-node 8 tests/gpu/random_cases.py

A case is one eager message through every communicator, or a few CUDA graphs of several messages each, replayed with
new inputs in a drawn order with eager calls in between. All ranks draw the same cases and know all ranks' inputs, so
each compares its result with the fp32 sum in rank order and with the float64 sum; every 50 cases the ranks compare
digests of what they got. After a failure ``--only CASE`` runs that case alone and shows elements.

``--fused`` draws cases of the fused all-reduce + residual add + RMSNorm instead (``fused_cases.py``), ``--both`` after
the plain ones. Where ranks share a GPU every operation costs time slices: there an eager message goes through one
communicator, which is drawn too, and graphs are fewer and smaller.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common import GraphPool, Recording, Session, add_seconds, parser, report, run, session
from fused_cases import FusedCase, FusedRunner, draw_fused_case
from plain_cases import COMMUNICATORS, QUANTIZED, Call, Case, EagerStep, Message, ReplayStep, draw_case
from values import Inputs, beyond_bound, bits, describe, differs, rank_order_sum
from verdicts import Guarded, Verdicts, Where, weights_of

from llm_comm import Communicator, Config
from llm_comm.bench.wire_reference import FORMAT_OF_WIRE, quantized_all_reduce

SETTLE_EVERY = 50
MOST_FAILURES = 10
# Grids and tiles that nobody would choose, so that blocks walk over many tiles with work in flight.
ODD_TABLE = """
device: any
world_size: 0
max_message_bytes: 1073741824
rows:
  - {operation: all_reduce, up_to: 2048, algorithm: one_shot, protocol: LL, blocks: 1, tile_lines: 1, depth: 2}
  - {operation: all_reduce, up_to: 6000, algorithm: two_shot, protocol: LL, blocks: 2, tile_lines: 2, depth: 0}
  - {operation: all_reduce, up_to: 12000, algorithm: two_shot_hb, protocol: HB, blocks: 2, tile_lines: 9, depth: 2}
  - {operation: all_reduce, up_to: 30000, algorithm: one_shot, protocol: LL, blocks: 3, tile_lines: 8, depth: 1}
  - {operation: all_reduce, up_to: 60000, algorithm: one_shot_hb, protocol: HB, blocks: 3, tile_lines: 40, depth: 3}
  - {operation: all_reduce, up_to: 200000, algorithm: two_shot, protocol: LL, blocks: 7, tile_lines: 16, depth: 3}
  - {operation: all_reduce, up_to: 600000, algorithm: two_shot_hb, protocol: HB, blocks: 5, tile_lines: 33, depth: 4}
  - {operation: all_reduce, up_to: 1073741824, algorithm: two_shot, protocol: LL, blocks: 40, tile_lines: 64, depth: 1}
  - {operation: all_reduce_add_rms_norm, up_to: 2048, algorithm: two_shot, protocol: LL,
     blocks: 2, threads: 64, cluster: 2, depth: 1}
  - {operation: all_reduce_add_rms_norm, up_to: 20000, algorithm: one_shot, protocol: LL,
     blocks: 3, threads: 128, cluster: 1, depth: 2}
  - {operation: all_reduce_add_rms_norm, up_to: 35000, algorithm: two_shot_hb, protocol: HB,
     blocks: 2, tile_lines: 90, depth: 2}
  - {operation: all_reduce_add_rms_norm, up_to: 70000, algorithm: one_shot, protocol: LL,
     blocks: 16, threads: 512, cluster: 4, depth: 1}
  - {operation: all_reduce_add_rms_norm, up_to: 300000, algorithm: two_shot, protocol: LL,
     blocks: 24, threads: 64, cluster: 8, depth: 3}
  - {operation: all_reduce_add_rms_norm, up_to: 1073741824, algorithm: two_shot, protocol: LL,
     blocks: 7, threads: 256, cluster: 1, depth: 0}
"""


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
        for call in step.calls:
            expected = expected_sum(rows, call)
            source, target = self._buffers(message, call)
            source.data.copy_(rows[self._ranks.rank])
            got = self._all_reduce(call, source.data, source if call.placement == "in_place" else target)
            kind = QUANTIZED.get(call.communicator, "eager")
            self._verify(Where(case.number, f"{name}, {kind}", message, call), got, rows, expected, source, target)

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
            expected.append(expected_sum(rows[-1], call))
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
        beyond = nothing if call.communicator in QUANTIZED else beyond_bound(got, rows).sum()
        self.verdicts.add(where, [wrong.sum(), beyond, damage, changed], digest)
        self.calls[call.communicator, "graph" if "graph" in where.result else "eager"] += 1
        self.elements += message.count
        if self._shows_elements and wrong.any():
            places = wrong.nonzero().flatten().tolist()
            shown = describe(got, expected, places[:8])
            print(f"rank {self._ranks.rank}, {where.result}: {len(places)} wrong: {shown}", flush=True)


def expected_sum(rows: torch.Tensor, call: Call) -> torch.Tensor:
    """Return the result of a call whose ranks contribute ``rows``: [world, count]."""
    wire = QUANTIZED.get(call.communicator)
    return rank_order_sum(rows) if wire is None else quantized_all_reduce(rows, FORMAT_OF_WIRE[wire])


@dataclass(frozen=True)
class RecordedGraph:
    calls: tuple[tuple[Message, Call], ...]
    buffers: list[tuple[Guarded, Guarded | None]]
    stages: list[torch.Tensor]
    recording: Recording[list[torch.Tensor]]


@contextlib.contextmanager
def open_communicators(ranks: Session, names: Sequence[str] = COMMUNICATORS) -> Iterator[dict[str, Communicator]]:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        table = Path(directory, "odd.yaml")
        table.write_text(ODD_TABLE, encoding="utf-8")

        def make(name: str) -> Communicator:
            config = Config.load(max_message_bytes=1 << 30)
            config = config.replace(table=str(table)) if name == "odd_table" else config.replace(algorithm=name)
            if name in QUANTIZED:
                config = config.replace(wire=QUANTIZED[name])
            return Communicator(ranks.group, ranks.device, config)

        yield {name: stack.enter_context(make(name)) for name in names}


def run_cases(runner: Runner | FusedRunner, ranks: Session, options: argparse.Namespace) -> tuple[int, list[str]]:
    """Returns the number of cases run, and the failures."""
    numbers = range(options.cases) if options.only is None else [options.only]
    failures: list[str] = []
    done = 0
    shown = begin = time.monotonic()
    for number in numbers:
        case: Case | FusedCase
        if options.fused:
            case = draw_fused_case(number, options, ranks.world, options.communicators)
        else:
            case = draw_case(number, options, ranks.world)
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
            if len(failures) > MOST_FAILURES or ranks.is_late(options):
                break
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                calls = runner.calls.total()
                ranks.say(f"{done} of {len(numbers)} cases, {calls} results compared, {shown - begin:.0f} s")
    return done, failures


@dataclass(frozen=True)
class Defaults:
    """What is run unless an option says otherwise. ``few_calls``: see the top of this file."""

    cases: int
    fused_cases: int
    max_count: int
    graph_share: float
    few_calls: bool = False


ON_GPUS = Defaults(10_000, 5_000, 1 << 21, 0.1)
ON_A_SHARED_GPU = Defaults(200, 100, 1 << 20, 0.05, few_calls=True)
EMULATED = Defaults(300, 50, 20_000, 0.1)


def run_kind(ranks: Session, communicators: dict[str, Communicator], options: argparse.Namespace) -> bool:
    """Runs and reports plain or fused cases. Returns whether all were right."""
    runner = (FusedRunner if options.fused else Runner)(ranks, communicators, options)
    ranks.synchronize()
    begin = time.monotonic()
    done, failures = run_cases(runner, ranks, options)
    seconds = time.monotonic() - begin
    if ranks.rank == 0:
        _report(ranks, options, runner, done, failures, seconds)
    return not failures


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    add_seconds(options)
    kinds = options.add_mutually_exclusive_group()
    kinds.add_argument("--fused", action="store_true", help="the fused all-reduce + residual add + RMSNorm")
    kinds.add_argument("--both", action="store_true", help="plain cases, then fused ones; --json writes FILE_fused too")
    options.add_argument("--cases", type=int, help=_by_default("cases"))
    options.add_argument("--fused-cases", type=int, help=f"{_by_default('fused_cases')}; with --fused also --cases")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", type=int, metavar="CASE", help="run this case alone and show wrong elements")
    options.add_argument("--max-count", type=int, help=f"elements; {_by_default('max_count')}")
    options.add_argument("--graph-share", type=float, help=f"share of graphs; {_by_default('graph_share')}")
    options.add_argument("--communicators", nargs="+", choices=COMMUNICATORS, default=COMMUNICATORS, metavar="NAME")
    options.add_argument("--few-calls", action="store_true", help="as where ranks share a GPU")
    arguments = options.parse_args()
    with session(arguments) as ranks:
        defaults = ON_A_SHARED_GPU if ranks.shares_gpu else ON_GPUS if ranks.on_gpu else EMULATED
        arguments.few_calls |= defaults.few_calls
        if arguments.fused and arguments.fused_cases is None:
            arguments.fused_cases = arguments.cases
        for name in ("cases", "fused_cases", "max_count", "graph_share"):
            if getattr(arguments, name) is None:
                setattr(arguments, name, getattr(defaults, name))
        plain, fused = (argparse.Namespace(**vars(arguments)) for _ in range(2))
        plain.fused, fused.fused = False, True
        fused.cases = arguments.fused_cases
        if arguments.both and arguments.json is not None:
            fused.json = arguments.json.with_stem(f"{arguments.json.stem}_fused")
        with open_communicators(ranks, arguments.communicators) as communicators:
            kinds_to_run = [plain, fused] if arguments.both else [fused if arguments.fused else plain]
            wrong = [kind for kind in kinds_to_run if not run_kind(ranks, communicators, kind)]
    return 1 if wrong else 0


def _by_default(name: str) -> str:
    values = (getattr(defaults, name) for defaults in (ON_GPUS, ON_A_SHARED_GPU, EMULATED))
    return "default: {} on GPUs, {} on a shared one, {} on emulated ones".format(*values)


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
        print("again with --only CASE, the same other options and the same number of ranks", file=sys.stderr)
    table = [("communicator", "eager results", "graph results")]
    table += [(n, str(runner.calls[n, "eager"]), str(runner.calls[n, "graph"])) for n in options.communicators]
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
