"""docs/engines/log_messages.md has every log line and error of the engine integrations, and names none that is gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "engines" / "log_messages.md"
#: Pages that quote log lines. Those of docs/experiments quote the lines of their day.
QUOTING = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "bench_serving" / "README.md")
    if "experiments" not in page.parts and page != PAGE
]
INTEGRATIONS = ROOT / "llm_comm" / "integrations"
_LEVELS = ("info", "warning", "error", "critical", "exception")
#: Stands for a value in a text of the code; a page has "..." for it.
_VALUE = "\0"
#: Errors of functions that no operator calls: arguments of operators, and attributes.
_INTERNAL = ("there is no group", "cannot be hooked", "stands in front of nothing")
#: Lines of other programs that the page explains.
_FOREIGN = ("Failed to load plugin", "Failed to apply hooks")


def text_of(node: ast.expr, names: dict[str, ast.expr]) -> str | None:
    """Return a text of the code with ``_VALUE`` for each value in it; None where it cannot be told."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(?:\.\d)?[sdrfg]", _VALUE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else _VALUE for part in node.values)
    if isinstance(node, ast.Name) and node.id in names:
        return text_of(names[node.id], names)
    return None


def trees() -> Iterator[ast.Module]:
    for file in sorted((ROOT / "llm_comm").rglob("*.py")):
        yield ast.parse(file.read_text(encoding="utf-8"))


def said() -> Iterator[str]:
    """Return what the integrations log at level info and above, and the errors that they raise."""
    for file in sorted(INTEGRATIONS.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
        names = {node.targets[0].id: node.value for node in assigned if isinstance(node.targets[0], ast.Name)}
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not call.args:
                continue
            is_log = isinstance(call.func, ast.Attribute) and call.func.attr in _LEVELS
            if is_log or isinstance(node, ast.Raise):
                text = text_of(call.args[0], names)
                if text is not None and len(text.replace(_VALUE, "")) > 20:
                    yield text


def words() -> str:
    """Return all texts of the package, in one string."""
    found = [text_of(node, {}) for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.expr)]
    return "\n".join(dict.fromkeys(text for text in found if text))


WORDS = words()


def quoted(page: Path) -> list[str]:
    """Return the lines in the first column of the tables of ``page``, as they are quoted."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def fragments(line: str) -> list[str]:
    """Return the fixed parts of a quoted line that are long enough to be looked for."""
    parts = (
        part.strip(" ;().,:")
        for part in re.split(r"\.\.\.+|ENGINE|\); |: |\d+|\b[td]p\b|VMM|beside vllm| \(|one_shot", line)
    )
    return [part for part in parts if len(part) > 3]


def test_the_page_has_each_line() -> None:
    patterns = [
        re.compile(".*".join(re.escape(part) for part in re.split(r"\.\.\.+|ENGINE", line)), re.DOTALL)
        for line in quoted(PAGE)
    ]
    lacking = [
        text
        for text in dict.fromkeys(said())
        if not any(pattern.match(text) for pattern in patterns) and not any(part in text for part in _INTERNAL)
    ]
    assert lacking == []


@pytest.mark.parametrize("line", [line for line in quoted(PAGE) if not line.startswith(_FOREIGN)])
def test_the_code_has_each_line_of_the_page(line: str) -> None:
    assert fragments(line)
    assert [part for part in fragments(line) if part not in WORDS] == []


def spans(page: Path) -> list[str]:
    """Return the log lines that stand in code spans of ``page``."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    return [span for span in found if re.match(r"llm_comm: |llm_comm fused |llm_comm computes |llm_comm .* is ", span)]


@pytest.mark.parametrize("page", QUOTING, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_that_other_pages_quote(page: Path) -> None:
    assert [part for line in spans(page) for part in fragments(line) if part not in WORDS] == []
