"""`Communicator.release` and `restore`: the memory of the workspaces goes back to the device and comes again, and CUDA
graphs that were captured before replay rightly afterwards.

    torchrun --standalone --nproc-per-node 2 tests/gpu/release.py
    torchrun --standalone --nproc-per-node 8 tests/gpu/release.py --cycles 20

Ranks share a GPU where there are fewer. For each algorithm, and for heaps and port channels:

- what cudaMemGetInfo calls free grows by the workspaces, but for a granule (2 MiB) of each rank, and shrinks again;
- a replay while they are released ends at once without a CUDA error and writes nothing;
- eager calls and replays after it are right, cycle after cycle.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common import Recording, Session, error_of, expect, parser, report, run, session
from values import Inputs, Sums, Values

from llm_comm import Communicator, Config, LlmCommError

MIB = 1 << 20
GRANULE_BYTES = 2 * MIB
#: Of device memory, by chance: pools of the driver.
SLACK_BYTES = 8 * MIB
PLAIN = Values("normal", 0, 1)
TIMEOUT_S = 20.0
AT_ONCE_S = TIMEOUT_S / 4
COUNTS = (1, 4096, 10_018, 300_001)
HIDDEN = 1024
ALGORITHMS = ("one_shot", "two_shot", "one_shot_hb", "two_shot_hb", "port")
#: Of symmetric tensors.
SYMMETRIC = ("auto", "two_shot_ce")


class Calls:
    """All-reduces of several sizes and a fused one, as a graph and eagerly.

    Args:
        symmetric: Whether the tensors lie in symmetric memory.
    """

    def __init__(self, ranks: Session, comm: Communicator, symmetric: bool) -> None:
        self._ranks, self._comm = ranks, comm
        inputs = Inputs(ranks.device, ranks.world)
        self._rows = [inputs.rows(PLAIN, count, torch.bfloat16, seed) for seed, count in enumerate(COUNTS)]
        new = (lambda x: comm.empty(x.shape, x.dtype)) if symmetric else torch.empty_like
        self._x = [new(rows[0]).copy_(rows[ranks.rank]) for rows in self._rows]
        self._outputs = [new(x) for x in self._x]
        self._normed = torch.empty(4, HIDDEN, dtype=torch.bfloat16, device=ranks.device)
        self._ones = torch.ones_like(self._normed)
        self._make()  # not in a capture
        self._recording = Recording(self._make, ranks.device)

    def _make(self) -> None:
        for x, out in zip(self._x, self._outputs, strict=True):
            self._comm.all_reduce(x, out)
        self._comm.all_reduce_add_rms_norm(self._ones, None, self._ones[0], 0.0, out=self._normed)

    def _forget(self) -> None:
        for out in (*self._outputs, self._normed):
            out.fill_(-7)

    def expect_right(self, replays: bool, what: str) -> None:
        self._forget()
        self._recording.replay() if replays else self._make()
        self._ranks.synchronize()
        self._comm.check()
        sums = Sums()
        for rows, out in zip(self._rows, self._outputs, strict=True):
            sums.expect(out, rows, f"{what}, {out.numel()}")
        sums.check()
        expect(bool(self._normed.eq(1).all()), f"{what}, fused")

    def expect_nothing(self) -> None:
        """Of a replay while the workspaces are released."""
        if not self._ranks.on_gpu:
            return
        self._forget()
        begin = time.monotonic()
        self._recording.replay()
        self._ranks.synchronize()
        seconds = time.monotonic() - begin
        expect(seconds < AT_ONCE_S, f"a replay while released took {seconds:.1f} s")


def make(ranks: Session, algorithm: str) -> Communicator:
    config = Config.load(timeout_s=TIMEOUT_S, share_gpu=ranks.shares_gpu, log="error", algorithm=algorithm)
    comm = Communicator(ranks.group, ranks.device, config)
    comm.use_table(comm.table._replace(min_symmetric_bytes=0))
    return comm


def free_bytes(ranks: Session) -> int:
    """Of this rank's device, when all ranks have come here."""
    ranks.synchronize()
    ranks.barrier()
    free = torch.cuda.mem_get_info()[0] if ranks.on_gpu else 0
    ranks.barrier()
    return free


def cycle(ranks: Session, comm: Communicator, calls: Calls, what: str) -> int:
    """A release and a restore. Returns how many bytes came back to the device."""
    before = free_bytes(ranks)
    whole = comm.workspace_bytes
    comm.release()
    gained = free_bytes(ranks) - before
    on_this_gpu = ranks.world if ranks.shares_gpu else 1
    wanted = on_this_gpu * (whole - GRANULE_BYTES) - SLACK_BYTES
    if ranks.on_gpu and comm.memory_kind == "VMM":
        expect(gained >= wanted, f"{what}: {gained} bytes came back, not {wanted}")
    text = error_of(RuntimeError, lambda: comm.all_reduce(torch.ones(COUNTS[1], device=ranks.device)))
    expect("is released" in text, text)
    calls.expect_nothing()
    ranks.barrier()
    comm.restore()
    kept = free_bytes(ranks) - before
    expect(abs(kept) <= SLACK_BYTES or not ranks.on_gpu, f"{what}: {kept} bytes are missing, or too many are free")
    return gained


def algorithm_cycles(ranks: Session, algorithm: str, cycles: int, symmetric: bool = False) -> int:
    gained = 0
    with make(ranks, algorithm) as comm:
        calls = Calls(ranks, comm, symmetric)
        if symmetric and algorithm != "auto":
            chosen = comm.plan(torch.empty(COUNTS[-1], dtype=torch.bfloat16, device=ranks.device)).symmetric
            expect(chosen == algorithm, f"{chosen or 'none'} would run, not {algorithm}")
        calls.expect_right(True, f"{algorithm}, before")
        for number in range(cycles):
            gained = cycle(ranks, comm, calls, algorithm)
            calls.expect_right(True, f"{algorithm}, replay after cycle {number}")
            calls.expect_right(False, f"{algorithm}, eager after cycle {number}")
        ranks.barrier()
    return gained


def closed_while_released(ranks: Session) -> int:
    """The graph outlives the communicator: a replay does nothing."""
    comm = make(ranks, "auto")
    calls = Calls(ranks, comm, symmetric=False)
    calls.expect_right(True, "before")
    before = free_bytes(ranks)
    comm.release()
    ranks.barrier()
    comm.close()
    gained = free_bytes(ranks) - before
    calls.expect_nothing()
    ranks.barrier()
    with make(ranks, "auto") as another:
        Calls(ranks, another, symmetric=False).expect_right(True, "another communicator")
        ranks.barrier()
    return gained


def refused_in_a_capture(ranks: Session) -> int:
    if not ranks.on_gpu:
        return 0
    with make(ranks, "auto") as comm:
        calls = Calls(ranks, comm, symmetric=False)
        text = ""

        def capture() -> None:
            nonlocal text
            text = error_of(LlmCommError, comm.release)

        Recording(capture, ranks.device)
        expect("a CUDA graph is being captured" in text, text)
        calls.expect_right(True, "after a refusal")
        ranks.barrier()
    return 0


def main() -> int:
    options = parser("The workspaces' memory given back and taken again, and CUDA graphs across it.")
    options.add_argument("--cycles", type=int, default=3, help="releases for each algorithm (%(default)s)")
    arguments = options.parse_args()
    rows, figures = [["part", "seconds", "MiB that came back"]], {}
    with session(arguments) as ranks:
        parts: dict[str, Callable[[], int]] = {
            each: lambda each=each: algorithm_cycles(ranks, each, arguments.cycles)  # type: ignore[misc]
            for each in ALGORITHMS
        }
        for each in SYMMETRIC:
            parts[f"symmetric tensors, {each}"] = lambda each=each: algorithm_cycles(  # type: ignore[misc]
                ranks, each, arguments.cycles, symmetric=True
            )
        parts["closed while released"] = lambda: closed_while_released(ranks)
        parts["refused in a capture"] = lambda: refused_in_a_capture(ranks)
        for name, part in parts.items():
            ranks.barrier()
            begin = time.monotonic()
            gained = part()
            ranks.watchdog.progress(name)
            seconds = time.monotonic() - begin
            rows.append([name, f"{seconds:.1f}", f"{gained / MIB:.0f}"])
            figures[name] = {"seconds": round(seconds, 2), "bytes": gained}
        ranks.barrier()
        if ranks.rank == 0:
            report("release", ranks.device.type, ranks.world, rows, figures, arguments.json)
    return 0


if __name__ == "__main__":
    run(main)
