"""Environment of a comparison: packages, CUDA, devices, commit. No package is imported, and no GPU is used."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import subprocess
from pathlib import Path

#: Memory in MiB below which a GPU counts as unused; drivers and daemons hold a few hundred MiB.
_IDLE_MIB = 2048
_PACKAGES = ("torch", "llm_comm", "triton", "transformers", "flashinfer-python")


def versions(engine: str) -> dict[str, str | None]:
    """Return the versions of packages in this environment, which is the engine's; None for missing ones."""
    found: dict[str, str | None] = {name: _installed(name) for name in (engine, *_PACKAGES)}
    gpu = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {**found, "python": platform.python_version(), "cuda": _cuda_of_torch(), "driver": gpu or None}


def device() -> str | None:
    """Return the name of the first GPU, or None."""
    return _first_line("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or None


def busy_gpus(count: int) -> list[str]:
    """Return a sentence for each of the first ``count`` visible GPUs on which other processes hold memory.

    Other processes distort the measurement, and the engine may not start.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    which = ("-i", chosen) if chosen else ()
    lines = _output("nvidia-smi", *which, "--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits")
    busy = []
    for line in lines[:count]:
        # With MIG the value is "[N/A]".
        found = re.fullmatch(r"(\d+), (\d+), (\d+)", line.strip())
        if found and int(found[2]) > _IDLE_MIB:
            busy.append(f"GPU {found[1]}: {found[2]} of {found[3]} MiB are in use by other processes")
    return busy


def commit(root: Path) -> str | None:
    """Return the commit of the checkout in ``root``, or None if it is no checkout."""
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
    return next(iter(_output(*command)), "").strip()


def _output(*command: str) -> list[str]:
    """Return the lines that a command prints; empty if the command is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
