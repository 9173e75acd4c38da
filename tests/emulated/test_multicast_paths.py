"""Which programs ask a core for NVLink multicast: none where a variable forbids it.

They run on emulated GPUs, with a recorder in every process. That a core of a real GPU then looks nothing up is shown in
``tests/unit/test_multicast_memory.py``; that no other way leads there, by the tests of sources below.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_comm import _core

REPOSITORY = Path(__file__).parents[2]
RECORDER = REPOSITORY / "tests" / "stand_in_driver" / "recorder"
PROGRAMS = {
    "doctor": ["doctor"],
    "demo": ["demo", "--device", "emulated", "--world", "2", "--tokens", "8", "--layers", "1"],
    "bench": [
        "bench",
        "all-reduce",
        "--device",
        "emulated",
        "--world",
        "2",
        "--min",
        "1K",
        "--max",
        "1K",
        "--reps",
        "2",
    ],
    "tune": ["tune", "--device", "emulated", "--world", "2"],  # which refuses: it measures GPUs
}
PERMITTED = not _core.multicast_switched_off(
    {name: os.environ[name] for name in _core.multicast_switches if name in os.environ}
)


def record_of(folder: Path, program: str, **variables: str) -> list[str]:
    """What a program's processes have recorded."""
    record = folder / "record"
    environment = {**os.environ, "LLM_COMM_TEST_RECORD": str(record), "PYTHONPATH": str(RECORDER), **variables}
    command = [sys.executable, "-m", "llm_comm", *PROGRAMS[program]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 or program == "tune", done.stdout + done.stderr
    return record.read_text(encoding="utf-8").splitlines()


def programs_and_switches() -> Iterator[tuple[str, str]]:
    """Each program with some variable and each variable with some program that starts ranks, which takes seconds."""
    with_ranks = itertools.cycle(("demo", "bench"))
    for number, name in enumerate(_core.multicast_switches):
        yield next(with_ranks), name
        yield ("doctor", "tune")[number % 2], name


@pytest.mark.parametrize(("program", "name"), list(programs_and_switches()))
def test_a_variable_alone_keeps_every_program_from_it(program: str, name: str, tmp_path: Path) -> None:
    variables = {"LLM_COMM_MULTICAST": "1", name: _core.multicast_switches[name]}
    found = record_of(tmp_path, program, **variables)
    assert set(found) == {"start"}
    assert len(found) > 2 or program in ("doctor", "tune")  # the ranks were recorded too


@pytest.mark.skipif(not PERMITTED, reason="this machine forbids NVLink multicast")
def test_the_recorder_sees_it_where_it_is_permitted(tmp_path: Path) -> None:
    found = record_of(tmp_path, "demo", LLM_COMM_MULTICAST="1")
    assert {"create_multicast", "join_multicast", "bind_multicast"} < set(found)
    assert "bind_multicast" not in record_of(tmp_path, "doctor", LLM_COMM_MULTICAST="1")[len(found) :]


def test_one_module_asks_the_core_for_it() -> None:
    """Engines, tune and whoever else makes a communicator come by there."""
    step = r"\b(create|join|bind|drop)_multicast\b|\badd_multicast_device\b"
    package = REPOSITORY / "llm_comm"
    naming = {p.relative_to(package).as_posix() for p in package.rglob("*.py") if re.search(step, p.read_text("utf-8"))}
    assert naming == {"runtime/multicast.py"}
    callers = r"\bmulticast\.set_up\("
    calling = {
        p.relative_to(package).as_posix() for p in package.rglob("*.py") if re.search(callers, p.read_text("utf-8"))
    }
    assert calling == {"runtime/connect.py"}
