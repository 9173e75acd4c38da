"""The first program of docs/reference/dsl.md gets the answers of the page, and its last form is the example's."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from llm_comm import dsl

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "dsl.md").read_text(encoding="utf-8")
PROGRAMS = [text for text in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "def gather" in text]
#: By the program before each.
ERRORS = {0: 0}


def error_of(text: str, directory: Path) -> str:
    """What the check says of a program; "" if it is accepted in all worlds."""
    (directory / "gather.py").write_text(text, encoding="utf-8")
    program = runpy.run_path(str(directory / "gather.py"))["gather"]
    try:
        for world in range(2, 9):
            dsl.check(program.build(world))
    except dsl.ProgramError as error:
        return " ".join(str(error).replace(f"{directory}/", "").split())
    return ""


@pytest.mark.parametrize("number", range(2))
def test_programs_get_the_answers_that_the_page_shows(number: int, tmp_path: Path) -> None:
    shown = [" ".join(text.split()) for text in re.findall(r"```\n(gather\.py.*?)```", PAGE, flags=re.DOTALL)]
    assert len(PROGRAMS) == 2
    assert len(shown) == len(ERRORS)
    assert error_of(PROGRAMS[number], tmp_path) == (shown[ERRORS[number]] if number in ERRORS else "")


def test_the_example_has_the_last_program() -> None:
    example = (ROOT / "examples" / "dsl_all_gather.py").read_text(encoding="utf-8")
    assert PROGRAMS[-1].partition("@dsl.program")[2].strip() in example
