#!/usr/bin/env python3
"""Write docs/options.md from the table of options in llm_comm/options.py.

.venv/bin/python tools/options_page.py
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from llm_comm.config import EngineOptions
from llm_comm.options import MIB, OPTIONS, Option

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
_HEAD = """\
# Options

`tools/options_page.py` writes this page from `llm_comm/options.py`; `tests/unit/test_option_table.py` compares them.

An option can be set in four places. Later places override earlier ones:

1. the default;
2. the YAML file that `LLM_COMM_CONFIG` names, with lines `option: value`;
3. the environment variable `LLM_COMM_` and the option's name in capitals, such as `LLM_COMM_TIMEOUT_S=5`;
4. the argument of `llm_comm.Config(...)`; in vLLM `additional_config["llm_comm"]`.

- Sizes may be written as `64M`. An empty variable counts as not set. `llm-comm doctor` shows where each value comes
  from.
- An unknown option or `LLM_COMM_*` variable is an error in Python and on the command line.
- In an engine an unknown name is a warning, which says what may be meant: the engine starts. So it also starts with an
  older llm_comm and the settings of a newer one. That holds for variables, the file, and vLLM's `additional_config`.
- A value that is not allowed is an error everywhere, in an engine on all ranks: without it, sums could have other bits
  than was asked for. Take such a value out before you go back to a version that does not know it.
- Only engine integrations read the [options of engines](#options-of-engines). A `Communicator` of your own ignores
  them in the file and the environment, and `llm_comm.Config(...)` does not take them.
- **Alike on all ranks** says whether all ranks of a group must have the same value. `yes`: the values are compared when
  a communicator is made. Where they differ, all ranks raise one `RendezvousError` with option, values and ranks (in an
  engine: a warning, and the engine's own collectives are used).

## Options of a communicator

"""
_ENGINES = "\n## Options of engines\n\n"
_COLUMNS = """\
| option | values | default | alike on all ranks | meaning |
|---|---|---|---|---|
"""
_WHY = """
## Why ranks must be alike

| option | alike on all ranks | reason |
|---|---|---|
"""


def page() -> str:
    """The page."""
    tables = [_table(of_engines) for of_engines in (False, True)]
    reasons = "".join(
        f"| `{name}` | {option.alike.value} | {_markdown(option.why)} |\n" for name, option in OPTIONS.items()
    )
    return _HEAD + _ENGINES.join(tables) + _WHY + reasons


def _table(of_engines: bool) -> str:
    defaults = {field.name: field.default for field in dataclasses.fields(EngineOptions)}
    options = ((name, option) for name, option in OPTIONS.items() if option.of_engines == of_engines)
    return _COLUMNS + "".join(_row(name, option, defaults[name]) for name, option in options)


def _row(name: str, option: Option, default: object) -> str:
    values = option.kind.values_on_page or option.kind.valid_values
    cells = (f"`{name}`", _markdown(values), _default(default), option.alike.value, _markdown(option.meaning))
    return f"| {' | '.join(cells)} |\n"


def _default(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value % MIB == 0:
        return f"{value // MIB}M"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _markdown(text: str) -> str:
    """Names of pages become links, and literals have one backtick."""
    return re.sub(r"docs/((?:[a-z]+/)?([a-z_]+)\.md(?:#[\w-]+)?)", r"[\2.md](\1)", text.replace("``", "`"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
