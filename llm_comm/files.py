"""Files: YAML of options, reports of commands, and locks.

Nothing in a YAML file is passed over, and none costs more than its size. Only what such files need is read: mappings,
lists, words, numbers. PyYAML alone takes the last of two equal keys, follows aliases that make gigabytes of a few
lines, and ends in whatever exception a value happens to raise.
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

#: PyYAML reads about 100 KiB in a second. The files of this package have 3 KiB.
MAX_BYTES = 128 << 10
MAX_DEPTH = 16
_MAX_NUMBER = 1 << 63
_MAX_DIGITS = 100

_TAG = "tag:yaml.org,2002:"
_CONSTANTS = {f"{_TAG}bool", f"{_TAG}null"}
_NUMBERS = {f"{_TAG}int", f"{_TAG}float"}


class InvalidYamlError(Exception):
    """A file that cannot be used. The text says why and in which line, and leaves the file's name to others."""


class YamlMapping(dict[Any, Any]):
    """A mapping of a file. ``lines``: where each key stands."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, int] = {}


def kind_of(value: Any) -> str:
    """What a value of a file is, in a word."""
    return "dict" if isinstance(value, dict) else type(value).__name__


def read_yaml(path: Path) -> Any:
    """What a file says: a ``YamlMapping``, a list, a word, number, truth value, or None if it is empty.

    Raises:
        InvalidYamlError: It cannot be read, is too large, or has something that such a file has no need of.
    """
    return parse_yaml(_read(path))


def parse_yaml(content: bytes) -> Any:
    """The same of what is in a file."""
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
    # Escapes and directives with numbers that stand for nothing end in ValueError or OverflowError.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise InvalidYamlError(f"line {reader.line()}: {type(error).__name__}: {shortened(str(error))}") from error


def _read(path: Path) -> bytes:
    try:
        # A pipe or terminal would be waited for, and has nothing for the second rank that reads it.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InvalidYamlError("it is no ordinary file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidYamlError(f"{type(error).__name__}: {error.strerror}") from error
    except ValueError as error:  # a name with a NUL
        raise InvalidYamlError(f"{type(error).__name__}: {shortened(str(error))}") from error
    if len(content) > MAX_BYTES:
        raise InvalidYamlError(f"it has more than {MAX_BYTES} bytes")
    return content


class _Reader:
    """Makes values of PyYAML's events, one after the other, so that nothing is made of what is refused."""

    def __init__(self, text: str) -> None:
        self._loader = yaml.SafeLoader(text)
        self._loader.name = "this file"

    def line(self) -> int:
        """How far it has read."""
        return int(self._loader.line) + 1

    def document(self) -> Any:
        self._next()  # the begin of the stream
        if self._loader.check_event(yaml.StreamEndEvent):
            return None
        self._next()  # the begin of the document
        value = self._value(self._next(), 0)
        self._next()  # its end
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
        """What YAML means by a word. A date stays a word."""
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
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")  # another process may write the same file
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


_POLL_S = 0.05


@contextmanager
def locked(path: Path, patience_s: float = math.inf) -> Iterator[None]:
    """The lock ends with the process at the latest. The file stays: who waits for it has it open.

    Args:
        path: The file.
        patience_s: Longest wait in seconds; then the block runs without the lock.

    Raises:
        OSError: The file cannot be made or locked.
    """
    deadline = time.monotonic() + patience_s
    # With these flags opening does not block, not even where a pipe lies there.
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
