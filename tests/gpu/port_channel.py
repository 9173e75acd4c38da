"""Port channels on GPUs: the primitive, and the algorithms that use it, in eager mode and in CUDA graphs.

    python tests/gpu/port_channel.py --primitive                                   # needs nvcc
    torchrun --standalone --nproc-per-node 2 tests/gpu/port_channel.py
    torchrun --standalone --nproc-per-node 2 tests/gpu/port_channel.py --bench     # needs a GPU for each rank

The primitive: two GPUs of one process, or twice the only one, swap buffers by put, signal, wait and flush
(tests/port_channel). The algorithms: all-reduces bitwise equal to those of the LL algorithm, in and out of place, and
all-gathers, of all sizes, in turn with LL; a flood of eager calls; a graph that outlives its communicator.
``--bench`` times the choices that the registry offers.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Recording, Session, parser, report, run, session, wants_cuda
from user_kernels import nvcc_path

from llm_comm import Communicator, Config, _core, registry

TESTS = Path(__file__).parents[1]
CSRC = TESTS.parent / "csrc"
PORT = "port"
TIMEOUT_S = 20.0
#: Of whichever rank's part, of bf16 or of bytes.
COUNTS = (1, 7, 4096, 100_003, 1 << 20, (5 << 20) + 13)
COUNTS_EMULATED = (1, 7, 10_003)
#: Eager calls that are enqueued without a pause: more than fit into the queue of a GPU.
FLOOD = 3000
BENCH_BYTES = tuple(1 << power for power in range(22, 29))
BENCH_CALLS = 10
BENCH_REPLAYS = 7


# ---- The primitive -------------------------------------------------------------------------------------------------


def primitive(arguments: argparse.Namespace) -> int:
    """Compiles tests/port_channel with the proxy and the copy engines of this checkout, and runs it."""
    if not wants_cuda(arguments.device):
        raise SystemExit("--primitive needs a GPU; tests/emulated/test_ports.py runs it on emulated ones")
    nvcc = nvcc_path()
    if nvcc is None:
        raise SystemExit("nvcc is not on the PATH; it comes with the CUDA toolkit")
    major, minor = torch.cuda.get_device_capability(0)
    sources = [TESTS / "port_channel" / "gpu_main.cu", CSRC / "host" / "proxy.cpp", CSRC / "host" / "port_batch.cpp"]
    sources += [CSRC / "host" / "cuda" / f"{name}.cpp" for name in ("copy_engines", "driver")]
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory, "exchange")
        flags = ["-std=c++20", f"-arch=sm_{major}{minor}", "-I", str(CSRC), "-I", str(CSRC / "include")]
        subprocess.run([nvcc, *flags, *map(str, sources), "-o", str(program)], check=True, timeout=300)
        done = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    print(done.stdout + done.stderr, flush=True)
    table = [("program", "outcome"), ("exchange", "ok" if done.returncode == 0 else "FAIL")]
    figures = {"status": done.returncode, "printed": done.stdout}
    report("port_channel --primitive", "cuda", 2, table, figures, arguments.json)
    return done.returncode


# ---- Calls by the core ---------------------------------------------------------------------------------------------


class TuningParameters(NamedTuple):
    blocks: int
    tile_lines: int
    depth: int


def number_of(operation: str, algorithm: str) -> int:
    return next(a.number for a in registry.operations()[operation].algorithms if a.name == algorithm)


class Caller:
    """Calls of algorithms by name, on the current stream."""

    def __init__(self, ranks: Session, communicator: Communicator) -> None:
        self._ranks = ranks
        self._communicator = communicator
        self._prepared: dict[Any, Callable[..., bool]] = {}

    def all_reduce(self, algorithm: str, x: torch.Tensor, out: torch.Tensor, choice: TuningParameters) -> None:
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        problem = self.problem(x.numel(), names[x.dtype])
        self._run("all_reduce", algorithm, (x.numel(), x.dtype), problem, choice, (x, out))

    def all_gather(
        self, algorithm: str, part: torch.Tensor, out: torch.Tensor, sizes: Sequence[int], choice: TuningParameters
    ) -> None:
        """Bytes, one row."""
        parameters = (1, *sizes, *[0] * (8 - len(sizes)))
        problem = self.problem(max(sizes), "byte", parameters)
        self._run("all_gather", algorithm, tuple(sizes), problem, choice, (part, out))

    def problem(self, count: int, data_type: str, parameters: Sequence[float] = ()) -> _core.Problem:
        types = tuple(registry.data_types())
        return _core.Problem(
            count=count,
            row=0,
            data_type=types.index(data_type),
            world_size=self._ranks.world,
            parameters=parameters,
        )

    def _run(
        self, operation: str, algorithm: str, key: Any, problem: _core.Problem, choice: TuningParameters, buffers: Any
    ) -> None:
        key = (operation, algorithm, choice, key)
        if key not in self._prepared:
            number = number_of(operation, algorithm)
            chosen = _core.TuningParameters(**choice._asdict())
            tiling = _core.shape(number, problem, chosen, self._communicator.limits).tiling
            self._prepared[key] = self._communicator._handle.core().prepare(number, problem, tiling)
        stream = torch.cuda.current_stream().cuda_stream if self._ranks.on_gpu else 0
        if not self._prepared[key](*(buffer.data_ptr() for buffer in buffers), stream):
            self._communicator.check()
            raise AssertionError("a call was not enqueued, and there is no error")

    def forget(self) -> None:
        self._prepared.clear()


def make(ranks: Session) -> Communicator:
    return Communicator(ranks.group, ranks.device, Config.load(timeout_s=TIMEOUT_S))


# ---- What is right -------------------------------------------------------------------------------------------------


class Checks:
    """Counts what was right, and fails where something was not."""

    def __init__(self) -> None:
        self.count = 0

    def expect(self, out: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        same = torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
        if not same:
            wrong = (out.view(torch.uint8) != expected.view(torch.uint8)).nonzero()
            raise AssertionError(f"{what}: {len(wrong)} bytes differ, the first at {int(wrong[0])}")
        self.count += 1


class Case:
    """One call of each operation, its inputs and what it has to give."""

    def __init__(self, ranks: Session, caller: Caller, count: int, choice: TuningParameters, seed: int) -> None:
        self._ranks, self._caller, self._choice = ranks, caller, choice
        generator = torch.Generator(ranks.device).manual_seed(1000 * seed + ranks.rank)
        self.x = torch.randn(count, generator=generator, device=ranks.device).to(torch.bfloat16)
        self.sums = torch.empty_like(self.x)
        self.in_place = torch.empty_like(self.x)
        self.expected_sums = torch.empty_like(self.x)
        # Uneven: the last rank has less.
        self.sizes = [count] * (ranks.world - 1) + [count // 3]
        offsets = [sum(self.sizes[:rank]) for rank in range(ranks.world + 1)]
        self.expected_parts = torch.empty(offsets[-1], dtype=torch.uint8, device=ranks.device)
        for rank in range(ranks.world):
            seeded = torch.Generator(ranks.device).manual_seed(7000 * seed + rank)
            drawn = torch.randint(0, 256, (self.sizes[rank],), generator=seeded, device=ranks.device)
            self.expected_parts[offsets[rank] : offsets[rank + 1]] = drawn
        own = self.expected_parts[offsets[ranks.rank] : offsets[ranks.rank + 1]]
        self.part = torch.zeros(max(1, own.numel()), dtype=torch.uint8, device=ranks.device)  # never without memory
        self.part[: own.numel()] = own
        self.parts = torch.empty_like(self.expected_parts)

    def call(self) -> None:
        """What may be recorded."""
        self.in_place.copy_(self.x)
        self._caller.all_reduce(PORT, self.x, self.sums, self._choice)
        self._caller.all_reduce("one_shot", self.x, self.expected_sums, TuningParameters(8, 16, 0))
        self._caller.all_reduce(PORT, self.in_place, self.in_place, self._choice)
        self._caller.all_gather(PORT, self.part, self.parts, self.sizes, self._choice)

    def check(self, checks: Checks, how: str) -> None:
        what = f"{how}, {self.x.numel()} elements, {self._choice}"
        checks.expect(self.sums, self.expected_sums, f"all-reduce, {what}")
        checks.expect(self.in_place, self.expected_sums, f"all-reduce in place, {what}")
        checks.expect(self.parts, self.expected_parts, f"all-gather, {what}")
        for out in (self.sums, self.in_place, self.expected_sums, self.parts):
            out.fill_(1)


def choices(ranks: Session) -> tuple[TuningParameters, ...]:
    if not ranks.on_gpu:
        return (TuningParameters(2, 16, 1),)
    return (
        TuningParameters(1, 64, 1),
        TuningParameters(8, 1024, 1),
        TuningParameters(16, 4096, 3),
        TuningParameters(32, 1 << 16, 1),
    )


def check_calls(ranks: Session) -> int:
    """Every case eagerly, then all in one graph that is replayed between eager calls."""
    checks = Checks()
    counts = COUNTS if ranks.on_gpu else COUNTS_EMULATED
    with make(ranks) as communicator:
        caller = Caller(ranks, communicator)
        drawn = [(count, choice) for count in counts for choice in choices(ranks)]
        cases = [Case(ranks, caller, count, choice, seed) for seed, (count, choice) in enumerate(drawn)]
        for case in cases:
            case.call()
            case.check(checks, "eager")
            ranks.watchdog.progress(f"eager, {case.x.numel()} elements")

        def calls() -> None:
            for case in cases:
                case.call()

        recording = Recording(calls, ranks.device)
        for replay in range(3):
            recording.replay()
            ranks.synchronize()
            for case in cases:
                case.check(checks, f"replay {replay}")
            cases[replay].call()
            cases[replay].check(checks, "eager between replays")
            ranks.watchdog.progress(f"replay {replay}")
        communicator.check()
        ranks.barrier()
        caller.forget()
    return checks.count


def check_flood(ranks: Session) -> int:
    """Eager calls by the thousand without a pause. The launches of kernels fill the queue of the GPU, and the proxy has
    to get its copies through."""
    calls = FLOOD if ranks.on_gpu and not ranks.shares_gpu else 50
    checks = Checks()
    with make(ranks) as communicator:
        caller = Caller(ranks, communicator)
        case = Case(ranks, caller, 30_000, choices(ranks)[-1], 99)
        for call in range(calls):
            caller.all_gather(PORT, case.part, case.parts, case.sizes, choices(ranks)[-1])
            if call % 100 == 0:
                ranks.watchdog.progress(f"call {call}")
        ranks.synchronize()
        communicator.check()
        checks.expect(case.parts, case.expected_parts, "all-gather after a flood")
        ranks.barrier()
        caller.forget()
    return calls


def check_graph_outlives(ranks: Session) -> float:
    """A replay after close() does nothing, at once. Returns its seconds."""
    communicator = make(ranks)
    caller = Caller(ranks, communicator)
    case = Case(ranks, caller, 50_000, choices(ranks)[0], 5)
    case.call()
    recording = Recording(case.call, ranks.device)
    recording.replay()
    ranks.synchronize()
    case.check(Checks(), "before close()")
    ranks.barrier()
    caller.forget()
    communicator.close()
    if not ranks.on_gpu:
        return 0.0
    begin = time.monotonic()
    recording.replay()
    ranks.synchronize()
    seconds = time.monotonic() - begin
    if seconds > TIMEOUT_S / 4:
        raise AssertionError(f"a replay without a communicator took {seconds:.1f} s: something waited")
    with make(ranks) as again:
        other = Caller(ranks, again)
        fresh = Case(ranks, other, 50_000, choices(ranks)[0], 6)
        fresh.call()
        fresh.check(Checks(), "with a new communicator")
        ranks.barrier()
        other.forget()
    return seconds


# ---- What is fast --------------------------------------------------------------------------------------------------


def time_us(ranks: Session, call: Callable[[], None]) -> float:
    """Of one of BENCH_CALLS calls in a graph, the median of the replays, on the slowest rank."""

    def calls() -> None:
        for _ in range(BENCH_CALLS):
            call()

    call()
    recording = Recording(calls, ranks.device)
    times = []
    for _ in range(BENCH_REPLAYS):
        ranks.synchronize()
        ranks.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call()  # the ranks begin together
        begin.record()
        recording.replay()
        end.record()
        ranks.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / BENCH_CALLS)
    return float(ranks.gather(torch.tensor([sorted(times)[len(times) // 2]])).max())


def bench_size(ranks: Session, communicator: Communicator, size: int) -> dict[str, dict[str, float]]:
    """By operation: microseconds of each choice, for inputs of so many bytes."""
    caller = Caller(ranks, communicator)
    x = torch.zeros(size // 2, dtype=torch.bfloat16, device=ranks.device)
    out = torch.empty_like(x)
    parts = torch.empty(size * ranks.world, dtype=torch.uint8, device=ranks.device)
    sizes = [size] * ranks.world
    calls: dict[str, tuple[_core.Problem, Callable[[TuningParameters], None]]] = {
        "all_reduce": (
            caller.problem(size // 2, "bf16"),
            lambda choice: caller.all_reduce(PORT, x, out, choice),
        ),
        "all_gather": (
            caller.problem(size, "byte", (1, *sizes, *[0] * (8 - ranks.world))),
            lambda choice: caller.all_gather(PORT, x.view(torch.uint8), parts, sizes, choice),
        ),
    }
    figures: dict[str, dict[str, float]] = {}
    for operation, (problem, call) in calls.items():
        for candidate in _core.candidates(number_of(operation, PORT), problem, communicator.limits):
            choice = TuningParameters(candidate.blocks, candidate.tile_lines, candidate.depth)
            us = time_us(ranks, functools.partial(call, choice))
            figures.setdefault(operation, {})[str(tuple(choice))] = round(us, 2)
            ranks.watchdog.progress(f"{operation} of {size} bytes, {choice}")
    caller.forget()
    return figures


def bench(ranks: Session) -> dict[str, Any]:
    """By operation and bytes of a rank's input: microseconds of each choice."""
    figures: dict[str, Any] = {}
    with make(ranks) as communicator:
        for size in BENCH_BYTES:
            for operation, times in bench_size(ranks, communicator, size).items():
                figures.setdefault(operation, {})[str(size)] = times
        communicator.check()
        ranks.barrier()
    return figures


def bench_table(ranks: Session, figures: dict[str, Any]) -> list[tuple[str, ...]]:
    """The best choice of each size, and what a rank sends (and receives) a second."""
    rows: list[tuple[str, ...]] = [("operation", "bytes", "us", "GB/s each way", "blocks, tile_lines, depth")]
    for operation, sizes in figures.items():
        for size, times in sizes.items():
            best = min(times, key=times.get)
            sent = int(size) * (ranks.world - 1)
            if operation == "all_reduce":
                sent = 2 * int(size) * (ranks.world - 1) // ranks.world
            rows.append((operation, size, f"{times[best]:.1f}", f"{sent / times[best] / 1000:.0f}", best))
    return rows


def rank_main(arguments: argparse.Namespace) -> int:
    with session(arguments, measures=arguments.bench) as ranks:
        if arguments.bench:
            figures = bench(ranks)
            table = bench_table(ranks, figures)
        else:
            figures = {"right results": check_calls(ranks)}
            figures["calls of the flood"] = check_flood(ranks)
            figures["replay after close(), s"] = round(check_graph_outlives(ranks), 3)
            table = [("check", "figure"), *((name, str(value)) for name, value in figures.items())]
        if ranks.rank == 0:
            report("port_channel", ranks.device.type, ranks.world, table, figures, arguments.json)
    return 0


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--primitive", action="store_true", help="compile and run the kernels of the primitive")
    options.add_argument("--bench", action="store_true", help="time the algorithms, not check them")
    arguments = options.parse_args()
    return primitive(arguments) if arguments.primitive else rank_main(arguments)


if __name__ == "__main__":
    run(main)
