"""Ranks without processes: the cores of all of them in this process, each called in a thread of its own.

For what the kernels and the core do, where no part of a ``Communicator`` is asked: quicker by far, and with waits of
the kernels themselves, which otherwise come behind the comparison of calls.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.dlpack

from llm_comm import _core, registry

Call = Callable[[], bool]


def connected(
    world: int,
    check_calls: bool = False,
    timeout_s: float = 60.0,
    slot_bytes: int = 1 << 20,
    staging_bytes: int = 1 << 20,
) -> list[_core.Core]:
    """The cores of all ranks, by rank."""
    cores = [
        _core.make_emulated_core(
            _core.CoreOptions(
                rank=rank,
                world_size=world,
                slot_bytes=slot_bytes,
                staging_bytes=staging_bytes,
                timeout_s=timeout_s,
                dependent_launch=False,
                check_calls=check_calls,
            )
        )
        for rank in range(world)
    ]
    handles = [core.create_workspace("descriptor") for core in cores]
    for rank, core in enumerate(cores):
        for peer, handle in enumerate(handles):
            if peer != rank:
                core.map_peer(peer, *handle)
        core.bind_multicast()  # an emulated switch needs no object, and asks nobody
    for descriptor, _ in handles:
        os.close(descriptor)
    return cores


def with_window(cores: Sequence[_core.Core], nbytes: int = 1 << 21) -> Sequence[_core.Core]:
    """The same, with window 0 of a symmetric heap."""
    handles = [core.create_window(0, nbytes) for core in cores]
    for rank, core in enumerate(cores):
        for peer, handle in enumerate(handles):
            if peer != rank:
                core.map_window(0, peer, *handle)
    for descriptor, _ in handles:
        os.close(descriptor)
    return cores


def symmetric(core: _core.Core, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, so many bytes behind the begin of window 0."""
    capsule, _ = core.lend(0, offset, like.nbytes, -1)
    return torch.utils.dlpack.from_dlpack(capsule).view(like.dtype).view(like.shape).copy_(like)


def number_of(operation: str, algorithm: str) -> int:
    """Of an algorithm, in the core."""
    return next(a.number for a in registry.operations()[operation].algorithms if a.name == algorithm)


def problem_of(x: torch.Tensor, world: int, *parameters: float) -> _core.Problem:
    """Of inputs like ``x``; with parameters, of an operation that works by its rows."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.uint8: "byte"}
    return _core.Problem(
        count=x.numel(),
        row=x.shape[-1] if parameters else 0,
        data_type=tuple(registry.data_types()).index(names[x.dtype]),
        world_size=world,
        parameters=parameters,
    )


def gather_problem(world: int, rows: int, sizes: Sequence[int]) -> _core.Problem:
    """An all-gather of parts of so many bytes of each row."""
    return _core.Problem(
        count=rows * max(sizes),
        row=0,
        data_type=tuple(registry.data_types()).index("byte"),
        world_size=world,
        parameters=(rows, *sizes, *[0] * (8 - world)),
    )


def parts_of(rows: int, sizes: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    """Bytes, the same each time: the parts of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (rows, size), generator=generator, dtype=torch.uint8) for size in sizes]


def tiling_of(launch_units: int, **changes: int) -> _core.Tiling:
    """Blocks enough to share the work, small enough that each has several tiles."""
    return _core.Tiling(
        **{"blocks": 4, "tile_lines": 8, "cluster": 1, "depth": 1, "launch_units": launch_units, **changes}
    )


def together(*calls: Call) -> list[bool]:
    """Makes each call in a thread of its own; what they return, in order."""
    results: dict[int, bool] = {}

    def run(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=[number], daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(calls))]


def run_on_all(
    cores: Sequence[_core.Core], number: int, problem: _core.Problem, tiling: _core.Tiling, buffers: Sequence[Any]
) -> None:
    """One call on all ranks. ``buffers``: of each rank, tensors in the operation's order, None for 0."""
    calls = []
    for core, tensors in zip(cores, buffers, strict=True):
        run = core.prepare(number, problem, tiling)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        calls.append(lambda run=run, addresses=addresses: run(*addresses, 0))
    assert together(*calls) == [True] * len(cores), [core.error() for core in cores]
