"""The programs of the DSL's library, compiled: bitwise what the communicator's own operations return, eager and in
graphs; and, with ``--time``, how long they take beside the hand-written algorithm of the same kind, and beside what the
communicator selects.

    torchrun --standalone --nproc-per-node 2 tests/gpu/dsl_programs.py [--calls 12] [--time] [--json FILE]

Ranks share a GPU where there are fewer. cupy compiles on GPUs, the C++ compiler for emulated ones. Times are aligned,
of CUDA graphs, and say nothing where ranks share a GPU.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch
from common import Recording, Session, parser, report, run, session

from llm_comm import Communicator, Config, dsl
from llm_comm.bench import timing
from llm_comm.dsl.compiled import Compiled
from llm_comm.dsl.compiled import compile as compile_program
from llm_comm.dsl.ir import Operation
from llm_comm.dsl.library import PROGRAMS
from llm_comm.dsl.programs import ProgramDefinition

#: They do not add in the order of the ranks: whole numbers, whose sums are exact, tell whether they add all.
ADD_IN_ANOTHER_ORDER = ("ring_ll", "hierarchical_ll")
#: Programs for so many ranks only as their text allows.
FOR_EVEN_WORLDS = ("hierarchical_ll",)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_BYTES, MOST_OF_SHARED, MOST_OF_EMULATED = 16 << 20, 256 << 10, 16 << 10
TIMED_SIZES = tuple(1 << power for power in range(10, 25))
#: Of an all-reduce: the algorithm that does the same.
COUNTERPARTS = {
    "one_shot_ll": "one_shot",
    "one_shot_hb": "one_shot_hb",
    "two_shot_ll": "two_shot",
    "two_shot_hb": "two_shot_hb",
}


def draw(dice: random.Random, text: ProgramDefinition, dtype: torch.dtype, most: int, ranks: Session) -> torch.Tensor:
    """The input of this rank: of a size that all draw alike."""
    world = ranks.world
    parts = world if text.operation in (Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL) else 1
    factor = world if text.operation in (Operation.ALL_GATHER, Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL) else 1
    elements = most // dtype.itemsize // factor
    count = dice.choice((1, dice.randint(1, 64), dice.randint(1, elements), elements))
    generator = torch.Generator().manual_seed(dice.getrandbits(40) + ranks.rank)
    values = torch.randn(count * parts, generator=generator)
    if text.name in ADD_IN_ANOTHER_ORDER:
        values = values.mul(3).round()
    return values.to(dtype).to(ranks.device)


def expected(comm: Communicator, text: ProgramDefinition, x: torch.Tensor, ranks: Session) -> torch.Tensor:
    """What the operation returns, by the communicator's own operations."""
    if text.operation is Operation.ALL_REDUCE:
        return comm.all_reduce(x)
    if text.operation is Operation.REDUCE_SCATTER:
        return comm.reduce_scatter(x)
    gathered = comm.all_gather(x)
    if text.operation is Operation.ALL_GATHER:
        return gathered
    of_rank = gathered.view(ranks.world, -1)
    if text.operation is Operation.BROADCAST:
        return of_rank[text.root]
    return torch.cat([row.chunk(ranks.world)[ranks.rank] for row in of_rank])


def output_of(comm: Communicator, text: ProgramDefinition, like: torch.Tensor) -> torch.Tensor | None:
    """Where a program stores whose peers write the output: symmetric memory."""
    if not any(buffer.is_symmetric and buffer.name == "output" for buffer in text.build(comm.world_size).buffers):
        return None
    return comm.empty(like.shape, like.dtype)


def check(
    text: ProgramDefinition, compiled: Compiled, comm: Communicator, x: torch.Tensor, times: int, ranks: Session
) -> int:
    """How many results were wrong, of eager calls and of replays of a graph."""
    due = expected(comm, text, x, ranks)
    out = output_of(comm, text, due)
    wrong = 0
    for _ in range(times):
        wrong += not torch.equal(compiled(x, out), due)
    recording = Recording(lambda: compiled(x, out), ranks.device)
    for _ in range(times):
        got = recording.replay()
        ranks.synchronize()
        wrong += not torch.equal(got, due)
    comm.check()
    return wrong


def timed(
    text: ProgramDefinition, compiled: Compiled, comm: Communicator, like: Communicator, nbytes: int, ranks: Session
) -> tuple[float, float, float]:
    """Microseconds of a message of so many bytes: of the program, of the algorithm of the same kind, which ``like``
    runs, and of what the communicator selects."""
    parts = ranks.world if text.operation is Operation.ALL_GATHER else 1
    x = torch.ones(nbytes // 2 // parts, dtype=torch.bfloat16, device=ranks.device)
    due = expected(comm, text, x, ranks)
    out = output_of(comm, text, due)
    target = torch.empty_like(due) if out is None else out

    def native(by: Communicator) -> None:
        if text.operation is Operation.ALL_REDUCE:
            by.all_reduce(x, target)
        elif text.operation is Operation.ALL_GATHER:
            by.all_gather(x, out=target)
        else:
            by.reduce_scatter(x, out=target)

    def time_of(call: Callable[[], object]) -> float:
        call()
        ranks.synchronize()
        schedule = timing.Schedule.by("aligned", 20, 9)
        return timing.time_graph(lambda: (call(), None)[1], lambda: None, schedule, ranks.group).us

    return time_of(lambda: compiled(x, target)), time_of(lambda: native(like)), time_of(lambda: native(comm))


def run_program(
    text: ProgramDefinition, options: argparse.Namespace, ranks: Session
) -> tuple[int, int, float, list[list[object]]]:
    """Wrong results, results, seconds of the first compilation, and rows of times."""
    most = MOST_OF_EMULATED if not ranks.on_gpu else MOST_OF_SHARED if ranks.shares_gpu else MOST_BYTES
    dice = random.Random(f"{options.seed}/{text.name}")
    dsl.check(text.build(ranks.world))
    wrong, results, compile_s, rows = 0, 0, 0.0, []
    with Communicator(ranks.group, ranks.device, Config.load(timeout_s=20.0)) as comm:
        for dtype in DTYPES:
            begin = time.monotonic()
            compiled = compile_program(text, comm, dtype=dtype, max_bytes=most)
            compile_s = max(compile_s, time.monotonic() - begin)
            for _ in range(options.calls):
                times = dice.choice((1, 2, 3))
                wrong += check(text, compiled, comm, draw(dice, text, dtype, most, ranks), times, ranks)
                results += 2 * times
                ranks.watchdog.progress(f"{text.name}, {dtype}")
            if options.time and dtype == torch.bfloat16 and text.operation in TIMED:
                forced = Config.load(timeout_s=20.0, algorithm=COUNTERPARTS.get(text.name, "auto"))
                with Communicator(ranks.group, ranks.device, forced) as like:
                    for nbytes in TIMED_SIZES:
                        times_us = timed(text, compiled, comm, like, nbytes, ranks)
                        rows.append([text.name, nbytes, *(round(us, 3) for us in times_us)])
                        ranks.watchdog.progress(f"{text.name}, {nbytes} bytes")
                    ranks.barrier()
        ranks.barrier()
    return wrong, results, compile_s, rows


#: Operations that a communicator has too.
TIMED = (Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.REDUCE_SCATTER)


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--calls", type=int, default=12, help="inputs for each program and type (%(default)s)")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument(
        "--time", action="store_true", help="times too, of programs that a communicator has in its own form"
    )
    chosen: argparse.Namespace = options.parse_args()
    with session(chosen, measures=chosen.time) as ranks:
        table = [["program", "results", "wrong", "compiled in s"]]
        rows: list[list[object]] = []
        total = 0
        for text in PROGRAMS:
            if text.name in FOR_EVEN_WORLDS and ranks.world % 2:
                continue
            wrong, results, compile_s, timed_rows = run_program(text, chosen, ranks)
            wrong = int(ranks.gather(torch.tensor([wrong])).sum())
            total += wrong
            rows += timed_rows
            table.append([text.name, str(results * ranks.world), str(wrong), f"{compile_s:.1f}"])
        if ranks.rank == 0:
            report(
                "dsl_programs", ranks.device.type, ranks.world, table, {"programs": table, "times": rows}, chosen.json
            )
            for name, nbytes, us, like_us, selected_us in rows:
                kind = COUNTERPARTS.get(name, "selected")
                print(
                    f"{name:17} {nbytes:9} {us:8.2f} us, {kind:11} {like_us:8.2f} ({like_us / us:5.3f}x), "
                    f"selected {selected_us:8.2f}"
                )
    return int(total != 0)


if __name__ == "__main__":
    run(main)
