"""What must be alike on all ranks of a group before they can share memory, and the error where it is not."""

from __future__ import annotations

from typing import Any

import torch

from llm_comm import _core
from llm_comm.config import Config
from llm_comm.errors import RendezvousError
from llm_comm.runtime.devices import gpu_name
from llm_comm.runtime.rendezvous import Rendezvous, host_identity

# What would make the ranks of a group run different kernels, expect other messages, or give up at different times.
_OPTIONS_OF_ALL_RANKS = ("workspace_bytes", "max_message_bytes", "algorithm", "fuse", "debug", "timeout_s", "pdl")

_LIMITS_OF_A_DEVICE = ("sm_count", "max_cluster", "compute_capability")


def compare_ranks(rendezvous: Rendezvous, device: torch.device, limits: _core.Limits, config: Config) -> None:
    """Compares hosts, GPUs, versions, devices and options. Before anything else: a rank elsewhere cannot map memory.

    Raises:
        RendezvousError: They differ. Raised on all ranks alike.
    """
    hello = {
        **host_identity(),
        "version": _core.version,
        "device": device.type,
        "gpu": gpu_name(device),
        "limits": {name: getattr(limits, name) for name in _LIMITS_OF_A_DEVICE},
        "config": {name: getattr(config, name) for name in _OPTIONS_OF_ALL_RANKS},
    }
    if rendezvous.world_size > _core.max_world_size:
        raise RendezvousError(
            f"the group has {rendezvous.world_size} ranks; llm_comm serves up to {_core.max_world_size}"
        )
    everyone = rendezvous.gather("comparison of ranks", hello)
    hosts = [f"{other['host']} (boot id {other['boot_id']})" for other in everyone]
    check_alike("are on different machines", [other["boot_id"] for other in everyone], shown=hosts)
    gpus = [other["gpu"] for other in everyone]
    shared = {gpu: [rank for rank, of in enumerate(gpus) if of == gpu] for gpu in gpus if gpu and gpus.count(gpu) > 1}
    if shared:
        found = "; ".join(f"ranks {', '.join(map(str, ranks))} use {gpu}" for gpu, ranks in shared.items())
        raise RendezvousError(f"ranks share a GPU, each needs one of its own (torch.cuda.set_device): {found}")
    check_alike("have different versions of llm_comm", [other["version"] for other in everyone])
    check_alike("have different kinds of device", [other["device"] for other in everyone])
    check_alike("have devices of different kinds", [other["limits"] for other in everyone])
    check_alike("have different options", [other["config"] for other in everyone])


def check_alike(what: str, values: list[Any], shown: list[Any] | None = None) -> None:
    """Raises RendezvousError, on all ranks alike, unless all values are equal."""
    if any(value != values[0] for value in values):
        found = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(shown or values))
        raise RendezvousError(f"the ranks {what}: {found}")
