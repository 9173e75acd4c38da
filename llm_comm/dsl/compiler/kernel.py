"""Compiles source for the device of a communicator, and launches it on the current stream."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch

from llm_comm import emulated
from llm_comm.dsl.compiler.cache import cached_library
from llm_comm.installation import get_nvrtc_options

#: Grid, threads of a block, arguments, bytes of shared memory.
Launch = Callable[[int, int, Sequence[int], int], None]


def compile_kernel(code: str, name: str, device: torch.device) -> Launch:
    """A kernel that is launched on the current stream of a device.

    Args:
        code: C++ source.
        name: Of the kernel.
        device: A GPU, for which cupy compiles; the CPU stands for an emulated one.

    Raises:
        ModuleNotFoundError: cupy is not installed.
        RuntimeError: The compiler does not take the source.
    """
    return _emulated(code, name) if device.type == "cpu" else _on_gpu(code, name, device)


def _emulated(code: str, name: str) -> Launch:
    kernel = emulated.RawKernel(code, name, library=cached_library(code, name))

    def launch(blocks: int, threads: int, arguments: Sequence[int], shared_bytes: int) -> None:
        kernel((blocks,), (threads,), arguments, shared_mem=shared_bytes)

    return launch


def _on_gpu(code: str, name: str, device: torch.device) -> Launch:
    try:
        cupy = importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "programs of llm_comm.dsl are compiled for GPUs by cupy, which is not installed: pip install cupy-cuda12x"
        ) from error
    with cupy.cuda.Device(device.index):
        kernel = cupy.RawKernel(code, name, options=get_nvrtc_options())
        kernel.compile()

    def launch(blocks: int, threads: int, arguments: Sequence[int], shared_bytes: int) -> None:
        with cupy.cuda.Device(device.index), cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream):
            kernel((blocks,), (threads,), tuple(arguments), shared_mem=shared_bytes)

    return launch
