"""Device memory that peers map by descriptors or fabric handles, by a stand-in for the driver."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from test_multicast_memory import CUDA, REPOSITORY, STAND_IN

pytestmark = pytest.mark.skipif(
    CUDA is None or shutil.which("g++") is None, reason="needs g++ and the headers of CUDA, as nvcc brings them"
)
STEPS = (
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
)
#: Steps that fail where IMEX does not permit fabric handles.
OF_HANDLES = ("cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle")
NOTHING_LEFT = "LEFT 0 objects, 0 ranges"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("device_memory") / "memory"
    csrc = REPOSITORY / "csrc"
    sources = [STAND_IN / "memory.cpp", csrc / "host" / "cuda" / "device_memory.cpp"]
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-DLLM_COMM_EMULATOR=1", "-I", csrc, "-I", csrc / "include"]
    # Not linked to any driver or runtime: a function of theirs would be missing here.
    subprocess.run(["g++", *flags, "-isystem", str(CUDA), *sources, "-o", path], check=True)
    return path


def run(program: Path, *arguments: str) -> list[str]:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("sharing", "handle"), [("descriptor", "HANDLE fd yes, 0 bytes"), ("fabric", "HANDLE fd no, 64 bytes")]
)
def test_memory_is_shared_and_taken_again(program: Path, sharing: str, handle: str) -> None:
    assert run(program, sharing) == [handle] * 3 + ["SHARED at the same addresses", NOTHING_LEFT]


@pytest.mark.parametrize("sharing", ["descriptor", "fabric"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_is_named_and_leaves_nothing(program: Path, sharing: str, step: str) -> None:
    *_, failed, left = run(program, sharing, step)
    assert failed.startswith(f"FAILED {step}: error 800")
    assert ("nvidia-imex" in failed) == (sharing == "fabric" and step in OF_HANDLES)
    assert left == NOTHING_LEFT


def test_a_handle_of_another_size_is_refused(program: Path) -> None:
    assert run(program, "fabric", "short handle") == ["FAILED a fabric handle has 64 bytes, got 5", NOTHING_LEFT]
