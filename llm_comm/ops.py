"""The operations as torch custom operators, so that models which call them compile with ``fullgraph=True``.

An operator names its communicator by a string, since a compiled graph holds no Python objects.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from llm_comm.fused import check_quantization

if TYPE_CHECKING:
    from llm_comm.communicator import Communicator

_communicators: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_library = torch.library.Library("llm_comm", "DEF")
_library.define("all_reduce(Tensor x, str communicator) -> Tensor")
_FUSED = "Tensor x, Tensor? residual, Tensor weight, float eps, str communicator"
_library.define(f"all_reduce_add_rms_norm({_FUSED}) -> (Tensor, Tensor)")
_library.define(f"all_reduce_add_rms_norm_static_fp8({_FUSED}, Tensor scale) -> (Tensor, Tensor)")
_library.define(f"all_reduce_add_rms_norm_dynamic_fp8({_FUSED}) -> (Tensor, Tensor, Tensor)")


def register(communicator: Communicator) -> str:
    """A name by which operators find the communicator as long as it lives: the same on all ranks that make their
    communicators in the same order."""
    name = f"llm_comm.{next(_numbers)}"
    _communicators[name] = communicator
    return name


def _find(communicator: str) -> Communicator:
    found = _communicators.get(communicator)
    if found is None:
        raise RuntimeError(f"there is no communicator {communicator!r} in this process (any more)")
    return found


def _all_reduce(x: torch.Tensor, communicator: str) -> torch.Tensor:
    return _find(communicator)._all_reduce(x)


def _all_reduce_fake(x: torch.Tensor, communicator: str) -> torch.Tensor:
    return torch.empty_like(x)


_Results = tuple[torch.Tensor, ...]


def _fused(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, name: str) -> _Results:
    return _find(name)._all_reduce_add_rms_norm(x, residual, weight, eps)


def _fused_fake(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, communicator: str
) -> _Results:
    return torch.empty_like(x), torch.empty_like(x)


def _fused_static(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    name: str,
    scale: torch.Tensor,
) -> _Results:
    return _find(name)._all_reduce_add_rms_norm(x, residual, weight, eps, quantize="static", scale=scale)


def _fused_static_fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    communicator: str,
    scale: torch.Tensor,
) -> _Results:
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty_like(x)


def _fused_dynamic(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, name: str
) -> _Results:
    return _find(name)._all_reduce_add_rms_norm(x, residual, weight, eps, quantize="dynamic")


def _fused_dynamic_fake(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, communicator: str
) -> _Results:
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty_like(x), scale


def fused(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    quantize: str | None,
    scale: torch.Tensor | None,
    communicator: str,
) -> _Results:
    """The operator for a call of ``Communicator.all_reduce_add_rms_norm`` without given outputs."""
    operators = torch.ops.llm_comm
    results: _Results
    check_quantization(quantize, scale)
    if quantize is None:
        results = operators.all_reduce_add_rms_norm(x, residual, weight, eps, communicator)
    elif quantize == "static":
        results = operators.all_reduce_add_rms_norm_static_fp8(x, residual, weight, eps, communicator, scale)
    else:
        results = operators.all_reduce_add_rms_norm_dynamic_fp8(x, residual, weight, eps, communicator)
    return results


def _implement(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    for device in ("CPU", "CUDA"):
        _library.impl(name, function, device)
    torch.library.register_fake(f"llm_comm::{name}", fake, lib=_library)


_implement("all_reduce", _all_reduce, _all_reduce_fake)
_implement("all_reduce_add_rms_norm", _fused, _fused_fake)
_implement("all_reduce_add_rms_norm_static_fp8", _fused_static, _fused_static_fake)
_implement("all_reduce_add_rms_norm_dynamic_fp8", _fused_dynamic, _fused_dynamic_fake)
