"""The multicast object of a communicator, by a stand-in for the driver that knows what CUDA's documentation allows.

Nothing here can reach a driver: the program finds functions in the stand-in alone, and its "environment" is what it is
given as arguments.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from llm_comm import _core

REPOSITORY = Path(__file__).parents[2]
STAND_IN = REPOSITORY / "tests" / "stand_in_driver"
SOURCE = REPOSITORY / "csrc" / "host" / "cuda" / "multicast_memory.cpp"
SET_UP = ("cuMulticastBindMem", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")
UNDO = {"cuMemMap": "cuMemUnmap", "cuMemAddressReserve": "cuMemAddressFree", "cuMulticastBindMem": "cuMulticastUnbind"}


def headers_of_cuda() -> Path | None:
    """Where cuda.h is: the stand-in has its types."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    roots += [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    found = [Path(root) / "include" for root in roots if root and (Path(root) / "include" / "cuda.h").is_file()]
    return found[0] if found else None


CUDA = headers_of_cuda()
pytestmark = pytest.mark.skipif(
    CUDA is None or shutil.which("g++") is None, reason="needs g++ and the headers of CUDA, as nvcc brings them"
)


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The program with the stand-in as its driver."""
    place = tmp_path_factory.mktemp("stand_in_driver")
    common = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-isystem", str(CUDA)]
    library, program = place / "libstand_in_driver.so", place / "drive"
    csrc = REPOSITORY / "csrc"
    subprocess.run([*common, "-shared", "-fPIC", STAND_IN / "stand_in.cpp", "-o", library], check=True)
    includes = ["-I", csrc, "-I", csrc / "include", "-DLLM_COMM_EMULATOR=1"]
    # Not linked to any driver: a function that was not found through the stand-in would be missing here.
    subprocess.run([*common, *includes, STAND_IN / "drive.cpp", SOURCE, "-ldl", "-o", program], check=True)
    return [str(program), str(library)]


def run(drive: list[str], world: int, *how: str) -> list[str]:
    done = subprocess.run([*drive, str(world), *how], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def calls(lines: list[str], rank: int) -> list[str]:
    """Of a rank, without what may be asked at any time and without the releases of a failed set-up's end."""
    own = [line.split()[1] for line in lines if line.startswith(f"{rank} ") and "FAILED" not in line]
    return [name for name in own if not name.startswith("cuDevice") and name != "cuMulticastGetGranularity"]


@pytest.mark.parametrize("world", [2, 5, 8])
def test_success_is_the_documented_sequence(drive: list[str], world: int) -> None:
    lines = run(drive, world)
    undo = ["cuMemUnmap", "cuMemAddressFree", "cuMulticastUnbind", "cuMemRelease"]
    for rank in range(world):
        got = ["cuMulticastCreate", "cuMemExportToShareableHandle"] if rank == 0 else ["cuMemImportFromShareableHandle"]
        assert calls(lines, rank) == [*got, "cuMulticastAddDevice", *SET_UP, *undo]
    assert [line for line in lines if line.startswith(("VOTE", "UP", "LEAKED"))] == [
        *(f"VOTE {step}: yes" for step in ("open", "share", "add", "bind")),
        "UP",
        "LEAKED 0",
    ]
    assert lines.index("VOTE add: yes") < lines.index("0 cuMulticastBindMem")


@pytest.mark.parametrize(
    "name",
    [
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuMulticastGetGranularity",
        "cuMulticastCreate",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMulticastAddDevice",
        *SET_UP,
    ],
)
def test_a_step_that_fails_is_undone(drive: list[str], name: str) -> None:
    lines = run(drive, 3, "fail", name)
    assert "DOWN" in lines
    assert lines[-1] == "LEAKED 0"
    assert any("FAILED" in line and f"{name}" in line and "the stand-in fails here" in line for line in lines)
    for rank in range(3):
        done = calls(lines, rank)
        # What has succeeded is undone, the last first, and nothing else is.
        succeeded = [one for one in done if one in UNDO and one != name]
        assert [one for one in done if one in UNDO.values()] == [UNDO[one] for one in UNDO if one in succeeded]
        got = {"cuMulticastCreate", "cuMemImportFromShareableHandle"} - {name}
        assert done.count("cuMemRelease") == len(got & set(done))
        assert done == sorted(done, key=lambda one: one in {*UNDO.values(), "cuMemRelease"})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *_core.multicast_switches.items(),
        ("LLM_COMM_MULTICAST", "off"),
        ("NCCL_NVLS_ENABLE", " 0 "),
        ("NCCL_NVLS_ENABLE", "00"),
        ("NCCL_NVLS_ENABLE", "False"),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "TRUE"),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "whatever"),
        ("NVSHMEM_DISABLE_NVLS", "yes"),
        ("NVSHMEM_DISABLE_NVLS", "2"),
    ],
)
def test_a_switch_alone_forbids_even_to_look(drive: list[str], variable: str, value: str) -> None:
    lines = run(drive, 2, "variable", variable, value)
    assert lines == [
        *(f"{rank} FAILED open: NVLink multicast is switched off by {variable}={value}" for rank in range(2)),
        "VOTE open: no",
        "DOWN",
        "LEAKED 0",
    ]
    assert _core.multicast_switched_off({variable: value}) == f"{variable}={value}"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LLM_COMM_MULTICAST", "1"),
        ("LLM_COMM_MULTICAST", "auto"),
        ("LLM_COMM_MULTICAST", ""),
        ("NCCL_NVLS_ENABLE", "1"),
        ("NCCL_NVLS_ENABLE", "2"),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0"),
        ("NVSHMEM_DISABLE_NVLS", "no"),
    ],
)
def test_other_values_permit(drive: list[str], variable: str, value: str) -> None:
    assert "UP" in run(drive, 2, "variable", variable, value)
    assert _core.multicast_switched_off({variable: value}) == ""


def test_a_device_without_multicast_is_asked_nothing_of_it(drive: list[str]) -> None:
    lines = run(drive, 2, "unsupported")
    assert "0 FAILED open: the device has no NVLink multicast" in lines
    assert not any("cuMulticast" in line for line in lines)


def test_a_workspace_of_another_size_is_refused(drive: list[str]) -> None:
    lines = run(drive, 2, "odd-size")
    assert any("is no multiple of 2097152 bytes, the granularity of multicast objects" in line for line in lines)
    assert not any("cuMulticastCreate" in line for line in lines if not line.startswith("resolve"))
