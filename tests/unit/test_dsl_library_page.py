"""The library's part of docs/reference/dsl.md: a drawing of each program, and a table that says what they do."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from llm_comm import dsl
from llm_comm.dsl import ir, library
from llm_comm.dsl.compiler.layout import lay_out
from llm_comm.dsl.compiler.runs import runs_of
from llm_comm.dsl.compiler.source import is_moved
from llm_comm.dsl.programs import ProgramDefinition

DOCS = Path(__file__).parents[2] / "docs" / "reference"
PAGE = (DOCS / "dsl.md").read_text(encoding="utf-8")
#: Blocks and threads of one multiprocessor each, as on an H100.
INSTANCES, THREADS = 132, 512


def sent(program: ir.Program) -> Fraction:
    """By the rank that sends most, of the message."""
    puts = [op for op in program.ops() if isinstance(op, ir.Put | ir.PutPackets)]
    return max(
        sum((Fraction(1, op.target.buffer.parts) for op in puts if op.only is None or rank in op.only), Fraction())
        for rank in range(program.world)
    )


def memory(program: ir.Program, max_bytes: int) -> int:
    groups = runs_of(program)
    return lay_out(program, groups, max_bytes, INSTANCES, THREADS, masks=is_moved(program)).bytes


def memory_in_words(program: ir.Program) -> str:
    least, most = (memory(program, mib << 20) for mib in (64, 128))
    if most == least:
        return "none" if most < 1 << 20 else "fixed"
    return f"{round((most - least) / (64 << 20), 1):g}x"


@pytest.mark.parametrize("text", library.PROGRAMS, ids=lambda text: text.name)
def test_the_table_says_what_a_program_does(text: ProgramDefinition) -> None:
    (row,) = re.findall(rf"^\| `{text.name}` \| (.*) \|$", PAGE, flags=re.MULTILINE)
    operation, _, *figures = row.split(" | ")
    assert operation == text.operation.value
    assert figures == [
        *(str(sent(text.build(world))) for world in (2, 4, 8)),
        *(memory_in_words(text.build(world)) for world in (2, 8)),
    ]


@pytest.mark.parametrize("text", library.PROGRAMS, ids=lambda text: text.name)
def test_each_program_has_a_section_with_its_drawing(text: ProgramDefinition) -> None:
    section = re.search(rf"^### `{text.name}`\n(.*?)(?=^##|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert section is not None
    ((world, file),) = re.findall(r"!\[\w+ of (\d) ranks\]\((.*?)\)", section[1])
    assert (DOCS / file).read_text(encoding="utf-8") == dsl.draw(text.build(int(world)))
