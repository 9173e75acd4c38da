"""Builds of the kernels for GPUs of AMD (cmake/hip.cmake), with the compiler that ``make check-amd`` sets up."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = REPOSITORY / "build" / "amd-env"
BUILD = REPOSITORY / "build" / "amd"
#: Directory of ``hip/hip_runtime_api.h``.
HIP_HEADERS = ENVIRONMENT / "triton" / "backends" / "amd" / "include"
needs_compiler = pytest.mark.skipif(
    not (ENVIRONMENT / ".installed").exists(), reason="`make check-amd` and `make test` set up the compiler"
)


def compiler() -> list[str]:
    """Return the command of clang. The wheel keeps clang's own headers where clang does not look for them."""
    (package,) = ENVIRONMENT.glob("lib/python*/site-packages/ziglang")
    return [
        str(ENVIRONMENT / "bin" / "python"),
        "-m",
        "ziglang",
        "clang",
        "-resource-dir",
        str(package / "lib"),
    ]


def build(source: Path, directory: Path, options: Mapping[str, str], targets: Iterable[str] = ("all",)) -> None:
    """Configure ``source`` with ``options`` of CMake in ``directory``, and build targets. Processes take turns."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    given = [f"-D{name}={value}" for name, value in options.items()]
    with open(directory / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            ["cmake", "-S", str(source), "-B", str(directory), *generator, *given],
            ["cmake", "--build", str(directory), "--parallel", str(os.cpu_count()), "--target", *targets],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


def assembly(descriptors: Iterable[str], arch: str = "gfx942", directory: Path = BUILD, flags: str = "") -> list[Path]:
    """Compile algorithms of the registry to assembly, and return the files.

    Waits look at the clock as often as the emulator's, since schedules bound how long a wait may last. Else the machine
    code is that of a build without tests.

    Args:
        descriptors: Descriptors of the algorithms, such as ``"AllReduceOneShot"``; ``["all"]`` for all with kernels.
        directory: Build directory.
        flags: More flags of the compiler.
    """
    options = {
        "LLM_COMM_HIP": "CHECK",
        "LLM_COMM_CUDA": "OFF",
        "LLM_COMM_PYTHON": "OFF",
        "LLM_COMM_HIP_COMPILER": ";".join(compiler()),
        "LLM_COMM_HIP_FLAGS": f"-DLLM_COMM_POLLS_PER_CHECK=4;{flags}",
    }
    targets = [f"hip_{arch}" if name == "all" else f"hip_{arch}_{name}" for name in descriptors]
    build(REPOSITORY, directory, options, targets)
    found = directory / "hip" / arch
    return sorted(found.glob("*.s")) if "all" in descriptors else [found / f"kernels_{name}.s" for name in descriptors]
