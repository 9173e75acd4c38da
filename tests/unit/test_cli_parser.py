"""The command line: what it parses, to whom it hands over, and which exit status it returns."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable

import pytest

import llm_comm
from llm_comm.cli import commands
from llm_comm.errors import ConfigError, PeerTimeout


@pytest.mark.parametrize(
    ("text", "count"),
    [("512", 512), ("1K", 1024), ("64k", 65536), ("8M", 8 << 20), ("8MB", 8 << 20), ("1G", 1 << 30), ("8MiB", 8 << 20)],
)
def test_byte_count(text: str, count: int) -> None:
    assert commands.byte_count(text) == count


@pytest.mark.parametrize("text", ["", "K", "4Q", "-1K", "1.5K", "4iB"])
def test_byte_count_rejects(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a size: write 512, 64K or 8M"):
        commands.byte_count(text)
    with pytest.raises(argparse.ArgumentTypeError, match="'0K': a message has at least a byte"):
        commands.byte_count("0K")


@pytest.mark.parametrize(
    ("argv", "runs"),
    [
        (["demo"], "llm_comm.demo.run:run"),
        (["bench", "all-reduce"], "llm_comm.bench.collectives:run"),
        (["bench", "all-gather"], "llm_comm.bench.collectives:run"),
        (["bench", "reduce-scatter"], "llm_comm.bench.collectives:run"),
        (["bench", "fused"], "llm_comm.bench.fused:run"),
        (["bench", "linear"], "llm_comm.bench.linear:run"),
        (["bench", "table"], "llm_comm.bench.table:run"),
        (["tune"], "llm_comm.bench.tune:run"),
        (["algorithms"], "llm_comm.cli.contents:algorithms"),
        (["check", "module:program"], "llm_comm.cli.contents:check"),
        (["doctor"], "llm_comm.cli.doctor:run"),
        (["nccl-path"], "llm_comm.cli.contents:nccl_path"),
    ],
)
def test_every_command_is_handed_to_its_function(argv: list[str], runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def resolve(name: str) -> Callable[[argparse.Namespace], int]:
        return lambda args: seen.append((name, args.argv)) or 5

    monkeypatch.setattr(commands.pkgutil, "resolve_name", resolve)
    assert commands.main(argv) == 5
    assert seen == [(runs, argv)]


@pytest.mark.parametrize("argv", [[], ["bench"], ["demo", "--world", "0"], ["bench", "all-reduce", "--mode", "x"]])
def test_wrong_command_line_exits_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        commands.main(argv)
    assert exit_.value.code == 2


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["demo", "--wrld", "4"], "llm-comm demo: error: unrecognized arguments: --wrld (did you mean --world?) 4"),
        (["demo", "--wrld=4"], "unrecognized arguments: --wrld=4 (did you mean --world?)"),
        (
            ["bench", "fused", "--hiden", "64"],
            "llm-comm bench fused: error: unrecognized arguments: --hiden (did you me",
        ),
        (["doctor", "now"], "llm-comm doctor: error: unrecognized arguments: now\n"),
        (["demo", "--timeout-s", "0"], "--timeout-s: '0' is not allowed; valid: a number of seconds above 0"),
        (["demo", "--timeout-s", "soon"], "--timeout-s: 'soon' is not allowed; valid: a number of seconds above 0"),
        (["bench", "all-reduce", "--plot", "a.xyz"], "--plot: 'a.xyz' does not end in .png, .svg or .pdf: name such"),
        (["bench", "fused", "--plot", "a"], "--plot: 'a' does not end in .png, .svg or .pdf"),
    ],
)
def test_what_is_wrong_and_what_may_be_meant_is_named(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        commands.main(argv)
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        commands.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"llm-comm {llm_comm.__version__}\n"


def test_the_package_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "llm_comm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"llm-comm {llm_comm.__version__}\n"


@pytest.mark.parametrize(("text", "modes"), [("graph,eager", ("eager", "graph")), ("eager,eager", ("eager",))])
def test_bench_modes_are_ordered_and_unique(text: str, modes: tuple[str, ...]) -> None:
    args = commands.build_parser().parse_args(["bench", "all-reduce", "--mode", text])
    assert args.mode == modes


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("too wide"), 2), (PeerTimeout("rank 3 is gone", rank=1, peer=3), 1)]
)
def test_known_errors_become_one_line_and_a_status(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(commands.pkgutil, "resolve_name", lambda _: fail)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert commands.main(["doctor"]) == status
    assert capsys.readouterr().err == f"llm-comm, rank 1: {type(error).__name__}: {error}\n"
    monkeypatch.delenv("LOCAL_RANK")
    assert commands.main(["doctor"]) == status
    assert capsys.readouterr().err == f"llm-comm: {type(error).__name__}: {error}\n"
