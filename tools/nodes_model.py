"""A small model of an all-reduce over several nodes: the phases of docs/operate/nodes.md beside NCCL over all ranks.

    python tools/nodes_model.py --json docs/results/nodes_model.json --plot docs/results/nodes_model.png

Alpha-beta: a step takes a latency, and its bytes over a bandwidth. What goes in:

- In the node: all-gather and reduce-scatter as measured on 4 GPUs (``IN_NODE``), fitted, and carried over to 8. The
  bytes follow by arithmetic, the latency by the ratio that all-reduce has (``docs/reference/performance.md``).
- NCCL: the cost model by which NCCL itself selects (``src/graph/tuning.cc`` of NVIDIA/nccl, commit 01afd20): latencies
  of its algorithms and protocols, and what share of the bandwidth each has. NCCL takes the fastest, and so does this.
- The network: 46 to 48 GB/s of each card of 400 Gb/s under NCCL (NVIDIA/nccl-tests, issue 290).
- NCCL over all ranks, large messages: a bus bandwidth of 350 GB/s (nccl-tests, issue 283: H200, many nodes) up to 476
  (issue 290: one H100 node with NVLink SHARP, which trees over two nodes cannot exceed).

Each quantity has a range. The fast end of ours with the slow end of NCCL, and the other way round, bound the
prediction.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: What the phases in the node are fitted to.
IN_NODE = "docs/results/2026-11-26_h200x4_tune.json"
MEASURED_RANKS = 4
RANKS_OF_NODE = 8
NODES = (2, 4, 8)
SIZES = tuple(1 << power for power in range(13, 29))  # 8 KiB to 256 MiB
#: Slices above it are exchanged in pieces where there are three nodes or more (llm_comm/planning/node_rows.py).
WHOLE_BELOW = 64 << 10

#: Chunks of a quarter of a MiB or more are tried.
LEAST_CHUNK = 256 << 10

#: Microseconds, by algorithm and protocol (LL, LL128, Simple): baseLat and hwLat of NCCL's tuning.cc.
BASE = {"tree": (4.4, 4.4, 0.0), "ring": (3.6, 10.0, 8.4)}
NVLINK_STEP = {"tree": (0.52, 1.2, 28.0), "ring": (0.47, 1.9, 3.4)}
NETWORK_STEP = {"tree": (5.0, 8.5, 50.0), "ring": (2.7, 4.0, 9.6)}
#: Share of the bandwidth that a protocol has: there too. With one rank on each node LL128 has 0.7.
SHARE = {"tree": (1 / 3.8, 0.915, 0.9), "ring": (1 / 4, 0.92, 1.0)}
ALONE = (1 / 4, 0.7, 1.0)
#: What NCCL's model multiplies steps over NVLink by where LL goes over a network.
LL_OVER_NETWORK = 1.8


@dataclass(frozen=True)
class Line:
    """us = latency + bytes / bandwidth, in MB/s which is bytes a us."""

    latency: float
    bandwidth: float

    def us(self, size: float) -> float:
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Assumptions:
    """One end of each range.

    Args:
        latency_ratio: Of a phase on 8 GPUs over one on 4, for the smallest messages.
        launch_us: Between two kernels of a CUDA graph that follow each other.
        card: Bytes a us of a network card.
        flat: Bus bandwidth of NCCL over all ranks, in bytes a us.
    """

    latency_ratio: float
    launch_us: float
    card: float
    flat: float


#: The first is good for llm_comm, the second for NCCL over all ranks.
OURS = Assumptions(latency_ratio=1.0, launch_us=0.5, card=48e3, flat=350e3)
THEIRS = Assumptions(latency_ratio=1.5, launch_us=1.5, card=46e3, flat=476e3)
MIDDLE = Assumptions(latency_ratio=1.25, launch_us=1.0, card=47e3, flat=400e3)


def fitted(operation: str) -> Line:
    """Of the part of a rank, as measured: the latency of the smallest, and the bandwidth between 1 and 64 MiB."""
    run = json.loads((ROOT / IN_NODE).read_text(encoding="utf-8"))["runs"][-1]
    us = {row["bytes"]: row["candidates"][0]["us"] for row in run["operations"][operation]}
    sent = (MEASURED_RANKS - 1) * (max(us) - (1 << 20))
    return Line(us[min(us)], sent / (us[max(us)] - us[1 << 20]))


def in_node(operation: str, size: int, given: Assumptions) -> float:
    line = fitted(operation)
    return line.latency * given.latency_ratio + (RANKS_OF_NODE - 1) * size / RANKS_OF_NODE / line.bandwidth


def sum_of_nodes(nodes: int, given: Assumptions) -> float:
    """Kernels of torch that add the sums of the nodes (llm_comm/nodes/exchange.py): one for two nodes, else one for
    each. A slice is small, so what one takes is the launch: 0.8 us were measured (docs/experiments/nodes.md)."""
    return given.launch_us * (1 if nodes == 2 else nodes)


def between_nodes(nodes: int, size: float, given: Assumptions) -> float:
    """The slices of a place in its nodes, exchanged and added: each rank has one, and its card for itself."""

    def gather(size: float, steps: int) -> float:
        return min(
            base + steps * step + size / (given.card * share)
            for base, step, share in zip(BASE["ring"], NETWORK_STEP["ring"], ALONE, strict=True)
        )

    added = sum_of_nodes(nodes, given)
    if nodes == 2 or size <= WHOLE_BELOW:
        return gather((nodes - 1) * size, nodes - 1) + added
    # An all-to-all by send and receive, one step of protocol Simple; then an all-gather of what each has added up.
    moved = (nodes - 1) / nodes * size
    pieces = BASE["ring"][2] + NETWORK_STEP["ring"][2] + moved / given.card
    return pieces + added + gather(moved, nodes - 1) + given.launch_us


def hierarchical(nodes: int, size: int, given: Assumptions) -> float:
    """Reduce-scatter, exchange and all-gather, one behind the other."""
    slice_bytes = size / RANKS_OF_NODE
    phases = in_node("reduce_scatter", size, given) + between_nodes(nodes, slice_bytes, given)
    return phases + in_node("all_gather", size, given) + 2 * given.launch_us


def pipelined(nodes: int, size: int, chunk: int, given: Assumptions) -> float:
    """The same in chunks: each is exchanged while the node scatters the next one, and gathers the one before it."""
    in_node_us = exchanged_us = gathered_from = 0.0
    for first in range(0, size, chunk):
        part = min(chunk, size - first)
        in_node_us += in_node("reduce_scatter", part, given) + (given.launch_us if first else 0)
        begin = max(in_node_us, exchanged_us) + given.launch_us
        before, exchanged_us = exchanged_us, begin + between_nodes(nodes, part / RANKS_OF_NODE, given)
        if first:
            in_node_us = max(in_node_us, before) + given.launch_us + in_node("all_gather", chunk, given)
        gathered_from = max(in_node_us, exchanged_us) + given.launch_us
    return gathered_from + in_node("all_gather", part, given)


def best_chunk(nodes: int, size: int, given: Assumptions) -> tuple[int, float]:
    """Bytes of the chunks that are best, the message itself if none are, and the microseconds."""
    chunks = [size >> power for power in range(5) if size >> power >= LEAST_CHUNK]
    return min(((chunk, pipelined(nodes, size, chunk, given)) for chunk in chunks or [size]), key=lambda one: one[1])


def flat(nodes: int, size: int, given: Assumptions) -> float:
    """NCCL over all ranks: the fastest of its algorithms and protocols, by its own model."""
    ranks = nodes * RANKS_OF_NODE
    times = []
    for algorithm in ("tree", "ring"):
        for protocol in range(3):
            over_nvlink = NVLINK_STEP[algorithm][protocol] * (LL_OVER_NETWORK if protocol == 0 else 1)
            over_network = NETWORK_STEP[algorithm][protocol]
            if algorithm == "tree":
                steps = 2 * ((RANKS_OF_NODE - 1) * over_nvlink + math.log2(nodes) * over_network)
            else:
                inter = 2 * (nodes - 1)
                steps = (2 * (ranks - 1) - inter) * over_nvlink + inter * over_network
            moved = 2 * (ranks - 1) / ranks * size
            times.append(BASE[algorithm][protocol] + steps + moved / (given.flat * SHARE[algorithm][protocol]))
    return min(times)


def predicted(nodes: int) -> list[dict[str, Any]]:
    """By size: microseconds of both, and how many times faster the phases are, at worst, probably and at best."""
    rows = []
    for size in SIZES:
        ratios = [flat(nodes, size, given) / hierarchical(nodes, size, given) for given in (THEIRS, MIDDLE, OURS)]
        ours, nccl = hierarchical(nodes, size, MIDDLE), flat(nodes, size, MIDDLE)
        rows.append(
            {"bytes": size, "us": round(ours, 1), "nccl_us": round(nccl, 1), "ratio": [round(r, 2) for r in ratios]}
        )
    return rows


def in_chunks(nodes: int) -> list[dict[str, Any]]:
    """By size: the best chunks, their time, and how many times faster than NCCL they are, probably."""
    rows = []
    for size in SIZES:
        chunk, us = best_chunk(nodes, size, MIDDLE)
        ratio = flat(nodes, size, MIDDLE) / us
        rows.append({"bytes": size, "chunk_bytes": chunk, "us": round(us, 1), "ratio": round(ratio, 2)})
    return rows


def draw(figures: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for nodes, rows in figures.items():
        sizes = [row["bytes"] for row in rows]
        (line,) = axes.plot(sizes, [row["ratio"][1] for row in rows], label=f"{nodes} nodes of {RANKS_OF_NODE}")
        axes.fill_between(
            sizes,
            [row["ratio"][0] for row in rows],
            [row["ratio"][2] for row in rows],
            alpha=0.15,
            color=line.get_color(),
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES[::2], [f"{size >> 10}K" if size < 1 << 20 else f"{size >> 20}M" for size in SIZES[::2]])
    axes.set_xlabel("bytes of the message")
    axes.set_ylabel("NCCL over all ranks / three phases")
    axes.set_title("Predicted, not measured: all-reduce over nodes of 8 H200, a card of 400 Gb/s each")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the prediction")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw it")
    options = parser.parse_args(arguments)
    figures = {str(nodes): predicted(nodes) for nodes in NODES}
    for nodes, rows in figures.items():
        print(f"{nodes} nodes of {RANKS_OF_NODE}: bytes, us, us of NCCL, ratio at worst, probably, at best")
        for row in rows:
            print(f"{row['bytes']:>11} {row['us']:9.1f} {row['nccl_us']:9.1f}  ", *(f"{r:5.2f}" for r in row["ratio"]))
    chunked = {str(nodes): in_chunks(nodes) for nodes in NODES}
    for nodes, rows in chunked.items():
        print(f"{nodes} nodes of {RANKS_OF_NODE}, in chunks: bytes, bytes of a chunk, us, ratio")
        for row in rows:
            print(f"{row['bytes']:>11} {row['chunk_bytes']:>11} {row['us']:9.1f}   {row['ratio']:5.2f}")
    if options.json is not None:
        content = {
            "what": "a prediction of tools/nodes_model.py: nothing of it has been measured",
            "in_node": {"file": IN_NODE, **{name: asdict(fitted(name)) for name in ("all_gather", "reduce_scatter")}},
            "assumptions": {"for llm_comm": asdict(OURS), "probable": asdict(MIDDLE), "for NCCL": asdict(THEIRS)},
            "nodes": figures,
            "in_chunks": chunked,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        draw(figures, options.plot)


if __name__ == "__main__":
    main()
