"""A rank is killed while the others wait for it in an all-reduce of the library that stands in for NCCL: each of them
must hear of it by ncclCommGetAsyncError, long before the time is up.

    python tests/gpu/nccl_drill.py [--world 3] [--emulated]

Ranks share a GPU where there are fewer GPUs than ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

import torch

import llm_comm

TIMEOUT_S = 120
LIMIT_S = 30
FLOAT, SUM, REMOTE_ERROR = 7, 0, 6


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


def run_rank(rank: int, world: int, emulated: bool, pipe: Connection) -> None:
    os.environ["LLM_COMM_TIMEOUT_S"] = str(TIMEOUT_S)
    device = torch.device("cpu")
    if not emulated:
        gpus = torch.cuda.device_count()
        if gpus < world:
            os.environ.update(LLM_COMM_SHARE_GPU="1", LLM_COMM_NCCL_LIBRARY="none")
        device = torch.device("cuda", rank % gpus)
        torch.cuda.set_device(device)
    library = ctypes.CDLL(llm_comm.nccl_library(emulated=emulated))
    library.ncclGetLastError.restype = ctypes.c_char_p
    unique_id, comm, error = UniqueId(), ctypes.c_void_p(), ctypes.c_int()
    if rank == 0:
        assert library.ncclGetUniqueId(ctypes.byref(unique_id)) == 0
        pipe.send(bytes(unique_id))
    ctypes.memmove(ctypes.byref(unique_id), pipe.recv(), 128)
    assert library.ncclCommInitRank(ctypes.byref(comm), world, unique_id, rank) == 0, library.ncclGetLastError(None)
    values = torch.ones(1000, device=device)
    address = ctypes.c_void_p(values.data_ptr())
    stream = ctypes.c_void_p(None if emulated else torch.cuda.current_stream().cuda_stream)

    def all_reduce() -> int:
        return library.ncclAllReduce(address, address, ctypes.c_size_t(1000), FLOAT, SUM, comm, stream)

    assert all_reduce() == 0
    if not emulated:
        torch.cuda.synchronize()
    assert values.eq(world).all()
    pipe.send("ready")
    pipe.recv()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    all_reduce()
    while error.value == 0 and time.monotonic() - begin < LIMIT_S:
        assert library.ncclCommGetAsyncError(comm, ctypes.byref(error)) == 0
        time.sleep(0.01)
    pipe.send((error.value, time.monotonic() - begin, library.ncclGetLastError(comm).decode()))
    assert library.ncclCommAbort(comm) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=3)
    parser.add_argument("--emulated", action="store_true")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(options.world):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=run_rank, args=(rank, options.world, options.emulated, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    unique_id = pipes[0].recv()
    for said in (unique_id, "go"):
        for pipe in pipes:
            pipe.send(said)
        if said == unique_id:
            assert [pipe.recv() for pipe in pipes] == ["ready"] * options.world
    wrong = 0
    for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
        if rank == 1:
            continue
        if not pipe.poll(2 * LIMIT_S):
            print(f"rank {rank} says nothing")
            wrong += 1
            continue
        error, seconds, text = pipe.recv()
        print(f"rank {rank}: {error} after {seconds:.2f} s: {text}")
        process.join(LIMIT_S)
        wrong += error != REMOTE_ERROR or process.exitcode != 0
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
