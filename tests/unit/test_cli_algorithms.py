"""What ``llm-comm algorithms`` makes of the registry, and ``llm-comm check`` of programs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_comm import registry
from llm_comm.cli import commands, launch
from llm_comm.dsl import library, programs
from llm_comm.dsl.schedules import plan

OPERATIONS: list[dict[str, Any]] = [
    {"name": "all_reduce", "title": "sum of all ranks", "buffers": ["x", "out"], "parameters": []},
    {"name": "all_reduce_norm", "title": "sum and norm", "buffers": ["x", "weight"], "parameters": ["epsilon"]},
]
ALGORITHMS: list[dict[str, Any]] = [
    {
        "operation": "all_reduce",
        "name": "one_shot",
        "protocol": "LL",
        "data_types": ["bf16", "fp32"],
        "tunables": ["blocks", "depth"],
        "needs": [],
        "title": "every rank sends all",
    },
    {
        "operation": "all_reduce_norm",
        "name": "two_shot",
        "protocol": "HB",
        "data_types": ["bf16"],
        "tunables": [],
        "needs": ["symmetric tensors", "NVLink multicast", "sum=any", "a row or option"],
        "title": "every rank sums a part",
    },
]
RANGE = registry.Range(1, 8, False)


def operation_of(entry: dict[str, Any]) -> registry.Operation:
    """As the registry has it."""
    algorithms = tuple(
        registry.Algorithm(
            0,
            *(a["operation"], a["name"], a["protocol"], a["title"], tuple(a["data_types"])),
            dict.fromkeys(a["tunables"], RANGE),
            *(bool(a["needs"]),) * 3,
            needs_row=bool(a["needs"]),
        )
        for a in ALGORITHMS
        if a["operation"] == entry["name"]
    )
    words = tuple(entry["buffers"]), frozenset(), frozenset(), tuple(entry["parameters"])
    return registry.Operation(entry["name"], entry["title"], *words, 0, 0, algorithms)


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "operations", lambda: {o["name"]: operation_of(o) for o in OPERATIONS})
    monkeypatch.delenv("LLM_COMM_DSL", raising=False)
    monkeypatch.setattr(programs, "_registered", {})
    monkeypatch.setattr(launch, "spawn", lambda *_: pytest.fail("started ranks"))
    monkeypatch.setattr(launch, "usable_gpus", lambda: pytest.fail("looked for GPUs"))


def cells(line: str) -> list[str]:
    return re.split("  +", line)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4:] == [
        "operation        what              buffers    parameters",
        "all_reduce       sum of all ranks  x, out     -",
        "all_reduce_norm  sum and norm      x, weight  epsilon",
    ]
    needs = "symmetric tensors, NVLink multicast, sum=any, a row or option"
    assert [cells(line) for line in lines[:4]] == [
        ["operation", "algorithm", "protocol", "data types", "tunables", "needs", "how"],
        ["all_reduce", "one_shot", "LL", "bf16, fp32", "blocks, depth", "-", "every rank sends all"],
        ["all_reduce_norm", "two_shot", "HB", "bf16", "-", needs, "every rank sums a part"],
        [""],
    ]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["algorithms", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "operations": OPERATIONS,
        "algorithms": ALGORITHMS,
        "world": 4,
        "programs": [],
    }


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, Any]]:
    """The programs that the command lists, by name."""
    assert commands.main(["algorithms", "--json", *options]) == 0
    return {found["name"]: found for found in json.loads(capsys.readouterr().out)["programs"]}


def test_programs_of_the_library_say_whether_they_can_be_selected(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, "--library")
    assert list(found) == [f"dsl:{text.name}" for text in library.PROGRAMS]
    assert found["dsl:two_shot_ll"] == {
        "operation": "all_reduce",
        "name": "dsl:two_shot_ll",
        "lines": 13,
        "dsl": "llm_comm.dsl.library:two_shot_ll",
        "selectable": True,
        "why_not": "",
    }
    assert found["dsl:ring_ll"]["why_not"].startswith("it adds up some ranks before others")
    assert found["dsl:broadcast_ll"]["why_not"] == (
        "it is a program of broadcast; those of all_reduce, all_gather, reduce_scatter can be selected"
    )
    selectable = {f"dsl:{shots}_shot_{protocol}" for shots in ("one", "two") for protocol in ("ll", "hb")}
    selectable |= {"dsl:all_gather_ll", "dsl:reduce_scatter_ll"}
    assert {name for name, program in found.items() if program["selectable"]} == selectable
    assert listed(capsys, "--library", "--world", "2")["dsl:ring_ll"]["selectable"], "two ranks have one order"


MODULE = """
from llm_comm import dsl

@dsl.program("all_reduce")
def of_five(p: dsl.Builder) -> None:
    assert p.world == 5

    p.store(p.input.chunks(1)[0], p.output.chunks(1)[0])

another = of_five
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module with a program, which is no all-reduce and for one world."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "listed_programs.py").write_text(MODULE, encoding="utf-8")
    yield "listed_programs"
    sys.modules.pop("listed_programs", None)


@pytest.mark.parametrize("by_variable", [False, True])
def test_programs_that_an_option_names(
    by_variable: bool, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = f"llm_comm.dsl.library:ring_ll, {module}:another"
    monkeypatch.setenv("LLM_COMM_DSL", named if by_variable else f"{module}:no_such_program")
    found = listed(capsys, *(() if by_variable else ("--dsl", named)))
    assert [(name, program["dsl"]) for name, program in found.items()] == [
        ("dsl:ring_ll", "llm_comm.dsl.library:ring_ll"),
        ("dsl:of_five", f"{module}:another"),
    ]
    assert found["dsl:of_five"]["lines"] == 4
    assert found["dsl:of_five"]["why_not"].startswith("dsl:of_five for 4 ranks: AssertionError")
    monkeypatch.setenv("LLM_COMM_SUM", "any")
    options = "--world", "5", "--dsl", named
    assert listed(capsys, *options)["dsl:ring_ll"]["selectable"]
    why_not = listed(capsys, *options)["dsl:of_five"]["why_not"]
    assert re.match(r"dsl:of_five for 5 ranks: .*listed_programs\.py:8: ", why_not)


def test_a_table_of_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        commands.main(["algorithms", "--dsl", "llm_comm.dsl.library:all_gather_ll,llm_comm.dsl.library:ring_ll"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    begin = lines.index("programs of llm_comm.dsl for 4 ranks")
    assert [cells(line) for line in lines[begin + 1 : begin + 4]] == [
        ["operation", "program", "lines", "option dsl", "selectable"],
        ["all_gather", "dsl:all_gather_ll", "10", "llm_comm.dsl.library:all_gather_ll", "yes"],
        [
            *("all_reduce", "dsl:ring_ll", "19", "llm_comm.dsl.library:ring_ll"),
            "no: it adds up some ranks before others, so its sums are not those in rank order, which option sum asks "
            "for: sum=any permits it, where deterministic is off",
        ],
    ]


def test_what_cannot_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["algorithms", "--dsl", "no_such_module:program"]) == 2
    assert "option dsl (--dsl): no_such_module:program: cannot import no_such_module" in capsys.readouterr().err
    for options in (["--dsl", "module"], ["--world", "9"]):
        with pytest.raises(SystemExit):
            commands.main(["algorithms", *options])
    err = capsys.readouterr().err
    assert "argument --dsl: 'module' is not allowed; valid: programs as MODULE:PROGRAM" in err
    assert "argument --world: '9' is not a number of ranks, 2 to 8" in err


def test_needs_of_the_algorithms_of_this_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = {(a.name, a.protocol): a.needs for a in registry.operations()["all_reduce"].algorithms}
    assert found["one_shot", "LL"] == ()
    assert found["port", "Port"] == ("a row or option",)
    assert found["two_shot_ld_reduce", "Switch"] == ("NVLink multicast", "sum=any", "a row or option")


# ---- llm-comm check --------------------------------------------------------------------------------------------------

CHECK = ["check", "llm_comm.dsl.library:one_shot_ll", "--world", "2", "--schedules", "3"]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@needs_compiler
def test_a_correct_program_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(CHECK) == 0
    assert capsys.readouterr().out == "dsl:one_shot_ll for 2 ranks: correct, passed 3 schedules\n"


@needs_compiler
def test_a_program_that_fails_under_a_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packets are not reset to the sentinel."""
    generate = plan.generate
    monkeypatch.setattr(plan, "generate", lambda *given: generate(*given).replace("reset_line(", "(void)("))
    assert commands.main(CHECK) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("llm-comm: dsl:one_shot_ll: ")
    assert "fails under schedule 0 of the deterministic emulator, at step " in said.err


def test_a_program_for_another_world_and_no_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    found = ",".join(f"llm_comm.dsl.library:{name}" for name in ("one_shot_ll", "hierarchical_ll"))
    assert commands.main(["check", found, "--world", "3"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("there is no C++ compiler '/nowhere/g++'; CXX names another")
    assert second.startswith("llm-comm: dsl:hierarchical_ll: dsl:hierarchical_ll for 3 ranks: ")


def test_a_program_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", "llm_comm.dsl.library:nothing"]) == 2
    assert "llm_comm.dsl.library:nothing: program is 'nothing'" in capsys.readouterr().err
