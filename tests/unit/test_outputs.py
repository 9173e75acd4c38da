"""Files at the end of a run: what cannot be written is not lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llm_comm import files

FULL = Path("/dev/full")


def test_what_can_be_written_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert files.write_json("--json", tmp_path / "x.json", {"a": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("path", "why"), [(FULL, "No space left on device"), (Path("/no/x.json"), "No such file or directory")]
)
def test_what_cannot_be_written_is_printed(path: Path, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not files.write_json("--json", path, {"a": list(range(10_000))})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": list(range(10_000))}
    assert err == f"llm-comm: --json {path} could not be written: {why}; its content is on the standard output\n"
