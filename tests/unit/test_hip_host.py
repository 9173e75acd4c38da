"""The core for GPUs of AMD (``csrc/host/hip``) on a stub of the HIP runtime (``tests/hip``).

The sources compile against HIP's own headers, and the program links without an undefined symbol. No GPU of AMD has run
them: the stub shows which calls the core makes, and what it does where a call fails.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.append(str(REPOSITORY / "tests" / "amd"))

from hip_build import ENVIRONMENT, compiler, needs_compiler  # noqa: E402

BUILD = REPOSITORY / "build" / "hip"
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


def headers_of_hip() -> Path | None:
    """Return the directory of ``hip/hip_runtime_api.h``: LLM_COMM_HIP_HEADERS, or where the package triton has it."""
    places = [Path(os.environ.get("LLM_COMM_HIP_HEADERS", "/opt/rocm/include"))]
    places += ENVIRONMENT.glob("lib/python*/site-packages/triton/backends/amd/include")
    return next((place for place in places if (place / "hip" / "hip_runtime_api.h").is_file()), None)


HEADERS = headers_of_hip()
pytestmark = [
    needs_compiler,
    pytest.mark.skipif(
        HEADERS is None, reason="needs the headers of HIP 7.1: LLM_COMM_HIP_HEADERS=DIR, or triton in build/amd-env"
    ),
    pytest.mark.skipif(shutil.which("ninja") is None, reason="needs ninja, which `make test` installs"),
]


@pytest.fixture(scope="module")
def hip_host() -> Path:
    """The program with the stub as its runtime."""
    BUILD.mkdir(parents=True, exist_ok=True)
    # The wheel's clang compiles for musl unless told otherwise.
    command = ";".join([*compiler(), f"--target={platform.machine()}-linux-gnu"])
    with open(BUILD / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        options = [f"-DCMAKE_CXX_COMPILER={command}", f"-DLLM_COMM_HIP_HEADERS={HEADERS}"]
        for step in (
            ["cmake", "-S", REPOSITORY / "tests" / "hip", "-B", BUILD, "-G", "Ninja", *options],
            ["cmake", "--build", BUILD],
        ):
            done = subprocess.run(step, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return BUILD / "hip_host"


@pytest.mark.parametrize("case", CASES)
def test_core_on_a_stub(hip_host: Path, case: str) -> None:
    done = subprocess.run([hip_host, case], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
