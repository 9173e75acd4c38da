#!/usr/bin/env python3
"""Write docs/options.md from the table of options in llm_comm/options.py.

.venv/bin/python tools/options_page.py
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
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
3. the environment variable, such as `LLM_COMM_TIMEOUT_S=5`;
4. in Python the argument of `llm_comm.Config(...)`; in vLLM `additional_config["llm_comm"]`.

Rules for all options:

- Sizes may be written as `64M`, which is 64 MiB; true and false as `1` and `0`. An empty variable counts as not set.
- `llm-comm doctor` shows each value and where it comes from.
- An unknown option or `LLM_COMM_*` variable is an error in Python and on the command line. In an engine it is a
  warning, so an older llm_comm starts with the settings of a newer one.
- A value that is not allowed is an error everywhere. An engine does not start with it.
- Only engine integrations read the [options of engines](#options-of-engines). A `Communicator` of your own ignores
  them in the file and the environment, and `llm_comm.Config(...)` does not take them.
- **Ranks must agree: yes** means that the values are compared when a communicator is made. A difference is one
  `RendezvousError` on all ranks, with option, values and ranks. In an engine it is a warning, and the engine uses its
  own collectives.

## Options of a communicator
"""
_ENGINES = "\n## Options of engines\n"


def page() -> str:
    """Return the text of the page."""
    return _HEAD + _ENGINES.join(_sections(of_engines) for of_engines in (False, True))


def _sections(of_engines: bool) -> str:
    defaults = {field.name: field.default for field in dataclasses.fields(EngineOptions)}
    options = ((name, option) for name, option in OPTIONS.items() if option.of_engines == of_engines)
    return "".join(_section(name, option, defaults[name]) for name, option in options)


def _section(name: str, option: Option, default: object) -> str:
    return f"""
### `{name}`

{_wrapped(option.meaning)}

- Variable: `LLM_COMM_{name.upper()}`
- Values: {_values(option)}
- Default: `{_default(default)}`
- Ranks must agree: {option.alike.value}
- Reason: {_markdown(option.why)}
"""


def _wrapped(text: str) -> str:
    return textwrap.fill(_markdown(text), 120, break_long_words=False, break_on_hyphens=False)


def _values(option: Option) -> str:
    """Return the values of an option, without what the page says of all options."""
    values = _markdown(option.kind.values_on_page or option.kind.valid_values)
    return re.sub(r" \(environment[^;)]*\)|(?<=\()environment[^;)]*; ", "", values)


def _default(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value % MIB == 0:
        return f"{value // MIB}M"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _markdown(text: str) -> str:
    """Turn names of pages into links, and double backticks into single ones."""
    return re.sub(r"docs/((?:[a-z]+/)?([a-z_]+)\.md(?:#[\w-]+)?)", r"[\2.md](\1)", text.replace("``", "`"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
