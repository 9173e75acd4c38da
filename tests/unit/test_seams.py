"""The tables of seams to engines: what they say of an engine's sources, and that a feature is replaced whole or not."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import llm_comm
from llm_comm.integrations import seams
from llm_comm.integrations.engine_sources import Modules, Sources
from llm_comm.integrations.seams import Row, Table
from llm_comm.integrations.sglang.seams import TABLE as SGLANG
from llm_comm.integrations.vllm.seams import TABLE as VLLM

ENGINE = {
    "__init__": "from toy_engine.sums import *",
    "sums": '''
if 1 > 2:
    def total(x): return x
else:
    def total(x, *more, scale=1, **rest):
        """Text."""
        return f"{x + 1:>3} {scale!r}"

class Base:
    def __init__(self):
        self.size = 1

    @classmethod
    def name(cls): return "theirs"

class Group(Base):
    kind: str = "tp"

    def sum(self, x): return x
''',
    "user": "from toy_engine.sums import Group, total as the_total, total",
}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``toy_engine`` that can be imported."""
    directory = tmp_path / "toy_engine"
    directory.mkdir()
    for name, text in ENGINE.items():
        (directory / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield directory
    for name in [name for name in sys.modules if name.split(".")[0] == "toy_engine"]:
        del sys.modules[name]


def table_of(directory: Path, *rows: Row, install: Any = seams.replace) -> Table:
    digests = directory / "digests.json"
    if not digests.exists():
        found = Sources(Modules())
        symbols = [symbol for row in rows for symbol in row.symbols.split() if found.has(symbol)]
        digests.write_text(json.dumps({symbol: {found.find(symbol).digest: ["1"]} for symbol in symbols}))
    return Table("Toy", "toy_engine", rows, {"sums": "Sums are Toy's"}, digests, install)


def around(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    return ("ours", theirs(*args, **kwargs))


HERE = __name__
SUM = Row("sums", "toy_engine.user:Group.sum", patch=f"{HERE}:around")
NAME = Row("sums", "toy_engine.sums:Group.name", patch=f"{HERE}:around")
TOTAL = Row("sums", "toy_engine:total", patch=f"{HERE}:around")


def test_definitions_are_found_where_they_are_and_told_apart_by_their_code(engine: Path) -> None:
    found = Sources(Modules())
    # The number is the same under every version of Python that CI runs.
    assert found.find("toy_engine:total").digest == "06b208af31a3"
    assert found.find("toy_engine.user:the_total") == found.find("toy_engine.sums:total")
    assert found.find("toy_engine:total").takes == ("x", "*more", "scale", "**rest")
    assert found.find("toy_engine:Group.name") == found.find("toy_engine.sums:Base.name")
    assert found.has("toy_engine.user:Group.size")
    assert found.has("toy_engine.user:Group.kind")
    for absent in ("toy_engine:nothing", "toy_engine.nothing:total", "toy_engine:Group.nothing", "no_engine:total"):
        assert not found.has(absent), absent
    before = found.find("toy_engine:total").digest
    for old, new, is_same in (
        ('"""Text."""', '"""Another text."""', True),
        ("return x\n", "return x  # a comment\n\n", True),
        ("scale=1", "scale=2", False),
        ("x + 1", "x + 2", False),
        ("return x\n", "return -x\n", False),
    ):
        (engine / "sums.py").write_text(ENGINE["sums"].replace(old, new))
        assert (Sources(Modules()).find("toy_engine:total").digest == before) == is_same, new


def test_a_feature_is_replaced_as_a_whole_where_all_is_as_it_was_tested(engine: Path) -> None:
    table = table_of(engine, SUM, NAME, TOTAL)
    user = importlib.import_module("toy_engine.user")
    done: list[int] = []
    assert table.attempt("sums", lambda: done.append(1)) is None
    assert table.attempt("sums", lambda: done.append(2)) is None, "more than once is no error"
    assert done == [1, 2]
    assert user.Group().sum(3) == ("ours", 3)
    assert user.Group.name() == ("ours", "theirs")
    assert user.total(1) == user.the_total(1) == ("ours", "  2 1"), "a module that has imported the function"
    assert table.describe() is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def sum(", "def add(", "has no toy_engine.user:Group.sum"),
        ("def sum(self, x)", "def sum(self, x, y)", "toy_engine.user:Group.sum of Toy of an unknown version was"),
        ("def sum(self, x): return x", "def sum(self, x): return -x", "was not tested (LLM_COMM_UNTESTED=1 turns it"),
        (
            "class Base",
            "raise RuntimeError('broken')\nclass Base",
            "it cannot be set up in Toy of an unknown version (R",
        ),
    ],
)
def test_nothing_is_replaced_in_a_release_that_lost_a_symbol(engine: Path, old: str, new: str, said: str) -> None:
    table_of(engine, NAME, SUM, TOTAL)
    (engine / "sums.py").write_text(ENGINE["sums"].replace(old, new))
    table = table_of(engine, NAME, SUM, TOTAL)
    why_not = table.attempt("sums", pytest.fail if "cannot" not in said else lambda: None)
    assert said in str(why_not)
    if "cannot" in said:
        return
    group = importlib.import_module("toy_engine.sums").Group
    assert group.name() == "theirs"
    assert f"sums: off, {why_not}. Sums are Toy's" in str(table.describe())
    table.untested = True
    assert (table.attempt("sums") is None) == ("has no" not in said), "what is gone cannot be turned on"
    assert (group.name() == ("ours", "theirs")) == ("has no" not in said)


def test_a_feature_is_off_with_the_one_that_it_needs(engine: Path) -> None:
    lost = {"sums": "Sums are Toy's", "products": "Products are Toy's"}
    gone = Row("sums", "toy_engine:nothing")
    table = Table("Toy", "toy_engine", (gone,), lost, engine / "digests.json", seams.replace, {"products": "sums"})
    said = str(table.describe())
    assert "on: nothing; sums: off, " in said
    assert said.endswith("products: off, it needs sums. Products are Toy's")


def test_a_replacement_that_fails_takes_back_those_before(engine: Path) -> None:
    def install(symbol: str, patch: Callable[..., Any]) -> None:
        if symbol == SUM.symbols:
            raise RuntimeError("cannot be hooked")
        seams.replace(symbol, patch)

    table = table_of(engine, TOTAL, NAME, SUM, install=install)
    user = importlib.import_module("toy_engine.user")
    assert "RuntimeError: cannot be hooked" in str(table.attempt("sums"))
    assert (user.total(1), user.the_total(1), user.Group.name(), user.Group().sum(3)) == ("  2 1", "  2 1", "theirs", 3)


def test_rows_of_some_releases_and_symbols_that_may_be_missing(engine: Path) -> None:
    elsewhere = Row("sums", "toy_engine.nothing:total toy_engine.sums:total", by_digest=False)
    void = Row("sums", "toy_engine:nothing", where="toy_engine.nothing")
    void_too = Row("sums", "toy_engine:nothing", where="!toy_engine.sums:total")
    optional = Row("sums", "toy_engine:nothing", is_required=False, lost="Nothing is lost")
    table = table_of(engine, elsewhere, void, void_too, optional)
    assert table.present(elsewhere) == "toy_engine.sums:total"
    assert table.why_not("sums") is None
    assert str(table.describe()).endswith("on: sums; sums: toy_engine:nothing is missing. Nothing is lost")
    assert table_of(engine, Row("sums", "toy_engine:total", takes=("x",))).why_not("sums") == (
        "toy_engine:total of Toy of an unknown version is (x, *more, scale, **rest), not (x)"
    )


@pytest.mark.parametrize("table", [VLLM, SGLANG], ids=lambda table: table.engine)
def test_all_that_is_imported_of_an_engine_is_in_its_table(table: Table) -> None:
    directory = Path(llm_comm.__file__).parent / "integrations" / table.package
    symbols = {symbol for row in table.rows for symbol in row.symbols.split()}
    modules = {symbol.partition(":")[0] for symbol in symbols}
    for path in directory.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != table.package:
                continue
            for alias in node.names:
                name = f"{node.module}:{alias.name}"
                in_table = any(symbol == name or symbol.startswith(f"{name}.") for symbol in symbols)
                assert in_table or f"{node.module}.{alias.name}" in modules, f"{path.name} imports {name}"
    assert {row.feature for row in table.rows} >= set(table.lost)
    for row in table.rows:
        assert row.patch == "" or _defines(row.patch), row.patch
        if row.by_digest and row.is_required and not row.where:
            assert any(table.tested.get(symbol) for symbol in row.symbols.split()), row


def _defines(patch: str) -> bool:
    module, _, name = patch.partition(":")
    path = Path(llm_comm.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return any(getattr(node, "name", "") == name for node in ast.parse(path.read_text(encoding="utf-8")).body)
