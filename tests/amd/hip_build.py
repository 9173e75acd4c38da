"""Builds of the kernels for GPUs of AMD (cmake/hip.cmake), with the compiler that ``make check-amd`` sets up."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = REPOSITORY / "build" / "amd-env"
BUILD = REPOSITORY / "build" / "amd"
needs_compiler = pytest.mark.skipif(
    not (ENVIRONMENT / ".installed").exists(), reason="`make check-amd` and `make test` set up the compiler"
)


def package(name: str) -> Path:
    """Return the directory of a package of the environment."""
    (found,) = ENVIRONMENT.glob(f"lib/python*/site-packages/{name}")
    return found


def compiler() -> list[str]:
    return [
        str(ENVIRONMENT / "bin" / "python"),
        "-m",
        "ziglang",
        "clang",
        "-resource-dir",
        str(package("ziglang") / "lib"),
    ]


def assembly(descriptors: Iterable[str], arch: str = "gfx942", build: Path = BUILD, flags: str = "") -> list[Path]:
    """Compile algorithms of the registry to assembly, and return the files.

    Args:
        descriptors: Their descriptors, such as ``"AllReduceOneShot"``; ``["all"]``: all that have kernels there.
        build: Build directory. Processes take turns in it.
        flags: More flags of the compiler.
    """
    build.mkdir(parents=True, exist_ok=True)
    targets = [f"hip_{arch}" if name == "all" else f"hip_{arch}_{name}" for name in descriptors]
    options = {
        "LLM_COMM_HIP": "CHECK",
        "LLM_COMM_CUDA": "OFF",
        "LLM_COMM_PYTHON": "OFF",
        "LLM_COMM_HIP_COMPILER": ";".join(compiler()),
        "LLM_COMM_HIP_FLAGS": flags,
    }
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    with open(build / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            ["cmake", "-S", str(REPOSITORY), "-B", str(build), *generator, *(f"-D{k}={v}" for k, v in options.items())],
            ["cmake", "--build", str(build), "--parallel", str(os.cpu_count()), "--target", *targets],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    directory = build / "hip" / arch
    return (
        sorted(directory.glob("*.s")) if "all" in descriptors else [directory / f"kernels_{n}.s" for n in descriptors]
    )
