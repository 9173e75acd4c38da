"""What commands check before they start ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tables import plain_row, write_table

from llm_comm.cli import commands, launch
from llm_comm.errors import ConfigError


@pytest.fixture(autouse=True)
def _outside_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LLM_COMM_TABLE", "LLM_COMM_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_what_can_be_written_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").touch()
    launch.checked_config({"--json": Path("new.json"), "--out": tmp_path / "old.json", "--plot": None})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.json"], "nothing is written yet"


def test_missing_directory_and_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--json .*/no/x\.json: there is no directory .*/no; make it"):
        launch.checked_config({"--out": tmp_path / "there.yaml", "--json": tmp_path / "no" / "x.json"})
    with pytest.raises(ConfigError, match=r"--json .* is a directory"):
        launch.checked_config({"--json": tmp_path})


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a mode of the file: the tests may run as root, who may write everywhere."""
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    (tmp_path / "old").touch()
    for name, asked_for in (("new", tmp_path), ("old", tmp_path / "old")):
        with pytest.raises(ConfigError, match=f"--json .*{name}: no permission"):
            launch.checked_config({"--json": tmp_path / name})
        assert asked.pop() == (asked_for, os.W_OK)


def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(tmp_path / "table.yaml", [plain_row(1024, "one_shot", 1, 8, 0)])
    monkeypatch.setenv("LLM_COMM_TABLE", str(path))
    config = launch.checked_config({}, timeout_s=3.0, dsl=None)
    assert (config.timeout_s, config.dsl, config.origins["timeout_s"]) == (3.0, None, "--timeout-s")
    path.write_text("all_reduce: []")
    with pytest.raises(ConfigError, match=r"option table \(LLM_COMM_TABLE\): tuning table .*table\.yaml"):
        launch.checked_config({})


@pytest.mark.parametrize("command", [["demo"], ["bench", "all-reduce"], ["bench", "fused", "--hidden", "64"], ["tune"]])
@pytest.mark.parametrize("fault", ["table", "variable", "json"])
def test_every_command_checks_before_it_starts_ranks(
    command: list[str], fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "place", lambda *_, **__: launch.Placement(2, on_gpu=command == ["tune"]))
    monkeypatch.setattr(launch, "spawn", lambda *_: pytest.fail("started ranks"))
    if fault == "table":
        monkeypatch.setenv("LLM_COMM_TABLE", "/no/such/table.yaml")
    if fault == "variable":
        monkeypatch.setenv("LLM_COMM_ALGORITM", "two_shot")
    argv = [*command, "--json", "/no/such/directory/x.json"] if fault == "json" else command
    assert commands.main(argv) == 2
    assert {"table": "/no/such/table.yaml", "variable": "LLM_COMM_ALGORITM", "json": "/no/such/directory"}[
        fault
    ] in capsys.readouterr().err


def test_tune_checks_where_its_table_goes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(launch, "place", lambda *_, **__: launch.Placement(2, on_gpu=True))
    monkeypatch.setattr(launch, "spawn", lambda *_: pytest.fail("started ranks"))
    assert commands.main(["tune", "--out", "/no/such/directory/table.yaml"]) == 2
    assert "--out /no/such/directory/table.yaml: there is no directory" in capsys.readouterr().err
