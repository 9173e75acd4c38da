"""What a comparison ran on: packages, CUDA, devices, commit. Nothing is imported for it, and no GPU is touched."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import runpy
import subprocess
from pathlib import Path

_PACKAGES = ("torch", "llm_comm", "triton", "transformers", "flashinfer-python")


def versions(engine: str) -> dict[str, str | None]:
    """Of the packages in this environment, which is that of the engine; None for what is not there."""
    found: dict[str, str | None] = {name: _installed(name) for name in (engine, *_PACKAGES)}
    gpu = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {**found, "python": platform.python_version(), "cuda": _cuda_of_torch(), "driver": gpu or None}


def device() -> str | None:
    """Name of the first GPU, or None."""
    return _first_line("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or None


def commit(root: Path) -> str | None:
    """Of the checkout in ``root``, or None if it is none."""
    return _first_line("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or None


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_of_torch() -> str | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    return runpy.run_path(str(file)).get("cuda") if file.is_file() else None


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0].strip()
