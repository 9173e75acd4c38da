"""An all-gather in Python, checked, compiled, compared with the library's own, and timed: docs/reference/dsl.md.

    torchrun --standalone --nproc-per-node 2 examples/dsl_all_gather.py

Runs on GPUs where cupy is installed, else on emulated ones, for which g++ compiles the same kernel. Ranks that share a
GPU need LLM_COMM_SHARE_GPU=1.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import llm_comm
from llm_comm import dsl

CALLS = 20


@dsl.program("all_gather")
def gather(p: dsl.Builder) -> None:
    x, y = p.input.chunks(1), p.output.chunks(p.world)
    received = p.scratch(p.world, like=x, stages=4)
    with p.loop():
        p.copy(x[0], y[p.rank])
        for peer in p.peers:
            p.put(x[0], peer, received[p.rank])
        for peer in p.peers:
            p.signal(peer)
        with p.behind(1):
            for peer in p.peers:
                p.wait(peer)
            for peer in p.peers:
                p.copy(received[peer], y[peer])


def microseconds(call: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Of a call, in a CUDA graph of many; on emulated GPUs by the clock, which says nothing of a GPU."""
    call()
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - begin) / CALLS * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        graph.replay()
    dist.barrier()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS * 1e3


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--emulated", action="store_true", help="also where there are GPUs")
    has_gpu = torch.cuda.is_available() and llm_comm.cuda_compiled()
    on_gpu = has_gpu and importlib.util.find_spec("cupy") is not None and not options.parse_args().emulated
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # containers often cannot resolve their own name
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    with llm_comm.Communicator(dist.group.WORLD, device) as comm:
        dsl.check(gather.build(comm.world_size))
        kernel = dsl.compile(gather, comm, dtype=torch.bfloat16, max_bytes=4 << 20)
        for count in (5, 1000, (64 if on_gpu else 1) << 10):
            x = torch.full((count,), float(comm.rank + 1), dtype=torch.bfloat16, device=device)
            native = comm.all_gather(x)
            if not torch.equal(kernel(x), native):
                raise SystemExit(f"rank {comm.rank}: {count} elements: the results differ")
            ours, theirs = (microseconds(functools.partial(call, x), comm.device) for call in (kernel, comm.all_gather))
            if comm.rank == 0:
                where = "on GPUs" if on_gpu else "emulated"
                print(f"{count} elements of each rank: {ours:.1f} us, the library's own {theirs:.1f} us ({where})")
        comm.check()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
