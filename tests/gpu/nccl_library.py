"""Random collectives through the library that stands in for NCCL, by ctypes as vLLM calls it: eager, in groups and in
CUDA graphs, against sums in rank order, bit for bit.

    torchrun --standalone --nproc-per-node N tests/gpu/nccl_library.py [--cases 300] [--seed 1]

Ranks that share a GPU have no NCCL behind the library, which does not take a GPU twice: it then serves every size. With
a GPU each, what it does not serve goes there, and is checked too.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from common import Recording, Session, parser, run, session

import llm_comm

TYPES = {torch.float32: 7, torch.float16: 6, torch.bfloat16: 9}
SUM = 0
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
#: Elements of a rank's part; a case may have a few less.
COUNTS = (1, 2, 8, 100, 1024, 4096, 30_000, 100_000, 1 << 19, 3 << 20)
MOST_OF_SHARED = 100_000


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class Nccl:
    """A communicator of all ranks.

    Raises:
        RuntimeError: A call fails.
    """

    def __init__(self, ranks: Session) -> None:
        self._library = ctypes.CDLL(llm_comm.nccl_library(emulated=not ranks.on_gpu))
        self._library.ncclGetLastError.restype = ctypes.c_char_p
        unique_id = UniqueId()
        if ranks.rank == 0:
            self.call("ncclGetUniqueId", ctypes.byref(unique_id))
        told = torch.frombuffer(bytearray(unique_id.internal), dtype=torch.uint8).clone()
        dist.broadcast(told, 0, group=ranks.control)
        ctypes.memmove(ctypes.byref(unique_id), bytes(told.tolist()), 128)
        self.comm = ctypes.c_void_p()
        self.call("ncclCommInitRank", ctypes.byref(self.comm), ranks.world, unique_id, ranks.rank)

    def call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            text = self._library.ncclGetLastError(None)
            raise RuntimeError(f"{name} returns {result}: {(text or b'').decode()}")


@dataclass
class Case:
    """One call. ``input`` is [world x count] of a reduce-scatter and an all-to-all, else [count]."""

    operation: str
    count: int
    root: int
    input: torch.Tensor
    output: torch.Tensor

    def enqueue(self, nccl: Nccl, on_gpu: bool) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if on_gpu else None)
        buffers = (ctypes.c_void_p(self.input.data_ptr()), ctypes.c_void_p(self.output.data_ptr()))
        head = (*buffers, ctypes.c_size_t(self.count), TYPES[self.input.dtype])
        tail = (nccl.comm, stream)
        if self.operation == "all_reduce":
            nccl.call("ncclAllReduce", *head, SUM, *tail)
        elif self.operation == "reduce_scatter":
            nccl.call("ncclReduceScatter", *head, SUM, *tail)
        elif self.operation == "all_gather":
            nccl.call("ncclAllGather", *head, *tail)
        elif self.operation == "all_to_all":
            nccl.call("ncclAlltoAll", *head, *tail)
        else:
            nccl.call("ncclBroadcast", *head, self.root, *tail)

    def expected(self, inputs: torch.Tensor, rank: int) -> torch.Tensor:
        """From those of all ranks, in their order."""
        if self.operation == "broadcast":
            return inputs[self.root]
        if self.operation == "all_gather":
            return inputs.flatten()
        if self.operation == "all_to_all":
            return inputs.view(inputs.shape[0], -1, self.count)[:, rank].flatten()
        total = torch.zeros(inputs[0].shape, dtype=torch.float32)
        for one in inputs:
            total += one.float()
        rounded = total.to(inputs.dtype)
        return rounded if self.operation == "all_reduce" else rounded.view(inputs.shape[0], -1)[rank]


def draw(dice: random.Random, ranks: Session) -> Case:
    """The same on all ranks, but for the values and whether input and output are one."""
    operation = dice.choice(OPERATIONS)
    counts = [count for count in COUNTS if count <= MOST_OF_SHARED] if ranks.shares_gpu or not ranks.on_gpu else COUNTS
    count = max(1, dice.choice(counts) - dice.randrange(9))
    dtype = dice.choice(list(TYPES))
    in_place = dice.random() < 0.5
    # NCCL, which gets the large ones, does not do it in place.
    in_place = in_place and not (operation == "all_to_all" and count > MOST_OF_SHARED)
    offset = dice.randrange(8)
    large = count * ranks.world
    of_kinds = {"all_gather": (count, large), "reduce_scatter": (large, count), "all_to_all": (large, large)}
    sizes = of_kinds.get(operation, (count, count))
    where = torch.empty(max(sizes) + offset, dtype=dtype, device=ranks.device)[offset:]
    output = torch.full((sizes[1] + offset,), -1, dtype=dtype, device=ranks.device)[offset:]
    source = where[: sizes[0]]
    if in_place and operation == "all_gather":
        output, source = where, where[ranks.rank * count :][:count]
    elif in_place and operation == "reduce_scatter":
        output = where[ranks.rank * count :][:count]
    elif in_place:
        output = source
    source.copy_(torch.randn(sizes[0], device=ranks.device))
    return Case(operation, count, dice.randrange(ranks.world), source, output)


def check(cases: list[Case], play: Callable[[], None], ranks: Session) -> int:
    """Runs the calls and returns how many have a wrong result on this rank. NCCL sums in another order: what goes there
    has to be near."""
    inputs = [ranks.gather(case.input.cpu().view(torch.uint8)).view(case.input.dtype) for case in cases]
    play()
    ranks.synchronize()
    wrong = 0
    for case, of_all in zip(cases, inputs, strict=True):
        expected = case.expected(of_all, ranks.rank)
        if not torch.equal(case.output.cpu(), expected):
            near = torch.allclose(case.output.cpu().float(), expected.float(), rtol=0.02, atol=0.02)
            served = ranks.shares_gpu or not ranks.on_gpu or case.count * case.input.element_size() <= 1 << 20
            wrong += served or not near
    return wrong


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--cases", type=int, default=300)
    options.add_argument("--seed", type=int, default=1)
    chosen: argparse.Namespace = options.parse_args()
    with session(chosen) as ranks:
        if ranks.shares_gpu:
            os.environ["LLM_COMM_NCCL_LIBRARY"] = "none"
        nccl = Nccl(ranks)
        dice = random.Random(chosen.seed)
        wrong = 0
        for number in range(chosen.cases):
            ranks.watchdog.progress(f"case {number}")
            group = [draw(dice, ranks) for _ in range(dice.choice((1, 1, 1, 3)))]

            def enqueue(cases: list[Case] = group) -> None:
                if len(cases) > 1:
                    nccl.call("ncclGroupStart")
                for case in cases:
                    case.enqueue(nccl, ranks.on_gpu)
                if len(cases) > 1:
                    nccl.call("ncclGroupEnd")

            # Replaying what was captured makes the calls once: in place, a second time would add up sums.
            is_graph = dice.random() < 0.3
            play = Recording(enqueue, ranks.device).replay if is_graph else enqueue
            found = check(group, play, ranks)
            if found:
                what = ", ".join(f"{c.operation} of {c.count} {c.input.dtype}" for c in group)
                print(f"rank {ranks.rank}, case {number}, {'graph' if is_graph else 'eager'}: {what}", flush=True)
            wrong += found
        ranks.barrier()
        nccl.call("ncclCommDestroy", nccl.comm)
        ranks.say(f"{chosen.cases} cases on {ranks.world} ranks")
        total = int(ranks.gather(torch.tensor([wrong])).sum())
        ranks.say(f"wrong results: {total}")
    return int(total != 0)


if __name__ == "__main__":
    run(main)
