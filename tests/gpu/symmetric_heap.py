"""Symmetric tensors (`Communicator.empty`): where they lie, what is summed and gathered in them, CUDA graphs, the end.

    torchrun --standalone --nproc-per-node 2 tests/gpu/symmetric_heap.py
    torchrun --standalone --nproc-per-node 8 tests/gpu/symmetric_heap.py --largest 16777216

Ranks share a GPU where there are fewer. Each part runs with memory shared by descriptors (VMM) and by cudaIpc.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from unittest import mock

import torch
from common import Recording, Session, error_of, expect, parser, report, run, session
from values import DTYPES, Inputs, Sums, Values

from llm_comm import Communicator, CommunicatorError, Config, LlmCommError, MismatchError, _core, registry
from llm_comm.planning.tables import ALL_REDUCE, Row
from llm_comm.runtime import connect
from llm_comm.runtime.workspaces import ways_to_share

MIB = 1 << 20
PLAIN = Values("normal", 0, 1)
TIMEOUT_S = 20.0
#: Of device memory, by chance: pools of the driver.
SLACK_BYTES = 8 * MIB
DIRECT_SUM = "two-shot all-reduce of symmetric tensors by pull (HB)"
COPIED_SUM = "two-shot all-reduce with copies in the stream"
DIRECT_GATHER = "all-gather of symmetric tensors by push (HB)"


class Part:
    """What a part needs. Each part has a communicator of its own."""

    def __init__(self, ranks: Session, use_ipc: bool, largest: int) -> None:
        self.ranks = ranks
        self.largest = largest
        self.inputs = Inputs(ranks.device, ranks.world)
        self._use_ipc = use_ipc and ranks.on_gpu
        self.results = 0

    def communicator(self) -> Communicator:
        config = Config.load(timeout_s=TIMEOUT_S, share_gpu=self.ranks.shares_gpu, log="error")
        kinds = ways_to_share(is_emulated=not self.ranks.on_gpu, spans_hosts=False)
        with mock.patch.object(connect, "ways_to_share", return_value=("cudaIpc",) if self._use_ipc else kinds):
            comm = Communicator(self.ranks.group, self.ranks.device, config)
        comm.use_table(comm.table._replace(min_symmetric_bytes=0))
        return comm

    def sizes(self) -> list[int]:
        """Elements, of whole lines and not."""
        found = [8, 4096, 10_018, 1 << 18]
        while found[-1] * 16 <= self.largest:
            found.append(found[-1] * 4)
        return found


def last_call(comm: Communicator) -> str:
    return comm._handle.core().last_call().operation


def place(comm: Communicator, tensor: torch.Tensor) -> tuple[int, int]:
    found = comm._handle.core().find(tensor.data_ptr(), tensor.nbytes)
    assert found is not None
    return found


# ---- The parts -----------------------------------------------------------------------------------------------------


def tensors(part: Part) -> None:
    """Places are the same on all ranks; torch takes them for ordinary tensors."""
    ranks = part.ranks
    with part.communicator() as comm:
        kept = [comm.empty((n, 33), dtype) for n in (1, 500, 40_000) for dtype in (torch.bfloat16, torch.float32)]
        mine = torch.tensor([place(comm, t) for t in kept])
        expect(bool((ranks.gather(mine) == mine).all()), "places differ between ranks")
        for number, tensor in enumerate(kept):
            tensor.fill_(number)
        expect(all(bool(t.eq(n).all()) for n, t in enumerate(kept)), "tensors share memory")
        a = torch.randn(64, 128, device=ranks.device, dtype=torch.bfloat16)
        b = torch.randn(128, 256, device=ranks.device, dtype=torch.bfloat16)
        out = comm.empty((2, 64, 256), torch.bfloat16)
        torch.mm(a, b, out=out[1])
        expect(torch.equal(out[1], torch.mm(a, b)), "mm into a view")
        if ranks.on_gpu:
            out.record_stream(torch.cuda.Stream())
        part.results += len(kept) + 1


def sums(part: Part) -> None:
    """Eagerly and replayed, out of place, in place, and mixed with ordinary tensors."""
    ranks, checks = part.ranks, Sums()
    with part.communicator() as comm:
        for count in part.sizes():
            for dtype in DTYPES:
                rows = part.inputs.rows(PLAIN, count, dtype, seed=count)
                x, y = comm.empty(count, dtype), comm.empty(count, dtype)
                ordinary = torch.empty_like(rows[0])
                for a, b in ((x, y), (x, x), (ordinary, y), (x, ordinary), (y, x)):
                    what = f"{count} {dtype}"
                    a.copy_(rows[ranks.rank])
                    comm.all_reduce(a, out=b)
                    is_direct = ordinary is not a and ordinary is not b and x.nbytes % 16 == 0
                    expect((last_call(comm) == DIRECT_SUM) == is_direct, f"{what} ran {last_call(comm)}")
                    checks.expect(b, rows, what)
                    part.results += 1
                if ranks.on_gpu:
                    x.copy_(rows[ranks.rank])
                    graph = Recording(lambda x=x, y=y: comm.all_reduce(x, out=y), ranks.device)
                    for seed in range(3):
                        rows = part.inputs.rows(PLAIN, count, dtype, seed=count + 1 + seed)
                        x.copy_(rows[ranks.rank])
                        y.zero_()
                        graph.replay()
                        checks.expect(y, rows, f"{count} {dtype}, replay {seed}")
                        part.results += 1
                ranks.synchronize()
            checks.check()
            ranks.watchdog.progress(f"sums of {count}")
        comm.check()


def copied_sums(part: Part) -> None:
    """By copies in the stream, in different numbers of pieces: eager calls and graphs in turn, none of which waits for
    the ones before, into one output that is read behind each of them. In place another algorithm runs."""
    ranks, checks = part.ranks, Sums()
    with part.communicator() as comm:
        for count in part.sizes()[1:]:
            for dtype, depth in zip(DTYPES, (1, 3, 8), strict=True):
                row = Row(1 << 40, ALL_REDUCE, "two_shot_ce", "CE", blocks=24, tile_lines=512, depth=depth)
                comm.use_table(comm.table.with_rows(row, *comm.table.rows[ALL_REDUCE]))
                what = f"{count} {dtype} in {depth} pieces"
                given = [part.inputs.rows(PLAIN, count, dtype, seed=count + seed) for seed in range(6)]
                x, y = comm.empty(count, dtype), comm.empty(count, dtype)

                def reduce(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
                    comm.all_reduce(x, out=y)

                reduce()
                expect(last_call(comm) == COPIED_SUM, f"{what} ran {last_call(comm)}")
                graph = Recording(reduce, ranks.device) if ranks.on_gpu else None
                found = []
                for number, rows in enumerate(given):
                    x.copy_(rows[ranks.rank])
                    reduce() if graph is None or number % 2 == 0 else graph.replay()
                    found.append(y.clone())
                comm.all_reduce(x, out=x)
                expect(last_call(comm) != COPIED_SUM, f"{what}, in place, ran {last_call(comm)}")
                for rows, result in zip((*given, given[-1]), (*found, x), strict=True):
                    checks.expect(result, rows, what)
                    part.results += 1
                ranks.synchronize()
            checks.check()
            ranks.watchdog.progress(f"copied sums of {count}")
        comm.check()


def layers(part: Part) -> None:
    """A linear layer that writes into the heap and the sum of that, in one graph."""
    ranks = part.ranks
    with part.communicator() as comm:
        x = torch.randn(32, 256, device=ranks.device).to(torch.bfloat16)
        weight = torch.randn(256, 512, device=ranks.device).to(torch.bfloat16)
        product, total = comm.empty((32, 512), torch.bfloat16), comm.empty((32, 512), torch.bfloat16)

        def layer() -> None:
            torch.mm(x, weight, out=product)
            comm.all_reduce(product, out=total)

        layer()
        ranks.synchronize()
        graph = Recording(layer, ranks.device)
        for _ in range(5):
            x.normal_()
            graph.replay()
            ranks.synchronize()
            everyone = ranks.gather(product.cpu().view(torch.int32)).view(torch.bfloat16)
            checks = Sums()
            checks.expect(total.cpu(), everyone, "sum of a layer")
            checks.check()
            part.results += 1


def gathers(part: Part) -> None:
    """By the core: parts of bytes, even and not, in one row and in several."""
    ranks = part.ranks
    (number,) = (a.number for a in registry.operations()["all_gather"].algorithms if a.name == "direct_push_hb")
    byte = tuple(registry.data_types()).index("byte")
    stream = torch.cuda.current_stream().cuda_stream if ranks.on_gpu else 0
    with part.communicator() as comm:
        for lines in (1, 100, part.largest // 64):
            for rows in (1, 4):
                sizes = [16 * (lines + rank % 2 * (lines // 2)) for rank in range(ranks.world)]
                problem = _core.Problem(
                    count=rows * max(sizes),
                    row=0,
                    data_type=byte,
                    world_size=ranks.world,
                    parameters=(rows, *sizes, *[0] * (8 - ranks.world)),
                )
                shape = _core.shape(number, problem, _core.TuningParameters(blocks=64, tile_lines=1024), comm.limits)
                gather = comm._handle.core().prepare(number, problem, shape.tiling)
                whole = part.inputs.rows(PLAIN, rows * sum(sizes) // 4, torch.float32, seed=lines)[0]
                expected = whole.view(torch.uint8).view(rows, -1)
                first = sum(sizes[: ranks.rank])
                x = expected[:, first : first + sizes[ranks.rank]].contiguous()
                y = comm.empty((rows, sum(sizes)), torch.uint8).zero_()
                for _ in range(3):
                    y.zero_()
                    expect(gather(x.data_ptr(), y.data_ptr(), stream), "not enqueued")
                    expect(torch.equal(y, expected), f"all-gather of {rows} rows of {sizes}")
                    part.results += 1
                expect(last_call(comm) == DIRECT_GATHER, last_call(comm))
        comm.check()


def memory(part: Part) -> None:
    """It grows, goes back to the device, and is not there is said on all ranks."""
    ranks = part.ranks

    def used() -> int:
        ranks.synchronize()
        gc.collect()
        ranks.barrier()
        free, total = torch.cuda.mem_get_info() if ranks.on_gpu else (0, 0)
        return total - free

    before = used()
    ranks_a_gpu = ranks.world if ranks.shares_gpu else 1
    slack = ranks_a_gpu * SLACK_BYTES
    outlive_and_free(part, used, slack)
    expect(used() - before <= slack, f"left: {used() - before} bytes")


def outlive_and_free(part: Part, used: Callable[[], int], slack: int) -> None:
    ranks = part.ranks
    comm = part.communicator()
    small = comm.empty(16, torch.uint8).fill_(5)
    with_small = used()
    large = comm.empty(64 * MIB, torch.uint8).fill_(3)
    window, _ = place(comm, small)
    expect(place(comm, large)[0] != window, "the large tensor is where there is no room for it")
    if ranks.on_gpu:
        expect(used() - with_small >= 64 * MIB, "the tensor takes no memory")
    del large
    # By this call ranks learn that it has died. The new tensor has room beside the first one.
    other = comm.empty(16, torch.uint8)
    expect(place(comm, other)[0] == window, "a small tensor keeps the memory of a large one")
    expect(list(comm._heap._layout.windows()) == [window], "the heap keeps the memory of a tensor that has died")
    expect(used() - with_small <= slack, "the memory of a tensor that has died is still there")
    text = error_of(LlmCommError, lambda: comm.empty(1 << 46, torch.uint8))
    expect("symmetric memory" in text, text)
    shape = 8 if ranks.rank == 0 else 9
    text = error_of(LlmCommError, lambda: comm.empty(shape))
    expect("different tensors" in text and "(9,) of torch." in text and " on rank 1 (" in text, text)
    expect(bool(small.eq(5).all()), "a tensor was overwritten")
    comm.close()
    small.add_(1)
    expect(bool(small.eq(6).all()), "a tensor that outlives its communicator")
    part.results += 8


def graph_outlives(part: Part) -> None:
    """The communicator is gone, the graph is replayed: it does nothing, and tensors keep their memory."""
    ranks = part.ranks
    if not ranks.on_gpu:
        return
    comm = part.communicator()
    x, y = [comm.empty(4096).fill_(1)], comm.empty(4096)

    def reduce() -> None:
        comm.all_reduce(x[0], out=y)

    reduce()
    graph = Recording(reduce, ranks.device)
    text = ""

    def capture() -> None:
        nonlocal text
        text = error_of(LlmCommError, lambda: comm.empty(8))

    Recording(capture, ranks.device)
    expect("CUDA graph is being captured" in text, text)
    graph.replay()
    ranks.synchronize()
    expect(bool(y.eq(ranks.world).all()), "a replay")
    x.clear()
    expect(place(comm, comm.empty(4096)) != (0, 0), "memory that graphs use was given to another tensor")
    ranks.barrier()
    comm.close()
    y.fill_(7)
    for _ in range(3):
        graph.replay()
    ranks.synchronize()
    expect(bool(y.eq(7).all()), "a graph that outlives its communicator has written")
    part.results += 4


def mismatch(part: Part) -> None:
    """One rank's tensor is not symmetric: all ranks say so, at once. Without the choice that Python would have made."""
    ranks = part.ranks
    (number,) = (a.number for a in registry.operations()["all_reduce"].algorithms if a.name == "two_shot_pull_hb")
    comm = part.communicator()
    x = comm.empty(4096).fill_(1)
    if ranks.rank == ranks.world - 1:
        x = torch.ones(4096, device=ranks.device)
    problem = _core.Problem(
        count=4096,
        row=0,
        data_type=tuple(registry.data_types()).index("fp32"),
        world_size=ranks.world,
        parameters=(),
    )
    shape = _core.shape(number, problem, _core.TuningParameters(blocks=4, tile_lines=64), comm.limits)
    stream = torch.cuda.current_stream().cuda_stream if ranks.on_gpu else 0
    comm._handle.core().prepare(number, problem, shape.tiling)(x.data_ptr(), x.data_ptr(), stream)
    ranks.synchronize()

    def wait_and_check() -> None:
        torch.cuda.synchronize() if ranks.on_gpu else None
        comm.check()

    text = error_of(CommunicatorError, wait_and_check)
    expect(f"a tensor of rank {ranks.world - 1} (" in text and "is not in symmetric memory" in text, text)
    error_of(MismatchError, comm.check)
    ranks.barrier()
    comm.close()
    part.results += 1


PARTS = (tensors, sums, copied_sums, layers, gathers, memory, graph_outlives, mismatch)


def main() -> int:
    options = parser("Symmetric tensors: where they lie, sums and gathers in them, graphs, memory.")
    options.add_argument("--largest", type=int, default=64 * MIB, help="bytes of a message (%(default)s)")
    options.add_argument("--part", choices=[part.__name__ for part in PARTS], help="this part alone")
    args = options.parse_args()
    rows, figures = [["part", "memory", "results"]], {}
    with session(args) as ranks:
        largest = args.largest if ranks.on_gpu else min(args.largest, MIB)
        for use_ipc in (False, True) if ranks.on_gpu else (False,):
            for of in PARTS:
                if args.part not in (None, of.__name__):
                    continue
                ranks.barrier()
                part = Part(ranks, use_ipc, largest)
                of(part)
                ranks.watchdog.progress(of.__name__)
                kind = "cudaIpc" if use_ipc else "VMM" if ranks.on_gpu else "shared"
                rows.append([of.__name__, kind, str(part.results)])
                figures[f"{of.__name__} {kind}"] = part.results
        ranks.barrier()
        if ranks.rank == 0:
            report("symmetric_heap", ranks.device.type, ranks.world, rows, {"results": figures}, args.json)
    return 0


if __name__ == "__main__":
    run(main)
