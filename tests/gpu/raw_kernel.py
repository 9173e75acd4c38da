"""Kernels of one's own, compiled at run time: by cupy, or by NVRTC or nvcc and launched by the driver, without cupy.

torch for CUDA brings NVRTC, so what such kernels do can be tried wherever there is a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from user_kernels import nvcc_path

import llm_comm
from llm_comm import emulated

#: cupy first, which is what docs/reference/own_kernels.md recommends.
COMPILERS = ("cupy", "nvrtc", "nvcc")


def find_nvrtc() -> ctypes.CDLL | None:
    names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
    in_wheels = [str(path) for place in sys.path for path in Path(place).glob("nvidia/*/lib/libnvrtc.so.1?")]
    toolkit = [str(path) for path in Path("/usr/local/cuda/lib64").glob("libnvrtc.so.1?")]
    for name in in_wheels + names + toolkit:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def usable_compilers() -> list[str]:
    found = {"cupy": importlib.util.find_spec("cupy"), "nvrtc": find_nvrtc(), "nvcc": nvcc_path()}
    return [name for name in COMPILERS if found[name] is not None]


def compile_kernel(compiler: str, code: str, name: str, device: torch.device) -> Callable[..., None]:
    """A kernel that is called as those of cupy are, and launched on the current stream of torch."""
    if device.type == "cpu":
        return emulated.RawKernel(code, name)
    if compiler == "cupy":
        return _cupy_kernel(code, name, device)
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return DriverKernel(compile_by_nvrtc(code, arch) if compiler == "nvrtc" else compile_by_nvcc(code, arch), name)


def _cupy_kernel(code: str, name: str, device: torch.device) -> Callable[..., None]:
    import cupy

    cupy.cuda.Device(device.index).use()
    kernel = cupy.RawKernel(code, name, options=llm_comm.get_nvrtc_options())
    kernel.compile()

    def launch(*arguments: Any) -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel(*arguments)

    return launch


# ---- Without cupy --------------------------------------------------------------------------------------------------


@functools.cache
def compile_by_nvrtc(code: str, arch: str) -> bytes:
    """A cubin for ``sm_90`` and the like.

    Raises:
        RuntimeError: NVRTC does not take the source: the text holds its log.
    """
    nvrtc = find_nvrtc()
    if nvrtc is None:
        raise RuntimeError("there is no libnvrtc")
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"kernel.cu", 0, None, None) != 0:
        raise RuntimeError("nvrtcCreateProgram failed")
    try:
        options = [option.encode() for option in (f"--gpu-architecture={arch}", *llm_comm.get_nvrtc_options())]
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if status != 0:
            log = _text_of(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0")
            raise RuntimeError(f"NVRTC status {status}:\n{log.decode(errors='replace')}")
        return _text_of(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text_of(program: ctypes.c_void_p, get_size: Any, get: Any) -> bytes:
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    get(program, text)
    return text.raw


@functools.cache
def compile_by_nvcc(code: str, arch: str) -> bytes:
    """The same by nvcc, with its warnings as errors."""
    nvcc = nvcc_path()
    if nvcc is None:
        raise RuntimeError("there is no nvcc")
    with tempfile.TemporaryDirectory() as directory:
        source, cubin = Path(directory, "kernel.cu"), Path(directory, "kernel.cubin")
        source.write_text(code, encoding="utf-8")
        flags = [*llm_comm.get_nvrtc_options(), f"-arch={arch}", "-Werror=all-warnings", "-cubin"]
        command = [nvcc, *flags, str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"nvcc does not compile it:\n{done.stderr}")
        return cubin.read_bytes()


class DriverKernel:
    """A kernel of a cubin, in the current context: that of torch, once it has used the device."""

    def __init__(self, cubin: bytes, name: str) -> None:
        self.name = name
        self._cuda = ctypes.CDLL("libcuda.so.1")
        torch.cuda.current_stream().synchronize()  # makes the context current
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), cubin)
        self._call("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[int]) -> None:
        """``args``: whole numbers and addresses. A parameter takes as many of the 8 bytes of each as it has."""
        values = [ctypes.c_uint64(value) for value in args]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        dimensions = [ctypes.c_uint(n) for size in (grid, block) for n in (*size, 1, 1)[:3]]
        self._call("cuLaunchKernel", self._function, *dimensions, ctypes.c_uint(0), stream, addresses, None)

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._cuda, function)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"kernel {self.name}: {function}: {(text.value or b'?').decode()} ({status})")
