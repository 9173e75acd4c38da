"""Modules of the directory ``tools``, whose programs import each other by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).parents[1] / "tools"


def tool(name: str) -> Iterator[ModuleType]:
    """Yield the module of a program, for a fixture. What it imports later is found while the fixture lives."""
    sys.path.insert(0, str(TOOLS))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(TOOLS))
