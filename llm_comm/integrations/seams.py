"""Seams to an engine: one table per engine with all symbols of the engine that llm_comm replaces or relies on.

Each row of a table (``vllm/seams.py``, ``sglang/seams.py``) belongs to a feature of llm_comm. ``Table.attempt`` checks
all rows of a feature before it replaces anything. So a feature is on completely, or off with a reason for the log.

A row is compared with the engine's sources by a digest (``engine_sources.py``). ``tools/engine_digests.py`` writes the
digests of tested releases to a file beside the table. In a release with other sources the feature is off, unless option
``untested`` switches it on. Rows of the all-reduce have no digest: they list the parameters that a function must have,
so that the all-reduce is served in untested releases too.
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

#: Function that replaces a symbol of the engine. Arguments: the symbol, and the row's ``patch``.
Install = Callable[[str, Callable[..., Any]], None]


class Row(NamedTuple):
    """Row of a table: a symbol of an engine that a feature needs.

    Attributes:
        feature: Feature of llm_comm that needs the symbol.
        symbols: ``module:qualified name``, or several separated by spaces: the first that the release has is used.
        patch: ``module:function`` of llm_comm that is called in place of the symbol. Its first argument is the replaced
            function. Empty: the symbol is not replaced; llm_comm calls, reads or subclasses it.
        takes: Parameters that the function must have; None: not compared.
        by_digest: Whether the symbol's source must be that of a tested release.
        is_required: Whether the feature is off in a release without the symbol.
        where: Condition for the row: a symbol or module that the release must have, or must not have with ``!`` ahead.
        lost: Consequence, in words, in a release without this optional symbol.
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
    """Table of the seams to one engine.

    Args:
        engine: Name of the engine, for messages.
        package: Name of the engine's Python package.
        rows: Rows of the table.
        lost: Consequence of each feature being off, in words, by feature. The order is that of messages.
        digests: File with the digests of tested releases.
        install: Function that replaces a symbol in this engine.
        needs: Dependencies between features: ``needs[a] == b`` means that ``a`` is off if ``b`` is off.
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
        #: Whether digests are ignored, so that features are on in untested releases (option ``untested``).
        self.untested = False
        self.sources = Sources(Modules())

    def why_not(self, feature: str) -> str | None:
        """Return the reason why this release of the engine cannot have ``feature``, or None. Never raises."""
        try:
            return next(filter(None, (self.objection(row) for row in self.rows if row.feature == feature)), None)
        except Exception as error:
            return f"the sources of {self.release} cannot be read ({type(error).__name__}: {error})"

    def attempt(self, feature: str, *set_ups: Callable[[], str | None]) -> str | None:
        """Switch ``feature`` on in this process. Return the reason why it stays off, or None. Never raises.

        The rows are checked first, then ``set_ups`` run in order. Each returns a reason to stop, or None. Only then are
        the symbols of the feature replaced, all or none, and once a process.
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
        """Return the symbol of ``row`` that this release has; None if it has none, or if the row does not apply."""
        return None if self._is_void(row) else self.first_of(row.symbols)

    def first_of(self, symbols: str) -> str | None:
        """Return the first of ``symbols``, separated by spaces, that this release has; None if it has none."""
        return next((symbol for symbol in symbols.split() if self.has(symbol)), None)

    def describe(self) -> str | None:
        """Return one line with the features that are off in this release, reasons and consequences; None if all are on.

        Only rows are checked, not options or models.
        """
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
        """Name and installed version of the engine, for messages."""
        try:
            return f"{self.engine} {metadata.version(self.package)}"
        except metadata.PackageNotFoundError:
            return f"{self.engine} of an unknown version"

    @functools.cached_property
    def tested(self) -> Mapping[str, Mapping[str, list[str]]]:
        """Tested releases, by symbol and then by digest."""
        found: dict[str, dict[str, list[str]]] = json.loads(self.digests.read_text(encoding="utf-8"))
        return found

    def _is_void(self, row: Row) -> bool:
        """Return whether the row's condition ``where`` excludes this release."""
        return bool(row.where) and self.has(row.where.removeprefix("!")) == row.where.startswith("!")

    def objection(self, row: Row) -> str | None:
        """Return the reason why the symbol of ``row`` cannot be used in this release, or None."""
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
        """Return the symbols that ``feature`` replaces in this release, each with the replacement.

        Raises:
            ImportError, AttributeError: A function of llm_comm cannot be imported.
        """
        found = [(self.present(row), row.patch) for row in self.rows if row.feature == feature and row.patch]
        return [(symbol, load(patch)) for symbol, patch in found if symbol is not None]

    def _apply(self, feature: str) -> None:
        """Replace all symbols of ``feature``, or none.

        Raises:
            Exception: A symbol cannot be imported or replaced. Replacements made so far have been undone.
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


#: Feature of ``flashinfer_rows``. It is not in ``Table.lost``, so a missing FlashInfer is not reported.
FLASHINFER = "norms that the engine fuses by FlashInfer"


def named_rows(feature: str, *symbols: str) -> tuple[Row, ...]:
    """Return rows of symbols that must exist, with any definition."""
    return tuple(Row(feature, symbol, by_digest=False) for symbol in symbols)


def digest_rows(feature: str, *symbols: str, where: str = "") -> tuple[Row, ...]:
    """Return rows of symbols whose definition must be that of a tested release."""
    return tuple(Row(feature, symbol, where=where) for symbol in symbols)


def flashinfer_rows() -> tuple[Row, ...]:
    """Return the rows of ``flashinfer_calls.py``, for the table of each engine.

    They have no digests, since FlashInfer's releases are independent of the engine's.
    """
    theirs, ours = "flashinfer.comm:", "llm_comm.integrations.flashinfer_calls:"
    return (
        Row(FLASHINFER, f"{theirs}allreduce_fusion", patch=f"{ours}around_fusion", by_digest=False),
        Row(FLASHINFER, f"{theirs}create_allreduce_fusion_workspace", patch=f"{ours}note_group", by_digest=False),
        Row(FLASHINFER, f"{theirs}AllReduceFusionPattern", by_digest=False),
    )


def owner_of(symbol: str) -> tuple[Any, str]:
    """Import the module or class that holds ``symbol``. Return the holder and the symbol's last name.

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
    """Import and return the object that ``symbol`` (``module:qualified name``) names.

    Raises:
        ImportError, AttributeError: It is not there.
    """
    return getattr(*owner_of(symbol))


def replace(symbol: str, patch: Callable[..., Any]) -> None:
    """Replace ``symbol`` by a function that calls ``patch`` with the replaced function ahead of the arguments.

    Modules that have already imported the function, under any name, get the replacement too.
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
    """Set attribute ``name`` of ``owner`` to ``after``. If ``owner`` is a module, replace ``before`` in all imported
    modules that hold it, under any name."""
    setattr(owner, name, after)
    if isinstance(owner, ModuleType):
        for module in list(sys.modules.values()):
            names = [key for key, value in list(getattr(module, "__dict__", {}).items()) if value is before]
            for key in names:
                setattr(module, key, after)
