"""What a mutant is: a small bug put into a copy of the tree, and the tests that should notice it.

A check is what is run on the mutant: ``"driver ..."`` and ``"sanitized ..."`` are the programs of
``tests/deterministic`` and, under AddressSanitizer, of ``tests/sanitizers`` with their arguments; anything else is
arguments of pytest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "tests" / "deterministic"))

from edits import TYPES, Change, Edit, source, switched  # noqa: E402

__all__ = [
    "REPOSITORY",
    "TYPES",
    "Change",
    "Edit",
    "Mutant",
    "changes_of",
    "check_names",
    "cpp",
    "cpp_edits",
    "python",
    "source",
    "switched",
]


@dataclass(frozen=True)
class Mutant:
    """A bug, and who should notice.

    Attributes:
        name: What the mutant does wrong.
        edits: In C++ behind a switch (``WITHOUT``), in Python for good.
        checks: The narrowest first.
        equivalent: Why nobody can notice; "" where somebody should.
    """

    name: str
    edits: tuple[Edit, ...]
    checks: tuple[str, ...]
    equivalent: str = ""

    @property
    def is_cpp(self) -> bool:
        return not self.file.endswith(".py")

    @property
    def file(self) -> str:
        return self.edits[0].file


def cpp(name: str, file: str, old: str, new: str, *checks: str, equivalent: str = "") -> Mutant:
    """Of one edit. ``new`` takes the place of the expression ``old``, unless it says itself what is ``WITHOUT``."""
    return cpp_edits(name, [(file, old, new)], *checks, equivalent=equivalent)


def cpp_edits(name: str, edits: Sequence[tuple[str, str, str]], *checks: str, equivalent: str = "") -> Mutant:
    switched = (
        Edit(file, old, new if "WITHOUT" in new else f"(WITHOUT ? ({new}) : ({old}))") for file, old, new in edits
    )
    return Mutant(name, tuple(switched), checks, equivalent)


def python(name: str, file: str, old: str, new: str, *checks: str, equivalent: str = "") -> Mutant:
    """Of one edit in Python. White space at the ends is of no account: it stays as it is in the source."""
    return Mutant(name, (Edit(file, old.strip(), new.strip()),), checks, equivalent)


def changes_of(mutants: Sequence[Mutant]) -> list[Change]:
    """The edits of the C++ mutants as one copy of the sources has them: number i, from 1, turns on mutant i.

    Raises:
        ValueError: The text of an edit is not there, or not once.
    """
    return [
        Change.behind_switch(edit.file, edit.places(source(edit.file))[0], edit.new, number)
        for number, mutant in enumerate(mutants, start=1)
        if mutant.is_cpp
        for edit in mutant.edits
    ]


def check_names(mutants: Sequence[Mutant]) -> None:
    """Raises ValueError where two mutants have one name, or one has nobody to notice it."""
    names = [mutant.name for mutant in mutants]
    repeated = {name for name in names if names.count(name) > 1}
    unguarded = [mutant.name for mutant in mutants if not mutant.checks]
    if repeated or unguarded:
        raise ValueError(f"mutants with one name: {sorted(repeated)}; without a check: {unguarded}")
