"""With a torch for ROCm, llm_comm serves no GPU of AMD, and names the page that says why."""

from __future__ import annotations

import pytest
import torch

from llm_comm.errors import UnsupportedInputError
from llm_comm.runtime import devices

PAGE = "docs/develop/amd.md"


@pytest.fixture(autouse=True)
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for ROCm on a machine with GPUs, which it calls CUDA devices."""
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_a_gpu_of_amd_is_refused() -> None:
    for device in ("cuda", 0, torch.device("cuda", 1)):
        with pytest.raises(UnsupportedInputError, match=rf"^device cuda.*{PAGE}"):
            devices.resolve(device)


def test_gpus_are_emulated_there() -> None:
    assert devices.resolve(None) == devices.resolve("cpu") == torch.device("cpu")


def test_the_note_is_for_rocm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PAGE in devices.note_on_amd()
    monkeypatch.setattr(torch.version, "hip", None)
    assert devices.note_on_amd() == ""
