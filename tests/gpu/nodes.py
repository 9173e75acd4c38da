"""Several nodes in one machine: each rank is told on which it is (LLM_COMM_NODE); NCCL, gloo or UCX is between them.

    torchrun --standalone --nproc-per-node 2 tests/gpu/nodes.py --nodes 2            # two GPUs as two nodes of one
    torchrun --standalone --nproc-per-node 4 tests/gpu/nodes.py --nodes 2            # one GPU: gloo, host memory
    torchrun --standalone --nproc-per-node 4 tests/gpu/nodes.py --transport ucx      # the same by UCX, in graphs too
    torchrun --standalone --nproc-per-node 2 tests/gpu/nodes.py --nodes 2 --bench    # and times beside flat NCCL
    torchrun --standalone --nproc-per-node 4 tests/gpu/nodes.py --nodes 2 --chunk-bytes 1048576   # in chunks

All-reduces, also with a norm where nodes have several ranks, all-gathers and reduce-scatters of many sizes and types,
eager and, but for gloo, in a CUDA graph that is replayed with other inputs, each bitwise as docs/operate/nodes.md says.
Messages of every size are served, however the table bounds them. ``--bench``: microseconds a call in a graph,
aligned (llm_comm.bench.timing), beside the all_reduce of torch. That says little of real nodes: NVLink, or
PCIe, is in place of a network.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from common import GraphPool, Recording, Session, parser, report, run, session, wants_cuda

from llm_comm import Communicator, Config
from llm_comm.bench.timing import Schedule, time_eager, time_graph
from llm_comm.planning.node_rows import EXCHANGES, WHOLE, NodeRow

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COUNTS = (1, 7, 8, 1000, 4096, 70_001, 1 << 20, (3 << 20) + 5)
COUNTS_EMULATED = (1, 7, 8, 1000, 70_001)
ROWS = ((1, 64), (3, 5120), (40, 8192))
EPS = 1e-5
REPLAYS = 3
BENCH_BYTES = tuple(1 << power for power in range(13, 27))  # 8 KiB to 64 MiB
BENCH_BYTES_EMULATED = (1 << 13, 1 << 16)


def inputs(world: int, count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """What each rank puts in, of spread magnitudes; the same in every process."""
    generator = torch.Generator().manual_seed(seed * 1009 + count)
    scale = torch.randint(-4, 5, (world, count), generator=generator)
    return list(torch.ldexp(torch.randn(world, count, generator=generator), scale).to(dtype).unbind())


def ordered_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """In fp32, in order, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def sum_over_nodes(parts: list[torch.Tensor], nodes: int) -> torch.Tensor:
    """The promised one: of each node in rank order, of these in node order."""
    places = len(parts) // nodes
    return ordered_sum([ordered_sum(parts[n * places : (n + 1) * places]) for n in range(nodes)])


class Checks:
    """Counts results, each compared bitwise."""

    def __init__(self, ranks: Session, nodes: int) -> None:
        self._ranks = ranks
        self._nodes = nodes
        self.count = 0

    def cases(self) -> Iterator[tuple[int, torch.dtype]]:
        for count in COUNTS if self._ranks.on_gpu else COUNTS_EMULATED:
            for dtype in DTYPES:
                yield count, dtype

    def compare(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        ranks = self._ranks
        same = torch.equal(found.cpu().view(torch.uint8), expected.contiguous().view(torch.uint8))
        if not ranks.gather(torch.tensor([same])).all():
            raise AssertionError(f"rank {ranks.rank}: {what}: {'right here' if same else 'WRONG here'}")
        self.count += 1
        ranks.watchdog.progress(what)

    def eager(self, comm: Communicator) -> None:
        rank, world, device = self._ranks.rank, self._ranks.world, self._ranks.device
        for count, dtype in self.cases():
            parts = inputs(world, count, dtype, 1)
            x, what = parts[rank].to(device), f"{count} {dtype}"
            expected = sum_over_nodes(parts, self._nodes)
            self.compare(comm.all_reduce(x), expected, f"all-reduce of {what}")
            self.compare(
                comm.all_reduce(x.clone(), out=torch.empty_like(x)), expected, f"all-reduce into out of {what}"
            )
            in_place = x.clone()
            self.compare(comm.all_reduce(in_place, out=in_place), expected, f"all-reduce in place of {what}")
            self.compare(comm.all_gather(x), torch.cat(parts), f"all-gather of {what}")
            # Whole rows for each rank: bitwise the part of the all-reduce.
            repeated = [part.repeat(world) for part in parts]
            self.compare(comm.reduce_scatter(repeated[rank].to(device)), expected, f"reduce-scatter of {what}")

    def norms(self, comm: Communicator, in_graph: bool) -> None:
        """The new residual bitwise, and the normed rows within rounding of what float64 makes of it."""
        rank, world, device = self._ranks.rank, self._ranks.world, self._ranks.device
        pool = GraphPool(device)
        for rows, hidden in ROWS:
            for dtype in (torch.bfloat16, torch.float16):
                parts = inputs(world, rows * hidden, dtype, 2)
                residual, *_ = inputs(1, rows * hidden, dtype, 3)
                x, added = (part.view(rows, hidden).to(device) for part in (parts[rank], residual))
                weight = torch.full((hidden,), 0.5, dtype=dtype, device=device)

                def call(
                    x: torch.Tensor = x, added: torch.Tensor = added, weight: torch.Tensor = weight
                ) -> tuple[torch.Tensor, ...]:
                    return comm.all_reduce_add_rms_norm(x, added, weight, EPS)

                normed, new_residual = call()
                if in_graph:
                    normed, new_residual = Recording(call, device, pool.handle).replay()
                expected = (sum_over_nodes(parts, self._nodes) + residual).view(rows, hidden)
                what = f"{rows} rows of {hidden} {dtype}{' in a graph' * in_graph}"
                self.compare(new_residual, expected, f"new residual of {what}")
                exact = expected.double() * (expected.double().square().mean(-1, keepdim=True) + EPS).rsqrt() / 2
                torch.testing.assert_close(normed.cpu().double(), exact, rtol=2**-7, atol=1e-6)

    def in_graphs(self, comm: Communicator) -> None:
        """Graphs of all three, in a chain, replayed with other inputs, with eager calls between."""
        rank, world, device = self._ranks.rank, self._ranks.world, self._ranks.device
        pool = GraphPool(device)
        for count, dtype in self.cases():
            x = torch.zeros(count, dtype=dtype, device=device)

            def chain(x: torch.Tensor = x) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                return comm.all_reduce(x), comm.all_gather(x), comm.reduce_scatter(x.repeat(world))

            chain()  # prepared outside of the capture
            recording = Recording(chain, device, pool.handle)
            for seed in range(REPLAYS):
                parts = inputs(world, count, dtype, 10 + seed)
                x.copy_(parts[rank])
                total, gathered, scattered = recording.replay()
                expected = sum_over_nodes(parts, self._nodes)
                what = f"{count} {dtype}, replay {seed}"
                self.compare(total, expected, f"all-reduce in a graph of {what}")
                self.compare(gathered, torch.cat(parts), f"all-gather in a graph of {what}")
                self.compare(scattered, expected, f"reduce-scatter in a graph of {what}")
                self.compare(comm.all_reduce(x), expected, f"eager all-reduce after {what}")


def bench(ranks: Session, comm: Communicator, flat: dist.ProcessGroup) -> dict[str, dict[str, float]]:
    """{bytes: {what: us}}, bf16."""
    schedule = Schedule(20, 50, True) if ranks.on_gpu else Schedule(2, 3, True)
    timed: dict[str, dict[str, float]] = {}
    for size in BENCH_BYTES if ranks.on_gpu else BENCH_BYTES_EMULATED:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=ranks.device)
        out = torch.empty_like(x)
        calls = {"2PH": partial(comm.all_reduce, x, out), "flat": partial(dist.all_reduce, x, group=flat)}
        timed[str(size)] = {}
        for name, call in calls.items():
            call()
            if ranks.on_gpu:
                timing = time_graph(call, lambda: None, schedule, ranks.control)
            else:
                timing = time_eager(call, lambda: None, schedule, ranks.device, ranks.control)
            timed[str(size)][name] = round(timing.us, 2)
            ranks.watchdog.progress(f"{name} of {size} bytes")
    return timed


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--nodes", type=int, default=2, help="into how many the ranks are divided; default: 2")
    options.add_argument("--transport", choices=("auto", "nccl", "gloo", "ucx"), default="auto", help="between nodes")
    options.add_argument("--bench", action="store_true", help="time it, beside flat NCCL")
    options.add_argument("--exchange", choices=EXCHANGES, default=WHOLE, help="between the nodes; default: %(default)s")
    options.add_argument("--chunk-bytes", type=int, default=0, help="of messages that are larger; default: no chunks")
    arguments = options.parse_args()
    with session(arguments, measures=arguments.bench) as ranks:
        places = ranks.world // arguments.nodes
        os.environ["LLM_COMM_NODE"] = f"node-{ranks.rank // places}"
        over_nccl = wants_cuda(arguments.device) and not ranks.shares_gpu
        kind = arguments.transport
        in_graphs = wants_cuda(arguments.device) and (kind in ("nccl", "ucx") or (kind == "auto" and over_nccl))
        config = Config.load(timeout_s=30.0, node_transport=kind)
        with Communicator(ranks.group, ranks.device, config) as comm:
            assert comm.nodes == arguments.nodes
            row = NodeRow(comm.nodes, 1 << 40, arguments.exchange, arguments.chunk_bytes, is_faster=True)
            comm.use_table(comm.table_of_node._replace(nodes=(row,)))
            checks = Checks(ranks, arguments.nodes)
            ranks.say(comm.plan(torch.zeros(4096, dtype=torch.bfloat16, device=ranks.device)).reason)
            checks.eager(comm)
            if places > 1:
                checks.norms(comm, in_graph=False)
            ranks.say(f"eager: {checks.count} results, all right")
            if in_graphs:
                checks.in_graphs(comm)
                if places > 1:
                    checks.norms(comm, in_graph=True)
                ranks.say(f"in graphs too: {checks.count} results, all right")
            figures: dict[str, object] = {"nodes": arguments.nodes, "results": checks.count, "in_graphs": in_graphs}
            table = [("what", "value"), *((name, str(value)) for name, value in figures.items())]
            if arguments.bench:
                flat = dist.new_group(backend="nccl") if over_nccl else ranks.group
                us = figures["us"] = bench(ranks, comm, flat)
                table = [("bytes", "2PH us", "flat us", "flat / 2PH")]
                for size, each in us.items():
                    ratio = each["flat"] / each["2PH"]
                    table.append((size, f"{each['2PH']:.2f}", f"{each['flat']:.2f}", f"{ratio:.2f}"))
            if ranks.rank == 0:
                report(f"{arguments.nodes} nodes", ranks.device.type, ranks.world, table, figures, arguments.json)
            ranks.barrier()
    return 0


if __name__ == "__main__":
    run(main)
