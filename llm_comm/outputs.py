"""The files that a command writes at its end: no result of a long run is lost with them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_text(option: str, path: Path, text: str) -> bool:
    """Writes the file of an option. If that fails, says so and prints what would be in it.

    Returns:
        Whether it was written. The command fails if not.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        tell_unwritten(option, path, error, "its content is on the standard output")
        print(text, flush=True)
        return False
    return True


def write_json(option: str, path: Path, report: Mapping[str, Any]) -> bool:
    """As :func:`write_text`, of a report."""
    return write_text(option, path, json.dumps(report, indent=2) + "\n")


def tell_unwritten(option: str, path: Path, error: OSError, consequence: str) -> None:
    """Says on stderr that the file of an option could not be written (whole), why, and what follows."""
    print(f"llm-comm: {option} {path} could not be written: {error.strerror or error}; {consequence}", file=sys.stderr)
