"""Ranks for tests: a pool of processes that run functions as the ranks of a gloo group.

Importing torch takes seconds, so the processes are forked from a server that has it, and live as long as the pool.
Each task gets a process group of its own. A task that fails, hangs or loses a process ends within its time limit with
one error that holds the tracebacks of all ranks; the pool then starts new processes for the next task.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import llm_comm
from llm_comm.config import EngineOptions
from llm_comm.runtime.rank_names import RankName, RankNames

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["torch", "torch.distributed", "llm_comm", "pytest"])

# What the ranks still get once one of them has failed: they may be waiting for it.
_GRACE_S = 5.0
# In which a process that is let go has to end.
_END_S = 30.0
_GROUP_TIMEOUT = timedelta(seconds=60)


class RanksFailedError(AssertionError):
    """A task failed on some ranks."""


# ---- In the process of a rank --------------------------------------------------------------------------------------


def store() -> dist.Store:
    """A store that the ranks of the running task share. It outlives all of them."""
    return _running["store"]


def join_group(group_store: dist.Store, rank: int, world_size: int) -> None:
    """Makes this process a rank of a gloo group of its own, dist.group.WORLD. Returns when all ranks have joined."""
    dist.init_process_group("gloo", store=group_store, rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT)
    dist.barrier()  # a rank that left before would fail those that still connect to it


def regroup(name: str, members: list[int]) -> None:
    """Leaves the task's group and forms a new one of ``members``, ranks of the old one, of which this is one."""
    rank = members.index(dist.get_rank())
    dist.destroy_process_group()
    join_group(dist.PrefixStore(name, store()), rank, len(members))


def new_groups(memberships: Iterable[list[int]]) -> list[dist.ProcessGroup]:
    """Groups of ranks of the task's group, by all of its ranks. Returns when all have joined theirs."""
    groups = [dist.new_group(members) for members in memberships]
    dist.barrier()
    return groups


def names_of_world(size: int) -> RankNames:
    """Names of the ranks of a group that is torch's default group."""
    return RankNames("WORLD", tuple(RankName(rank, rank) for rank in range(size)), size)


def unnamed(text: str) -> str:
    """A text with short names of ranks: "rank 1" for "group WORLD, rank 1 (global rank 1, pid 7 on a)"."""
    text = re.sub(r" \(global ranks? [^()]*\)", "", text)
    return re.sub(r"group \S+, (?=rank)| of group [^\s:,]+", "", text)


def make_communicator(group: dist.ProcessGroup | None = None, **options: Any) -> llm_comm.Communicator:
    """An emulated communicator of the task's group, as engines make them. A busy machine keeps the limit on waits."""
    defaults = {"workspace_bytes": 4 << 20, "timeout_s": 60.0}
    config = EngineOptions.load({}, **{**defaults, **options})
    return llm_comm.Communicator(group or dist.group.WORLD, device="cpu", config=config)


@contextmanager
def pidfds(exist: bool) -> Iterator[None]:
    """Where they do not, as on Linux before 5.3, a communicator that is made learns nothing of processes that exit."""
    with nullcontext() if exist else mock.patch("os.pidfd_open", side_effect=OSError):
        yield


@contextmanager
def nothing_leaked() -> Iterator[None]:
    """Fails if this process ends the block with more descriptors, or mapped workspaces or windows of a heap, than it
    entered with."""
    before = _resources()
    yield
    after = _resources()
    if any(after[kind] > before[kind] for kind in before):
        raise AssertionError(f"leaked: {before} before, {after} after")


def error_of_setup(**options: Any) -> str:
    """What making a communicator raises, and its class; nothing is left of it, and the group works."""
    with nothing_leaked():
        try:
            make_communicator(**options)
        except llm_comm.LlmCommError as error:
            said = unnamed(f"{type(error).__name__}: {error}")
        else:
            raise AssertionError("a communicator was made")
    with make_communicator() as comm:
        assert comm.all_reduce(torch.ones(5)).eq(comm.world_size).all()
        dist.barrier()
    return said


def _resources() -> dict[str, int]:
    gc.collect()  # exceptions and the frames of their tracebacks hold each other
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        workspaces = sum("llm_comm_workspace" in line or "llm_comm_heap" in line for line in maps)
    return {"descriptors": len(os.listdir("/proc/self/fd")), "mapped workspaces": workspaces}


_running: dict[str, dist.Store] = {}  # of the process


def _serve(connection: Connection, rank: int, port: int) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gc.freeze()  # what the modules hold stays: no collection goes through it, nor copies its pages
    root = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            task = connection.recv()
        except EOFError:  # the pool is gone
            return
        _running["store"] = dist.PrefixStore(task.name, root)
        before = dict(os.environ)
        try:
            join_group(dist.PrefixStore("group", store()), rank, task.world_size)
            try:
                answer = _Answer(task.function(*task.arguments), None)
            finally:
                dist.destroy_process_group()
        except BaseException:
            answer = _Answer(None, traceback.format_exc())
        os.environ.clear()  # the next task finds the variables that this one did
        os.environ.update(before)
        connection.send(answer)


# ---- In the process of the tests -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    name: str
    world_size: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Answer:
    result: Any
    error: str | None


@dataclass(frozen=True)
class _Rank:
    process: Any
    connection: Connection


class RankPool:
    """Up to ``size`` ranks.

    Functions are sent by name, so they stand at the top level of a module; arguments and results are pickled.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks: list[_Rank] = []
        self._tasks = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        time_limit_s: float = 120.0,
        dying: Collection[int] = (),
    ) -> list[Any]:
        """Runs ``function(*arguments)`` on ranks 0..world_size-1; returns the results by rank.

        The ranks in ``dying`` must be killed by SIGKILL during the task; their result is None. The processes of the
        others must end by themselves after it.
        """
        self._start(world_size)
        self._tasks += 1
        task = _Task(f"task{self._tasks}", world_size, function, arguments)
        ranks = dict(enumerate(self._ranks[:world_size]))
        for rank in ranks.values():
            rank.connection.send(task)
        answers = dict(self._answers(ranks, time_limit_s, dying))
        for number in ranks.keys() - answers.keys():
            answers[number] = _Answer(None, "no answer in time (the stack of each thread is on stderr)")
        errors = {number: answer.error for number, answer in sorted(answers.items()) if answer.error}
        if dying and not errors:
            errors = self._end(set(ranks.keys() - dying))
        if errors or dying:
            self.stop()
        if errors:
            raise RanksFailedError("\n".join(f"rank {number}: {text}" for number, text in errors.items()))
        return [answers[number].result for number in sorted(answers)]

    def _answers(
        self, ranks: dict[int, _Rank], time_limit_s: float, dying: Collection[int]
    ) -> Iterable[tuple[int, _Answer]]:
        """The answers that come in time, as they come."""
        deadline = time.monotonic() + time_limit_s
        waiting = {rank.connection: number for number, rank in ranks.items()}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                _print_stacks(ranks[number] for number in waiting.values())
                return
            for connection in ready:
                number = waiting.pop(connection)
                try:
                    answer = connection.recv()
                except EOFError:
                    answer = _answer_of_dead(ranks[number], number in dying)
                if answer.error:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                yield number, answer

    def _start(self, world_size: int) -> None:
        if world_size > self._size:
            raise ValueError(f"{world_size} ranks asked of a pool of {self._size}")
        for rank in range(len(self._ranks), world_size):
            ours, theirs = _FORKSERVER.Pipe()
            process = _FORKSERVER.Process(target=_serve, args=(theirs, rank, self._store.port), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours))

    def _end(self, numbers: Iterable[int]) -> dict[int, str]:
        """Lets processes go; returns those that did not end as they should."""
        for number in numbers:
            self._ranks[number].connection.close()
        deadline = time.monotonic() + _END_S
        errors = {}
        for number in numbers:
            process = self._ranks[number].process
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode != 0:
                errors[number] = f"let go, the process has exit code {process.exitcode} after {_END_S:g} s"
        return errors

    def stop(self) -> None:
        """Kills all processes; the next task gets new ones."""
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()
            rank.connection.close()
        self._ranks.clear()


def _answer_of_dead(rank: _Rank, is_expected: bool) -> _Answer:
    rank.process.join()
    code = rank.process.exitcode
    if is_expected and code == -signal.SIGKILL:
        return _Answer(None, None)
    return _Answer(None, f"the process ended with exit code {code}")


def _print_stacks(ranks: Iterable[_Rank]) -> None:
    for rank in ranks:
        os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(1.0)  # for them to write
