"""Memory of a rank's device, by its address, as a tensor."""

from __future__ import annotations

import ctypes

import torch


class _OnDevice:
    """What torch takes for an array of a GPU."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """A tensor [nbytes] of uint8 over memory that whoever calls keeps.

    Args:
        address: Of the first byte.
        nbytes: 0 is an empty tensor.
        device: That has the memory.

    Raises:
        ValueError: The address is 0: it is that of a fake tensor, say.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if address == 0:
        raise ValueError("a tensor has no memory: it is a fake tensor or a wrapper of others")
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    with torch.cuda.device(device):
        return torch.as_tensor(_OnDevice(address, nbytes), device=device)
