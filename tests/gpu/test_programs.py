"""The programs of this directory with their default settings: on up to 8 GPUs, or with 8 ranks that share the only one.

Where ranks share a GPU an operation takes milliseconds, so the programs make fewer of them, and those that measure time
are left out.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from memcheck import sanitizer_path
from overlap import mps_control_path
from user_kernels import nvcc_path

from llm_comm.cli import launch

HERE = Path(__file__).parent
GPUS, WHY_NONE = launch.usable_gpus()
SHARED = GPUS == 1
WORLD = 8 if SHARED else min(8, GPUS)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason=f"needs a GPU: {WHY_NONE}"),
]

measures = pytest.mark.skipif(GPUS < 2, reason="measures time: needs a GPU for each rank")


def run_program(command: list[str], limit_s: float) -> None:
    """Output goes to pytest. The ranks of a program that is killed at its limit end with it."""
    done = subprocess.run([sys.executable, *command], timeout=limit_s, check=False)
    assert done.returncode == 0, f"{' '.join(command)} ended with status {done.returncode}"


def run_ranks(program: str, limit_s: float, *options: str, world: int = WORLD) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    run_program([*torchrun, "--nproc-per-node", str(world), str(HERE / program), *options], limit_s)


@pytest.mark.timeout(620)
@pytest.mark.parametrize("world", [*range(2, 9), 12, 16] if SHARED else [WORLD])
def test_random_cases(world: int) -> None:
    run_ranks("random_cases.py", 600, "--both", world=world)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("world", (2, 5, 8) if SHARED else [WORLD])
def test_fused_blocks(world: int) -> None:
    run_ranks("fused_blocks.py", 300, world=world)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("world", (2, 3, 8) if SHARED else [WORLD])
def test_nccl_library(world: int) -> None:
    run_ranks("nccl_library.py", 300, *(("--cases", "60") if SHARED else ()), world=world)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("chunk_bytes", [0, 1 << 20])
def test_nodes(chunk_bytes: int) -> None:
    chunks = "--chunk-bytes", str(chunk_bytes)
    run_ranks("nodes.py", 300, "--nodes", "2", *chunks, world=4 if SHARED else WORLD // 2 * 2)


@pytest.mark.timeout(200)
def test_nccl_drill() -> None:
    run_program([str(HERE / "nccl_drill.py"), "--world", str(3 if SHARED else WORLD)], 180)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("world", (1, 2, 5, WORLD) if SHARED else sorted({1, WORLD}))
def test_random_linear_layers(world: int) -> None:
    run_ranks("random_linear.py", 300, world=world)


@pytest.mark.timeout(320)
def test_random_experts() -> None:
    run_ranks("random_experts.py", 300, world=1)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("world", (2, 5, WORLD) if SHARED else sorted({2, WORLD}))
def test_experts_exchange(world: int) -> None:
    run_ranks("experts_exchange.py", 300, *(("--cases", "60") if SHARED else ()), world=world)


@pytest.mark.timeout(420)
def test_drill() -> None:
    run_program([str(HERE / "drill.py")], 400)


@pytest.mark.timeout(420)
@pytest.mark.skipif(sanitizer_path() is None, reason="no compute-sanitizer")
@pytest.mark.parametrize("world", [WORLD] if SHARED else sorted({2, min(3, GPUS), WORLD}))
def test_memcheck(world: int) -> None:
    run_program([str(HERE / "memcheck.py"), "--world", str(world)], 400)


@pytest.mark.timeout(130)
def test_first_call_in_a_graph() -> None:
    run_ranks("setup_cost.py", 120, "--first-call-in-graph")


@pytest.mark.timeout(620)
def test_cycles() -> None:
    run_ranks("cycles.py", 600, "--cycles", "200", "--rss-slack", str(32 << 20))


@pytest.mark.timeout(420)
@pytest.mark.parametrize("world", [2, 3, WORLD] if SHARED else [WORLD])
def test_symmetric_heap(world: int) -> None:
    run_ranks("symmetric_heap.py", 400, "--largest", str((4 if SHARED else 64) << 20), world=world)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("world", [2, WORLD] if SHARED else [WORLD])
def test_release(world: int) -> None:
    run_ranks("release.py", 300, world=world)


@pytest.mark.timeout(620)
def test_soak() -> None:
    if SHARED:  # as many calls at world 8 take minutes: tests/gpu/campaign.py makes them
        run_ranks("soak.py", 600, "--calls", "10000", world=2)
    else:
        run_ranks("soak.py", 600, "--calls", "1000000", "--eager-share", "0.05")


@pytest.mark.timeout(420)
def test_environments() -> None:
    run_program([str(HERE / "environments.py")], 400)


@pytest.mark.timeout(140)
def test_call_counts() -> None:
    run_ranks("call_counts.py", 120, world=2)


@pytest.mark.timeout(320)
def test_graph_outlives_communicator() -> None:
    run_program([str(HERE / "graph_outlives.py")], 300)


@pytest.mark.timeout(200)
def test_overlapping_communicators() -> None:
    run_ranks("overlap.py", 180, world=2)


@pytest.mark.timeout(200)
@pytest.mark.skipif(mps_control_path() is None, reason="no nvidia-cuda-mps-control")
def test_overlapping_communicators_under_mps() -> None:
    run_program([str(HERE / "overlap.py"), "--mps"], 180)


@pytest.mark.timeout(420)
@pytest.mark.parametrize("world", (2, 3, WORLD) if SHARED else sorted({2, WORLD}))
def test_port_channels(world: int) -> None:
    run_ranks("port_channel.py", 400, world=world)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("world", (2, 3, WORLD) if SHARED else sorted({2, WORLD}))
def test_channels(world: int) -> None:
    run_ranks("channels.py", 300, "--compiler", "all", world=world)


@pytest.mark.timeout(420)
@pytest.mark.skipif(find_spec("cupy") is None, reason="no cupy")
@pytest.mark.parametrize("world", (2, 3, WORLD) if SHARED else sorted({2, WORLD}))
def test_programs_of_the_dsl(world: int) -> None:
    run_ranks("dsl_programs.py", 400, world=world)


@pytest.mark.timeout(420)
@pytest.mark.skipif(nvcc_path() is None, reason="no nvcc")
def test_primitive_of_port_channels() -> None:
    run_program([str(HERE / "port_channel.py"), "--primitive"], 400)


@pytest.mark.timeout(320)
@pytest.mark.skipif(nvcc_path() is None, reason="no nvcc")
def test_user_kernel() -> None:
    run_program([str(HERE / "user_kernels.py")], 300)


@measures
@pytest.mark.timeout(200)
def test_late_rank() -> None:
    run_ranks("late_rank.py", 180)


@measures
@pytest.mark.timeout(200)
def test_decode_chain() -> None:
    run_ranks("decode_chain.py", 180, "--layers", "4", "--batch-sizes", "1,16", "--orders", "1")
