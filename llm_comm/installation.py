"""What this installation of llm_comm has: its version, CUDA kernels or none, headers and libraries."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from pathlib import Path

from llm_comm import _core

VERSION: str = _core.version


def cuda_compiled() -> bool:
    """Whether this build has CUDA kernels; without them it has emulated GPUs only."""
    return bool(_core.cuda_archs)


def code_for(compute_capability: int, machine_code: str = _core.cuda_archs, ptx: str = _core.cuda_ptx_archs) -> str:
    """Which of the kernels in this build a GPU runs.

    Args:
        compute_capability: 10 * major + minor of the GPU.
        machine_code, ptx: What the build has, ``"80,90"``. Machine code runs on GPUs of the same major number and the
            same or a larger minor one, ``90a`` on nothing else than 9.0; PTX on all that are not older.

    Returns:
        ``"sm_80"``, ``"PTX of sm_100, which the driver compiles"`` or ``"none"``.
    """
    exact = [name for name in machine_code.split(",") if name == f"{compute_capability}a"]
    older = [int(name) for name in machine_code.split(",") if name.isdigit() and int(name) <= compute_capability]
    same = [number for number in older if number // 10 == compute_capability // 10]
    compiled = [int(name) for name in ptx.split(",") if name.isdigit() and int(name) <= compute_capability]
    if exact or same:
        return f"sm_{exact[0] if exact else max(same)}"
    return f"PTX of sm_{max(compiled)}, which the driver compiles" if compiled else "none"


def oldest_driver(nvcc_version: str = _core.nvcc_version) -> str | None:
    """The oldest driver that runs a build of this nvcc, ``"580"``; None without CUDA and for a CUDA not known yet.

    It is the same for all minor versions of CUDA (its minor version compatibility). PTX is apart: for that the driver
    has to be as new as the nvcc.
    """
    return {"12": "525", "13": "580"}.get(nvcc_version.partition(".")[0])


@functools.cache
def digest_of_kernels() -> str:
    """Of the compiled kernels of this build, with the code that launches them: what measurements are kept by."""
    libraries = [Path(_core.__file__), *sorted(Path(get_library_dir()).glob("libllm_comm_cuda.so*"))]
    digest = hashlib.sha256()
    for path in libraries:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def get_include() -> str:
    """Directory to pass to a compiler with ``-I`` for ``#include "llm_comm/memory_channel.cuh"``."""
    return _installed_directory("include")


@functools.cache
def get_nvrtc_options() -> tuple[str, ...]:
    """Options with which ``cupy.RawKernel`` compiles a kernel that includes the headers.

    The last one does nothing but change with the headers: cupy keeps what it has compiled by source and options, and
    would go on using a kernel that was compiled with headers of before.
    """
    return "-std=c++20", f"-I{get_include()}", f"-DLLM_COMM_HEADERS=0x{digest_of_headers()[:8]}"


def digest_of_headers() -> str:
    """Of their names and contents: what kernels are kept by that were compiled with them."""
    include = Path(get_include())
    digest = hashlib.sha256()
    for path in sorted(path for path in include.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(include)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def get_library_dir() -> str:
    """Directory of ``libllm_comm_emulator.a``, for kernels compiled for the emulator, and of
    ``libllm_comm_deterministic.a``, for programs of ``llm_comm.dsl`` under schedules."""
    return _installed_directory("lib")


def nccl_library(emulated: bool = False) -> str:
    """Path of the library that stands in for NCCL, for ``LD_PRELOAD`` (docs/reference/nccl.md).

    Args:
        emulated: The one over emulated GPUs, for tests: pointers are those of the host, streams are not looked at.

    Raises:
        FileNotFoundError: This installation was built without CUDA, and ``emulated`` is false.
    """
    name = f"libllm_comm_nccl{'_emulated' if emulated else ''}.so"
    path = Path(get_library_dir(), name)
    if not path.is_file():
        raise FileNotFoundError(f"this installation of llm_comm has no {name}: install it where nvcc is found")
    return str(path)


def _installed_directory(name: str) -> str:
    # Not relative to __file__: an editable install keeps these apart from the Python sources.
    directory = resources.files("llm_comm") / name
    if not directory.is_dir():
        raise FileNotFoundError(f"this installation of llm_comm has no {name!r} directory: install it with pip")
    return str(directory)
