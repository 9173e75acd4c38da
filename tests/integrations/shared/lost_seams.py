"""An engine of a later release, as far as the table of seams can see: symbols that are gone or defined otherwise."""

from __future__ import annotations

import ast
import copy
import functools
import sys

from llm_comm.integrations.engine_sources import Definition, Modules, Sources
from llm_comm.integrations.seams import Row, Table

GONE, OTHER_PARAMETERS, OTHER_BODY = "gone", "other parameters", "other body"


class Changed(Sources):
    """The sources of the engine but for the definitions that ``change`` maps to others, or to none."""

    def __init__(self, changes: dict[str, str]) -> None:
        super().__init__(Modules())
        self._changes = changes

    def find(self, symbol: str) -> Definition:
        return super().find(symbol) if symbol in self._changes else _find(symbol)

    def nodes(self, symbol: str) -> list[ast.AST]:
        found = _nodes(symbol)
        how = self._changes.get(symbol)
        if how is None or not found:
            return found
        if how == GONE:
            return []
        node = copy.deepcopy(found[-1])
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if how == OTHER_PARAMETERS:
                node.args.args.append(ast.arg("and_another"))
            else:
                node.body.append(ast.parse("raise RuntimeError").body[0])
        elif isinstance(node, ast.ClassDef):
            node.body.append(ast.parse("another: int = 0").body[0])
        else:
            return [node, ast.parse("raise RuntimeError").body[0]]
        return [node]


# Of all engines of later releases together: they are read once.
_nodes = functools.cache(Sources(Modules()).nodes)
_find = functools.cache(Sources(Modules()).find)


def lose(table: Table, *symbols: str, how: str = GONE) -> None:
    """Have the engine of this process lack ``symbols``, or define them otherwise."""
    table.sources = Changed(dict.fromkeys(symbols, how))


def check_every_symbol(table: Table) -> None:
    """Each symbol of each row, lost in each way, switches off the features that need it and no other; what is said of
    them is true, and nothing of them is replaced."""
    lose(table)
    there = {row.feature for row in table.rows if table.why_not(row.feature) is None}
    assert set(table.lost) <= there, table.describe()
    assert table.describe() is None, table.describe()
    rows = [(row, symbol) for row in table.rows if row.feature in there and (symbol := table.present(row)) is not None]
    assert len(rows) > 40
    for symbol in dict.fromkeys(symbol for _, symbol in rows):
        with_it = [row for row, its_symbol in rows if its_symbol == symbol]
        for how in (GONE, OTHER_PARAMETERS, OTHER_BODY):
            lose(table, symbol, how=how)
            off = {feature for feature in there if table.why_not(feature) is not None}
            assert off == {row.feature for row in with_it if _must_be_off(row, how)}, (symbol, how, off)
            said = table.describe() or ""
            for feature in off:
                why_not = table.why_not(feature) or ""
                assert symbol in why_not, why_not
                assert table.release in why_not, why_not
                assert feature not in table.lost or f"{feature}: off, {why_not}. {table.lost[feature]}" in said, said
                assert table.attempt(feature, _never) == why_not
            with_others = set(off)
            for feature, other in table.needs.items():  # ordered: one may need what needs another
                with_others |= {feature} if other in with_others else set()
            assert said.count(": off, ") == len(with_others & set(table.lost)), said
            # An operator may want what was not tested, never what is not there.
            table.untested = True
            off = {feature for feature in there if table.why_not(feature) is not None}
            assert off == {row.feature for row in with_it if _must_be_off(row._replace(by_digest=False), how)}, symbol
            table.untested = False
    lose(table)
    assert not [symbol for row, symbol in rows if row.patch and _is_replaced(symbol)], "half of a feature is in place"


def _must_be_off(row: Row, how: str) -> bool:
    if how == GONE:
        return row.is_required
    return row.by_digest or (how == OTHER_PARAMETERS and row.takes is not None)


def _is_replaced(symbol: str) -> bool:
    module, _, qualified = symbol.partition(":")
    found: object = sys.modules.get(module)
    for name in qualified.split("."):
        found = getattr(found, name, None)
    return hasattr(found, "by_llm_comm")


def _never() -> None:
    raise AssertionError("a feature that is off is not set up")
