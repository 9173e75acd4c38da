"""A checkout that is not built, in whose root Python is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import llm_comm
from llm_comm import _core, bare_sources

PACKAGE = Path(bare_sources.__file__).parent


def run(*path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Without the finder by which an editable llm_comm is found from everywhere."""
    packages = Path(torch.__file__).parents[1]
    begin = f"import sys; sys.path[:0] = {[str(entry) for entry in (*path, packages)]}; "
    return subprocess.run([sys.executable, "-S", "-c", begin + code], capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "llm_comm").symlink_to(PACKAGE)
    return root


def test_an_installed_llm_comm_is_not_hidden(checkout: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site" / "llm_comm"
    installed.mkdir(parents=True)
    for path in (*PACKAGE.iterdir(), *Path(_core.__file__).parent.iterdir()):
        if not (installed / path.name).exists():
            (installed / path.name).symlink_to(path)
    files = "llm_comm.__file__, errors.__file__, llm_comm.__version__"
    ask = f"import llm_comm; from llm_comm import errors; print({files})"
    done = run(checkout, installed.parent, code=ask)
    expected = f"{installed / '__init__.py'} {installed / 'errors.py'} {llm_comm.__version__}\n"
    assert done.stdout == expected, done.stderr
    assert f"is not built: the installed one in {installed} is used" in done.stderr


def test_without_another_one_the_error_says_what_to_do(checkout: Path) -> None:
    done = run(checkout, code="import llm_comm")
    assert done.returncode == 1
    assert f"ImportError: llm_comm in {checkout / 'llm_comm'} is not built" in done.stderr
    assert f"run `pip install .` in {checkout}" in done.stderr
