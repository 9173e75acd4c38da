"""Files: YAML of options and tuning tables, reports of commands, and locks.

The YAML reader accepts mappings, lists, words and numbers, and rejects everything else with a line number. PyYAML alone
keeps the last of two equal keys, expands aliases to gigabytes, and raises arbitrary exceptions for some values.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from llm_comm.errors import quoted, shortened

#: Size limit of a file in bytes. PyYAML reads about 100 KiB per second; files of this package have 3 KiB.
MAX_BYTES = 128 << 10
MAX_DEPTH = 16
_MAX_NUMBER = 1 << 63
_MAX_DIGITS = 100

_TAG = "tag:yaml.org,2002:"
_CONSTANTS = {f"{_TAG}bool", f"{_TAG}null"}
_NUMBERS = {f"{_TAG}int", f"{_TAG}float"}


class InvalidYamlError(Exception):
    """A YAML file cannot be used. The text gives reason and line; callers add the file name."""


class YamlMapping(dict[Any, Any]):
    """Mapping of a YAML file. ``lines`` has the line number of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, int] = {}


def kind_of(value: Any) -> str:
    """Return the type of a YAML value in a word, for errors."""
    return "dict" if isinstance(value, dict) else type(value).__name__


def read_yaml(path: Path) -> Any:
    """Read a YAML file: a ``YamlMapping``, list, string, number, bool, or None if the file is empty.

    Raises:
        InvalidYamlError: The file cannot be read, is too large, or uses an unsupported feature of YAML.
    """
    return parse_yaml(_read(path))


def parse_yaml(content: bytes) -> Any:
    """Parse the content of a YAML file, see ``read_yaml``."""
    try:
        reader = _Reader(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InvalidYamlError(f"line {line}: {type(error).__name__}: {error}") from error
    except yaml.reader.ReaderError as error:
        line = content.decode("utf-8").count("\n", 0, error.position) + 1
        raise InvalidYamlError(f"line {line}: character #x{error.character:04x} is not allowed") from error
    try:
        return reader.document()
    except yaml.MarkedYAMLError as error:
        raise InvalidYamlError(shortened(str(error))) from error
    # Invalid escapes and out-of-range numbers end in ValueError or OverflowError.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise InvalidYamlError(f"line {reader.line()}: {type(error).__name__}: {shortened(str(error))}") from error


def _read(path: Path) -> bytes:
    try:
        # Reading a pipe or terminal would block, and a second rank would find it empty.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InvalidYamlError("it is no ordinary file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidYamlError(f"{type(error).__name__}: {error.strerror}") from error
    except ValueError as error:  # the name contains a NUL
        raise InvalidYamlError(f"{type(error).__name__}: {shortened(str(error))}") from error
    if len(content) > MAX_BYTES:
        raise InvalidYamlError(f"it has more than {MAX_BYTES} bytes")
    return content


class _Reader:
    """Build values from PyYAML events one by one, so that rejected content is never constructed."""

    def __init__(self, text: str) -> None:
        self._loader = yaml.SafeLoader(text)
        self._loader.name = "this file"

    def line(self) -> int:
        """Return the current line number."""
        return int(self._loader.line) + 1

    def document(self) -> Any:
        self._next()  # StreamStart
        if self._loader.check_event(yaml.StreamEndEvent):
            return None
        self._next()  # DocumentStart
        value = self._value(self._next(), 0)
        self._next()  # DocumentEnd
        if not self._loader.check_event(yaml.StreamEndEvent):
            raise InvalidYamlError(f"line {_line(self._next())}: a second document begins; there may be one")
        return value

    def _next(self) -> Any:
        return self._loader.get_event()

    def _value(self, event: Any, depth: int) -> Any:
        line = _line(event)
        if isinstance(event, yaml.AliasEvent):
            raise InvalidYamlError(
                f"line {line}: aliases (*{shortened(str(event.anchor), 40)}) are not allowed: write it out"
            )
        if event.tag is not None:
            raise InvalidYamlError(f"line {line}: tags ({shortened(event.tag, 40)}) are not allowed")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if depth == MAX_DEPTH:
            raise InvalidYamlError(f"line {line}: more than {MAX_DEPTH} levels")
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        return self._mapping(depth + 1) if is_mapping else self._sequence(depth + 1)

    def _mapping(self, depth: int) -> YamlMapping:
        found = YamlMapping()
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            line = _line(event)
            if not isinstance(event, yaml.ScalarEvent | yaml.AliasEvent):
                raise InvalidYamlError(f"line {line}: a key must be a word")
            key = self._value(event, depth)
            if key in found:
                raise InvalidYamlError(f"line {line}: {quoted(key)} stands in line {found.lines[key]} already")
            found.lines[key] = line
            found[key] = self._value(self._next(), depth)
        return found

    def _sequence(self, depth: int) -> list[Any]:
        found = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            found.append(self._value(event, depth))
        return found

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        """Return the value of a scalar. Dates stay strings."""
        tag = self._loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        node = yaml.ScalarNode(tag, event.value)
        if tag in _CONSTANTS:
            return self._loader.construct_object(node)
        if tag not in _NUMBERS:
            return event.value
        if len(event.value) > _MAX_DIGITS:
            raise InvalidYamlError(f"line {_line(event)}: a number of {len(event.value)} digits")
        try:
            number = self._loader.construct_object(node)
        except (ValueError, OverflowError) as error:
            raise InvalidYamlError(f"line {_line(event)}: {quoted(event.value)} is no number") from error
        if isinstance(number, int) and abs(number) >= _MAX_NUMBER:
            raise InvalidYamlError(f"line {_line(event)}: {quoted(number)} is too large")
        return number


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def write_text(option: str, path: Path, text: str) -> bool:
    """Write the output file of an option. If that fails, report it and print the content instead.

    Returns:
        True if the file was written. Otherwise the command must fail.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        tell_unwritten(option, path, error, "its content is on the standard output")
        print(text, flush=True)
        return False
    return True


def write_json(option: str, path: Path, report: Mapping[str, Any]) -> bool:
    """Write ``report`` as JSON, see :func:`write_text`."""
    return write_text(option, path, json.dumps(report, indent=2) + "\n")


def replace_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write ``report`` as JSON, see :func:`replace_text`."""
    replace_text(path, json.dumps(report, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: it always has its complete old or its complete new content.

    Raises:
        OSError: The file cannot be written. The old content is unchanged.
    """
    if path.exists() and not path.is_file():  # a device or pipe must not be replaced by a regular file
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()  # the target of a symbolic link, not the link
    # unique name: another process may write the same file
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def tell_unwritten(option: str, path: Path, error: OSError, consequence: str) -> None:
    """Report on stderr that the output file of an option was not (completely) written, why, and the consequence."""
    print(f"llm-comm: {option} {path} could not be written: {error.strerror or error}; {consequence}", file=sys.stderr)


_POLL_S = 0.05


@contextmanager
def locked(path: Path, patience_s: float = math.inf) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` during the block. The kernel releases the lock if the process dies.

    The file is never deleted, since waiting processes have it open.

    Args:
        path: Lock file, created if missing.
        patience_s: Longest wait in seconds. After it the block runs without the lock.

    Raises:
        OSError: The file cannot be created or locked.
    """
    deadline = time.monotonic() + patience_s
    # With these flags open does not block, even if the path is a pipe.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)
