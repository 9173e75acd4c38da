"""The operations as torch custom operators, so that models which call them compile with ``fullgraph=True``.

An operator names its communicator by a string, since a compiled graph holds no Python objects.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from llm_comm.communicator import Communicator

_communicators: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_library = torch.library.Library("llm_comm", "DEF")
_library.define("all_reduce(Tensor x, str communicator) -> Tensor")


def register(communicator: Communicator) -> str:
    """A name by which operators find the communicator as long as it lives: the same on all ranks that make their
    communicators in the same order."""
    name = f"llm_comm.{next(_numbers)}"
    _communicators[name] = communicator
    return name


def _all_reduce(x: torch.Tensor, communicator: str) -> torch.Tensor:
    found = _communicators.get(communicator)
    if found is None:
        raise RuntimeError(f"there is no communicator {communicator!r} in this process (any more)")
    result: torch.Tensor = found.all_reduce(x)
    return result


def _all_reduce_fake(x: torch.Tensor, communicator: str) -> torch.Tensor:
    return torch.empty_like(x)


_library.impl("all_reduce", _all_reduce, "CPU")
_library.impl("all_reduce", _all_reduce, "CUDA")
torch.library.register_fake("llm_comm::all_reduce", _all_reduce_fake, lib=_library)
