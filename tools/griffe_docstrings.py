"""Extension of griffe, which reads the docstrings of docs/api.md: sections in which entries share a line."""

from __future__ import annotations

import re
from typing import Any

import griffe

#: Entry of several parameters, such as ``weight, out, bias: As in ``linear``.`` with its further lines.
_SHARED = re.compile(r"^( *)(\w+(?:, \w+)+): (.*(?:\n\1 +\S.*)*)$", re.MULTILINE)


class SharedEntries(griffe.Extension):
    """Give each parameter that shares an entry of ``Args`` one of its own, so griffe compares all names."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.docstring is None:
            return
        head, section, rest = func.docstring.value.partition("\nArgs:\n")
        arguments, gap, others = rest.partition("\n\n")
        func.docstring.value = head + section + _SHARED.sub(_apart, arguments) + gap + others


def _apart(entry: re.Match[str]) -> str:
    indent, names, text = entry.groups()
    return "\n".join(f"{indent}{name}: {text}" for name in names.split(", "))
