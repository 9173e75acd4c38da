"""Programs of the DSL in the place of all-gathers and reduce-scatters, between emulated ranks: the same bits."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator
from reference import assert_bitwise_equal, contributions, rank_order_sum

from llm_comm import Communicator
from llm_comm.dsl import programs

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

LIBRARY = "llm_comm.dsl.library"
#: Of all parts together.
MAX_BYTES = 24 << 10


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the kernels are that the tests of this file compile."""
    return str(tmp_path_factory.mktemp("kernels"))


def communicator(directory: str, program: str) -> Communicator:
    """One that runs a program of the library wherever it can."""
    os.environ["LLM_COMM_CACHE_DIR"] = directory
    programs._registered.clear()  # what an earlier test has registered in this process
    return make_communicator(dsl=f"{LIBRARY}:{program}", dsl_max_bytes=MAX_BYTES, algorithm=f"dsl:{program}")


def last_was(comm: Communicator) -> str:
    """What the core has launched last."""
    return comm._handle.core().last_call().operation


def gather_by_a_program(directory: str) -> None:
    with communicator(directory, "all_gather_ll") as comm:
        world, rank = comm.world_size, comm.rank
        for dtype in (torch.bfloat16, torch.uint8, torch.float64):
            for shape in ((1,), (5, 3), (7, 33)):
                # Any bits, those of an empty slot too.
                parts = [torch.full(shape, float(r), dtype=dtype) for r in range(world - 1)]
                parts.append(torch.full(shape, 255, dtype=torch.uint8).repeat_interleave(dtype.itemsize).view(dtype))
                parts[-1] = parts[-1].reshape(shape)
                x, expected = parts[rank], torch.cat(parts)
                assert comm.plan_all_gather(x).algorithm == "dsl:all_gather_ll"
                out = torch.zeros_like(expected)
                in_place = torch.zeros_like(expected)
                in_place[rank * shape[0] : (rank + 1) * shape[0]] = x
                for found in (
                    comm.all_gather(x),
                    comm.all_gather(x, out=out),
                    comm.all_gather(in_place[rank * shape[0] : (rank + 1) * shape[0]], out=in_place),
                ):
                    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
                    assert last_was(comm).startswith("program ")
        run_others_as_before(comm)
        dist.barrier()


def run_others_as_before(comm: Communicator) -> None:
    """What the program does not serve: other dimensions, parts of other sizes, large ones, other operations."""
    world = comm.world_size
    x = torch.full((4, 6), float(comm.rank))
    assert comm.all_gather(x, dim=1)[0].tolist() == [float(r) for r in range(world) for _ in range(6)]
    assert "along the first dimension" in comm.plan_all_gather(x, dim=1).reason
    assert not last_was(comm).startswith("program ")
    sizes = [4] * (world - 1) + [3]
    uneven = comm.all_gather(x[: sizes[comm.rank]], sizes=sizes)
    assert uneven.shape == (sum(sizes), 6)
    assert not last_was(comm).startswith("program ")
    large = torch.full((MAX_BYTES // world + 16,), comm.rank, dtype=torch.uint8)
    assert comm.all_gather(large).shape == (world * large.numel(),)
    assert "dsl_max_bytes bounds all shards together" in comm.plan_all_gather(large).reason
    assert not last_was(comm).startswith("program ")
    assert comm.all_reduce(torch.ones(8)).eq(world).all()
    assert not last_was(comm).startswith("program ")
    assert comm.all_gather(torch.empty(0)).shape == (0,)


@pytest.mark.parametrize("world", [2, 3])
def test_gathers_are_those_of_an_algorithm(ranks: RankPool, cache: str, world: int) -> None:
    ranks.run(world, gather_by_a_program, cache)


def scatter_by_a_program(directory: str) -> None:
    with communicator(directory, "reduce_scatter_ll") as comm:
        world, rank = comm.world_size, comm.rank
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for count in (1, 7, 515):
                inputs = contributions(world, count * world, dtype, seed=count)
                x = inputs[rank]
                expected = rank_order_sum(inputs)[rank * count : (rank + 1) * count]
                assert comm.plan_reduce_scatter(x).algorithm == "dsl:reduce_scatter_ll"
                own = x.clone()
                for found in (
                    comm.reduce_scatter(x),
                    comm.reduce_scatter(x, out=torch.zeros_like(expected)),
                    comm.reduce_scatter(own, out=own[rank * count : (rank + 1) * count]),
                ):
                    assert_bitwise_equal(found, expected, "this rank's part of the sum")
                    assert last_was(comm).startswith("program ")
        assert comm.all_gather(torch.ones(3)).shape == (3 * world,)
        assert not last_was(comm).startswith("program ")
        dist.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_scatters_are_those_of_an_algorithm(ranks: RankPool, cache: str, world: int) -> None:
    ranks.run(world, scatter_by_a_program, cache)
