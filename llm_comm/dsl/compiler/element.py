"""Types of elements, as a kernel has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_NUMBERS = {
    torch.bfloat16: "kBFloat16",
    torch.float16: "kFloat16",
    torch.float32: "kFloat32",
}


@dataclass(frozen=True)
class Element:
    """Of a message.

    Attributes:
        dtype: As torch has it.
        number: The DataType of data_type.h that sums it; None: elements are moved only.
        storage: By which loads and stores take it apart where a line is not aligned, or not full.
    """

    dtype: torch.dtype
    number: str | None
    storage: str


def element_of(dtype: torch.dtype) -> Element:
    """The element of a dtype of torch."""
    width = min(dtype.itemsize, 4)
    return Element(dtype, _NUMBERS.get(dtype), f"uint{8 * width}_t")
