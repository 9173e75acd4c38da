"""The processes in which scenarios run, and what scenarios of all engines are made of.

``python scenarios.py FD`` imports an engine once, then reads names of scenarios from stdin. For each it forks the
ranks, lets them run the function of that name, and writes one line to the descriptor: {"name": ..., "applies": whether
it has run, "errors": [...]}.
A rank leaves one error, the traceback, if its function raises or its process does not end as the scenario says.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

import llm_comm
from llm_comm.planning import catalogue

DIED_OF_THE_WATCHDOG = 1
#: Packages that stand in for others, for scenarios that put them on the path.
STAND_INS = Path(__file__).parent / "stand_ins"
_RANKS_S = 120.0


def scenario(
    world: int = 2,
    exit_codes: tuple[int, ...] | None = None,
    applies: bool = True,
    smoke: bool = False,
    **environment: str,
) -> Callable[[Any], Any]:
    """Marks a scenario.

    Args:
        world: Number of ranks.
        exit_codes: How their processes end; None: with 0.
        applies: Whether this version of the engine has what the scenario is about.
        smoke: Whether `make test` runs it in every version of the engine, and not in the newest alone (`contract.py`
            reads that from the source).
        environment: What the operator has set.
    """

    def mark(function: Any) -> Any:
        @wraps(function)
        def run() -> None:
            os.environ.update(environment)
            function()

        run.world, run.exit_codes, run.applies = world, exit_codes or (0,) * world, applies
        return run

    return mark


class Log(logging.Handler):
    """All that comes out through the logger ``name`` from now on."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._records: list[logging.LogRecord] = []
        logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def having(self, text: str, level: int = logging.DEBUG, of: str = "") -> list[str]:
        records = [r for r in self._records if r.name.startswith(of) and r.levelno >= level]
        return [r.getMessage() for r in records if text in r.getMessage()]


def calls_of(communicator: llm_comm.Communicator) -> list[torch.Size]:
    """The shapes that ``communicator`` sums from now on, for an engine."""
    shapes: list[torch.Size] = []
    original = communicator.try_all_reduce

    def try_all_reduce(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor | None:
        total = original(x, out)
        if total is not None:
            shapes.append(x.shape)
        return total

    communicator.try_all_reduce = try_all_reduce  # type: ignore[method-assign]
    return shapes


def wait_for_text(path: Path, text: str) -> str:
    """What another rank has written to ``path``, once ``text`` is in it."""
    deadline = time.monotonic() + 30
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{path.name} does not say {text!r}"
        time.sleep(0.1)
    return path.read_text()


def use_nccl_library_by(wrapper: ModuleType) -> None:
    """An engine's own wrapper of NCCL loads the library in place of NCCL, finds every function that it lists, and moves
    data. ``wrapper``: the engine's module ``pynccl_wrapper``."""
    library = wrapper.NCCLLibrary(llm_comm.nccl_library(emulated=True))
    assert not [f.name for f in wrapper.NCCLLibrary.exported_functions if f.name not in library._funcs]
    rank, place = dist_rank(), shared_directory()
    if rank == 0:
        (place / "id.new").write_bytes(bytes(library.ncclGetUniqueId()))
        (place / "id.new").rename(place / "id")
    while not (place / "id").exists():
        time.sleep(0.01)
    unique_id = wrapper.ncclUniqueId.from_buffer_copy((place / "id").read_bytes())
    comm = library.ncclCommInitRank(2, unique_id, rank)
    x, total = data((5, 1001), rank), torch.zeros(5, 1001, dtype=torch.bfloat16)
    types, pointers = wrapper.ncclDataTypeEnum, [wrapper.buffer_type(y.data_ptr()) for y in (x, total)]
    library.ncclAllReduce(*pointers, x.numel(), types.ncclBfloat16, wrapper.ncclRedOpTypeEnum.ncclSum, comm, None)
    assert torch.equal(total, expected_sum((5, 1001)))
    library.ncclBroadcast(*pointers, x.numel(), types.ncclBfloat16, 1, comm, None)
    assert torch.equal(total, data((5, 1001), 1))
    if "ncclCommSuspend" in library._funcs:  # refused, as no NCCL is there to do it
        invalid_usage = 5
        assert library._funcs["ncclCommSuspend"](comm, 1) == invalid_usage
        assert b"ncclCommSuspend is not served" in library._funcs["ncclGetLastError"](None)
    library.ncclCommDestroy(comm)


def lose_rank_1() -> None:
    """It dies. The engine of the other rank is idle, and takes no notice for longer than that rank may live."""
    dist.barrier()
    if dist_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def use_config_file(text: str, name: str = "options.yaml") -> None:
    path = shared_directory() / name
    mine = path.with_suffix(f".{dist_rank()}")
    mine.write_text(text)
    mine.replace(path)  # the other rank may be reading it
    os.environ["LLM_COMM_CONFIG"] = str(path)


def shared_directory() -> Path:
    return Path(os.environ["SHARED_DIRECTORY"])


def data(shape: tuple[int, ...], rank: int | None = None) -> torch.Tensor:
    """Different at every place and on every rank, and small enough for all sums to be exact in bfloat16."""
    rank = dist.get_rank() if rank is None else rank
    places = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return ((places * 7 + rank * 5) % 17 - rank).to(torch.bfloat16)


def expected_sum(shape: tuple[int, ...], ranks: tuple[int, ...] = (0, 1)) -> torch.Tensor:
    return torch.stack([data(shape, rank) for rank in ranks]).float().sum(0).to(torch.bfloat16)


def dist_rank() -> int:
    """The rank of this process, also before there are groups."""
    return int(os.environ["RANK"])


# ---- The process that forks the ranks -------------------------------------------------------------------------------


def serve(scenarios: Mapping[str, Any], process_name: str) -> None:
    """Runs scenarios by name until stdin ends; ``process_name`` is what the engine calls the process of a rank."""
    catalogue.find_table("emulated", 2, 1, llm_comm.Config.load({}))  # the ranks get what it has read
    results = os.fdopen(int(sys.argv[1]), "w")
    gc.freeze()  # no collector of a rank goes through what the engine's modules hold, and copies its pages
    for line in sys.stdin:
        name = line.strip()
        applies = scenarios[name].applies
        errors = _run(scenarios[name], process_name) if applies else []
        print(json.dumps({"name": name, "applies": applies, "errors": errors}), file=results, flush=True)


def _run(function: Any, process_name: str) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        ranks = [_fork_rank(function, rank, process_name, Path(directory)) for rank in range(function.world)]
        codes = _wait_for(ranks)
        errors = []
        for rank, (code, wanted) in enumerate(zip(codes, function.exit_codes, strict=True)):
            trace = Path(directory, f"error{rank}")
            if trace.exists():
                errors.append(f"rank {rank}: {trace.read_text()}")
            elif code != wanted:
                errors.append(f"rank {rank}: the process ended with {code}, not {wanted} (negative: a signal)")
        return errors


def _fork_rank(function: Any, rank: int, process_name: str, directory: Path) -> int:
    pid = os.fork()
    if pid != 0:
        return pid
    code = 0
    try:
        multiprocessing.current_process().name = process_name.format(rank)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(function.world), SHARED_DIRECTORY=str(directory))
        torch.set_num_threads(1)
        function()
    except BaseException:
        (directory / f"error{rank}").write_text(traceback.format_exc())
        code = 3
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait_for(pids: list[int]) -> list[int]:
    """Exit codes. Whoever is still there when the time is up is killed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + _RANKS_S
    while len(codes) < len(pids):
        for pid in pids:
            if pid in codes:
                continue
            if time.monotonic() > deadline:
                os.kill(pid, 9)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]
