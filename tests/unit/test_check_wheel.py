"""``tools/check_wheel.py``: what it finds wrong with wheels that are made here."""

from __future__ import annotations

import platform
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tool_modules import tool

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or shutil.which("readelf") is None, reason="needs gcc and readelf"
)


@pytest.fixture(scope="module")
def check_wheel() -> Iterator[ModuleType]:
    yield from tool("check_wheel")


def shared_library(path: Path, *options: str) -> Path:
    """An empty one, linked as asked."""
    command = ["gcc", "-shared", "-nostdlib", "-x", "c", "/dev/null", "-x", "none", "-o", str(path), *options]
    subprocess.run(command, check=True)
    return path


class Wheel:
    """A wheel that is right, until a test changes it."""

    def __init__(self, tool: ModuleType, directory: Path) -> None:
        self.tool = tool
        self.directory = directory
        self.name = f"llm_comm-{tool.version()}-cp312-cp312-manylinux_2_28_{platform.machine()}.whl"
        library = shared_library(directory / "fine.so", "-Wl,-rpath,$ORIGIN/lib")
        self.files: dict[str, bytes] = {
            f"llm_comm/{name}": library.read_bytes() if name.endswith(".so") else b"x"
            for name in (*tool.HELD, *tool.HELD_WITH_CUDA, "_core.cpython-312-x86_64-linux-gnu.so")
        }
        self.files["llm_comm-0.dist-info/entry_points.txt"] = b"x"

    def faults(self, with_cuda: bool = True) -> list[str]:
        path = self.directory / self.name
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in self.files.items():
                archive.writestr(name, content)
        return list(self.tool.faults(path, with_cuda))


@pytest.fixture
def wheel(check_wheel: ModuleType, tmp_path: Path) -> Wheel:
    return Wheel(check_wheel, tmp_path)


def test_nothing_is_wrong_with_a_wheel_that_is_right(wheel: Wheel) -> None:
    assert wheel.faults() == []


def test_a_wheel_of_emulated_gpus_has_no_cuda_libraries(wheel: Wheel) -> None:
    for name in wheel.tool.HELD_WITH_CUDA:
        del wheel.files[f"llm_comm/{name}"]
    assert wheel.faults(with_cuda=False) == []
    assert wheel.faults() == [f"lacks llm_comm/{name}" for name in wheel.tool.HELD_WITH_CUDA]


@pytest.mark.parametrize(
    ("lost", "fault"),
    [
        ("llm_comm/lib/libllm_comm_emulator.a", "lacks llm_comm/lib/libllm_comm_emulator.a"),
        ("llm_comm/_core.cpython-312-x86_64-linux-gnu.so", "lacks the module llm_comm/_core"),
        ("llm_comm-0.dist-info/entry_points.txt", "lacks the entry points by which engines find it"),
    ],
)
def test_what_is_missing(wheel: Wheel, lost: str, fault: str) -> None:
    del wheel.files[lost]
    assert wheel.faults() == [fault]


def test_libraries_of_another_machine(wheel: Wheel) -> None:
    wheel.name = wheel.name.replace(platform.machine(), "riscv64")
    libraries = sorted(name for name in wheel.files if name.endswith(".so"))
    assert sorted(wheel.faults()) == [f"{name} is not for the machine that the tag names" for name in libraries]


@pytest.mark.parametrize("driver", ["libcuda.so.1", "libcudart.so.13", "libnccl.so.2"])
def test_libraries_that_a_machine_may_not_have(wheel: Wheel, tmp_path: Path, driver: str) -> None:
    there = shared_library(tmp_path / "there.so", f"-Wl,-soname,{driver}")
    linked = shared_library(tmp_path / "linked.so", "-Wl,--no-as-needed", str(there))
    wheel.files["llm_comm/lib/libllm_comm_cuda.so"] = linked.read_bytes()
    assert wheel.faults() == [f"llm_comm/lib/libllm_comm_cuda.so is linked with {driver}"]


def test_directories_of_the_building_machine(wheel: Wheel, tmp_path: Path) -> None:
    linked = shared_library(tmp_path / "linked.so", "-Wl,-rpath,$ORIGIN:/home/builder/lib")
    wheel.files["llm_comm/lib/libllm_comm_nccl.so"] = linked.read_bytes()
    (fault,) = wheel.faults()
    assert "looks for libraries in $ORIGIN:/home/builder/lib" in fault


def test_a_library_that_auditwheel_has_copied(wheel: Wheel) -> None:
    wheel.files["llm_comm.libs/libcuda-1234.so.1"] = wheel.files["llm_comm/lib/libllm_comm_cuda.so"]
    assert wheel.faults() == ["holds llm_comm.libs/libcuda-1234.so.1, a library of the machine that built it"]


def test_size_tag_and_version(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.tool, "MOST_BYTES", 1_000)
    wheel.name = "llm_comm-0.0.1-cp312-cp312-linux_x86_64.whl"
    size, tag, version = wheel.faults()
    assert "MB, more than 0" in size
    assert tag == "is not tagged manylinux_2_28"
    assert version.startswith("is not of version ")
