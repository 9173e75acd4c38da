"""YAML files of options: nothing in them is passed over, and none costs more than its size.

The core reads their mappings, lists and words (``csrc/host/yaml.h``), as it does those of tuning tables. PyYAML says
what a word means.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from llm_comm import _core
from llm_comm.quoting import quoted

_MAX_NUMBER = 1 << 63
_MAX_DIGITS = 100

_TAG = "tag:yaml.org,2002:"
_CONSTANTS = {f"{_TAG}bool", f"{_TAG}null"}
_NUMBERS = {f"{_TAG}int", f"{_TAG}float"}


class InvalidYamlError(Exception):
    """A file that cannot be used. The text says why and in which line, and leaves the file's name to others."""


class YamlMapping(dict[str, Any]):
    """A mapping of a file. ``lines``: where each key stands."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}


def kind_of(value: Any) -> str:
    """What a value of a file is, in a word."""
    return "dict" if isinstance(value, dict) else type(value).__name__


def read_yaml(path: Path) -> Any:
    """What a file says: a ``YamlMapping``, a list, a word, number, truth value, or None if it is empty.

    Raises:
        InvalidYamlError: It cannot be read, is too large, or has something that such a file has no need of.
    """
    try:
        content = _core.read_file(os.fsencode(path))
    except ValueError as error:
        raise InvalidYamlError(str(error)) from None
    return parse_yaml(content)


def parse_yaml(content: bytes) -> Any:
    """The same of what is in a file."""
    try:
        found = _core.parse_yaml(content)
    except ValueError as error:
        raise InvalidYamlError(str(error)) from None
    return _value(*found)


def _value(line: int, kind: str, content: Any) -> Any:
    if kind == "mapping":
        found = YamlMapping()
        for key, value in content.items():
            found.lines[key] = value[0]
            found[key] = _value(*value)
        return found
    if kind == "list":
        return [_value(*item) for item in content]
    return content if kind == "text" else _meaning(content, line)


def _meaning(word: str, line: int) -> Any:
    """What YAML means by a word. A date stays a word."""
    loader = yaml.SafeLoader("")
    tag = loader.resolve(yaml.ScalarNode, word, (True, False))
    node = yaml.ScalarNode(tag, word)
    if tag in _CONSTANTS:
        return loader.construct_object(node)
    if tag not in _NUMBERS:
        return word
    if len(word) > _MAX_DIGITS:
        raise InvalidYamlError(f"line {line}: a number of {len(word)} digits")
    try:
        number = loader.construct_object(node)
    except (ValueError, OverflowError) as error:
        raise InvalidYamlError(f"line {line}: {quoted(word)} is no number") from error
    if isinstance(number, int) and abs(number) >= _MAX_NUMBER:
        raise InvalidYamlError(f"line {line}: {quoted(number)} is too large")
    return number
