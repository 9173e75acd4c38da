"""torch.distributed over NCCL and over the library that stands in for it (LD_PRELOAD): the same program, the same
results.

    python tests/gpu/nccl_torch.py [--world 2]

NCCL makes sums in another order, so the values are whole numbers, whose sums are exact. The weights after some training
steps have to agree as nearly as two orders of adding do.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import llm_comm

MARK = "LLM_COMM_TEST_NCCL_TORCH"


def results(rank: int, world: int, device: torch.device) -> dict[str, torch.Tensor]:
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        for count in (1, 1000, 100_003, 3 << 20):
            generator = torch.Generator().manual_seed(rank)
            values = torch.randint(-8, 8, (count * world,), generator=generator).to(dtype).to(device)
            name = f"{dtype} {count}"
            part = values[:count].clone()
            dist.all_reduce(part)
            found[f"all_reduce {name}"] = part
            largest = values[:count].clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            found[f"max {name}"] = largest
            whole = torch.empty_like(values)
            dist.all_gather_into_tensor(whole, values[:count])
            found[f"all_gather {name}"] = whole
            piece = torch.empty_like(values[:count])
            dist.reduce_scatter_tensor(piece, values)
            found[f"reduce_scatter {name}"] = piece
            sent = values[:count].clone()
            dist.broadcast(sent, world - 1)
            found[f"broadcast {name}"] = sent
            swapped = torch.empty_like(values)
            dist.all_to_all_single(swapped, values)
            found[f"all_to_all {name}"] = swapped
    halves = dist.new_group(list(range(world)))
    one = torch.full((4,), float(rank), device=device)
    dist.all_reduce(one, group=halves)
    found["new_group"] = one
    graph_input = torch.full((5000,), 1.0, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(graph_input)
    for _ in range(3):
        graph.replay()
    found["graph"] = graph_input
    dist.barrier()
    return found


def training_step(rank: int, device: torch.device) -> torch.Tensor:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to(device)
    model = torch.nn.parallel.DistributedDataParallel(layers, device_ids=[device.index])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank + 1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(64, 256, device=device)).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def run_rank(directory: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device if os.environ[MARK] == "bound" else None)
    exact = {name: digest(value) for name, value in results(rank, world, device).items()}
    weights = training_step(rank, device).cpu()
    torch.save((exact, weights), directory / f"rank{rank}.pt")
    dist.destroy_process_group()


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def run_arm(world: int, preload: str, kind: str) -> list[tuple[dict[str, str], torch.Tensor]]:
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        environment = {**os.environ, MARK: kind, "LLM_COMM_NCCL_DEBUG": "INFO"}
        if preload:
            environment["LD_PRELOAD"] = preload
        done = subprocess.run(
            [*command, __file__, "--directory", name],
            env=environment,
            timeout=280,
            check=False,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode != 0:
            raise SystemExit(
                f"{'with' if preload else 'without'} llm_comm: status {done.returncode}\n{done.stderr[-8000:]}"
            )
        if preload:
            print(
                "\n".join(
                    line for line in done.stderr.splitlines() if "at exit" in line and " 0 calls by llm" not in line
                )
            )
            if "calls by llm_comm" not in done.stderr:
                raise SystemExit(
                    "the library was not used: does torch bring an NCCL of its own that is linked into it?"
                )
        return [torch.load(Path(name, f"rank{rank}.pt")) for rank in range(world)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.directory is not None:
        run_rank(options.directory)
        return 0
    wrong = 0
    for kind in ("lazy", "bound"):
        theirs = run_arm(options.world, "", kind)
        ours = run_arm(options.world, llm_comm.nccl_library(), kind)
        for rank, ((wanted, weights), (found, trained)) in enumerate(zip(theirs, ours, strict=True)):
            different = [name for name, value in wanted.items() if found[name] != value]
            near = torch.allclose(weights, trained, rtol=1e-4, atol=1e-5)
            print(
                f"{kind}, rank {rank}: {len(wanted)} results, different: {different or 'none'}; training near: {near}"
            )
            wrong += len(different) + (not near)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
