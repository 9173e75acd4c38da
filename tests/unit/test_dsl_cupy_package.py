"""The package that has cupy, as it is told where cupy is missing."""

from __future__ import annotations

import pytest
import torch

from llm_comm.dsl.compiler.cache import cupy_package


@pytest.mark.parametrize(
    ("cuda", "package"),
    [("12.8", "cupy-cuda12x"), ("13.0", "cupy-cuda13x"), ("12", "cupy-cuda12x"), (None, "cupy-cuda12x")],
)
def test_it_follows_the_cuda_of_torch(cuda: str | None, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert cupy_package() == package
