"""What the build says about an nvcc that cannot be used."""

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
UNUSABLE = """\
#!/bin/sh
touch "$0.called"
echo "#error -- unsupported GNU version!" >&2
exit 1
"""

pytestmark = pytest.mark.skipif(
    shutil.which("cmake", path=SEARCHED) is None or shutil.which("c++", path=SEARCHED) is None,
    reason="no cmake or no C++ compiler",
)


def configure(nvcc: str, setting: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Configures a build up to the end, or to the first thing that this environment lacks for it."""
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=SEARCHED) else []
    command = ["cmake", "-S", str(REPOSITORY), "-B", str(directory / "build"), *generator]
    command += [f"-DLLM_COMM_CUDA={setting}", f"-DPython_EXECUTABLE={sys.executable}"]
    environment = {**os.environ, "PATH": SEARCHED, "CUDACXX": nvcc}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def nvcc(tmp_path: Path) -> str:
    path = tmp_path / "nvcc"
    path.write_text(UNUSABLE)
    path.chmod(0o755)
    return str(path)


def test_an_unusable_nvcc_is_warned_of(nvcc: str, tmp_path: Path) -> None:
    said = " ".join(configure(f"env '{nvcc}'", "AUTO", tmp_path).stderr.split())
    assert Path(f"{nvcc}.called").exists(), "a launcher stands before it, as in CUDACXX='ccache nvcc'"
    assert "CMake Warning" in said
    assert f"no CUDA kernels: {nvcc} does not compile a test program" in said
    assert "LLM_COMM_CUDA=ON makes this an error" in said


def test_an_unusable_nvcc_is_an_error_where_kernels_are_asked_for(nvcc: str, tmp_path: Path) -> None:
    done = configure(nvcc, "ON", tmp_path)
    assert done.returncode != 0
    assert f"LLM_COMM_CUDA=ON, but {nvcc} does not compile" in " ".join(done.stderr.split())


def test_whoever_asks_for_the_emulator_alone_is_not_warned(nvcc: str, tmp_path: Path) -> None:
    assert "no CUDA kernels" not in configure(nvcc, "OFF", tmp_path).stderr
