"""Small edits of the sources, all in one copy of them: a switch says which of them is on.

What negative controls (``controls.py``) and mutants (``tests/mutation``) of C++ are made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import driver

#: An environment variable: the number of the edit that is on; 0 or unset: none.
SWITCH = "LLM_COMM_TEST_CONTROL"
#: Whatever is edited includes it, in the copy.
TYPES = "csrc/include/llm_comm/platform_types.h"
_READ_SWITCH = f"""#include <cstdlib>
inline const int control_that_is_on = std::getenv("{SWITCH}") ? std::atoi(std::getenv("{SWITCH}")) : 0;
"""


@cache
def source(file: str) -> str:
    return (driver.REPOSITORY / file).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Edit:
    """Text of a source, which is there once, and what takes its place. Where a switch turns edits on, that is the same
    as before unless ``WITHOUT``."""

    file: str
    old: str
    new: str

    def places(self, text: str) -> list[re.Match[str]]:
        found = list(re.finditer(r"\s+".join(re.escape(word) for word in self.old.split()), text))
        if len(found) != 1:
            raise ValueError(f"{self.file} does not hold {self.old!r} once")
        return found

    def replacement(self, _: re.Match[str]) -> str:
        return self.new

    def applied(self, text: str) -> str:
        """``text`` with the edit in it, for good."""
        (place,) = self.places(text)
        return text[: place.start()] + self.new + text[place.end() :]


@dataclass(frozen=True)
class Change:
    """A place of a source, and what stands there in the copy."""

    file: str
    start: int
    end: int
    text: str

    @classmethod
    def behind_switch(cls, file: str, place: re.Match[str], text: str, number: int) -> Change:
        """``text`` counts where the switch is at ``number``."""
        return cls(file, place.start(), place.end(), text.replace("WITHOUT", f"(::control_that_is_on == {number})"))


def switched(files: Iterable[str], changes: Iterable[Change]) -> dict[str, bytes]:
    """The contents of ``files``, by name, with all changes, and with the switch."""
    changes = list(changes)
    texts = {file: (driver.REPOSITORY / file).read_bytes() for file in files}
    for file in {change.file for change in changes}:
        text, end = "", 0
        for change in sorted((c for c in changes if c.file == file), key=lambda c: (c.start, c.end)):
            if change.start < end:
                raise ValueError(f"{file}: two edits change {source(file)[change.start : end]!r}")
            text += source(file)[end : change.start] + change.text
            end = change.end
        include = "" if file == TYPES else f'#include "{TYPES.removeprefix("csrc/include/")}"\n'
        texts[file] = (include + text + source(file)[end:]).encode()
    texts[TYPES] += _READ_SWITCH.encode()
    return texts


def write(directory: Path, texts: dict[str, bytes]) -> Path:
    """Brings ``directory`` to hold ``texts`` and nothing else. What is there already is not
    written, nor built again."""
    if directory.exists():
        for path in directory.rglob("*"):
            if path.is_file() and str(path.relative_to(directory)) not in texts:
                path.unlink()
    for name, text in texts.items():
        path = directory / name
        if path.exists() and path.read_bytes() == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return directory
