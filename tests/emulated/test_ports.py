"""Port channels: the algorithms that use them, the proxy of each rank, and how it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import ucx_here
from cores import connected, gather_problem, number_of, parts_of, problem_of, run_on_all, tiling_of, together
from harness import RankPool, make_communicator, nothing_leaked
from reference import DTYPES, assert_is_sum, contributions

from llm_comm import PeerTimeout, _core
from llm_comm.planning.tables import ALL_REDUCE, Row

REPOSITORY = Path(__file__).parents[2]
CSRC = REPOSITORY / "csrc"
PORT = "port"


def port_row(blocks: int = 3, tile_lines: int = 16, depth: int = 1) -> Row:
    return Row(1 << 30, ALL_REDUCE, PORT, "Port", blocks=blocks, tile_lines=tile_lines, depth=depth)


def threads() -> int:
    """Of this process, those that are no Python threads too."""
    return len(os.listdir("/proc/self/task"))


# ---- The primitive and the proxy -----------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_primitive(tmp_path: Path) -> None:
    """put, signal, wait and flush between two emulated GPUs; a proxy that fails, that is flooded, that is forked."""
    program = built(tmp_path, "emulated_main")
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a put beyond the workspace is refused: yes" in done.stdout


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@ucx_here.needs_ucx
def test_primitive_over_ucx(tmp_path: Path) -> None:
    """The same between two processes, whose proxies reach each other by UCX; one of them ends, and one dies."""
    program = built(
        tmp_path, "ucx_main", *(CSRC / "host" / "ucx" / f"{name}.cpp" for name in ("ucp_api", "ucx_transport"))
    )
    package = ucx_here.package()
    of_package = [] if package is None else [str(package / "lib")]
    paths = [*of_package, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(paths), "UCX_TLS": "tcp"}
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "and the error names its rank: yes" in done.stdout


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_what_is_said_of_ucx_is_what_its_headers_say() -> None:
    package = ucx_here.package()
    if package is None:
        pytest.skip("the package libucx, which brings UCX's headers, is not installed")
    source = REPOSITORY / "tests" / "port_channel" / "ucp_layout.cpp"
    flags = ["-std=c++20", "-fsyntax-only", "-I", str(CSRC), "-isystem", str(package / "include")]
    subprocess.run(["g++", *flags, str(source)], check=True, timeout=300)


def built(directory: Path, name: str, *sources: Path) -> Path:
    """A program of tests/port_channel, with the emulator and a proxy."""
    of_host = [CSRC / "host" / f"{part}.cpp" for part in ("proxy", "port_batch")]
    of_emulator = [CSRC / "emulator" / f"{part}.cpp" for part in ("executor", "fiber", "gpu_thread")]
    inputs = [REPOSITORY / "tests" / "port_channel" / f"{name}.cpp", *sources, *of_host, *of_emulator]
    flags = ["-std=c++20", "-O1", "-DLLM_COMM_EMULATOR", "-pthread"]
    include = ["-I", str(CSRC), "-I", str(CSRC / "include")]
    program = directory / name
    subprocess.run(["g++", *flags, *include, *map(str, inputs), "-ldl", "-o", str(program)], check=True, timeout=300)
    return program


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_primitive_compiles_for_a_gpu(tmp_path: Path) -> None:
    source = REPOSITORY / "tests" / "port_channel" / "gpu_main.cu"
    flags = ["-std=c++20", "-arch=sm_90", "-Werror=all-warnings", "-I", str(CSRC), "-I", str(CSRC / "include")]
    subprocess.run(["nvcc", *flags, "-c", str(source), "-o", str(tmp_path / "gpu_main.o")], check=True, timeout=300)


# ---- The algorithms, by their cores --------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce(world: int, dtype: torch.dtype) -> None:
    """Messages of less than a chunk and of many, out of place and in place."""
    cores = connected(world, staging_bytes=64 << 10)
    number = number_of(ALL_REDUCE, PORT)
    for count in (1, 7, 1000, 20_011):
        for depth in (1, 3):
            inputs = contributions(world, count, dtype)
            problem, tiling = problem_of(inputs[0], world), tiling_of(count, blocks=3, tile_lines=8, depth=depth)
            outputs = [torch.empty_like(x) for x in inputs]
            run_on_all(cores, number, problem, tiling, [[x, out] for x, out in zip(inputs, outputs, strict=True)])
            for out in outputs:
                assert_is_sum(out, inputs, f"{count} elements, depth {depth}")
            in_place = [x.clone() for x in inputs]
            run_on_all(cores, number, problem, tiling, [[x, x] for x in in_place])
            for out in in_place:
                assert_is_sum(out, inputs, f"{count} elements in place, depth {depth}")


@pytest.mark.parametrize("sizes", [[4096, 4096], [5000, 0], [1, 7001, 300], [64, 64, 64, 64, 64]])
def test_all_gather(sizes: list[int]) -> None:
    """Parts of any size, in one row and in several."""
    world = len(sizes)
    cores = connected(world, staging_bytes=64 << 10)
    number = number_of("all_gather", PORT)
    for rows in (1, 3):
        parts = parts_of(rows, sizes)
        outputs = [torch.empty(rows, sum(sizes), dtype=torch.uint8) for _ in sizes]
        problem = gather_problem(world, rows, sizes)
        tiling = tiling_of(rows * max(sizes), blocks=2, tile_lines=8, depth=2)
        for _ in range(3):
            # A tensor without elements has no address.
            buffers = [[part if part.numel() else out, out] for part, out in zip(parts, outputs, strict=True)]
            run_on_all(cores, number, problem, tiling, buffers)
            for out in outputs:
                assert torch.equal(out, torch.cat(parts, dim=1))
                out.zero_()


def test_what_does_not_fit_is_refused() -> None:
    (core,) = connected(1)
    del core
    cores = connected(2, staging_bytes=1024)
    x = torch.zeros(100_000)
    with pytest.raises(ValueError, match="1024 bytes of staging memory"):
        cores[0].prepare(number_of(ALL_REDUCE, PORT), problem_of(x, 2), tiling_of(x.numel(), tile_lines=64))


# ---- The proxy's life ----------------------------------------------------------------------------------------------


def prepared(cores: list[_core.Core], x: torch.Tensor) -> list[Any]:
    number, problem = number_of(ALL_REDUCE, PORT), problem_of(x, len(cores))
    return [core.prepare(number, problem, tiling_of(x.numel())) for core in cores]


def test_a_proxy_begins_with_the_first_call_and_ends_with_its_core() -> None:
    before = threads()
    x = torch.ones(1000)
    for _ in range(5):
        cores = connected(2)
        assert threads() == before
        calls = prepared(cores, x)
        assert threads() == before + 2
        calls += prepared(cores, x)  # has begun already
        assert threads() == before + 2
        del calls, cores
        assert threads() == before


def test_a_proxy_ends_after_a_failure() -> None:
    """The other rank never comes: the wait ends, and so do both proxies."""
    before = threads()
    cores = connected(2, timeout_s=0.3)
    x = torch.ones(1000)
    calls = prepared(cores, x)
    out = torch.empty_like(x)
    assert not calls[0](x.data_ptr(), out.data_ptr(), 0)
    error = cores[0].error()
    assert error is not None
    assert (error.cause, error.peer) == ("timeout", 1)
    del calls, cores, error
    assert threads() == before


def test_a_proxy_ends_with_an_abort() -> None:
    before = threads()
    cores = connected(2, timeout_s=60.0)
    x = torch.ones(1000)
    out = torch.empty_like(x)
    calls = prepared(cores, x)
    timer = threading.Timer(0.2, cores[0].abort)
    timer.start()
    assert not calls[0](x.data_ptr(), out.data_ptr(), 0)
    timer.join()
    del calls, cores, timer
    assert threads() == before


def test_a_fork_drops_its_cores() -> None:
    cores = connected(2)
    x = torch.ones(1000)
    calls = prepared(cores, x)
    outputs = [torch.empty_like(x) for _ in cores]

    def reduce() -> None:
        made = [lambda c=c, o=o: c(x.data_ptr(), o.data_ptr(), 0) for c, o in zip(calls, outputs, strict=True)]
        assert together(*made) == [True, True]
        assert all(out.eq(2).all() for out in outputs)

    reduce()
    child = os.fork()
    if child == 0:
        calls.clear()
        cores.clear()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    reduce()


# ---- Communicators -------------------------------------------------------------------------------------------------


def reduce_by_ports() -> None:
    make_communicator().close()
    with nothing_leaked():
        first, second = make_communicator(), make_communicator()
        for comm in (first, second):
            comm.use_table(comm.table.with_rows(port_row()))
        for call, count in enumerate((1, 1000, 40_007, 13)):
            for comm in (first, second):
                inputs = contributions(comm.world_size, count, torch.bfloat16, call)
                x = inputs[comm.rank].clone()
                assert comm.plan(x).algorithm == PORT
                assert_is_sum(comm.all_reduce(x), inputs, f"{count} elements")
                assert_is_sum(comm.all_reduce(x, out=x), inputs, f"{count} elements in place")
        first.close()
        inputs = contributions(second.world_size, 5000, torch.float32)
        assert_is_sum(second.all_reduce(inputs[second.rank]), inputs, "after the other one is closed")
        second.close()
        del first, second, comm


@pytest.mark.parametrize("world", [2, 3])
def test_two_communicators(ranks: RankPool, world: int) -> None:
    ranks.run(world, reduce_by_ports)


def lose_a_rank() -> None:
    comm = make_communicator(timeout_s=1.0)
    comm.use_table(comm.table.with_rows(port_row()))
    x = torch.ones(10_000)
    assert comm.all_reduce(x).eq(comm.world_size).all()
    if comm.rank != 1:
        with pytest.raises(PeerTimeout, match="nothing came from rank 1"):
            comm.all_reduce(x)
    torch.distributed.barrier()
    comm.close()


def test_a_silent_rank_is_named(ranks: RankPool) -> None:
    ranks.run(3, lose_a_rank)
