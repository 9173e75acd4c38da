"""Seams to an engine: the symbols of the engine that llm_comm replaces or relies on, in one table an engine.

A feature of llm_comm needs some rows of the table (``vllm/seams.py``, ``sglang/seams.py``). ``Table.attempt`` looks at
all rows of a feature before it replaces anything, so a feature is on as a whole or off as a whole, with a reason.

A row is compared with the engine's sources by a digest (``engine_sources.py``). Digests of the releases that were
tested stand in a file beside the table; ``tools/engine_digests.py`` writes them. A release with other sources keeps the
engine's own code for that feature, until option ``untested`` asks for llm_comm all the same. The all-reduce does not go
by digests: its rows say which parameters a function must have.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from llm_comm.integrations.engine_sources import Definition, Modules, Sources

logger = logging.getLogger("llm_comm")

#: Puts a replacement in the place of a symbol: takes the symbol and the function that the row calls ``patch``.
Install = Callable[[str, Callable[..., Any]], None]


class Row(NamedTuple):
    """A symbol of an engine.

    Attributes:
        feature: The feature of llm_comm that needs the symbol.
        symbols: ``module:qualified name``. Of several, separated by spaces, the first that the release has counts.
        patch: ``module:function`` of llm_comm that is called in place of the symbol, with the replaced function before
            the arguments. Empty: llm_comm calls, reads or subclasses the symbol.
        takes: The parameters that the function must have. None: not compared.
        by_digest: Whether the source must be one that was tested.
        is_required: Whether the feature is off in a release without the symbol.
        where: A symbol or module: only releases that have it have the row; with ``!`` ahead, only those without it.
        lost: The loss in a release without an optional symbol.
    """

    feature: str
    symbols: str
    patch: str = ""
    takes: tuple[str, ...] | None = None
    by_digest: bool = True
    is_required: bool = True
    where: str = ""
    lost: str = ""


class Table:
    """All rows of an engine.

    Args:
        engine: Name of the engine, for messages.
        package: Name of its package.
        rows: See ``Row``.
        lost: The loss without a feature, by feature, in the order of messages.
        digests: The file with digests of tested releases.
        install: How this engine's functions are replaced.
        needs: The feature that another one cannot do without, by the latter.
    """

    def __init__(
        self,
        engine: str,
        package: str,
        rows: tuple[Row, ...],
        lost: Mapping[str, str],
        digests: Path,
        install: Install,
        needs: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.engine, self.package, self.rows, self.lost, self.digests = engine, package, rows, lost, digests
        self._install = install
        self.needs = needs
        self._applied: set[str] = set()
        #: Whether features are on in releases that were not tested (option ``untested``).
        self.untested = False
        self.sources = Sources(Modules())

    def why_not(self, feature: str) -> str | None:
        """Return why this release of the engine cannot have ``feature``, if so. Never raises."""
        try:
            return next(filter(None, (self.objection(row) for row in self.rows if row.feature == feature)), None)
        except Exception as error:
            return f"the sources of {self.release} cannot be read ({type(error).__name__}: {error})"

    def attempt(self, feature: str, *set_ups: Callable[[], str | None]) -> str | None:
        """Run ``set_ups``, then replace what ``feature`` replaces, once. Return why the feature is off, if so.

        Nothing is replaced unless all rows of the feature are as they must be. Never raises.
        """
        try:
            why_not = self.why_not(feature)
            if why_not is not None:
                return why_not
            for set_up in set_ups:
                why_not = set_up()
                if why_not is not None:
                    return why_not
            if feature not in self._applied:
                self._apply(feature)
                self._applied.add(feature)
        except Exception as error:
            logger.debug("%s cannot be set up", feature, exc_info=True)
            return f"it cannot be set up in {self.release} ({type(error).__name__}: {error})"
        return None

    def has(self, symbol: str) -> bool:
        """Return whether this release has ``symbol``, a ``module:qualified name`` or a module."""
        return self.sources.has(symbol)

    def present(self, row: Row) -> str | None:
        """Return the symbol of ``row`` that this release has; None: it has none, or does without the row."""
        return None if self._is_void(row) else self.first_of(row.symbols)

    def first_of(self, symbols: str) -> str | None:
        """Return the first of ``symbols``, separated by spaces, that this release has; None: it has none."""
        return next((symbol for symbol in symbols.split() if self.has(symbol)), None)

    def describe(self) -> str | None:
        """Return one line: the features that are off in this release, why, and what is lost; None: all are on."""
        off = {feature: self.why_not(feature) for feature in self.lost}
        for feature, other in self.needs.items():
            if off[other] and not off[feature]:
                off[feature] = f"it needs {other}"
        lines = [f"{feature}: off, {why_not}. {self.lost[feature]}" for feature, why_not in off.items() if why_not]
        lines += [
            f"{row.feature}: {row.symbols} is missing. {row.lost}"
            for row in self.rows
            if row.lost and not off[row.feature] and self.present(row) is None and not self._is_void(row)
        ]
        if not lines:
            return None
        on = ", ".join(feature for feature, why_not in off.items() if not why_not) or "nothing"
        return f"llm_comm in {self.release}: on: {on}; {'; '.join(lines)}"

    @functools.cached_property
    def release(self) -> str:
        """Name and version of the engine."""
        try:
            return f"{self.engine} {metadata.version(self.package)}"
        except metadata.PackageNotFoundError:
            return f"{self.engine} of an unknown version"

    @functools.cached_property
    def tested(self) -> Mapping[str, Mapping[str, list[str]]]:
        """Releases by digest, by symbol."""
        found: dict[str, dict[str, list[str]]] = json.loads(self.digests.read_text(encoding="utf-8"))
        return found

    def _is_void(self, row: Row) -> bool:
        return bool(row.where) and self.has(row.where.removeprefix("!")) == row.where.startswith("!")

    def objection(self, row: Row) -> str | None:
        """Return what is wrong with the symbol of ``row`` in this release, if something is."""
        if self._is_void(row):
            return None
        symbol = self.present(row)
        if symbol is None:
            return f"{self.release} has no {' or '.join(row.symbols.split())}" if row.is_required else None
        found: Definition = self.sources.find(symbol)
        if row.takes is not None and found.takes != row.takes:
            takes = "no function" if found.takes is None else f"({', '.join(found.takes)})"
            return f"{symbol} of {self.release} is {takes}, not ({', '.join(row.takes)})"
        if row.by_digest and not self.untested and found.digest not in self.tested.get(symbol, {}):
            return f"{symbol} of {self.release} was not tested (LLM_COMM_UNTESTED=1 turns it on)"
        return None

    def patches(self, feature: str) -> list[tuple[str, Callable[..., Any]]]:
        """Return what ``feature`` replaces in this release, by which functions.

        Raises:
            ImportError, AttributeError: A function of llm_comm cannot be imported.
        """
        found = [(self.present(row), row.patch) for row in self.rows if row.feature == feature and row.patch]
        return [(symbol, load(patch)) for symbol, patch in found if symbol is not None]

    def _apply(self, feature: str) -> None:
        """Put all patches of ``feature`` in place, or none.

        Raises:
            Exception: A symbol cannot be imported or replaced. All of them are as before then.
        """
        patches = self.patches(feature)
        places = [owner_of(symbol) for symbol, _ in patches]
        before = [inspect.getattr_static(owner, name) for owner, name in places]
        try:
            for symbol, patch in patches:
                self._install(symbol, patch)
        except Exception:
            for (owner, name), theirs in zip(places, before, strict=True):
                put(owner, name, inspect.getattr_static(owner, name), theirs)
            raise


#: What ``flashinfer_rows`` are for. No loss is told where FlashInfer is not installed.
FLASHINFER = "norms that the engine fuses by FlashInfer"


def named_rows(feature: str, *symbols: str) -> tuple[Row, ...]:
    """Rows of symbols that must be there, whatever their definition is."""
    return tuple(Row(feature, symbol, by_digest=False) for symbol in symbols)


def digest_rows(feature: str, *symbols: str, where: str = "") -> tuple[Row, ...]:
    """Rows of symbols whose definition must be one that was tested."""
    return tuple(Row(feature, symbol, where=where) for symbol in symbols)


def flashinfer_rows() -> tuple[Row, ...]:
    """The rows of ``flashinfer_calls.py``, in the table of each engine. FlashInfer has releases of its own."""
    theirs, ours = "flashinfer.comm:", "llm_comm.integrations.flashinfer_calls:"
    return (
        Row(FLASHINFER, f"{theirs}allreduce_fusion", patch=f"{ours}around_fusion", by_digest=False),
        Row(FLASHINFER, f"{theirs}create_allreduce_fusion_workspace", patch=f"{ours}note_group", by_digest=False),
        Row(FLASHINFER, f"{theirs}AllReduceFusionPattern", by_digest=False),
    )


def owner_of(symbol: str) -> tuple[Any, str]:
    """Return the module or class that holds ``symbol``, imported, and the name in there.

    Raises:
        ImportError, AttributeError: It is not there.
    """
    module, _, qualified = symbol.partition(":")
    owner = importlib.import_module(module)
    *path, name = qualified.split(".")
    for part in path:
        owner = getattr(owner, part)
    getattr(owner, name)
    return owner, name


def load(symbol: str) -> Any:
    """Return what ``module:qualified name`` names.

    Raises:
        ImportError, AttributeError: It is not there.
    """
    return getattr(*owner_of(symbol))


def replace(symbol: str, patch: Callable[..., Any]) -> None:
    """Have ``patch`` called in place of ``symbol``, with the replaced function before the arguments.

    Modules that have imported the function, by whatever name, get the replacement too.
    """
    owner, name = owner_of(symbol)
    theirs = inspect.getattr_static(owner, name)
    is_of_class = isinstance(theirs, classmethod)
    function = theirs.__func__ if is_of_class else theirs

    @functools.wraps(function)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return patch(function, *args, **kwargs)

    ours.by_llm_comm = True  # type: ignore[attr-defined]
    put(owner, name, theirs, classmethod(ours) if is_of_class else ours)


def put(owner: Any, name: str, before: Any, after: Any) -> None:
    """Put ``after`` in the place of ``before``, which is ``owner``'s; of a module's, in all modules that have it, by
    whatever name."""
    setattr(owner, name, after)
    if isinstance(owner, ModuleType):
        for module in list(sys.modules.values()):
            names = [key for key, value in list(getattr(module, "__dict__", {}).items()) if value is before]
            for key in names:
                setattr(module, key, after)
