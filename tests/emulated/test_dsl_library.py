"""The programs of the DSL's library in all worlds, compiled for emulated GPUs: bitwise what the communicator's own
operations return."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, make_communicator
from programs import run_as_ranks
from reference import assert_bitwise_equal, contributions

from llm_comm import Communicator
from llm_comm.dsl import ir, library
from llm_comm.dsl.compiled import compile as compile_program
from llm_comm.dsl.compiler.layout import sentinel_ranges
from llm_comm.dsl.compiler.source import symmetric_spaces
from llm_comm.dsl.programs import ProgramDefinition

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

MAX_BYTES = 24 << 10
WORLDS = range(2, 9)
#: They add in another order than that of the ranks. Of whole numbers the sum is the same.
OTHER_ORDERS = ("ring_ll", "hierarchical_ll")
PARTED = (ir.Operation.REDUCE_SCATTER, ir.Operation.ALL_TO_ALL)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def expected(comm: Communicator, text: ProgramDefinition, inputs: list[torch.Tensor]) -> torch.Tensor:
    """What the operation returns on this rank, by the communicator's own operations where it has them."""
    own = inputs[comm.rank].clone()
    if text.operation is ir.Operation.ALL_REDUCE:
        return comm.all_reduce(own)
    if text.operation is ir.Operation.REDUCE_SCATTER:
        return comm.reduce_scatter(own)
    if text.operation is ir.Operation.ALL_GATHER:
        return comm.all_gather(own)
    if text.operation is ir.Operation.BROADCAST:
        return inputs[text.root]
    return torch.cat([value.chunk(comm.world_size)[comm.rank] for value in inputs])


def run_program(number: int, directory: str) -> None:
    os.environ["LLM_COMM_CACHE_DIR"] = directory
    text, dtype = library.PROGRAMS[number], torch.bfloat16
    with make_communicator() as comm:
        built = text.build(comm.world_size)
        compiled = compile_program(built, comm, dtype=dtype, max_bytes=MAX_BYTES, threads=8)
        tensors = {space: comm.empty(MAX_BYTES // dtype.itemsize, dtype) for space in symmetric_spaces(built)}
        for call, count in enumerate((3, 61, 500)):
            length = count * (comm.world_size if text.operation in PARTED else 1)
            inputs = contributions(comm.world_size, length, dtype, seed=call)
            if text.name in OTHER_ORDERS:
                inputs = [value.mul(4).round().clamp(-8, 8) for value in inputs]
            due = expected(comm, text, inputs)
            x, out = inputs[comm.rank], torch.zeros_like(due)
            if ir.Space.INPUT in tensors:
                x = tensors[ir.Space.INPUT][:length].copy_(x)
            if ir.Space.OUTPUT in tensors:
                out = tensors[ir.Space.OUTPUT][: len(due)].zero_()
            for attempt in range(3):
                assert_bitwise_equal(compiled(x, out), due, f"{text.name}, {count}, call {attempt}")
        comm.check()
        dist.barrier()
        for begin, end in sentinel_ranges(compiled.program, compiled._kernel._layout):
            assert compiled._kernel._workspace.memory[begin:end].eq(0xFF).all()  # no packet is left


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("number", range(len(library.PROGRAMS)), ids=[text.name for text in library.PROGRAMS])
def test_programs_of_the_library(ranks: RankPool, cache: str, number: int, world: int) -> None:
    if library.PROGRAMS[number].name == "hierarchical_ll" and world % 2:
        pytest.skip("for two nodes of equally many ranks")
    ranks.run(world, run_program, number, cache)


def test_example(cache: str) -> None:
    program = Path(__file__).parents[2] / "examples" / "dsl_all_gather.py"
    variables = {"LLM_COMM_TIMEOUT_S": "60", "LLM_COMM_CACHE_DIR": cache}
    printed = run_as_ranks(program, "--emulated", timeout_s=240, **variables)
    assert printed.count("elements of each rank") == 3
