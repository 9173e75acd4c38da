"""The files that a command writes: no result of a long run is lost with them."""

from __future__ import annotations

import contextlib
import json
import os
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


def replace_json(path: Path, report: Mapping[str, Any]) -> None:
    """As :func:`replace_text`, of a report."""
    replace_text(path, json.dumps(report, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Writes a file so that it is whole at any time: it has all of what it had before, or all of the text.

    Raises:
        OSError: It cannot be written; what was there is still there.
    """
    if path.exists() and not path.is_file():  # a device or a pipe, which must not be replaced by a file
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()  # of a symbolic link the file, not the link
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def tell_unwritten(option: str, path: Path, error: OSError, consequence: str) -> None:
    """Says on stderr that the file of an option could not be written (whole), why, and what follows."""
    print(f"llm-comm: {option} {path} could not be written: {error.strerror or error}; {consequence}", file=sys.stderr)
