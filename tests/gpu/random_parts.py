"""Random test: all-gathers, reduce-scatters, all-to-alls and operations on symmetric tensors, compared bit by bit.

    torchrun --standalone --nproc-per-node 8 tests/gpu/random_parts.py

A case is one call through a communicator that is drawn, eager or captured in a CUDA graph, which is replayed with new
inputs. All ranks draw the same cases and know all ranks' inputs. So each compares its result with what is due to it: of
an all-gather the parts, of a sum that in fp32 in rank order, both quantized where the algorithm does so.
``--operation`` runs one kind alone, ``--only CASE`` one case.
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
from common import GraphPool, Recording, Session, add_seconds, parser, report, run, session
from values import Inputs, Values, bits, differs, draw_values, rank_order_sum
from verdicts import POISON, Guarded, Verdicts, Where, weights_of

from llm_comm import Communicator, Config
from llm_comm.bench.wire_reference import FORMAT_OF_WIRE, quantized_all_reduce, quantized_shard

SETTLE_EVERY = 50
MOST_FAILURES = 10
KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "symmetric")
#: By kind: the algorithms that are forced. "auto" goes by the table below.
ALGORITHMS = {
    "all_gather": ("one_shot", "push_hb", "push_fp8_hb", "port", "auto"),
    "reduce_scatter": ("one_shot", "push_hb", "push_fp8_hb", "auto"),
    "all_to_all": ("one_shot", "push_hb", "auto"),
    "all_to_all_v": ("one_shot", "push_hb", "auto"),
    "symmetric": ("direct_push_hb", "direct_port", "direct_ce", "two_shot_pull_hb", "two_shot_port", "two_shot_ce"),
}
#: Quantizes what it sends.
QUANTIZED = "push_fp8_hb"
#: Nothing may fill the queue of the GPU behind these, or load a kernel (docs/experiments/channels.md).
BY_PROXY = ("port", "direct_port", "two_shot_port")
# Grids and chunks that nobody would choose, so that blocks take many steps.
ODD_TABLE = """
device: any
world_size: 0
max_message_bytes: 1073741824
min_symmetric_bytes: 0
rows:
  - {operation: all_reduce, up_to: 1073741824, algorithm: two_shot, protocol: LL, blocks: 40, tile_lines: 64, depth: 1}
  - {operation: all_gather, up_to: 2000, algorithm: one_shot, protocol: LL, blocks: 2, tile_lines: 2}
  - {operation: all_gather, up_to: 60000, algorithm: push_hb, protocol: HB, blocks: 3, tile_lines: 32, depth: 3}
  - {operation: all_gather, up_to: 1073741824, algorithm: push_hb, protocol: HB, blocks: 7, tile_lines: 64, depth: 2}
  - {operation: reduce_scatter, up_to: 2000, algorithm: push_hb, protocol: HB, blocks: 1, tile_lines: 8, depth: 4}
  - {operation: reduce_scatter, up_to: 30000, algorithm: one_shot, protocol: LL, blocks: 5, tile_lines: 8}
  - {operation: reduce_scatter, up_to: 1073741824, algorithm: push_hb, protocol: HB, blocks: 9, tile_lines: 9, depth: 2}
  - {operation: all_to_all, up_to: 9000, algorithm: one_shot, protocol: LL, blocks: 3, tile_lines: 4}
  - {operation: all_to_all, up_to: 1073741824, algorithm: push_hb, protocol: HB, blocks: 5, tile_lines: 24, depth: 3}
"""
#: Of algorithms that a table has to name where messages are small.
ODD_ROWS = {
    "port": "operation: all_gather, protocol: Port, blocks: 5, tile_lines: 100, depth: 2",
    "direct_push_hb": "operation: all_gather, protocol: HB, blocks: 3, tile_lines: 100",
    "direct_port": "operation: all_gather, protocol: Port, blocks: 5, tile_lines: 64",
    "direct_ce": "operation: all_gather, protocol: CE",
    "two_shot_pull_hb": "operation: all_reduce, protocol: HB, blocks: 7, tile_lines: 90",
    "two_shot_port": "operation: all_reduce, protocol: Port, blocks: 6, tile_lines: 70, depth: 2",
    "two_shot_ce": "operation: all_reduce, protocol: CE, blocks: 6, tile_lines: 70, depth: 2",
}


@dataclass(frozen=True)
class Case:
    """One call. The whole tensor has shape [rows, all parts, inner]; elements of a rank's part: rows x size x inner.

    ``offsets``: elements from a 16-byte boundary, of input and output.
    """

    number: int
    kind: str
    algorithm: str
    dtype: torch.dtype
    values: Values
    rows: int
    sizes: tuple[int, ...]
    inner: int
    offsets: tuple[int, int]
    replays: int  # 0: eager

    @property
    def gathers(self) -> bool:
        return self.kind == "all_gather" or self.algorithm.startswith("direct")

    @property
    def whole(self) -> int:
        return self.rows * sum(self.sizes) * self.inner

    @property
    def exchanges(self) -> bool:
        return self.kind in ("all_to_all", "all_to_all_v")

    def part_of(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        shaped = whole.view(self.rows, sum(self.sizes), self.inner)
        return shaped.narrow(1, sum(self.sizes[:rank]), self.sizes[rank]).flatten()

    def __str__(self) -> str:
        return (
            f"{self.kind} by {self.algorithm}, {str(self.dtype).removeprefix('torch.')}, rows {self.rows}, sizes "
            f"{self.sizes} x {self.inner}, offsets {self.offsets}, {self.replays} replays, {self.values}"
        )


def draw_case(number: int, kind: str, options: argparse.Namespace, world: int) -> Case:
    rng = random.Random(f"{options.seed}/{kind}/{number}")
    algorithm = rng.choice(ALGORITHMS[kind])
    dtype = rng.choice((torch.bfloat16, torch.float16, torch.float32))
    most = int(2 ** rng.uniform(0, options.max_count.bit_length() - 1))
    rows = rng.choice((1, 1, 1, rng.randint(2, 9)))
    inner = rng.choice((1, 1, 8, rng.randint(2, 100), 128))
    offsets = (rng.choice((0, 0, rng.randrange(8))), rng.choice((0, 0, rng.randrange(8))))
    if kind == "symmetric":  # whole lines in one piece, from a boundary of them
        rows, inner, offsets = 1, 8, (0, 0)
    exchanges = kind in ("all_to_all", "all_to_all_v")
    if exchanges:
        rows = 1
    longest = max(1, most // (rows * inner * world))
    even = rng.random() < 0.5 or exchanges
    sizes = tuple(longest if even else rng.choice((0, 1, rng.randint(0, longest), longest)) for _ in range(world))
    if sum(sizes) == 0:
        sizes = (1,) * world
    replays = rng.choice((1, 2, 3)) if rng.random() < options.graph_share else 0
    return Case(number, kind, algorithm, dtype, draw_values(rng, dtype), rows, sizes, inner, offsets, replays)


class Buffer:
    """So many elements in the symmetric heap, poisoned, as `Guarded` is."""

    def __init__(self, memory: torch.Tensor, count: int, dtype: torch.dtype, first: int) -> None:
        self._bytes = memory[first : first + count * dtype.itemsize]
        self.data = self._bytes.view(dtype)
        self.poison()

    def poison(self) -> None:
        self._bytes.fill_(0xA5)

    def damage(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.int64, device=self._bytes.device)


class Runner:
    def __init__(
        self, ranks: Session, communicators: dict[str, Communicator], options: argparse.Namespace, kind: str
    ) -> None:
        self._ranks, self._communicators, self._seed = ranks, communicators, options.seed
        self._inputs = Inputs(ranks.device, ranks.world)
        self._pool = GraphPool(ranks.device)
        self._weights = weights_of(options.max_count + 128 * ranks.world, ranks.device)
        self._memory: dict[str, torch.Tensor] = {}
        if kind == "symmetric":  # empty() is collective, and slow
            nbytes = 4 * (options.max_count + 1024 * ranks.world) * 2
            self._memory = {name: comm.empty(nbytes, torch.uint8) for name, comm in communicators.items()}
        self.verdicts = Verdicts(ranks)
        self.calls: Counter[tuple[str, str]] = Counter()

    def run(self, case: Case) -> None:
        rank, comm = self._ranks.rank, self._communicators[case.algorithm]
        part = case.rows * case.sizes[rank] * case.inner
        source = self._buffer(case, part if case.gathers else case.whole, 0)
        target = self._buffer(case, part if case.kind == "reduce_scatter" else case.whole, 1)
        size_dtype = (torch.int64, torch.int32)[case.number % 2]
        sizes = [torch.zeros(comm.world_size, dtype=size_dtype, device=self._ranks.device) for _ in range(2)]

        def call() -> torch.Tensor:
            return self._call(comm, case, source.data, target.data, sizes)

        recording = Recording(call, self._ranks.device, self._pool.handle) if case.replays else None
        for replay in range(max(1, case.replays)):
            rows = self._rows(case, replay)
            if case.kind == "symmetric" and case.whole:
                self._expect_algorithm(comm, case, source.data)
            given = case.part_of(rows[rank], rank) if case.gathers else rows[rank]
            source.poison()
            target.poison()
            source.data.copy_(given)
            matrix = self._sizes(case, replay)
            for kept, new in zip(sizes, (matrix[rank], [of_sender[rank] for of_sender in matrix]), strict=True):
                kept.copy_(torch.tensor(new))
            result = call() if recording is None else recording.replay()
            if case.algorithm in BY_PROXY:
                self._ranks.synchronize()
            expected = self._expected(case, rows, matrix)
            where = Where(case.number, f"{case.kind}, replay {replay}", case, case.algorithm)
            is_exact = (case.gathers or case.exchanges) and case.algorithm != QUANTIZED
            wrong = (bits(result.flatten()) != bits(expected)) if is_exact else differs(result.flatten(), expected)
            changed = (bits(source.data) != bits(given)).sum()
            nothing = torch.zeros((), dtype=torch.int64, device=result.device)
            digest = nothing
            if case.kind != "reduce_scatter" and not case.exchanges:  # the ranks have parts of their own
                digest = (bits(result.flatten()).to(torch.int64) * self._weights[: len(expected)]).sum()
            self.verdicts.add(where, [wrong.sum(), nothing, source.damage() + target.damage(), changed], digest)
        self.calls[case.algorithm, "graph" if case.replays else "eager"] += 1

    def _call(
        self, comm: Communicator, case: Case, x: torch.Tensor, out: torch.Tensor, sizes: list[torch.Tensor]
    ) -> torch.Tensor:
        own, everything = case.sizes[self._ranks.rank], sum(case.sizes)
        part, whole = (case.rows, own, case.inner), (case.rows, everything, case.inner)
        if case.gathers:
            result = comm.all_gather(x.view(part), 1, case.sizes, out.view(whole), lossy=case.algorithm == QUANTIZED)
        elif case.kind == "reduce_scatter":
            result = comm.reduce_scatter(x.view(whole), 1, case.sizes, out.view(part))
        elif case.kind == "all_to_all":
            result = comm.all_to_all(x.view(whole[1:]), out=out.view(whole[1:]))
        elif case.kind == "all_to_all_v":
            result = comm.all_to_all(x.view(whole[1:]), *sizes, case.sizes[0], out.view(whole[1:]))
        else:
            result = comm.all_reduce(x, out)
        assert isinstance(result, torch.Tensor)
        return result

    def _expect_algorithm(self, comm: Communicator, case: Case, x: torch.Tensor) -> None:
        plan = comm.plan_all_gather(x.view(1, -1, case.inner), 1, case.sizes) if case.gathers else comm.plan(x)
        lines = case.whole * case.dtype.itemsize // 16
        slice_lines = -(-lines // comm.world_size)
        if case.algorithm == "two_shot_ce" and comm.world_size > 2 and (comm.world_size - 1) * slice_lines > lines:
            return  # the slices of all ranks but the last have to be whole
        if plan.symmetric != case.algorithm:
            raise AssertionError(f"{plan.symmetric} would run, not {case.algorithm}")

    def _buffer(self, case: Case, count: int, number: int) -> Guarded | Buffer:
        if case.kind != "symmetric":
            return Guarded(count, case.dtype, case.offsets[number], self._ranks.device)
        memory = self._memory[case.algorithm]
        return Buffer(memory, count, case.dtype, number * (memory.numel() // 2))

    def _rows(self, case: Case, replay: int) -> torch.Tensor:
        """Of all ranks: what each has of a whole tensor."""
        seed = random.Random(f"{self._seed}/{case.kind}/{case.number}/{replay}").getrandbits(62)
        return self._inputs.rows(case.values, case.whole, case.dtype, seed)

    def _sizes(self, case: Case, replay: int) -> list[list[int]]:
        """Sizes of parts on the device, by sender and receiver."""
        rng = random.Random(f"{self._seed}/sizes/{case.number}/{replay}")
        longest = case.sizes[0]
        return [[rng.choice((0, 1, longest, rng.randint(0, longest))) for _ in case.sizes] for _ in case.sizes]

    def _expected(self, case: Case, rows: torch.Tensor, matrix: list[list[int]]) -> torch.Tensor:
        if case.kind == "all_to_all_v":
            own, parts = self._ranks.rank, []
            for sizes, row in zip(matrix, rows, strict=True):
                parts.append(row.view(-1, case.inner).narrow(0, sum(sizes[:own]), sizes[own]).flatten())
            expected = torch.full((case.whole * case.dtype.itemsize,), POISON, dtype=torch.uint8, device=rows.device)
            expected = expected.view(case.dtype)
            received = torch.cat(parts)
            expected[: len(received)] = received
            return expected
        if case.kind == "all_to_all":
            return torch.cat([case.part_of(row, self._ranks.rank) for row in rows])
        if not case.gathers:
            if case.algorithm == QUANTIZED:
                own = self._ranks.rank
                return quantized_shard([case.part_of(row, own) for row in rows], own, FORMAT_OF_WIRE["fp8"])
            total = rank_order_sum(rows)
            return case.part_of(total, self._ranks.rank) if case.kind == "reduce_scatter" else total
        parts = [case.part_of(row, rank) for rank, row in enumerate(rows)]
        if case.algorithm == QUANTIZED:  # each part is the quantized sum of one contribution
            parts = [quantized_all_reduce([part], FORMAT_OF_WIRE["fp8"]) for part in parts]
        return torch.cat([part.view(case.rows, -1, case.inner) for part in parts], 1).flatten()


def table_of(algorithm: str) -> str:
    """The odd table. Its rows for all-gather give way to one that names the algorithm."""
    row = ODD_ROWS.get(algorithm)
    if row is None:
        return ODD_TABLE
    lines = [line for line in ODD_TABLE.splitlines() if algorithm != "port" or "operation: all_gather" not in line]
    return "\n".join([*lines, f"  - {{algorithm: {algorithm}, up_to: 1073741824, {row}}}", ""])


@contextlib.contextmanager
def open_communicators(ranks: Session, kind: str) -> Iterator[dict[str, Communicator]]:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:

        def make(name: str) -> Communicator:
            table = Path(directory, f"{name}.yaml")
            table.write_text(table_of(name), encoding="utf-8")
            wire = "fp8" if name == QUANTIZED else "none"
            return Communicator(ranks.group, ranks.device, Config.load(table=str(table), algorithm=name, wire=wire))

        yield {name: stack.enter_context(make(name)) for name in ALGORITHMS[kind]}


def run_kind(ranks: Session, kind: str, options: argparse.Namespace) -> dict[str, object]:
    begin = time.monotonic()
    failures: list[str] = []
    done = 0
    with open_communicators(ranks, kind) as communicators:
        runner = Runner(ranks, communicators, options, kind)
        numbers = range(options.cases) if options.only is None else [options.only]
        for number in numbers:
            case = draw_case(number, kind, options, ranks.world)
            ranks.watchdog.progress(f"case {number}")
            try:
                runner.run(case)
            except Exception as error:
                raise AssertionError(f"rank {ranks.rank}: case {number}, {case} failed") from error
            done += 1
            if done % SETTLE_EVERY == 0 or done == len(numbers):
                failures += runner.verdicts.settle()
                for communicator in communicators.values():
                    communicator.check()
                if len(failures) > MOST_FAILURES or ranks.is_late(options):
                    break
        calls = {"/".join(key): number for key, number in sorted(runner.calls.items())}
        del runner  # and its symmetric tensors
    if ranks.rank == 0:
        for failure in failures[:MOST_FAILURES]:
            print(f"WRONG {failure}", file=sys.stderr)
    seconds = round(time.monotonic() - begin, 1)
    return {"cases": done, "wrong_results": len(failures), "seconds": seconds, "calls": calls}


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    add_seconds(options)
    options.add_argument("--operation", choices=KINDS, action="append", help="default: all, one after the other")
    options.add_argument("--cases", type=int, help="of each; default: 1000 on GPUs, 60 on a shared or emulated one")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", type=int, metavar="CASE", help="run this case alone")
    options.add_argument("--max-count", type=int, help="elements; default: 4M on GPUs, 128K on a shared one, else 4K")
    options.add_argument("--graph-share", type=float, default=0.25)
    arguments = options.parse_args()
    with session(arguments) as ranks:
        alone = ranks.on_gpu and not ranks.shares_gpu
        if arguments.cases is None:
            arguments.cases = 1000 if alone else 60
        if arguments.max_count is None:
            arguments.max_count = 1 << (22 if alone else 17 if ranks.on_gpu else 12)
        figures = {kind: run_kind(ranks, kind, arguments) for kind in arguments.operation or KINDS}
        if ranks.rank == 0:
            names = ("cases", "wrong_results", "seconds")
            table = [("operation", *names)]
            table += [(kind, *(str(figure[name]) for name in names)) for kind, figure in figures.items()]
            report("random parts", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 1 if any(figure["wrong_results"] for figure in figures.values()) else 0


if __name__ == "__main__":
    run(main)
