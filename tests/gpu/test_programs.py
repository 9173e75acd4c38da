"""The programs of this directory with their default settings, on up to 8 GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from memcheck import sanitizer_path

from llm_comm import launch

HERE = Path(__file__).parent
GPUS, WHY_NONE = launch.usable_gpus()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs: {WHY_NONE}"),
]


def run_program(command: list[str], limit_s: float) -> None:
    """Output goes to pytest. The ranks of a program that is killed at its limit end with it."""
    done = subprocess.run([sys.executable, *command], timeout=limit_s, check=False)
    assert done.returncode == 0, f"{' '.join(command)} ended with status {done.returncode}"


def run_ranks(program: str, limit_s: float, *options: str) -> None:
    ranks = str(min(8, GPUS))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", ranks]
    run_program([*torchrun, str(HERE / program), *options], limit_s)


@pytest.mark.timeout(620)
def test_random_cases() -> None:
    run_ranks("random_cases.py", 600)


@pytest.mark.timeout(620)
def test_random_fused_cases() -> None:
    run_ranks("random_cases.py", 600, "--fused")


@pytest.mark.timeout(320)
def test_drill() -> None:
    run_program([str(HERE / "drill.py")], 300)


@pytest.mark.timeout(420)
@pytest.mark.skipif(sanitizer_path() is None, reason="no compute-sanitizer")
@pytest.mark.parametrize("world", sorted({2, min(3, GPUS), min(8, GPUS)}))
def test_memcheck(world: int) -> None:
    run_program([str(HERE / "memcheck.py"), "--world", str(world)], 400)


@pytest.mark.timeout(620)
def test_cycles() -> None:
    run_ranks("cycles.py", 600, "--cycles", "200", "--rss-slack", str(32 << 20))


@pytest.mark.timeout(620)
def test_soak() -> None:
    run_ranks("soak.py", 600, "--calls", "1000000", "--eager-share", "0.05")


@pytest.mark.timeout(200)
def test_late_rank() -> None:
    run_ranks("late_rank.py", 180)


@pytest.mark.timeout(200)
def test_decode_chain() -> None:
    run_ranks("decode_chain.py", 180, "--layers", "4", "--batch-sizes", "1,16", "--orders", "1")


@pytest.mark.timeout(420)
def test_environments() -> None:
    run_program([str(HERE / "environments.py")], 400)
