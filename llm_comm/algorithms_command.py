"""``llm-comm algorithms``: what the registry of the core lists. Needs no GPU and no ranks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from llm_comm import _core
from llm_comm.bench.report import columns

_OF_AN_ALGORITHM = ("operation", "name", "protocol", "data_types", "tunables", "title")
_OF_AN_OPERATION = ("name", "title", "buffers", "parameters")


def run(args: argparse.Namespace) -> int:
    """``llm-comm algorithms``. Returns 0."""
    algorithms = [_as_dict(entry, _OF_AN_ALGORITHM) for entry in _core.algorithms()]
    operations = [_as_dict(entry, _OF_AN_OPERATION) for entry in _core.operations()]
    if args.json:
        print(json.dumps({"operations": operations, "algorithms": algorithms}, indent=2))
    else:
        print(_table(["operation", "algorithm", "protocol", "data types", "tunables", "how"], algorithms))
        print()
        print(_table(["operation", "what", "buffers", "parameters"], operations))
    return 0


def _as_dict(entry: Any, fields: Sequence[str]) -> dict[str, str | list[str]]:
    return {name: getattr(entry, name) for name in fields}


def _table(head: Sequence[str], entries: Sequence[dict[str, str | list[str]]]) -> str:
    cells = [[value if isinstance(value, str) else " ".join(value) for value in entry.values()] for entry in entries]
    return columns([head, *([cell or "-" for cell in line] for line in cells)], str.ljust)
