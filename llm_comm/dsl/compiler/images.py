"""Compiles source for the device of a communicator to what its core loads: a cubin, or the path of a shared library."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import torch

from llm_comm.dsl.compiler.cache import cached_file, cached_library
from llm_comm.installation import get_nvrtc_options


def compile_image(code: str, name: str, device: torch.device) -> bytes:
    """What ``Core.load_program`` takes, compiled now or by an earlier call of any process.

    Args:
        code: C++ source.
        name: Of the kernel.
        device: A GPU, for which NVRTC compiles, by cupy; the CPU stands for an emulated one, for which g++ does.

    Raises:
        ModuleNotFoundError: cupy is not installed.
        RuntimeError: The compiler does not take the source.
        ConfigError: Another user could have put code into the directory of the cache.
        OSError: An emulated kernel cannot be written to any file.
    """
    if device.type == "cpu":
        return os.fsencode(cached_library(code, name))
    options = (*get_nvrtc_options(), f"-arch=sm_{''.join(map(str, torch.cuda.get_device_capability(device)))}")
    nvrtc = _nvrtc()
    version = ".".join(map(str, nvrtc.getVersion()))
    parts = (code, name, *options, f"NVRTC {version}")
    return cached_file(name, "cubin", parts, lambda: _cubin(nvrtc, code, name, options))


def _cubin(nvrtc: Any, code: str, name: str, options: tuple[str, ...]) -> bytes:
    program = nvrtc.createProgram(code, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"NVRTC does not compile kernel {name}:\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


@functools.cache
def _nvrtc() -> Any:
    """cupy's binding of NVRTC."""
    try:
        return importlib.import_module("cupy").cuda.nvrtc
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise
        raise ModuleNotFoundError(
            "programs of llm_comm.dsl are compiled for GPUs by cupy, which is not installed: pip install "
            f"{cupy_package()}",
            name="cupy",
        ) from error


def cupy_package() -> str:
    """The package of cupy for the CUDA that this torch is built for."""
    major = (torch.version.cuda or "12").partition(".")[0]
    return f"cupy-cuda{major}x"
