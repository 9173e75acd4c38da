"""A build that takes the libraries of another one (``LLM_COMM_BUILT``), as those of wheels do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# pip puts cmake and ninja beside python, which need not be on PATH.
SEARCHED = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

pytestmark = pytest.mark.skipif(
    shutil.which("cmake", path=SEARCHED) is None or shutil.which("c++", path=SEARCHED) is None,
    reason="no cmake or no C++ compiler",
)


def configure(directory: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=SEARCHED) else []
    definitions = [f"-D{setting}" for setting in (*settings, "LLM_COMM_PYTHON=OFF", "LLM_COMM_CUDA=OFF")]
    command = ["cmake", "-S", str(REPOSITORY), "-B", str(directory), *generator, *definitions]
    environment = {**os.environ, "PATH": SEARCHED}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_it_takes_over_what_the_other_has(tmp_path: Path) -> None:
    first = configure(tmp_path / "first")
    assert first.returncode == 0, first.stderr
    second = configure(tmp_path / "second", f"LLM_COMM_BUILT={tmp_path / 'first'}")
    assert second.returncode == 0, second.stderr
    # What is installed comes from the first, and nothing is compiled here.
    installed = (tmp_path / "second" / "cmake_install.cmake").read_text(encoding="utf-8")
    assert str(tmp_path / "first" / "libllm_comm_nccl_emulated.so") in installed
    assert (tmp_path / "first" / "compile_commands.json").exists()
    assert not (tmp_path / "second" / "compile_commands.json").exists()


def test_one_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "llm_comm_build.cmake").write_text("set(LLM_COMM_BUILT_VERSION [[9.8.7]])\n")
    done = configure(tmp_path / "build", f"LLM_COMM_BUILT={tmp_path}")
    assert done.returncode != 0
    assert f"{tmp_path} is of version 9.8.7" in " ".join(done.stderr.split())
