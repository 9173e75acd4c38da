"""Making a communicator: either all ranks get one, or all raise the same error in time, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator, nothing_leaked, store, unnamed
from reference import assert_is_sum, contributions
from tables import plain_row, write_table

from llm_comm import RendezvousError, _core
from llm_comm.errors import MissingRankError
from llm_comm.runtime import rendezvous as rendezvous_module
from llm_comm.runtime.descriptors import close_all

TIMEOUT_S = 2.0
SLACK_S = 20.0
WORLD = 3
FAULTY_RANK = 1
LONG_TEXT = "äöü🙂" * 1000


def rendezvous_error(**options: Any) -> str:
    with pytest.raises(RendezvousError) as error:
        make_communicator(**options)
    return unnamed(str(error.value))


def same_on_all(texts: list[str]) -> str:
    assert len(set(texts)) == 1, "\n".join(texts)
    return texts[0]


# ---- Ranks that do not come ----------------------------------------------------------------------------------------


def come_without(missing: int, is_alive: bool) -> tuple[str, float] | None:
    rank, others = dist.get_rank(), [rank for rank in range(dist.get_world_size()) if rank != missing]
    if rank == missing:
        if is_alive:
            store().wait([f"gave up {other}" for other in others], timedelta(seconds=60))
        return None
    start = time.monotonic()
    text = rendezvous_error(timeout_s=TIMEOUT_S)
    seconds = time.monotonic() - start
    store().set(f"gave up {rank}", "")
    return text, seconds


@pytest.mark.parametrize("is_alive", [True, False], ids=["elsewhere", "gone"])
@pytest.mark.parametrize("missing", [0, 2])
def test_missing_rank(mortal_ranks: RankPool, missing: int, is_alive: bool) -> None:
    found = mortal_ranks.run(WORLD, come_without, missing, is_alive)
    assert found.pop(missing) is None
    for text, seconds in found:
        assert "not all 3 ranks came" in text
        assert "LLM_COMM_TIMEOUT_S" in text
        assert seconds < TIMEOUT_S + SLACK_S


def die_during_set_up() -> str:
    def die(_options: _core.CoreOptions) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == FAULTY_RANK:
            patch.setattr(_core, "make_emulated_core", die)
        return rendezvous_error(timeout_s=TIMEOUT_S)


def test_rank_dies_during_set_up(mortal_ranks: RankPool) -> None:
    texts = mortal_ranks.run(WORLD, die_during_set_up, dying=[FAULTY_RANK])
    assert texts.pop(FAULTY_RANK) is None
    assert all("not all 3 ranks came" in text for text in texts)


# ---- Ranks that do not fit together --------------------------------------------------------------------------------


def come_with(options_of_faulty_rank: dict[str, Any], options_of_others: dict[str, Any]) -> str:
    return rendezvous_error(**(options_of_faulty_rank if dist.get_rank() == FAULTY_RANK else options_of_others))


def test_different_tuning_tables(ranks: RankPool, tmp_path: Path) -> None:
    """With other grids on one rank, sums would be wrong or never come."""
    paths = []
    for directory, algorithm in (("a", "one_shot"), ("b", "two_shot")):
        (tmp_path / directory).mkdir()
        rows = [plain_row(1024, algorithm, 1, 4, 0)]
        paths.append(str(write_table(tmp_path / directory / "table.yaml", rows)))
    options = [{"table": path, "timeout_s": TIMEOUT_S} for path in paths]
    text = same_on_all(ranks.run(WORLD, come_with, *options))
    assert f"rank {FAULTY_RANK}" in text


def come_with_directory(of_faulty_rank: str, of_others: str) -> str:
    directory = of_faulty_rank if dist.get_rank() == FAULTY_RANK else of_others
    with mock.patch.dict(os.environ, {"LLM_COMM_TABLE_DIR": directory}):
        return rendezvous_error(timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("kind", ["other", "missing", "broken"])
def test_different_directories_of_tuning_tables(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """Each rank would go by the table that it finds."""
    name = _core.table_file_name("emulated", WORLD)
    paths = []
    for directory, algorithm in (("a", "one_shot"), ("b", "two_shot")):
        (tmp_path / directory).mkdir()
        rows = [plain_row(1024, algorithm, 1, 4, 0)]
        paths.append(write_table(tmp_path / directory / name, rows, device="emulated", world_size=WORLD))
    if kind == "missing":
        paths[0].unlink()
    elif kind == "broken":
        paths[0].write_text("rows: none")
    text = same_on_all(ranks.run(WORLD, come_with_directory, *(str(path.parent) for path in paths)))
    origin = {
        "other": f"user's directory {paths[0]}",
        "missing": "emulated",
        "broken": f"emulated, as {paths[0]} cannot be used",
    }
    assert text.startswith("the ranks have different tuning tables: ")
    assert f"), {origin[kind]} on rank 1, " in text
    assert f"), user's directory {paths[1]} on ranks 0, 2; give all ranks" in text
    assert text.endswith(
        "give all ranks the same option table, or the same home or LLM_COMM_TABLE_DIR (docs/operate/tuning.md)"
    )


def table_of_directories(*directories: str) -> str:
    rank = dist.get_rank()
    with (
        mock.patch.dict(os.environ, {"LLM_COMM_TABLE_DIR": directories[rank]}),
        make_communicator() as comm,
    ):
        x = torch.full((600,), float(rank + 1))
        assert bool((comm.all_reduce(x) == 6).all())
        return f"{comm.plan(x).reason}; {comm.table.describe()}"


def test_directories_with_the_same_table_or_the_same_broken_one(ranks: RankPool, tmp_path: Path) -> None:
    """Copies will do: what is compared is what is chosen by."""
    name = _core.table_file_name("emulated", WORLD)
    directories = [tmp_path / str(rank) for rank in range(WORLD)]
    for directory in directories:
        directory.mkdir()
        rows = [plain_row(4096, "two_shot", 2, 4, 0)]
        write_table(directory / name, rows, device="emulated", world_size=WORLD)
    text = same_on_all(ranks.run(WORLD, table_of_directories, *map(str, directories)))
    assert text == f"{name}, up to 4096 bytes; {name}, user's directory"
    for directory in directories:
        (directory / name).write_text("rows: none")
    text = same_on_all(ranks.run(WORLD, table_of_directories, *map(str, directories)))
    assert text.endswith("; emulated")


def pretend_to_be_elsewhere() -> str:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == FAULTY_RANK:
            patch.setattr("llm_comm.nodes.topology.host_identity", lambda: {"host": "far-away", "boot_id": "another"})
        return rendezvous_error()


@contextmanager
def gpus_of_ranks(gpus: list[str]) -> Iterator[None]:
    """The ranks, which are emulated, say that they are on these GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llm_comm.runtime.comparison.gpu_name", lambda _device: gpus[dist.get_rank()])
        yield


def share_gpus(**options: Any) -> str:
    with gpus_of_ranks(["GPU-a", "GPU-b", "GPU-a"]):
        return rendezvous_error(**options)


def test_ranks_on_one_gpu(ranks: RankPool) -> None:
    assert "share a GPU" in (text := same_on_all(ranks.run(WORLD, share_gpus)))
    assert "ranks 0, 2 use GPU-a" in text
    assert text.endswith("For tests only, LLM_COMM_SHARE_GPU=1 permits it")


def permit_on_one_rank() -> str:
    return share_gpus(share_gpu=dist.get_rank() == FAULTY_RANK)


def test_permission_to_share_that_only_one_rank_has(ranks: RankPool) -> None:
    text = same_on_all(ranks.run(WORLD, permit_on_one_rank))
    assert "different options" in text
    assert f"different options: share_gpu is True on rank {FAULTY_RANK}, False on ranks 0, 2; give" in text


def share_with_permission(gpus: list[str]) -> list[str]:
    """What is logged from warnings upwards while a communicator is made, which then works."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("llm_comm")
    logger.addHandler(handler)
    try:
        with gpus_of_ranks(gpus), make_communicator(share_gpu=True) as comm:
            inputs = contributions(WORLD, 1000, torch.bfloat16, 0)
            assert_is_sum(comm.all_reduce(inputs[comm.rank]), inputs, "with permission")
    finally:
        logger.removeHandler(handler)
    return messages


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (["GPU-a", "GPU-b", "GPU-a"], "ranks 0, 2 use GPU-a. They take turns, so that an operation takes milliseconds"),
        (["GPU-a", "GPU-b", "GPU-c"], "no ranks share a GPU"),
    ],
    ids=["shared", "not shared"],
)
def test_permission_to_share_is_said_loudly_once(ranks: RankPool, gpus: list[str], said: str) -> None:
    first, *others = ranks.run(WORLD, share_with_permission, gpus)
    assert [unnamed(text) for text in first] == [
        f"llm_comm: group WORLD: share_gpu is on (Python), for tests only: {said}"
    ]
    assert others == [[], []]


def test_rank_on_another_machine(ranks: RankPool) -> None:
    text = same_on_all(ranks.run(WORLD, pretend_to_be_elsewhere))
    assert "the ranks are on 2 nodes, and not as many on each" in text
    assert f"rank {FAULTY_RANK}: far-away (boot id another)" in text


# ---- Steps that fail on one rank -----------------------------------------------------------------------------------


class FailingCore:
    """A core of which one method fails."""

    def __init__(self, core: _core.Core, method: str, failure: Callable[..., Any]) -> None:
        self._core, self._method, self._failure = core, method, failure

    def __getattr__(self, name: str) -> Any:
        return self._failure if name == self._method else getattr(self._core, name)


def no_memory(*_: object) -> None:
    raise OSError("out of memory, say")


def complain_at_length(*_: object) -> None:
    raise OSError(LONG_TEXT)


def failing_method(patch: pytest.MonkeyPatch, method: str, failure: Callable[..., Any]) -> None:
    make = _core.make_emulated_core
    patch.setattr(_core, "make_emulated_core", lambda options: FailingCore(make(options), method, failure))


@contextmanager
def no_large_files() -> Iterator[None]:
    """The system refuses shared memory of more than a few KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def failing(step: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if step == "core":
            patch.setattr(_core, "make_emulated_core", no_memory)
        elif step == "long text":
            patch.setattr(_core, "make_emulated_core", complain_at_length)
        elif step == "socket":
            patch.setattr(rendezvous_module.Rendezvous, "_listen", no_memory)
        elif step == "exchange":
            patch.setattr(rendezvous_module.Rendezvous, "_exchange", no_memory)
        elif step == "end of the exchange":
            exchange = rendezvous_module.Rendezvous._exchange

            def exchange_and_fail(*arguments: Any) -> None:
                close_all(exchange(*arguments).values())
                no_memory()

            patch.setattr(rendezvous_module.Rendezvous, "_exchange", exchange_and_fail)
        elif step == "thread":
            patch.setattr("llm_comm.runtime.watchdog.Watchdog.start", no_memory)
        elif step == "p2p test":
            failing_method(patch, "peers_unseen", lambda: [0])
        elif step != "allocation":
            failing_method(patch, step, no_memory)
        with no_large_files() if step == "allocation" else nullcontext():
            yield


def come_with_failure(step: str) -> str:
    """Fails to make a communicator, and makes one after all."""
    make_communicator().close()
    with nothing_leaked():
        if dist.get_rank() == FAULTY_RANK:
            with failing(step):
                text = rendezvous_error(timeout_s=5.0)
        else:
            text = rendezvous_error(timeout_s=5.0)
    with make_communicator() as comm:
        inputs = contributions(comm.world_size, 100, torch.float16)
        assert_is_sum(comm.all_reduce(inputs[comm.rank]), inputs, "after a failure")
    return text


REASONS = {
    "core": "out of memory, say",
    "max_cluster_blocks": "out of memory, say",
    "allocation": "shared memory",
    "create_workspace": "out of memory, say",
    "socket": "out of memory, say",
    "exchange": "out of memory, say",
    "end of the exchange": "out of memory, say",
    "thread": "out of memory, say",
    "map_peer": "out of memory, say",
    "send_marks": "out of memory, say",
    "p2p test": "stores of rank 0 did not arrive",
    "long text": LONG_TEXT[:100],
}


@pytest.mark.parametrize("step", REASONS)
def test_failure_of_one_rank(ranks: RankPool, step: str) -> None:
    text = same_on_all(ranks.run(WORLD, come_with_failure, step))
    assert f" of {WORLD} ranks: " in text
    assert REASONS[step] in text.partition(f"rank {FAULTY_RANK}: ")[2]


def keep_the_error(step: str) -> None:
    gc.disable()
    try:
        faults = failing(step) if dist.get_rank() == FAULTY_RANK else nullcontext()
        with faults, pytest.raises(RendezvousError) as kept:
            make_communicator()
        assert "llm_comm_workspace" not in Path("/proc/self/maps").read_text(), "the workspace lives with the error"
        assert kept.value.__traceback__ is not None
    finally:
        gc.enable()


@pytest.mark.parametrize("step", ["p2p test", "thread"])
def test_an_error_that_is_kept_holds_no_memory(ranks: RankPool, step: str) -> None:
    ranks.run(WORLD, keep_the_error, step)


def come_with_room_for_small_clusters() -> int:
    """The cluster of a row that the table gives two blocks."""
    x = torch.ones(2, 8192, dtype=torch.bfloat16)
    weight = torch.ones(8192, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == FAULTY_RANK:
            failing_method(patch, "max_cluster_blocks", lambda: 1)
        with make_communicator() as comm:
            normed, sums = comm.all_reduce_add_rms_norm(x, None, weight, 1e-5)
            assert torch.equal(sums, x * comm.world_size)
            assert torch.equal(normed, x)
            return comm.plan_all_reduce_add_rms_norm(x, weight).cluster


def test_all_ranks_go_by_the_smallest_clusters(ranks: RankPool) -> None:
    assert ranks.run(WORLD, come_with_room_for_small_clusters) == [1] * WORLD


def come_without_status_page() -> None:
    """Errors are told without the states of the ranks then; nothing else is lost."""
    with pytest.MonkeyPatch.context() as patch, nothing_leaked():
        if dist.get_rank() == FAULTY_RANK:
            patch.setattr(os, "memfd_create", no_memory)
        with make_communicator() as comm:
            inputs = contributions(comm.world_size, 100, torch.float16)
            assert_is_sum(comm.all_reduce(inputs[comm.rank]), inputs, "without status pages")


def test_rank_without_status_page(ranks: RankPool) -> None:
    ranks.run(WORLD, come_without_status_page)


def come_with_few_descriptors(free: int) -> str:
    """The error on this rank, or "" if it got a communicator."""
    make_communicator().close()
    with nothing_leaked():
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        if dist.get_rank() == FAULTY_RANK:
            # Files that are open stay so: those of lower numbers are counted too.
            numbers = {int(name) for name in os.listdir("/proc/self/fd")}
            limit = next(n for n in range(limits[0]) if len(set(range(n)) - numbers) == free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
        try:
            make_communicator(timeout_s=5.0).close()
            text = ""
        except RendezvousError as error:
            text = unnamed(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return text


@pytest.mark.parametrize("free", range(1, 9))
def test_rank_without_file_descriptors(ranks: RankPool, free: int) -> None:
    """Wherever they end, all ranks raise or none does."""
    text = same_on_all(ranks.run(WORLD, come_with_few_descriptors, free))
    assert free < 8 or text == ""
    assert free > 1 or f"rank {FAULTY_RANK}: OSError" in text


def come_to_another_step() -> str:
    rendezvous = rendezvous_module.Rendezvous(dist.group.WORLD, TIMEOUT_S)
    with pytest.raises(MissingRankError) as error:
        rendezvous.gather("supper" if dist.get_rank() == FAULTY_RANK else "lunch", None)
    return unnamed(str(error.value))


def test_ranks_at_different_steps(ranks: RankPool) -> None:
    text = same_on_all(ranks.run(WORLD, come_to_another_step))
    assert f"rank 0: 'lunch', rank {FAULTY_RANK}: 'supper'" in text


# ---- Strangers -----------------------------------------------------------------------------------------------------


def come_among_strangers(message: bytes | None) -> None:
    """Somebody else connects to every socket first, hands in a file of its own, and then waits."""
    exchange, strangers = rendezvous_module.Rendezvous._exchange, contextlib.ExitStack()

    def exchange_late(rendezvous: Any, server: socket.socket, *arguments: Any) -> Any:
        stranger = strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        stranger.connect(server.getsockname())
        if message is not None:
            with open("/dev/zero", "rb") as file:
                socket.send_fds(stranger, [message], [file.fileno()])
        return exchange(rendezvous, server, *arguments)

    make_communicator().close()
    with nothing_leaked():
        with pytest.MonkeyPatch.context() as patch, strangers:
            patch.setattr(rendezvous_module.Rendezvous, "_exchange", exchange_late)
            comm = make_communicator()
        with comm:
            inputs = contributions(comm.world_size, 100, torch.float16)
            assert_is_sum(comm.all_reduce(inputs[comm.rank]), inputs, "among strangers")


@pytest.mark.parametrize("message", [None, b"", b"0", b"not the word 1", b" 1", b"\xff\xfe 1"])
def test_strangers_are_not_listened_to(ranks: RankPool, message: bytes | None) -> None:
    ranks.run(WORLD, come_among_strangers, message)
