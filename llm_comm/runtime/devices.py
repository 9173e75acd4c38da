"""Device of a rank: its choice, its limits for kernel launches, and its current stream."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from llm_comm import _core
from llm_comm.config import Config
from llm_comm.errors import UnsupportedInputError
from llm_comm.planning import catalogue
from llm_comm.planning.tables import TuningTable

logger = logging.getLogger("llm_comm")


def note_on_amd() -> str:
    """Return what to add to the reason why llm_comm does not serve GPUs of AMD; "" if torch is not built for them."""
    return " (AMD: kernels compile, and none has run; docs/develop/amd.md)" if torch.version.hip else ""


def resolve(device: torch.device | str | int | None) -> torch.device:
    """Return the device that the argument ``device`` of ``Communicator`` means, with its index.

    None means the current CUDA device, or the CPU (emulated GPUs) without a GPU or without CUDA kernels in this build.

    Raises:
        UnsupportedInputError: ``device`` is neither a CUDA device nor the CPU, or is a GPU of AMD.
    """
    if device is None:
        use_cuda = torch.cuda.is_available() and not torch.version.hip
        if use_cuda and not _core.cuda_archs:
            use_cuda = False
            logger.warning(
                "there are GPUs, but this build of llm_comm has no CUDA kernels: it emulates GPUs, on CPU tensors. "
                "Install it where nvcc is found"
            )
        device = torch.device("cuda" if use_cuda else "cpu")
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and torch.version.hip):
        raise UnsupportedInputError(
            f"device {device}: llm_comm runs on CUDA devices and, emulated, on 'cpu'{note_on_amd()}"
        )
    return torch.empty(0, device=device).device


def gpu_name(device: torch.device) -> str | None:
    """Return an identifier of the physical GPU, equal on all ranks that use it; None for an emulated one."""
    return None if device.type == "cpu" else f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def limits_of(device: torch.device, workspace_bytes: int) -> _core.Limits:
    """Return the limits of kernel launches on ``device``: SMs, largest cluster, compute capability, and workspace
    sizes.

    An emulated device reports 4 SMs but runs fewer threads at once than those would (kResidentThreads in
    csrc/emulator/executor.h). Tests thereby cover grids that are not resident as a whole.

    ``max_cluster`` is the bound of the architecture. A device with disabled SMs may have room for less
    (``Core.max_cluster_blocks``).
    """
    sm_count, max_cluster, compute_capability = 4, 16, 0
    if device.type != "cpu":
        properties = torch.cuda.get_device_properties(device)
        sm_count = properties.multi_processor_count
        max_cluster = 16 if properties.major >= 9 else 1
        # The core derives the register need of its kernels from the capability (docs/experiments/registers.md).
        compute_capability = 10 * properties.major + properties.minor
    return make_limits(workspace_bytes, sm_count, max_cluster, compute_capability)


def make_limits(workspace_bytes: int, sm_count: int, max_cluster: int, compute_capability: int) -> _core.Limits:
    """Return the limits of launches for a workspace of ``workspace_bytes`` bytes."""
    return _core.Limits(
        slot_bytes=_core.slot_bytes(workspace_bytes),
        staging_bytes=_core.staging_bytes(workspace_bytes),
        sm_count=sm_count,
        max_cluster=max_cluster,
        compute_capability=compute_capability,
    )


def find_table(device: torch.device, world_size: int, config: Config) -> TuningTable:
    """Return the tuning table for ``world_size`` ranks on devices like this one.

    Raises:
        ConfigError: The table that the option ``table`` names cannot be used.
    """
    if device.type == "cpu":
        return catalogue.find_table("emulated", world_size, 1, config)
    properties = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor
    return catalogue.find_table(properties.name, world_size, properties.multi_processor_count, config, capability)


def current_stream_of(device: torch.device) -> Callable[[], int]:
    """Return a function that returns the raw handle of the device's current stream (0 on an emulated device)."""
    if device.type == "cpu":
        return _no_stream
    # The raw handle: a torch Stream object costs a large share of the host time of a call.
    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index)


def _no_stream() -> int:
    return 0


def is_capturing(device: torch.device) -> bool:
    """Return whether the device's current stream is being captured in a CUDA graph."""
    if device.type == "cpu":
        return False
    try:
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # the CUDA context is broken
        return False
