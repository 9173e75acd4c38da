"""What engines measure at their start and keep: files that are whole, of this device and these kernels, or not used."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llm_comm import Communicator, files
from llm_comm.config import EngineOptions
from llm_comm.integrations import measured_tables
from llm_comm.integrations.layer_tuning import LayerBench, tune
from llm_comm.integrations.measured_tables import MeasuredTables
from llm_comm.planning.catalogue import find_table
from llm_comm.planning.layers import LayerKey, LayerRow
from llm_comm.planning.models import Layer

LOG = logging.getLogger("test")
CPU = torch.device("cpu")
KEY = LayerKey("linear", 64, 128, True)
ROWS = (LayerRow(*KEY, 1, True, 32, 2, 4, 5.0, 6.0), LayerRow(*KEY, 16, False, 64, 3, 1, 7.0, 6.5))
NAME = "linear_64x128_pdl"
TABLE = find_table("emulated", 2, 1, EngineOptions.load({}))._replace(layers=ROWS)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLM_COMM_TABLE_DIR", str(tmp_path))
    return tmp_path


def tables() -> MeasuredTables:
    return MeasuredTables(CPU, 2, LOG)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOG.name]


def test_a_table_comes_back_as_it_was(directory: Path) -> None:
    assert tables().read(NAME) is None
    tables().write(NAME, TABLE)
    found = tables().read(NAME)
    assert found is not None
    assert (found.layers, found.rows) == (ROWS, TABLE.rows)
    assert tables().read(f"{NAME}_fp8") is None
    assert [path.suffix for path in directory.rglob("*") if path.is_file()] == [".yaml"], "nothing else is left"


def test_other_kernels_have_files_of_their_own(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables().write(NAME, TABLE)
    monkeypatch.setattr(measured_tables, "digest_of_kernels", lambda: "0" * 64)
    assert tables().read(NAME) is None
    tables().write(NAME, TABLE)
    assert len(list(directory.rglob("*.yaml"))) == 2


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda text: text[:-20], id="cut off"),
        pytest.param(lambda text: "", id="empty"),
        pytest.param(lambda text: "\x00\xff", id="no text"),
        pytest.param(lambda text: "[" * 60_000, id="deep"),
        pytest.param(lambda text: text + " " * (1 << 20), id="long"),
        pytest.param(lambda text: text.replace("device: emulated", "device: NVIDIA H200"), id="of another device"),
        pytest.param(lambda text: text.replace("kernels: ", "kernels: 0"), id="of other kernels"),
        pytest.param(lambda text: text.replace("  kernels: ", "  sources: "), id="of no kernels"),
        pytest.param(lambda text: text.replace("up_to: 16, is_faster", "up_to: 0, is_faster"), id="not sorted"),
        pytest.param(lambda text: text.replace("stages: 3", "stages: -3"), id="negative"),
        pytest.param(lambda text: text.replace("is_faster: true", "is_faster: 1"), id="a number for a truth"),
        pytest.param(lambda text: text.replace("us: 7.0", "warps: 4"), id="an entry of another version"),
    ],
)
def test_a_file_that_cannot_be_used(
    change: Callable[[str], str],
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning; its layer is measured, and the file is right again."""
    monkeypatch.setattr(LayerBench, "times", lambda *_: [(6.0, [(32, 2, 4, 5.0)]), (6.5, [(64, 3, 1, 7.0)])])
    tables().write(NAME, TABLE)
    path = tables().path(NAME)
    assert path is not None
    text = path.read_text(encoding="utf-8")
    assert change(text) != text
    path.write_text(change(text), encoding="latin-1")
    with Communicator(group, "cpu", EngineOptions.load({}, tune_at_start=60)) as comm:
        assert "1 measured" in tune(comm, group, [Layer("o_proj", "linear", 64, 128)], LOG)
        assert comm.table.layers == ROWS
    (said,) = warnings(caplog)
    assert str(path) in said
    assert said.endswith("; it is measured again")
    found = tables().read(NAME)
    assert found is not None
    assert found.layers == ROWS


def test_rows_of_another_layer_are_not_taken(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    other = TABLE._replace(layers=tuple(row._replace(outputs=128) for row in ROWS))
    tables().write(NAME, other)
    monkeypatch.setattr(LayerBench, "times", lambda *_: [(6.0, [(32, 2, 4, 5.0)]), (6.5, [(64, 3, 1, 7.0)])])
    with Communicator(group, "cpu", EngineOptions.load({}, tune_at_start=60)) as comm:
        assert "1 measured" in tune(comm, group, [Layer("o_proj", "linear", 64, 128)], LOG)
        assert comm.table.layers == ROWS


def test_a_directory_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def is_full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    mine = tables()
    with monkeypatch.context() as change:
        change.setattr(measured_tables, "replace_text", is_full)
        mine.write(NAME, TABLE)
        mine.write("other", TABLE)
    (said,) = warnings(caplog)
    assert "cannot be written (No space left on device): the next start measures again" in said
    monkeypatch.setenv("LLM_COMM_TABLE_DIR", "/dev/null")  # no directory
    mine = tables()
    assert mine.read(NAME) is None
    mine.write(NAME, TABLE)
    assert "Not a directory" in warnings(caplog)[1]


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(measured_tables, "table_directory", lambda: None)
    tables().write(NAME, TABLE)
    assert tables().read(NAME) is None
    assert not warnings(caplog)


def _write(path: Path, name: str, times: Iterable[int]) -> None:
    for _ in times:
        files.replace_json(path, {"name": name, "filling": name * 4000})


def test_processes_that_write_at_once(tmp_path: Path) -> None:
    """What is read is of one of them and whole, also where one was killed while it wrote."""
    path = tmp_path / "file.json"
    _write(path, "a", range(1))
    # They share no lock: a process that is killed would keep it.
    processes = multiprocessing.get_context("fork")
    of_names = {"a": itertools.count(), "b": range(300), "c": range(300)}
    writers = [processes.Process(target=_write, args=(path, *of_name)) for of_name in of_names.items()]
    for writer in writers:
        writer.start()
    for reads in itertools.count():
        content = json.loads(path.read_text())
        assert content["filling"] == content["name"] * 4000
        if reads == 20:
            writers[0].kill()
        if reads > 20 and not any(writer.is_alive() for writer in writers):
            break
    assert [writer.exitcode for writer in writers] == [-signal.SIGKILL, 0, 0]
