"""Negative controls: with a protection of the kernels taken out, sums must come out wrong or not at all.

Each changes a copy of the sources by replacing text that has to be there, so it also fails when the sources change and
the control has to be thought through again.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

import llm_comm

TESTS = Path(__file__).parents[1]
CSRC = TESTS.parent / "csrc"
RIGHT, WRONG_SUM, EXPIRED_WAIT = range(3)
OPERATIONS = 3000
OPERATIONS_IN_SLOW_MOTION = 200

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@dataclass(frozen=True)
class Edit:
    """Text of a source, and what takes its place."""

    file: str
    old: str
    new: str


#: Others run between the words of a line, as GPUs may see them arrive. The emulator's own stores are quicker.
TEAR_LINES = Edit(
    "include/llm_comm/platform_emulator.h",
    "for (int i = 0; i < 4; ++i) store_relaxed(words + i, line.word[i]);",
    "for (int i = 0; i < 4; ++i, ::sched_yield()) store_relaxed(words + i, line.word[i]);",
)

#: What is taken out, and the outcomes that show it.
CONTROLS = {
    "lines are not armed again": (
        [
            Edit(
                "include/llm_comm/memory_channel.cuh",
                "store_line_relaxed(line, armed_line());",
                "(void)line;",
            )
        ],
        {WRONG_SUM},
    ),
    "one slot": (
        [
            Edit(
                "include/llm_comm/device_comm.cuh",
                "return static_cast<uint32_t>(arrivals_) & kArrivalsPerOperation ? slot_bytes_ : 0;",
                "return 0;",
            )
        ],
        {WRONG_SUM, EXPIRED_WAIT},
    ),
    "every block counts as an operation": (
        [
            Edit(
                "include/llm_comm/device_comm.cuh",
                "block_index() == 0 ? kArrivalsPerOperation - (block_count() - 1) : 1",
                "kArrivalsPerOperation",
            )
        ],
        {WRONG_SUM, EXPIRED_WAIT},
    ),
    "sentinels are sent as they are": (
        [
            Edit(
                "include/llm_comm/line.cuh",
                "line.word[i] = line.word[i] < kSentinel - 1 ? line.word[i] : kSentinel - 1;",
                "line.word[i] = line.word[i];",
            )
        ],
        {EXPIRED_WAIT},
    ),
    "one word of a line is looked at": (
        [
            TEAR_LINES,
            Edit(
                "include/llm_comm/line.cuh",
                "return (low > high ? low : high) != kSentinel;",
                "return (low > high ? low : high) != kSentinel || line.word[0] != kSentinel;",
            ),
        ],
        {WRONG_SUM},
    ),
}


def edited_copy(edits: list[Edit], directory: Path) -> Path:
    sources = Path(shutil.copytree(CSRC, directory / "csrc"))
    for edit in edits:
        file = sources / edit.file
        text = file.read_text(encoding="utf-8")
        assert text.count(edit.old) == 1, f"{edit.file} does not hold {edit.old!r} once"
        file.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
    return sources


def soak(edits: list[Edit], directory: Path) -> tuple[int, str]:
    """Exit status and output of many all-reduces with edited kernels."""
    sources = edited_copy(edits, directory)
    operations = OPERATIONS_IN_SLOW_MOTION if TEAR_LINES in edits else OPERATIONS
    program = directory / "soak"
    flags = ["-std=c++20", "-O1", "-DLLM_COMM_EMULATOR", f"-I{sources}", f"-I{sources / 'include'}"]
    libraries = [f"-L{llm_comm.get_library_dir()}", "-lllm_comm_emulator", "-pthread"]
    command = ["g++", *flags, str(TESTS / "negative_control" / "soak.cpp"), "-o", str(program), *libraries]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, str(operations)], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize("edits", [[], [TEAR_LINES]], ids=["as they are", "with torn lines"])
def test_protected_kernels_are_right(edits: list[Edit], tmp_path: Path) -> None:
    assert soak(edits, tmp_path) == (RIGHT, "")


@pytest.mark.parametrize("name", CONTROLS)
def test_unprotected_kernels_are_wrong(name: str, tmp_path: Path) -> None:
    edits, outcomes = CONTROLS[name]
    status, printed = soak(edits, tmp_path)
    assert status in outcomes, f"exit status {status}: {printed}"
