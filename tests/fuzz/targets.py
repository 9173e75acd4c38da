"""What is fuzzed: the three readers of bytes that others wrote. Each target takes any bytes, and raises if its reader
raises anything but the error that is promised, repeats its input at length, or takes one thing for another."""

from __future__ import annotations

import atexit
import datetime
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from llm_comm.config import Config
from llm_comm.errors import ConfigError, RendezvousError
from llm_comm.files import InvalidYamlError, YamlMapping, parse_yaml
from llm_comm.planning.catalogue import load_table, table_text
from llm_comm.runtime import rendezvous
from llm_comm.runtime.descriptors import MAX_HELLO_BYTES, Exchange, Invitation, hello, listen
from llm_comm.runtime.rank_names import RankName, RankNames

LONGEST_ERROR = 4000
ENVIRONMENT = b"environment\n"
SECRET = "5ec3e7" * 6
NAMES = RankNames("fuzzed", (RankName(0, 0), RankName(1, 1)), 2)

_directory = Path(tempfile.mkdtemp(prefix="llm_comm_fuzz"))
atexit.register(shutil.rmtree, _directory, ignore_errors=True)


def config(data: bytes) -> None:
    """A configuration file, or after ``ENVIRONMENT`` lines ``NAME=value`` of variables."""
    if data.startswith(ENVIRONMENT):
        lines = data.removeprefix(ENVIRONMENT).decode("utf-8", "surrogateescape").split("\n")
        environ = {f"LLM_COMM_{name}": text for name, _, text in (line.partition("=") for line in lines)}
        environ.pop("LLM_COMM_CONFIG", None)
    else:
        environ = {"LLM_COMM_CONFIG": str(_written("config.yaml", data))}
        _compare_with_pyyaml(data)
    try:
        found = Config.load(environ)
    except ConfigError as error:
        _check_error(error, "LLM_COMM_CONFIG" in environ and "config.yaml")
        return
    assert found.replace() == found


def table(data: bytes) -> None:
    """A tuning table: one that is taken and written is the same when it is read again."""
    path = _written("table.yaml", data)
    try:
        found = load_table(path)
    except ConfigError as error:
        _check_error(error, "table.yaml")
        return
    path.write_text(table_text(*found), encoding="utf-8")
    assert load_table(path) == found


def message(data: bytes) -> None:
    """By the first byte: a message of a step, or what somebody says on the socket, with so many descriptors."""
    kind, data = data[:1], data[1:]
    if kind == b"m":
        _step_message(data)
    else:
        _exchange.say(data, descriptors=ord(kind or b"\0") % 4)


def _step_message(data: bytes) -> None:
    try:
        found = rendezvous.decode(data)
    except RendezvousError as error:
        _check_error(error, False)
        return
    assert isinstance(found.step, str)
    try:
        again = rendezvous.decode(rendezvous.encode(found))
    except ValueError:  # spaces between, which cost nothing on the way in
        return
    assert repr(again[:2]) == repr(found[:2])


class _Listener:
    """A rank of two that waits for the other one, which never comes."""

    def __init__(self) -> None:
        self._server = listen()
        self._null = os.open(os.devnull, os.O_RDONLY)
        self._exchange: Exchange | None = None
        self._count = self._descriptors = 0

    def say(self, data: bytes, descriptors: int) -> None:
        exchange = Exchange(0, self._server, [Invitation("", SECRET), Invitation("", "")], self._null, 1.0, NAMES)
        theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            if data:
                socket.send_fds(theirs, [data], [self._null] * descriptors)
            exchange._welcome(ours)
        is_hello = data[:MAX_HELLO_BYTES] == hello(SECRET, 1)
        assert bool(exchange._received) == (is_hello and descriptors > 0)
        for descriptor in exchange._received.values():
            os.close(descriptor)
        exchange._drop_silent()
        self._count += 1
        if self._count % 256 == 0:
            open_now = len(os.listdir("/proc/self/fd"))
            assert self._descriptors in (0, open_now), "descriptors are left open"
            self._descriptors = open_now


_exchange = _Listener()


def _written(name: str, data: bytes) -> Path:
    path = _directory / name
    path.write_bytes(data)
    return path


def _check_error(error: Exception, name: str | bool) -> None:
    text = str(error)
    assert text
    assert len(text) < LONGEST_ERROR, "the error repeats its input"
    assert not name or str(name) in text, "the error does not name the file"


def _compare_with_pyyaml(data: bytes) -> None:
    """Whatever is taken means what PyYAML says, but for dates and merge keys, which stay words."""
    try:
        ours = parse_yaml(data)
    except InvalidYamlError:
        return
    try:
        theirs = yaml.safe_load(data.decode("utf-8"))
    except (yaml.YAMLError, ValueError):
        return
    if "<<" not in repr(ours) and not _has_dates(theirs):
        assert repr(_plain(ours)) == repr(theirs)


def _has_dates(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_dates(part) for pair in value.items() for part in pair)
    return any(map(_has_dates, value)) if isinstance(value, list) else isinstance(value, datetime.date)


def _plain(value: Any) -> Any:
    if isinstance(value, YamlMapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value


TARGETS: dict[str, Callable[[bytes], None]] = {"config": config, "table": table, "messages": message}
