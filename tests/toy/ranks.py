"""The algorithm of broadcast.cuh on emulated GPUs, each a thread of this process.

For a process of its own: the module that is installed has classes of the same names.

``python tests/toy/ranks.py MODULE``, the file of a ``_core`` that was built with ``tests/toy/registry.def``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

SLOT_BYTES = 4096
TYPES = {"bf16": (0, ctypes.c_uint16), "fp16": (1, ctypes.c_uint16), "fp32": (2, ctypes.c_uint32)}


def load(path: Path) -> ModuleType:
    """The module as ``llm_comm._core``, in place of the one that is installed."""
    name = "llm_comm._core"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def leave() -> NoReturn:
    """Ends the process of a rank that has succeeded, at once.

    Threads of gloo live as long as the process group, which a traceback may keep. One that still frees a tensor while
    the interpreter ends aborts the process: it wants a lock that there is no more.
    """
    sys.stdout.flush()
    os._exit(0)


def connect(core: ModuleType, world: int) -> list[Any]:
    options = {"slot_bytes": SLOT_BYTES, "timeout_s": 30.0, "dependent_launch": False, "check_calls": True}
    ranks = [core.make_emulated_core(core.CoreOptions(rank=rank, world_size=world, **options)) for rank in range(world)]
    handles = [rank.create_workspace("descriptor") for rank in ranks]
    for rank, core_of_rank in enumerate(ranks):
        for peer, (fd, handle) in enumerate(handles):
            if peer != rank:
                core_of_rank.map_peer(peer, fd, handle)
    for fd, _ in handles:
        os.close(fd)
    return ranks


def broadcast(core: ModuleType, ranks: list[Any], values: list[int], data_type: str, root: int, **choice: int) -> int:
    """Checks what every rank ends up with. Returns the number of launches."""
    number, element = TYPES[data_type]
    (algorithm,) = [a for a in core.algorithms() if (a.operation, a.name) == ("broadcast", "direct")]
    parameters = [float(root)]
    problem = core.Problem(count=len(values), row=0, data_type=number, world_size=len(ranks), parameters=parameters)
    limits = core.Limits(slot_bytes=SLOT_BYTES, sm_count=4, max_cluster=1, compute_capability=0)
    candidates = core.candidates(algorithm.number, problem, limits)
    assert candidates
    shape = core.shape(algorithm.number, problem, core.TuningParameters(**choice) if choice else candidates[0], limits)
    buffer = element * (len(values) + 1)
    inputs = [buffer(*[0] + (values if rank == root else [rank] * len(values))) for rank in range(len(ranks))]
    outputs = [buffer() for _ in ranks]

    def run(rank: int) -> None:
        call = ranks[rank].prepare(algorithm.number, problem, shape.tiling)
        # From the second element on: not aligned.
        first = [ctypes.addressof(tensor[rank]) + ctypes.sizeof(element) for tensor in (inputs, outputs)]
        assert call(*first, 0)

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, output in enumerate(outputs):
        assert list(output)[1:] == values, f"rank {rank} of {len(ranks)}, {len(values)} {data_type} of rank {root}"
    return shape.launches


def main(path: Path) -> None:
    core = load(path)
    for world in (2, 3):
        ranks = connect(core, world)
        for root in range(world):
            for count in (1, 7, 8, 9, 300):
                values = [(31 * i + root) % 0x7F80 for i in range(count)]
                assert broadcast(core, ranks, values, "bf16", root) == 1
                assert broadcast(core, ranks, values, "fp32", root, blocks=3, tile_lines=2) == 1
        assert broadcast(core, ranks, list(range(3000)), "fp16", 1) > 1
        ended = [rank.operations_ended() for rank in ranks]
        assert len(set(ended)) == 1
        for nobody in (world, -1):
            try:
                broadcast(core, ranks, [1], "fp16", nobody)
                refused = ""
            except ValueError as error:
                refused = str(error)
            assert "root is not one of its ranks" in refused

    from llm_comm.cli.commands import main as command

    command(["algorithms"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
