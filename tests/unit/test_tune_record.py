"""Tuning that was cut off: what its file says at any time, who goes on behind it, and who is refused."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tables import limits_of

from llm_comm import files
from llm_comm.bench import timing, tune
from llm_comm.bench.choosing import Measured
from llm_comm.bench.measuring import AtSize, count_candidates
from llm_comm.bench.tune_record import Record
from llm_comm.bench.tune_subjects import Bound, CollectiveSubject
from llm_comm.cli import commands, launch
from llm_comm.config import Config
from llm_comm.errors import ConfigError
from llm_comm.planning.catalogue import load_table
from llm_comm.planning.multicast import NO_MULTICAST
from llm_comm.planning.plan import Plan, Problem
from llm_comm.planning.selection import select
from llm_comm.planning.tables import ALL_REDUCE, Row, TuningTable, by_operation

CONFIG = Config.load({})
ENVIRONMENT = {
    "date": "today",
    "ranks": {"world": 2, "device": "NVIDIA X"},
    "versions": {"commit": "abc", "torch": "2.11"},
    "variables": {"NCCL_NVLS_ENABLE": "0", "CUDA_VISIBLE_DEVICES": "0,1"},
}
OPTIONS = {"operations": ("all-reduce",), "min": 1024, "method": "aligned"}
ONE, TWO = (Row(1024, ALL_REDUCE, name, "LL", blocks=8, tile_lines=16) for name in ("one_shot", "two_shot"))
AT_SIZE = AtSize(1024, [Measured(ONE, 2.125), Measured(TWO, 3.5, at_length=False)], 7.25)


def record(path: Path | None, options: dict[str, Any] = OPTIONS, **environment: Any) -> Record:
    return Record(path, {**ENVIRONMENT, **environment}, options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "candidates.json"


def test_what_was_taken_down_is_read_again(path: Path) -> None:
    first = record(path)
    assert first.sizes("all_reduce") == {}
    first.add("all_reduce", AT_SIZE, writes=True)
    assert not json.loads(path.read_text())["complete"]
    assert record(path).sizes("all_reduce") == {1024: AT_SIZE}
    assert record(path).sizes("all_gather") == {}
    assert first.write()
    assert json.loads(path.read_text())["complete"]
    assert record(path).sizes("all_reduce") == {1024: AT_SIZE}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_only_one_rank_writes(path: Path) -> None:
    record(path).add("all_reduce", AT_SIZE, writes=False)
    assert not path.exists()
    nowhere = record(None)
    nowhere.add("all_reduce", AT_SIZE, writes=True)
    assert nowhere.sizes("all_reduce") == {1024: AT_SIZE}
    assert nowhere.write()


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        ({"options": {**OPTIONS, "min": 2048}}, "--min is 1024 there and 2048 here"),
        ({"options": {**OPTIONS, "operations": ("fused",)}}, r"--operations is \['all-reduce'\] there and \['fused'\]"),
        ({"ranks": {"world": 4, "device": "NVIDIA X"}}, "world is 2 there and 4 here"),
        ({"ranks": {"world": 2, "device": "NVIDIA Y"}}, "device is 'NVIDIA X' there and 'NVIDIA Y' here"),
        ({"versions": {"commit": "abd", "torch": "2.11"}}, "commit is 'abc' there and 'abd' here; name another file"),
        ({"variables": {}}, "NCCL_NVLS_ENABLE is '0' there and None here"),
    ],
)
def test_a_file_of_another_run_is_refused(other: dict[str, Any], complaint: str, path: Path) -> None:
    record(path).add("all_reduce", AT_SIZE, writes=True)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"--json .*candidates.json: there is a file of another run: {complaint}"):
        record(path, **other)
    assert path.read_bytes() == before


def test_another_day_and_other_gpus_of_the_machine_are_the_same_run(path: Path) -> None:
    record(path).add("all_reduce", AT_SIZE, writes=True)
    later = record(path, date="tomorrow", variables={"NCCL_NVLS_ENABLE": "0", "CUDA_VISIBLE_DEVICES": "2,3"})
    assert later.sizes("all_reduce") == {1024: AT_SIZE}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("no JSON", "did not write"),
        ("[]", "did not write"),
        ("{}", "did not write"),
        ('{"command": "bench all-reduce"}', "of another command"),
        ('{"command": "tune", "ranks": 1}', "did not write"),
    ],
)
def test_a_file_of_another_program_is_refused(content: str, complaint: str, path: Path) -> None:
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"--json .*candidates.json: there is a file .*{complaint}"):
        record(path)
    assert path.read_text() == content


@pytest.mark.parametrize("damage", ["us", "algorithm", "at_length"])
def test_a_damaged_file_is_refused(damage: str, path: Path) -> None:
    record(path).add("all_reduce", AT_SIZE, writes=True)
    content = json.loads(path.read_text())
    del content["operations"]["all_reduce"][0]["candidates"][0][damage]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="did not write"):
        record(path)


def test_an_empty_file_is_none(path: Path) -> None:
    path.touch()
    assert record(path).sizes("all_reduce") == {}


# ---- Files ---------------------------------------------------------------------------------------------------------


def test_a_file_is_whole_at_any_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.replace_json(path, {"a": 1})

    def full(self: Path, text: str, encoding: str) -> None:
        with self.open("w", encoding=encoding) as file:
            file.write(text[:3])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            files.replace_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_link_stays_a_link_and_a_device_a_device(path: Path) -> None:
    link = path.with_name("link.json")
    link.symlink_to(path)
    files.replace_json(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(OSError, match="No space left"):
        files.replace_json(Path("/dev/full"), {})
    assert Path("/dev/full").is_char_device()


def test_a_full_disk_is_told_once_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    full = record(Path("/dev/full"))
    for size in (1024, 2048):
        full.add("all_reduce", AT_SIZE._replace(size=size), writes=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("--json /dev/full could not be written: No space left on device; measuring goes on") == 1
    assert not full.write()
    assert [at["bytes"] for at in json.loads(capsys.readouterr().out)["operations"]["all_reduce"]] == [1024, 2048]


# ---- The command ---------------------------------------------------------------------------------------------------


class Comm(SimpleNamespace):
    """A communicator of two ranks on an imagined GPU."""

    rank, world_size, nodes, device, limits = 0, 2, 1, torch.device("cpu"), limits_of(CONFIG)
    config, multicast, programs = CONFIG, NO_MULTICAST, MappingProxyType({})

    def use_table(self, table: TuningTable) -> None:
        self.table = table

    def __enter__(self) -> Comm:
        self.table = TuningTable("shipped", by_operation([ONE]), 1 << 23)
        return self

    def __exit__(self, *_: object) -> None: ...


class Subject(CollectiveSubject):
    """Its calls do nothing."""

    def bind(self, comm: Any, group: Any, size: int) -> Bound:
        def plan() -> Plan:
            return select(Problem(ALL_REDUCE, size // 2, 0, "bf16", 2), comm.table, CONFIG, comm.limits)

        return Bound(plan, lambda: None)


class Cut(Exception):
    """The run ends here."""


def test_a_run_that_was_cut_off_goes_on_and_writes_the_same_table(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timed: list[int] = []
    left = 10**6

    def time_graph(*_: object) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Cut
        (row,) = comm.table.rows[ALL_REDUCE]
        timed.append(row.up_to)
        us = 10 + row.blocks / 1000 + row.tile_lines / row.up_to + (row.algorithm == "one_shot")
        return SimpleNamespace(us=us, min_us=us)

    comm = Comm()
    monkeypatch.setattr(launch, "place", lambda *_, **__: launch.Placement(2, on_gpu=True))
    monkeypatch.setattr(launch, "in_rank", lambda: True)
    monkeypatch.setattr(launch, "local_rank", lambda: 0)
    monkeypatch.setattr(launch, "process_group", lambda _: contextlib.nullcontext(group))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "test device")
    monkeypatch.setattr(tune, "Communicator", lambda *_: comm)
    monkeypatch.setattr(tune, "subjects_of", lambda *_: [Subject(ALL_REDUCE)])
    monkeypatch.setattr(tune.report, "environment", lambda _: ENVIRONMENT)
    monkeypatch.setattr(timing, "time_graph", time_graph)

    def command(name: str) -> list[str]:
        files = ["--out", str(tmp_path / f"{name}.yaml"), "--json", str(tmp_path / f"{name}.json")]
        return ["tune", "--operations", "all-reduce", "--max", "3K", *files]

    assert commands.main(command("whole")) == 0
    whole, printed = list(timed), capsys.readouterr().out
    assert sorted(set(whole)) == [1024, 1536, 2048, 3072]
    timed.clear()
    left = whole.index(1024) + 5
    assert list(dict.fromkeys(whole)) == [3072, 1536, 1024, 2048], "few sizes over the whole range come first"
    with pytest.raises(Cut):
        commands.main(command("cut"))
    assert not (tmp_path / "cut.yaml").exists()
    left = 10**6
    timed.clear()
    capsys.readouterr()
    assert commands.main(command("cut")) == 0
    assert timed == whole[whole.index(1024) :], "what was cut off is measured anew, those before it are not"
    out = capsys.readouterr().out
    assert out == f"{tmp_path / 'cut.json'} has 2 of 4 sizes: going on behind them\n{printed}"
    assert (tmp_path / "cut.yaml").read_text() == (tmp_path / "whole.yaml").read_text()
    assert json.loads((tmp_path / "cut.json").read_text()) == json.loads((tmp_path / "whole.json").read_text())
    rows = load_table(tmp_path / "cut.yaml").table.rows[ALL_REDUCE]
    assert all(row.us is not None and row.runner_up is not None for row in rows)
    timed.clear()
    assert commands.main(command("cut")) == 0
    assert timed == []


def test_a_file_of_another_run_is_told_once_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(launch, "place", lambda *_, **__: launch.Placement(2, on_gpu=True))
    monkeypatch.setattr(launch, "in_rank", lambda: False)
    monkeypatch.setattr(launch, "spawn", lambda *call: started.append(call) or 0)
    monkeypatch.setattr(tune.report, "environment", lambda _: ENVIRONMENT)
    record(path).add("all_reduce", AT_SIZE, writes=True)
    assert commands.main(["tune", "--json", str(path)]) == 2
    assert "there is a file of another run: --operations is ['all-reduce'] there and" in capsys.readouterr().err
    assert not started


def test_progress_shows_size_candidates_and_time_left(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(timing, "time_graph", lambda *_: SimpleNamespace(us=1.0, min_us=1.0))
    monkeypatch.setattr(tune.Progress, "show", lambda _, text: shown.append(text))
    given = argparse.Namespace(min=1024, max=1536, reps=9, method="aligned", seconds=None)
    comm: Any = Comm()
    subject = Subject(ALL_REDUCE)
    tune.measure(comm, group, [subject], given, record(None))
    total = count_candidates(subject, [1024, 1536], comm)
    assert shown[0].startswith("tuning 1.5K: candidate 1 of ")
    assert shown[0].endswith(f"; 0 of {total} in all")
    of_next = next(text for text in shown if text.startswith("tuning 1K"))
    assert f"; {count_candidates(subject, [1536], comm)} of {total} in all, about " in of_next
    assert of_next.endswith(" s left")
