"""Arrays that are to be written, or that lie elsewhere, made up here: there is no CuPy without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from llm_comm import arrays
from llm_comm.errors import UnsupportedInputError


class CudaArray:
    """As Numba and CuPy have them: memory by ``__cuda_array_interface__``, and flags or none."""

    def __init__(self, tensor: torch.Tensor, read_only: bool, **attributes: Any) -> None:
        self.__cuda_array_interface__ = {"data": (tensor.data_ptr(), read_only), "shape": (4,), "typestr": "<f4"}
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What torch makes of such arrays."""
    tensor = torch.zeros(4)
    monkeypatch.setattr(torch, "as_tensor", lambda array, device: tensor)
    return tensor


def flags(writeable: bool) -> Any:
    return SimpleNamespace(writeable=writeable)


@pytest.mark.parametrize("attributes", [{}, {"flags": SimpleNamespace()}, {"flags": flags(True)}])
def test_an_array_that_can_be_written(memory: torch.Tensor, attributes: dict[str, Any]) -> None:
    """CuPy's flags do not say so."""
    assert arrays.as_output(CudaArray(memory, False, **attributes)) is memory


@pytest.mark.parametrize(
    ("read_only", "attributes"),
    [
        (True, {}),
        (True, {"flags": flags(True)}),
        (True, {"flags": SimpleNamespace()}),
        (False, {"flags": flags(False)}),
    ],
)
def test_an_array_that_must_not_be_written(memory: torch.Tensor, read_only: bool, attributes: dict[str, Any]) -> None:
    array = CudaArray(memory, read_only, **attributes)
    assert arrays.as_tensor(array) is memory  # as an input it will do
    with pytest.raises(UnsupportedInputError, match="out is a CudaArray that is read-only"):
        arrays.as_output(array)


@pytest.mark.parametrize("library", ["jaxlib", "jax"])
def test_arrays_of_libraries_that_never_change_them(memory: torch.Tensor, library: str) -> None:
    array = type("Array", (CudaArray,), {"__module__": f"{library}.array"})(memory, False)
    with pytest.raises(UnsupportedInputError, match="read-only"):
        arrays.as_output(array)


class DlpackArray:
    """Hands out its memory, and says no more than DLPack does."""

    def __init__(self, array: np.ndarray, versions: bool) -> None:
        self._array = array
        self._versions = versions

    def __dlpack__(self, **options: Any) -> Any:
        if not self._versions and "max_version" in options:
            raise TypeError("there is no max_version")
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def test_arrays_that_are_read_only_by_dlpack() -> None:
    numbers = np.zeros(4, dtype=np.float32)
    for versions in (True, False):
        assert arrays.as_output(DlpackArray(numbers, versions)).data_ptr() == numbers.ctypes.data
    numbers.flags.writeable = False
    with pytest.raises(UnsupportedInputError, match="out is a DlpackArray that is read-only"):
        arrays.as_output(DlpackArray(numbers, True))


def test_memory_of_another_device(memory: torch.Tensor) -> None:
    """torch copies it, or takes the address for one of the current device."""
    elsewhere = torch.zeros(4)
    with pytest.raises(UnsupportedInputError, match="is not on the current CUDA device"):
        arrays.as_tensor(CudaArray(elsewhere, False))


def test_negative_strides() -> None:
    """torch would abort the process."""
    for backwards in (np.ones(4, dtype=np.float32)[::-1], np.ones((4, 4), dtype=np.float32)[:, ::-1]):
        with pytest.raises(UnsupportedInputError, match="negative strides"):
            arrays.as_tensor(backwards)
