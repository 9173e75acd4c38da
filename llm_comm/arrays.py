"""Arrays of other libraries (CuPy, NumPy, JAX, ...) as torch tensors over the same memory, and back."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.utils.dlpack

from llm_comm.errors import UnsupportedInputError


def as_tensor(array: Any) -> torch.Tensor:
    """A tensor over the memory of ``array``.

    Args:
        array: A tensor, or an object with ``__dlpack__`` or ``__cuda_array_interface__``.

    Raises:
        UnsupportedInputError: It is none of these.
    """
    if isinstance(array, torch.Tensor):
        return array
    if hasattr(array, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(array)
    if hasattr(array, "__cuda_array_interface__"):
        return torch.as_tensor(array, device="cuda")
    raise UnsupportedInputError(
        f"cannot use a {type(array).__name__}: pass a torch tensor or an array with DLPack or __cuda_array_interface__"
    )


def like(array: Any, tensor: torch.Tensor) -> Any:
    """``tensor`` as an array of the library that ``array`` belongs to, over the same memory."""
    if isinstance(array, torch.Tensor):
        return tensor
    library = importlib.import_module(type(array).__module__.partition(".")[0])
    from_dlpack = getattr(library, "from_dlpack", None)
    return tensor if from_dlpack is None else from_dlpack(tensor)
