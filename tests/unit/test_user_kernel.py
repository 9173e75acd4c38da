"""A kernel that somebody writes elsewhere, against the installed headers and library."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import llm_comm

SOURCES = Path(__file__).parents[1] / "user_kernel"


def run(command: Sequence[str | Path], cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The user's own directory."""
    return Path(shutil.copytree(SOURCES, tmp_path / "project"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_on_emulated_gpus(project: Path) -> None:
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-DLLM_COMM_EMULATOR", "-I", llm_comm.get_include()]
    libraries = ["-L", llm_comm.get_library_dir(), "-lllm_comm_emulator", "-pthread"]
    run(["g++", *flags, "emulated_main.cpp", "-o", "exchange", *libraries], project)
    printed = run([project / "exchange"], project)
    for kernel in ("exchange_with_signals", "exchange_packets", "count_signals"):
        assert f"{kernel}: failures 0 and 0\n" in printed
    assert "blocks take turns: yes\n" in printed


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_compiles_for_a_gpu(project: Path) -> None:
    flags = ["-std=c++20", "-arch=sm_90", "-Werror=all-warnings", "-I", llm_comm.get_include()]
    run(["nvcc", *flags, "-c", "gpu_main.cu", "-o", "exchange.o"], project)
    assert b"exchange_packets" in (project / "exchange.o").read_bytes()
