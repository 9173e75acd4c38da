"""Properties of this installation: version, CUDA kernels, headers and libraries; and what tools of the machine say."""

from __future__ import annotations

import functools
import hashlib
import subprocess
from importlib import resources
from pathlib import Path

from llm_comm import _core

VERSION: str = _core.version
"""Version of the package."""


def cuda_compiled() -> bool:
    """Return whether this build has CUDA kernels. Without them only emulated GPUs are available."""
    return bool(_core.cuda_archs)


def code_for(compute_capability: int, machine_code: str = _core.cuda_archs, ptx: str = _core.cuda_ptx_archs) -> str:
    """Return which of the build's kernels a GPU runs.

    Args:
        compute_capability: 10 * major + minor of the GPU.
        machine_code: Architectures with machine code, as in ``"80,90"``. Code runs on GPUs of the same major and the
            same or a larger minor version; ``90a`` runs on 9.0 only.
        ptx: Architectures with PTX. PTX runs on GPUs of the same or a newer version.

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
    """Return the oldest driver branch that runs a build of this nvcc, such as ``"580"``. None without CUDA, or for an
    unknown version of it.

    All minor versions of a CUDA release need the same driver (CUDA minor version compatibility). PTX is an exception:
    it needs a driver as new as the nvcc.
    """
    return {"12": "525", "13": "580"}.get(nvcc_version.partition(".")[0])


@functools.cache
def digest_of_kernels() -> str:
    """Return a digest of the compiled kernels and their launch code. Stored measurements are keyed by it."""
    libraries = [Path(_core.__file__), *sorted(Path(get_library_dir()).glob("libllm_comm_cuda.so*"))]
    digest = hashlib.sha256()
    for path in libraries:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def get_include() -> str:
    """Return the directory for ``-I``, so that ``#include "llm_comm/memory_channel.cuh"`` works."""
    return _installed_directory("include")


@functools.cache
def get_nvrtc_options() -> tuple[str, ...]:
    """Return the options with which ``cupy.RawKernel`` compiles a kernel that includes the headers.

    The last option only changes with the headers. cupy caches by source and options, and would otherwise reuse a kernel
    compiled with older headers.
    """
    return "-std=c++20", f"-I{get_include()}", f"-DLLM_COMM_HEADERS=0x{digest_of_headers()[:8]}"


def digest_of_headers() -> str:
    """Return a digest of the headers' names and contents. Compiled user kernels are cached by it."""
    include = Path(get_include())
    digest = hashlib.sha256()
    for path in sorted(path for path in include.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(include)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def get_library_dir() -> str:
    """Return the directory of the static libraries of the emulators.

    ``libllm_comm_emulator.a`` is for user kernels, ``libllm_comm_deterministic.a`` for DSL programs run under
    schedules.
    """
    return _installed_directory("lib")


def nccl_library(emulated: bool = False) -> str:
    """Return the path of the NCCL-compatible library, for ``LD_PRELOAD`` or ``VLLM_NCCL_SO_PATH``.

    docs/reference/nccl.md describes the library.

    Args:
        emulated: Return the library over emulated GPUs, for tests. Pointers are host pointers, streams are ignored.

    Raises:
        FileNotFoundError: This installation was built without CUDA, and ``emulated`` is false.
    """
    name = f"libllm_comm_nccl{'_emulated' if emulated else ''}.so"
    path = Path(get_library_dir(), name)
    if not path.is_file():
        raise FileNotFoundError(f"this installation of llm_comm has no {name}: install it where nvcc is found")
    return str(path)


def _installed_directory(name: str) -> str:
    # Not relative to __file__: in an editable install these directories are apart from the Python sources.
    directory = resources.files("llm_comm") / name
    if not directory.is_dir():
        raise FileNotFoundError(f"this installation of llm_comm has no {name!r} directory: install it with pip")
    return str(directory)


def run_tool(*command: str) -> str | None:
    """Return the stripped standard output of a command; None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
