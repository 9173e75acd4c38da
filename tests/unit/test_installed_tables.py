"""Tuning tables in the user's directory, and those of near devices: which table a start takes, and what it says."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tables import limits_of, plain_row, write_table

from llm_comm import Config, ConfigError, _core
from llm_comm.bench import tune_tables
from llm_comm.cli import commands, doctor, launch
from llm_comm.config import EngineOptions
from llm_comm.integrations import members
from llm_comm.planning import catalogue
from llm_comm.planning.catalogue import load_table, table_text
from llm_comm.planning.multicast import NO_MULTICAST
from llm_comm.planning.plan import Problem
from llm_comm.planning.selection import select
from llm_comm.planning.tables import (
    ALL_REDUCE,
    BY_OPTION,
    EMULATED,
    GENERAL,
    NEAREST,
    NOT_TUNED,
    OF_USER,
    SHIPPED,
    Origin,
    TuningTable,
    by_operation,
)

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
CONFIG = Config.load({})
ROW = plain_row(4096, "one_shot", 8, 16, 0)
OTHER_ROW = plain_row(8192, "two_shot", 8, 16, 1)
MEASURED = {"date": "2026-11-25T10:00:00+00:00", "complete": True, "llm_comm": "0.1.0", "commit": "0123456789abcdef"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user whose home is empty, and who has set nothing."""
    for name in [name for name in os.environ if name.startswith(("LLM_COMM_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def text_of(device: str = H200, world: int = 8, row: Any = ROW, **measured: Any) -> str:
    return table_text(device, world, TuningTable("", by_operation([row]), 1 << 20), {**MEASURED, **measured})


def install(device: str = H200, world: int = 8, row: Any = ROW, *, force: bool = False, **measured: Any) -> bool:
    text = text_of(device, world, row, **measured)
    return tune_tables.install(text, device, world, {**MEASURED, **measured}, CONFIG, force=force)


def find(device: str = H200, world: int = 8, config: Config = CONFIG, capability: int = 90) -> TuningTable:
    return catalogue.find_table(device, world, 132, config, capability)


# ---- Where it is ----------------------------------------------------------------------------------------------------


def test_the_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert catalogue.table_directory() == home / ".config" / "llm_comm" / "tables"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/xdg")
    assert catalogue.table_directory() == Path("/xdg/llm_comm/tables")
    monkeypatch.setenv("LLM_COMM_TABLE_DIR", "/tables")
    assert catalogue.table_directory() == Path("/tables")
    Config.load()  # the variable is no option, and no misspelt one


def test_a_user_without_a_home_has_no_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "table_directory", lambda: None)
    assert catalogue.table_directory() is None
    assert find().origin.kind == SHIPPED
    assert catalogue.installed_files() == []
    for options in (["--remove", "x"], ["--list", "--remove", "x"]):
        assert commands.main(["tune", *options]) == 2
    with pytest.raises(ConfigError, match="no home: set LLM_COMM_TABLE_DIR"):
        tune_tables.prepare(CONFIG)


def test_names_of_files() -> None:
    assert _core.table_file_name(H200, 8) == "nvidia_h200_8.format1.yaml"
    assert _core.table_file_name(H100, 2) == "nvidia_h100_80gb_hbm3_2.format1.yaml"


# ---- Which table is taken -------------------------------------------------------------------------------------------


def test_an_installed_table_is_found_without_an_option(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find().origin == Origin(SHIPPED)
    assert install()
    path = home / ".config" / "llm_comm" / "tables" / "nvidia_h200_8.format1.yaml"
    assert f"installed {path}: every later start on 8 of {H200} finds it" in capsys.readouterr().out
    table = find()
    assert table.rows == {ALL_REDUCE: (ROW,)}
    assert table.origin == Origin(OF_USER, str(path))
    assert table.describe() == "nvidia_h200_8.format1.yaml, user's directory"
    for device, world in ((H200, 4), (H200, 2), (H100, 8)):
        assert find(device, world).origin.kind != OF_USER
    assert sorted(path.name for path in path.parent.iterdir()) == [".lock", path.name], "nothing else is left"


def test_precedence(home: Path, tmp_path: Path) -> None:
    """Each goes before those after it."""
    path = write_table(tmp_path / "mine.yaml", [OTHER_ROW], device=H100, world_size=2)
    install(H100, 2)
    found = [find(H100, 2, config).describe() for config in (Config.load({}, table=str(path)), CONFIG)]
    tune_tables.remove("nvidia_h100_80gb_hbm3_2.format1.yaml")
    found += [find(H100, world).describe() for world in (2, 8, 3)]
    assert found == [
        "mine.yaml, option table",
        "nvidia_h100_80gb_hbm3_2.format1.yaml, user's directory",
        "tune_h100_2.yaml, shipped",  # though tune_h200_2.yaml is of a near device
        f"tune_h200_8.yaml, nearest: H200; {NOT_TUNED}",
        f"general table; {NOT_TUNED}",
    ]


def test_tables_of_an_option(tmp_path: Path) -> None:
    config = Config.load({}, table=str(write_table(tmp_path / "mine.yaml", [ROW], device=H200, world_size=4)))
    assert find(H200, 4, config).origin == Origin(BY_OPTION, config.table or "")
    assert find(H200, 8, config).describe() == f"mine.yaml, option table; {NOT_TUNED}"
    assert find("emulated", 8, config).describe() == "mine.yaml, option table", "nobody tunes for emulated GPUs"
    assert find("emulated", 8).origin == Origin(EMULATED)
    assert find("emulated", 8).describe() == "emulated"


def test_ranks_compare_what_is_chosen_by_and_not_where_it_was_found(home: Path) -> None:
    install()
    table = find()
    assert table.digest() == table._replace(origin=Origin(BY_OPTION, "elsewhere")).digest()
    assert find(H200, 2).digest() != table.digest()


# ---- Files that cannot be used --------------------------------------------------------------------------------------


def broken(home: Path, content: str) -> Path:
    path = home / ".config" / "llm_comm" / "tables" / "nvidia_h200_8.format1.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("rows: [", "tuning table .*: "),
        (text_of().replace("one_shot", "algorithm_of_before"), "algorithm is 'algorithm_of_before'"),
        (text_of(world=4), "it is for 4 of NVIDIA H200, and its name says 8 of NVIDIA H200"),
        (text_of(device=H100), "it is for 8 of NVIDIA H100 80GB HBM3, and its name says 8 of NVIDIA H200"),
    ],
)
def test_a_file_that_cannot_be_used_is_warned_of_and_passed_over(
    content: str, what: str, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = broken(home, content)
    table = find()
    assert table.origin == Origin(SHIPPED, passed_over=str(path))
    assert table.origin.describe() == f"shipped, as {path} cannot be used"
    assert table._replace(origin=Origin()) == find(H200, 8)._replace(origin=Origin())
    (record,) = caplog.records  # once, though it was looked up twice
    assert record.levelno == logging.WARNING
    text = record.getMessage()
    assert str(path) in text
    assert "`llm-comm tune --install` measures it anew, `llm-comm tune --remove nvidia_h200_8.format1.yaml`" in text
    assert re.search(what, text)
    assert install(), "a broken file is replaced"
    assert find().origin.kind == OF_USER


def test_what_is_no_ordinary_file_is_passed_over(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = broken(home, "")
    path.unlink()
    path.mkdir()
    assert find().origin.passed_over == str(path)
    assert "it is no ordinary file" in caplog.text


# ---- Install, list, remove ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "new", "why"),
    [
        ({}, {"date": "2026-11-25T09:59:59+00:00"}, "was measured later (2026-11-25T10:00:00+00:00), so it stays"),
        ({}, {"date": "2026-11-25T11:59:59+02:00"}, "was measured later"),
        ({}, {"complete": False}, "was measured completely and this table was not, so it stays"),
        ({"complete": False}, {"complete": False}, ""),
        ({"complete": False}, {}, ""),
        ({}, {}, ""),
        ({"date": "some day"}, {}, ""),
        ({"date": "2026-11-25"}, {}, ""),
    ],
)
def test_a_better_table_stays_unless_forced(
    present: dict[str, Any], new: dict[str, Any], why: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(**present)
    capsys.readouterr()
    assert install(row=OTHER_ROW, **new) == (not why)
    out, err = capsys.readouterr()
    assert find().rows[ALL_REDUCE] == ((ROW,) if why else (OTHER_ROW,))
    if why:
        assert why in err
        assert "--force replaces it" in err
        assert out == text_of(row=OTHER_ROW, **new) + "\n", "what was measured is not lost"
        assert install(row=OTHER_ROW, force=True, **new)
        assert find().rows[ALL_REDUCE] == (OTHER_ROW,)


def test_a_table_that_cannot_be_written_is_printed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / ".config").write_text("a file")
    assert not install()
    out, err = capsys.readouterr()
    assert "cannot be made" in err
    assert "set LLM_COMM_TABLE_DIR to another" in err
    assert out == text_of() + "\n"


def install_many(blocks: int) -> None:
    for _ in range(20):
        install(row=ROW._replace(blocks=blocks))


def test_several_processes_install_at_once(home: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=install_many, args=(blocks,)) for blocks in (1, 2, 3)]
    for process in processes:
        process.start()
    path = catalogue.table_directory() / "nvidia_h200_8.format1.yaml"  # type: ignore[operator]
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
    while any(process.is_alive() for process in processes):
        assert load_table(path).world_size == 8  # never a part of a file
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert load_table(path).table.rows[ALL_REDUCE][0].blocks in (1, 2, 3)


def test_an_option_that_goes_before_is_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config.load({"LLM_COMM_TABLE": "mine.yaml"})
    assert tune_tables.install(text_of(), H200, 8, MEASURED, config, force=False)
    assert "but option table (LLM_COMM_TABLE) goes before it: unset that" in capsys.readouterr().out


def test_tune_writes_where_both_options_say(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: H200)
    of_ranks = torch.device("cpu"), 8
    args: Any = SimpleNamespace(operations=["all-reduce"], install=True, force=False)
    environment = {"date": MEASURED["date"], "versions": {}, "options": {"method": "aligned"}, "complete": True}
    table = TuningTable("", by_operation([ROW]), 1 << 20)
    assert tune_tables.write(table, *of_ranks, args, environment, CONFIG, out=home / "out.yaml")
    assert load_table(home / "out.yaml").table.rows == find().rows
    assert find().origin.kind == OF_USER
    earlier = {**environment, "date": "2020-01-01T00:00:00+00:00"}
    assert not tune_tables.write(table, *of_ranks, args, earlier, CONFIG, out=None)


@pytest.mark.parametrize(
    ("options", "variables", "complaint"),
    [
        (["--force"], {}, "--force: it lets --install replace a better table; give --install too"),
        (["--install"], {"LLM_COMM_TABLE_DIR": "/dev/null/tables"}, "--install: /dev/null/tables cannot be made"),
        (["--install", "--dsl", "llm_comm.dsl.library:two_shot_ll"], {}, "--install: with programs (--dsl)"),
        (["--remove", "nothing.yaml"], {}, "has no such table; it has no table"),
        (["--remove", "../x.format1.yaml"], {}, "has no such table"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_rank_starts(
    options: list[str],
    variables: dict[str, str],
    complaint: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "place", lambda *_, **__: launch.Placement(2, on_gpu=True))
    monkeypatch.setattr(launch, "spawn", lambda *_: pytest.fail("ranks were started"))
    assert commands.main(["tune", *options]) == 2
    assert complaint in capsys.readouterr().err


def test_list(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    option = write_table(home / "mine.yaml", [ROW], device="NVIDIA X", world_size=3)
    monkeypatch.setenv("LLM_COMM_TABLE", str(option))
    install()
    wrong = broken(home, "rows: [").rename(home / ".config/llm_comm/tables/wrong_2.format1.yaml")
    install()
    capsys.readouterr()
    monkeypatch.setattr(launch, "usable_gpus", lambda: (0, "none"))
    assert commands.main(["tune", "--list"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["ORIGIN", "DEVICE", "RANKS", "MEASURED", "COMMIT", "LLM_COMM", "FILE"]
    mine, ours, unusable, *shipped = lines[:-3]
    assert mine.split() == ["option", "table", "NVIDIA", "X", "3", "-", "-", "-", str(option)]
    assert ours.startswith("user's directory")
    path = home / ".config/llm_comm/tables/nvidia_h200_8.format1.yaml"
    assert ours.split()[2:] == ["NVIDIA", "H200", "8", MEASURED["date"], "0123456", "0.1.0", str(path)]
    assert unusable.startswith("user's directory, cannot be used")
    assert f"{wrong} (tuning table {wrong}: " in unusable
    assert [line.split()[-1] for line in shipped] == [found.table.name for found in catalogue.shipped_tables()]
    assert all(line.startswith("shipped ") for line in shipped)
    assert lines[-2:] == ["Here:", "  4 ranks: mine.yaml, option table"]


def test_remove(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install()
    install(H200, 4)
    (path, other) = reversed(catalogue.installed_files())
    capsys.readouterr()
    assert commands.main(["tune", "--remove", "nvidia_h200_2.format1.yaml"]) == 2
    assert f"it has {other.name}, {path.name}" in capsys.readouterr().err
    assert commands.main(["tune", "--remove", path.name]) == 0
    assert capsys.readouterr().out == f"removed {path}\n"
    assert find().origin == Origin(SHIPPED)
    assert find(H200, 4).origin.kind == OF_USER
    assert commands.main(["tune", "--remove", str(other)]) == 0
    assert catalogue.installed_files() == []


# ---- Near devices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sm_count", "compute_capability"),
    [
        ("NVIDIA H20", 78, 90),
        ("NVIDIA H800", 132, 90),
        ("NVIDIA H100 NVL", 132, 90),
        ("NVIDIA H200 NVL", 132, 90),
        ("NVIDIA H100 PCIe", 114, 90),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, 90),
        ("NVIDIA B200", 148, 100),
        ("NVIDIA A100-SXM4-80GB", 108, 80),
        (H100, 114, 90),
        (H100, 132, 100),
        (H100, 132, 0),
    ],
)
def test_no_other_device_is_near(name: str, sm_count: int, compute_capability: int) -> None:
    table = catalogue.find_table(name, 8, sm_count, CONFIG, compute_capability)
    assert table.origin == Origin(GENERAL, is_tuned=False)


@pytest.mark.parametrize("world", [4, 8])
def test_more_than_two_h100_go_by_the_tables_of_h200(world: int) -> None:
    table = find(H100, world)
    theirs, own = find(H200, world), find(H100, 2)
    assert table.origin == Origin(NEAREST, is_tuned=False)
    assert table.describe() == f"tune_h200_{world}.yaml, nearest: H200; {NOT_TUNED}"
    assert (table.rows, table.max_message_bytes) == (theirs.rows, theirs.max_message_bytes)
    # Linear layers are bound by memory, which is not that of an H200.
    assert table.layers == own.layers != theirs.layers
    problem = Problem(ALL_REDUCE, 512, 0, "bf16", world)
    reason = select(problem, table, CONFIG, limits_of(CONFIG)).reason
    assert reason.startswith(f"tune_h200_{world}.yaml, nearest: H200, up to {table.rows[ALL_REDUCE][0].up_to} bytes")


@pytest.mark.parametrize("world", [3, 5, 6, 7])
def test_a_number_of_ranks_that_nobody_measured_has_the_general_table(world: int) -> None:
    assert find(H100, world).origin.kind == find(H200, world).origin.kind == GENERAL


# ---- What is told ---------------------------------------------------------------------------------------------------


def test_the_doctor_names_table_and_origin(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name=H100, multi_processor_count=132, major=9, minor=0, uuid="of all")
    monkeypatch.setattr(launch, "usable_gpus", lambda: (4, ""))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    install(H100, 2)
    told = doctor._tuning(CONFIG)
    assert told["2 ranks"].startswith("nvidia_h100_80gb_hbm3_2.format1.yaml, user's directory; messages above 1M ")
    assert told["3 ranks"].startswith(f"general table; {NOT_TUNED}; messages above ")
    assert told["4 ranks"].startswith(f"tune_h200_4.yaml, nearest: H200; {NOT_TUNED}; messages above ")


def test_what_a_file_says_of_when_it_was_measured(tmp_path: Path) -> None:
    path = write_table(tmp_path / "table.yaml", [ROW])
    assert load_table(path).measured == {}
    content = {**yaml.safe_load(path.read_text()), "measured": {"date": "today", "complete": False}}
    path.write_text(yaml.safe_dump(content))
    assert load_table(path).measured == {"date": "today", "complete": "False"}


@pytest.mark.parametrize("sums", [True, False])
def test_the_line_at_start_names_table_and_origin(sums: bool, home: Path) -> None:
    install(H200, 3)
    member = object.__new__(members.Member)  # without a watchdog over its communicator, which there is not
    member.group_name = "tp:0"
    for device, world, told in (
        (H200, 3, "(nvidia_h200_3.format1.yaml, user's directory); "),
        (H200, 8, "(tune_h200_8.yaml, shipped); "),
        (H100, 8, f"(tune_h200_8.yaml, nearest: H200; {NOT_TUNED}); "),
        (H100, 7, f"(general table; {NOT_TUNED}); "),
    ):
        communicator: Any = SimpleNamespace(
            config=EngineOptions.load({}),
            table=find(device, world),
            is_emulated=False,
            memory_kind="VMM",
            multicast=NO_MULTICAST,
            nodes=1,
            programs={},
            world_size=world,
        )
        member.communicator = communicator
        assert told in member.summary("vLLM", sums=sums)
