"""Conversion of arrays of other libraries (CuPy, NumPy, JAX, ...) to torch tensors over the same memory, and back."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack

from llm_comm.errors import UnsupportedInputError


def as_tensor(array: Any) -> torch.Tensor:
    """Return a tensor over the memory of ``array``.

    Args:
        array: A tensor, or an object with ``__dlpack__`` or ``__cuda_array_interface__``.

    Raises:
        UnsupportedInputError: ``array`` is none of these, or has a dtype or layout that torch does not support.
    """
    if isinstance(array, torch.Tensor):
        return array
    if hasattr(array, "__dlpack__"):
        # torch would abort the process on negative strides.
        if any(stride < 0 for stride in getattr(array, "strides", None) or ()):
            raise UnsupportedInputError(f"the {type(array).__name__} has negative strides, {array.strides}: copy it")
        try:
            return torch.utils.dlpack.from_dlpack(array)
        except BufferError as error:
            raise UnsupportedInputError(f"torch cannot use the {type(array).__name__}: {error}") from error
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        tensor = torch.as_tensor(array, device="cuda")
        if tensor.data_ptr() == interface["data"][0]:
            return tensor
        # torch ignores the array's device and assumes the current one.
        raise UnsupportedInputError(
            f"the memory of the {type(array).__name__} is not on the current CUDA device, {tensor.device}: "
            "make its device the current one"
        )
    raise UnsupportedInputError(
        f"cannot use a {type(array).__name__}: pass a torch tensor or an array with DLPack or __cuda_array_interface__"
    )


def as_output(array: Any) -> torch.Tensor:
    """Return a tensor over the memory of an array that will be written.

    Raises:
        UnsupportedInputError: The array cannot be used, or is read-only.
    """
    if isinstance(array, torch.Tensor):
        return array
    library = _library(array)
    flags, interface = getattr(array, "flags", None), getattr(array, "__cuda_array_interface__", None)
    # CuPy's flags have no "writeable": all of its arrays can be written.
    is_read_only = not getattr(flags, "writeable", True) or (interface is not None and interface["data"][1])
    if is_read_only or library in _IMMUTABLE or _is_read_only_by_dlpack(array):
        raise UnsupportedInputError(f"out is a {type(array).__name__} that is read-only; leave out out, or copy it")
    return as_tensor(array)


def call(operation: Callable[..., Any], x: Any, out: Any) -> Any:
    """Call ``operation(x, out)`` with tensors over the memory of the arrays.

    Returns:
        ``out``. If ``out`` is None, the result as an array like ``x``.

    Raises:
        UnsupportedInputError: See ``as_tensor`` and ``as_output``.
    """
    if out is None:
        return like(x, operation(as_tensor(x), None))
    written = as_output(out)
    operation(written if out is x else as_tensor(x), written)
    return out


def like(array: Any, tensor: torch.Tensor) -> Any:
    """Return ``tensor`` as an array of the library of ``array``, over the same memory. Return the tensor itself if that
    library has no ``from_dlpack``."""
    if isinstance(array, torch.Tensor):
        return tensor
    module = importlib.import_module(_MODULES.get(_library(array), _library(array)))
    from_dlpack = getattr(module, "from_dlpack", None)
    return tensor if from_dlpack is None else from_dlpack(tensor)


def is_dense_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor is one contiguous block of memory on ``device``. torch.compile can trace this check."""
    return (
        tensor.device == device and tensor.layout is torch.strided and not tensor.is_nested and tensor.is_contiguous()
    )


def why_not_plain(tensor: torch.Tensor) -> str:
    """Return why the memory of a tensor does not hold its values, or "". Must be called before ``is_contiguous``, which
    raises for sparse and nested tensors.

    Always "" under torch.compile, which cannot trace the question. The operator in the graph asks again.
    """
    if torch.compiler.is_compiling():
        return ""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"the tensor is {'nested' if tensor.is_nested else tensor.layout}"
    if tensor.is_neg():
        return "the tensor is a negated view of another's memory: pass tensor.resolve_neg()"
    if tensor.is_conj():
        return "the tensor is a conjugated view of another's memory: pass tensor.resolve_conj()"
    # A process that has not imported this module has no DTensor.
    sharded = sys.modules.get("torch.distributed.tensor")
    if sharded is not None and isinstance(tensor, sharded.DTensor):
        return "the tensor is a DTensor: pass tensor.to_local()"
    return ""


def _is_read_only_by_dlpack(array: Any) -> bool:
    """Return whether an array declares its memory read-only through DLPack 1.0 or later."""
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except (AttributeError, TypeError, BufferError):  # no DLPack, or an older version
        return False
    if not _is_capsule(capsule, _VERSIONED):
        return False
    return bool(_pointer_of(capsule, _VERSIONED)[0].flags & _READ_ONLY)


class _ManagedTensor(ctypes.Structure):
    """Leading fields of DLManagedTensorVersioned: https://dmlc.github.io/dlpack/latest/c_api.html"""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


_VERSIONED, _READ_ONLY = b"dltensor_versioned", 1
_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.POINTER(_ManagedTensor), ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

# Modules with from_dlpack, for libraries whose top module has none.
_MODULES = {"jaxlib": "jax.dlpack"}
_IMMUTABLE = ("jaxlib", "jax")


def _library(array: Any) -> str:
    return type(array).__module__.partition(".")[0]
