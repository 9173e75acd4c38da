"""What this installation of llm_comm has: its version, CUDA kernels or none, headers and libraries."""

from __future__ import annotations

from importlib import resources

from llm_comm import _core

VERSION: str = _core.version


def cuda_compiled() -> bool:
    """Whether this build has CUDA kernels; without them it has emulated GPUs only."""
    return bool(_core.cuda_archs)


def get_include() -> str:
    """Directory to pass to a compiler with ``-I`` for ``#include "llm_comm/memory_channel.cuh"``."""
    return _installed_directory("include")


def get_library_dir() -> str:
    """Directory of ``libllm_comm_emulator.a``, for kernels compiled for the emulator."""
    return _installed_directory("lib")


def _installed_directory(name: str) -> str:
    # Not relative to __file__: an editable install keeps these apart from the Python sources.
    directory = resources.files("llm_comm") / name
    if not directory.is_dir():
        raise FileNotFoundError(f"this installation of llm_comm has no {name!r} directory: install it with pip")
    return str(directory)
