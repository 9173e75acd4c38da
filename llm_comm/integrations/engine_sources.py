"""Parameters and digests of an engine's functions and classes, read from source files without importing them.

A digest is a hash of the syntax tree, so comments, layout and docstrings do not change it. The tree is serialized by
``_text`` and not by ``ast.dump``, because the digest must be equal under all versions of Python.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Reader(Protocol):
    """Source of module texts."""

    def read(self, module: str) -> tuple[str, bool] | None:
        """Return the source of ``module`` and whether it is a package; None if there is no such module."""


class Modules:
    """Reader of the installed packages that this process would import."""

    def read(self, module: str) -> tuple[str, bool] | None:
        top, *rest = module.split(".")
        # Find the top-level package only: ``find_spec`` of a submodule would import its parents.
        spec = importlib.util.find_spec(top)
        for root in (spec and spec.submodule_search_locations) or ():
            path = Path(root, *rest)
            for file, is_package in ((path / "__init__.py", True), (path.with_suffix(".py"), False)):
                if file.is_file():
                    return file.read_text(encoding="utf-8"), is_package
        return None


class Definition(NamedTuple):
    """Definition of a symbol of an engine.

    Attributes:
        digest: First 12 hexadecimal digits of the hash of the syntax tree.
        takes: Parameter names with their asterisks, without ``self`` and ``cls``; None if the symbol is no function.
    """

    digest: str
    takes: tuple[str, ...] | None


class Sources:
    """Lookup of definitions by symbol. A symbol is written ``module:qualified name``."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        # The cache is small because a tree takes many times the memory of its source. The rows of a module stand
        # together in a table, so few trees are needed at a time.
        self._tree = functools.lru_cache(maxsize=16)(self._parse)

    def has(self, symbol: str) -> bool:
        """Return whether ``symbol`` exists. A name without a colon is a module."""
        module, _, qualified = symbol.partition(":")
        return self._tree(module) is not None if not qualified else bool(self.nodes(symbol))

    def nodes(self, symbol: str) -> list[ast.AST]:
        """Return the statements that bind a symbol; an empty list if there is no such symbol."""
        module, _, qualified = symbol.partition(":")
        return self._look_up(module, qualified.split("."))

    def find(self, symbol: str) -> Definition:
        """Return the definition of a symbol.

        Raises:
            LookupError: There is no such symbol.
        """
        nodes = self.nodes(symbol)
        if not nodes:
            raise LookupError(symbol)
        digest = hashlib.sha256("\n".join(map(_text, nodes)).encode()).hexdigest()[:12]
        return Definition(digest, _parameters(nodes[-1]) if isinstance(nodes[-1], _Function) else None)

    def _parse(self, module: str) -> tuple[ast.Module, bool] | None:
        found = self._reader.read(module)
        if found is None:
            return None
        return ast.parse(found[0]), found[1]

    def _look_up(self, module: str, path: list[str], depth: int = 0) -> list[ast.AST]:
        """Return the statements that bind the last name of ``path``.

        Imports are followed to the defining module. The result has several statements if the engine chooses between
        definitions, for example by platform.
        """
        found = self._tree(module)
        if found is None or depth > 8:
            return []
        tree, is_package = found
        name, *rest = path
        bound = list(_bindings(tree.body, name))
        own = [node for node in bound if not isinstance(node, ast.ImportFrom)]
        if own:
            return self._inside(module, own, rest, depth) if rest else own
        for node in bound:
            assert isinstance(node, ast.ImportFrom)
            source = _absolute(node, module, is_package)
            original = next((a.name for a in node.names if (a.asname or a.name) == name), name)
            elsewhere = self._look_up(source, [original, *rest], depth + 1)
            if not elsewhere and self._tree(f"{source}.{original}") is not None:
                elsewhere = self._look_up(f"{source}.{original}", rest, depth + 1) if rest else [node]
            if elsewhere:
                return elsewhere
        # A name that is imported from a package without readable sources counts as bound by its import statement.
        return [] if rest else [node for node in bound if not _is_star(node)]

    def _inside(self, module: str, owners: list[ast.AST], path: list[str], depth: int) -> list[ast.AST]:
        """Return the statements that bind ``path`` inside a class, or in one of its base classes."""
        name, *rest = path
        for owner in owners:
            if not isinstance(owner, ast.ClassDef):
                continue
            bound = list(_bindings(owner.body, name)) or list(_set_on_self(owner, name))
            if bound:
                return self._inside(module, bound, rest, depth) if rest else bound
            for base in owner.bases:
                if isinstance(base, ast.Name):
                    inherited = self._look_up(module, [base.id, *path], depth + 1)
                    if inherited:
                        return inherited
        return []


def _bindings(body: list[ast.stmt], name: str) -> Iterator[ast.AST]:
    """Yield the statements of a body that bind ``name``, also inside of if, try and with."""
    for node in body:
        if isinstance(node, (*_Function, ast.ClassDef)):
            if node.name == name:
                yield node
        elif isinstance(node, ast.ImportFrom):
            if _is_star(node) or any((alias.asname or alias.name) == name for alias in node.names):
                yield node
        elif isinstance(node, ast.Import):
            if any((alias.asname or alias.name) == name for alias in node.names):
                yield node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(part, ast.Name) and part.id == name for target in targets for part in ast.walk(target)):
                yield node
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            parts = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            parts += [handler.body for handler in getattr(node, "handlers", [])]
            for part in parts:
                yield from _bindings(part, name)


def _set_on_self(owner: ast.ClassDef, name: str) -> Iterator[ast.AST]:
    """Yield the first assignment to ``self.name`` in the methods of a class."""
    for node in ast.walk(owner):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute, ctx=ast.Store()) if attribute == name:
                yield node
                return


def _is_star(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.names[0].name == "*"


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Return the absolute name of the module from which ``module`` imports."""
    if node.level == 0:
        return node.module or ""
    above = module.split(".")[: len(module.split(".")) - node.level + is_package]
    return ".".join([*above, *([node.module] if node.module else [])])


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    given = function.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args)]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [arg.arg for arg in given.kwonlyargs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return tuple(names)


def _text(node: object) -> str:
    """Serialize a syntax tree. Equal for all versions of Python, and independent of docstrings."""
    if isinstance(node, list):
        return f"[{','.join(map(_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):  # constants are left out: Python 3.12 splits them differently
        return f"f({','.join(_text(part.value) for part in node.values if isinstance(part, ast.FormattedValue))})"
    fields = []
    for name, found in ast.iter_fields(node):
        has_docstring = isinstance(node, (*_Function, ast.ClassDef)) and ast.get_docstring(node, clean=False)
        value = found[1:] if name == "body" and has_docstring else found
        # Empty fields are left out: newer versions of Python have additional fields, empty for older syntax.
        if value is not None and value != [] and name not in ("kind", "ctx", "type_comment"):
            fields.append(f"{name}={_text(value)}")
    return f"{type(node).__name__}({','.join(fields)})"
