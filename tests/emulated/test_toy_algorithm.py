"""An algorithm of one's own: one file and one row, from which all follows (docs/architecture.md)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TOY = REPOSITORY / "tests" / "toy"
#: Kept between runs: what has not changed is not built again.
BUILD = REPOSITORY / "build" / "toy"

#: What this process can import, the programs that it starts can.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("cmake") is None, reason="needs g++ and cmake"
)


def run(*command: object) -> str:
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def core() -> Path:
    """The extension module with the toy, for emulated GPUs."""
    pybind11 = pytest.importorskip("pybind11")
    options = {
        "LLM_COMM_CUDA": "OFF",
        "LLM_COMM_EXTRA_ALGORITHMS": TOY / "registry.def",
        "CMAKE_CXX_FLAGS_RELEASE": "-O1",
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "Python_EXECUTABLE": sys.executable,
    }
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    run("cmake", "-S", REPOSITORY, "-B", BUILD, *generator, *definitions)
    run("cmake", "--build", BUILD, "--target", "_core", "--parallel", os.cpu_count())
    (module,) = BUILD.glob("_core*.so")
    return module


def test_runs_and_is_listed(core: Path) -> None:
    """Planned from its descriptor, run by two and three ranks, and found by the command line."""
    listed = run(sys.executable, TOY / "ranks.py", core)
    (row,) = [line.split() for line in listed.splitlines() if line.startswith("broadcast") and "direct" in line]
    assert row[:3] == ["broadcast", "direct", "LL"]
    assert {"bf16", "fp16", "fp32", "blocks", "tile_lines"} <= set(row)
    assert [line.split()[-1] for line in listed.splitlines() if "input output" in line and "broadcast" in line] == [
        "root"
    ]


@pytest.mark.parametrize("world", [2, 3])
def test_a_communicator_runs_it(core: Path, world: int, tmp_path: Path) -> None:
    """Each rank a process: ``plan_for`` and ``run`` know it by its name."""
    program, meeting_point = TOY / "communicator.py", tmp_path / "meeting"
    commands = [[sys.executable, program, core, meeting_point, str(rank), str(world)] for rank in range(world)]
    ranks = [
        subprocess.Popen(
            list(map(str, command)), cwd=REPOSITORY, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        for command in commands
    ]
    said = [rank.communicate(timeout=200)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)
