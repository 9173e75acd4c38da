"""The core for GPUs of AMD (``csrc/host/hip``) on a stub of the HIP runtime (``tests/amd/host``).

The sources compile against HIP's own headers, and the program links without an undefined symbol. No GPU of AMD has run
them: the stub shows which calls the core makes, and what it does where a call fails.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
from hip_build import BUILD, HIP_HEADERS, REPOSITORY, build, compiler, needs_compiler

pytestmark = needs_compiler

CASES = (
    "set-up-ipc",
    "set-up-descriptor",
    "launch",
    "copies",
    "capture",
    "release",
    "refusals",
    "watchdog",
    "faults-ipc",
    "faults-descriptor",
)


@pytest.fixture(scope="module")
def hip_host() -> Path:
    """The program with the stub as its runtime."""
    # The wheel's clang compiles for musl unless told otherwise.
    command = ";".join([*compiler(), f"--target={platform.machine()}-linux-gnu"])
    directory = BUILD.with_name("amd-host")
    options = {"CMAKE_CXX_COMPILER": command, "LLM_COMM_HIP_HEADERS": str(HIP_HEADERS)}
    build(REPOSITORY / "tests" / "amd" / "host", directory, options)
    return directory / "hip_host"


@pytest.mark.parametrize("case", CASES)
def test_core_on_a_stub(hip_host: Path, case: str) -> None:
    done = subprocess.run([hip_host, case], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
