"""``tools/release.py``: which tags it refuses, and the list of hashes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tool_modules import tool

CHANGELOG = "# Changelog\n\n## [1.3.0] - unreleased\n\n## [1.2.0] - 2026-12-01\n"


@pytest.fixture(scope="module")
def release() -> Iterator[ModuleType]:
    yield from tool("release")


def test_tags_that_are_refused(release: ModuleType) -> None:
    assert release.why_not("v1.2.0", "1.2.0", CHANGELOG) == ""
    assert release.why_not("v1.2.0", "1.3.0", CHANGELOG) == "the tag is v1.2.0, and pyproject.toml has version 1.3.0"
    assert "with a date" in release.why_not("v1.3.0", "1.3.0", CHANGELOG)
    assert "with a date" in release.why_not("v1.2.0", "1.2.0", CHANGELOG.replace("1.2.0", "1x2.0"))
    assert release.why_not("1.2.0", "1.2.0", CHANGELOG)


def test_sums_are_those_of_sha256sum(release: ModuleType, tmp_path: Path) -> None:
    version = release.check_wheel.version()
    names = [f"llm_comm-{version}-cp312-cp312-{release.check_wheel.POLICY}_x86_64.whl", f"llm_comm-{version}.tar.gz"]
    for name in names:
        (tmp_path / name).write_text(name)
    (tmp_path / release.SUMS).write_text(release.sums(tmp_path))
    done = subprocess.run(
        ["sha256sum", "--check", release.SUMS], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"{name}: OK" for name in names]
    (tmp_path / "llm_comm-0.0.1-cp312-cp312-linux_x86_64.whl").touch()
    with pytest.raises(ValueError, match=r"files of another version: llm_comm-0\.0\.1"):
        release.sums(tmp_path)


def test_nothing_to_release_is_no_release(release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["release.py", "--built", "--out", str(tmp_path)])
    assert release.main() == 1
    assert list(tmp_path.iterdir()) == []
