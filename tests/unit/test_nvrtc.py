"""The headers and kernels of one's own, compiled as cupy does it: by NVRTC, which has no standard headers and takes no
function of the host. It needs no GPU; torch for CUDA and the toolkit bring it."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import llm_comm
from llm_comm import installation

REPOSITORY = Path(__file__).parents[2]
EXCHANGE = REPOSITORY / "tests" / "channels" / "exchange.cuh"
#: Those that docs/own_kernels.md names.
HEADERS = (
    "channels.cuh",
    "line.cuh",
    "ll_session.cuh",
    "memory_channel.cuh",
    "operation.cuh",
    "port_channel.cuh",
    "reduce.cuh",
    "semaphore.cuh",
    "symmetric.cuh",
    "wait.cuh",
    "workspace_layout.h",
)


def find_nvrtc() -> ctypes.CDLL | None:
    names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
    in_wheels = [str(path) for place in sys.path for path in Path(place).glob("nvidia/*/lib/libnvrtc.so.1?")]
    toolkit = [str(path) for path in Path("/usr/local/cuda/lib64").glob("libnvrtc.so.1?")]
    for name in names + in_wheels + toolkit:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


NVRTC = find_nvrtc()
needs_nvrtc = pytest.mark.skipif(NVRTC is None, reason="no libnvrtc")


def log_of_nvrtc(code: str) -> str:
    """What NVRTC says of it; nothing if it compiles."""
    assert NVRTC is not None
    program = ctypes.c_void_p()
    assert NVRTC.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"kernel.cu", 0, None, None) == 0
    options = [b"--gpu-architecture=compute_90", *(option.encode() for option in llm_comm.get_nvrtc_options())]
    failed = NVRTC.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    NVRTC.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    NVRTC.nvrtcGetProgramLog(program, log)
    NVRTC.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode() or f"error {failed}" if failed else ""


def example() -> ModuleType:
    path = REPOSITORY / "examples" / "all_gather_channels.py"
    spec = importlib.util.spec_from_file_location("all_gather_channels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernels() -> dict[str, str]:
    module = example()
    by_name = {name: getattr(module, name) for name in ("BY_STORES", "BY_COPY_ENGINES")}
    return {**by_name, "exchange": EXCHANGE.read_text(encoding="utf-8")}


@needs_nvrtc
@pytest.mark.parametrize("header", HEADERS)
def test_headers(header: str) -> None:
    assert log_of_nvrtc(f'#include "llm_comm/{header}"\n') == ""


@needs_nvrtc
@pytest.mark.parametrize("name", kernels())
def test_kernels(name: str) -> None:
    assert log_of_nvrtc(kernels()[name]) == ""


@needs_nvrtc
def test_errors_are_seen() -> None:
    assert "error" in log_of_nvrtc('#include "llm_comm/line.cuh"\nconstexpr int of_the_host() { return 1; }\n')


def test_options_change_with_the_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cupy looks up what it has compiled by source and options alone."""
    headers = shutil.copytree(llm_comm.get_include(), tmp_path / "include")
    monkeypatch.setattr(installation, "get_include", lambda: str(headers))
    found = installation.get_nvrtc_options.__wrapped__()
    assert found[2] == llm_comm.get_nvrtc_options()[2]
    with (headers / "llm_comm" / "channels.cuh").open("a", encoding="utf-8") as file:
        file.write("// changed\n")
    changed = installation.get_nvrtc_options.__wrapped__()
    assert changed[:2] == found[:2]
    assert changed[2] != found[2]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("name", kernels())
def test_kernels_by_nvcc(name: str, tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(kernels()[name], encoding="utf-8")
    flags = [*llm_comm.get_nvrtc_options(), "-arch=sm_90", "-Werror=all-warnings"]
    command = ["nvcc", *flags, "-c", str(source), "-o", str(tmp_path / "kernel.o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
