"""The extension module with the algorithms of ``tests/toy``, and programs that run with it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
TOY = REPOSITORY / "tests" / "toy"
#: Kept between runs: what has not changed is not built again.
BUILD = REPOSITORY / "build" / "toy"

#: What this process can import, the programs that it starts can.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("cmake") is None, reason="needs g++ and cmake"
)


def run(*command: object) -> str:
    """What a program prints that must succeed."""
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


def run_ranks(program: Path, core: Path, meeting_point: Path, world: int, *arguments: str) -> list[str]:
    """What the ranks print, each a process, which all must succeed."""
    commands = [
        [sys.executable, program, core, meeting_point, str(rank), str(world), *arguments] for rank in range(world)
    ]
    ranks = [
        subprocess.Popen(
            list(map(str, command)),
            cwd=REPOSITORY,
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    said: Sequence[tuple[str, str]] = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(errors for _, errors in said)
    return [output for output, _ in said]


def built_core() -> Path:
    """The extension module with the toys, for emulated GPUs."""
    pybind11 = pytest.importorskip("pybind11")
    options = {
        "LLM_COMM_CUDA": "OFF",
        "LLM_COMM_EXTRA_ALGORITHMS": f"{TOY / 'registry.def'};{TOY / 'switch.def'}",
        "CMAKE_CXX_FLAGS_RELEASE": "-O0",  # a third of the time of -O1, and little of it runs
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "Python_EXECUTABLE": sys.executable,
    }
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    BUILD.parent.mkdir(exist_ok=True)
    with open(BUILD.with_name("toy.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests of another process may want it too
        run("cmake", "-S", REPOSITORY, "-B", BUILD, *generator, *definitions)
        run("cmake", "--build", BUILD, "--target", "_core", "--parallel", os.cpu_count())
    (module,) = BUILD.glob("_core*.so")
    return module
