"""The list of mutants fits the sources, and what the documentation says of results fits their file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import run
from mutant import REPOSITORY, TYPES, Edit, Mutant, changes_of, check_names, cpp, python, source, switched
from table import MUTANTS
from workplace import files

RESULTS = sorted((REPOSITORY / "docs" / "results").glob("*_mutants.json"))


def test_the_text_of_every_edit_is_there_once() -> None:
    """Else the mutant has to be thought through again. No two edits are of one text, since all C++ mutants are in one
    copy."""
    switched(files(), changes_of(MUTANTS))
    for mutant in MUTANTS:
        if mutant.is_cpp:
            continue
        texts = {edit.file: source(edit.file) for edit in mutant.edits}
        for edit in mutant.edits:
            texts[edit.file] = edit.applied(texts[edit.file])
        for file, text in texts.items():
            assert text != source(file)
            compile(text, file, "exec")


def test_a_text_that_is_gone_is_an_error() -> None:
    gone = cpp("gone", TYPES, "text that is not there", "0", "driver")
    with pytest.raises(ValueError, match="does not hold 'text that is not there' once"):
        changes_of([gone])
    with pytest.raises(ValueError, match="does not hold"):
        python("gone", "setup.py", "a", "b", "tests").edits[0].applied("c")


def test_every_mutant_is_its_own_and_has_who_should_notice() -> None:
    check_names(MUTANTS)
    for check in {check for mutant in MUTANTS for check in mutant.checks}:
        kind = check.split()[0]
        assert kind in ("driver", "sanitized") or (REPOSITORY / kind).exists(), f"there is no {kind}"
    one = MUTANTS[0]
    with pytest.raises(ValueError, match="with one name"):
        check_names([one, one])
    with pytest.raises(ValueError, match="without a check"):
        check_names([Mutant("alone", (Edit("a.py", "a", "b"),), ())])


def test_verdicts() -> None:
    usual = Mutant("usual", (Edit("a.py", "a", "b"),), ("tests",))
    alike = Mutant("alike", (Edit("a.py", "a", "b"),), ("tests",), "because")
    outcomes = [run.Outcome(mutant, noticed_by, 1.0) for mutant in (usual, alike) for noticed_by in ("tests/a", "")]
    assert [outcome.verdict for outcome in outcomes] == [
        "noticed",
        "SURVIVED",
        "NOTICED THOUGH CALLED EQUIVALENT",
        "equivalent",
    ]
    assert [outcome.is_as_it_should_be for outcome in outcomes] == [True, False, False, True]
    assert not run.Outcome(alike, "", 0.0, "no such test").is_as_it_should_be


def test_the_page_says_what_the_results_say() -> None:
    """All noticed, or explained. The file is what a run has written: a mutant that is newer is not in it."""
    documented = json.loads(RESULTS[-1].read_text(encoding="utf-8"))
    assert all(bool(entry["noticed_by"]) != ("equivalent" in entry) for entry in documented["results"])
    noticed = sum(bool(entry["noticed_by"]) for entry in documented["results"])
    assert (len(documented["results"]), noticed) == (documented["mutants"], documented["noticed"])
    page = " ".join((REPOSITORY / "docs" / "develop" / "testing.md").read_text(encoding="utf-8").split())
    assert f"results of {documented['mutants']} mutants ([data](../results/{RESULTS[-1].name})): {noticed} were" in page
    assert f"and {documented['equivalent']} are marked" in page
