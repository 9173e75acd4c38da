"""Configuration files, tuning tables and variables that somebody has made to break their readers: always ConfigError,
with the file, the key and the line, and never at a length that nobody can read."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from llm_comm import Config, ConfigError
from llm_comm.files import MAX_BYTES, MAX_DEPTH, InvalidYamlError, parse_yaml, read_yaml
from llm_comm.planning import catalogue
from llm_comm.planning.catalogue import load_table

#: The longest error names every option.
LONGEST_ERROR = 2000
DIGITS = "9" * 5000


def error_of_config(text: str | bytes, path: Path) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as error:
        Config.load({"LLM_COMM_CONFIG": str(path)})
    return str(error.value)


def error_of_table(text: str | bytes, path: Path) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as error:
        load_table(path)
    return str(error.value)


READERS = {"config": error_of_config, "table": error_of_table}
HEAD = {"config": "pdl: true\n", "table": "device: x\n"}
TAIL = {"config": "", "table": "\nworld_size: 2\nrows:"}

#: What stands from line 2 on, and what the error says of a configuration file. ``KEY`` is an option of the one and a
#: limit of the other.
HOSTILE = {
    "digits": (f"KEY: {DIGITS}", "line 2: a number of 5000 digits"),
    "digits of another base": (f"KEY: 0x{'f' * 5000}", "line 2: a number of 5002 digits"),
    "a number without digits": ("KEY: 0x_", "line 2: '0x_' is no number"),
    "more than 63 bits": (f"KEY: {1 << 63}", "line 2: 9223372036854775808 is too large"),
    "nesting": (f"KEY: {'[' * 100_000}", f"line 2: more than {MAX_DEPTH} levels"),
    "nesting of blocks": (f"KEY:\n {'- ' * 20_000}", f"line 3: more than {MAX_DEPTH} levels"),
    "aliases": (
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "\n".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
        + "\nKEY: *i",
        "line 3: aliases (*a) are not allowed",
    ),
    "an alias for a key": ("a: &a x\n*a : 1", "line 3: aliases (*a) are not allowed"),
    "a key twice": ("KEY: 1\nlog: info\nKEY: 2", "line 4: 'KEY' stands in line 2 already"),
    "a key twice further down": ("KEY: {a: 1,\n  a: 2}", "line 3: 'a' stands in line 2 already"),
    "a tag": ("KEY: !!binary aGVsbG8=", "line 2: tags (tag:yaml.org,2002:binary) are not allowed"),
    "a tag of Python": ("KEY: !!python/object/apply:os.system [true]", "line 2: tags (tag:yaml.org,2002:python"),
    "a key that is a list": ("? [a]\n: 1", "line 2: a key must be a word"),
    "a second document": ("---\nKEY: 1", "line 2: a second document begins"),
    "a character that is none": ('KEY: "\\Uffffffff"', "line 2: OverflowError"),
    "a NUL": ("#\nKEY: a\0b", "line 3: character #x0000 is not allowed"),
    "other bytes than those of UTF-8": ("#\nKEY: \udcff", "line 3: UnicodeDecodeError"),
    "no end": ("KEY: 'a", "line 2, column"),
    "too long": ("KEY: 1\n" + "#" * MAX_BYTES, f"it has more than {MAX_BYTES} bytes"),
    "a version": (f"%YAML {DIGITS}.1\n---\nKEY: 1", "line 1: ValueError"),
}
KEYS = {"config": "timeout_s", "table": "max_message_bytes"}


#: Where the reader of tables says it in other words, and looks at numbers where they are used.
OF_TABLES = {
    "digits": "line 2: max_message_bytes is '99999",
    "digits of another base": "line 2: max_message_bytes is '0xfff",
    "a number without digits": "line 2: max_message_bytes is '0x_'; it must be a whole number",
    "more than 63 bits": "line 2: max_message_bytes is 9223372036854775808; it must be",
    "aliases": "line 2: aliases (&a) are not allowed",
    "an alias for a key": "line 2: aliases (&a) are not allowed",
    "a tag": "line 2: tags (!!binary) are not allowed",
    "a tag of Python": "line 2: tags (!!python/object/",
    "a character that is none": "line 2: \\U is not allowed in quotes",
    "a NUL": "line 3: character 0 is not allowed",
    "other bytes than those of UTF-8": "line 3: its bytes are not those of UTF-8",
    "no end": "line 2: the quote ' has no end in its line",
    "a version": "line 1: a word cannot begin with %",
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("reader", READERS)
def test_hostile_files(reader: str, what: str, tmp_path: Path) -> None:
    text, found = (part.replace("KEY", KEYS[reader]) for part in HOSTILE[what])
    if reader == "table":
        found = OF_TABLES.get(what, found)
    path = tmp_path / f"{reader}.yaml"
    begins_alone = text.startswith("%")
    error = READERS[reader](text if begins_alone else HEAD[reader] + text + TAIL[reader], path)
    assert found in error
    assert str(path) in error
    assert len(error) < LONGEST_ERROR


def test_files_up_to_the_limits_are_read(tmp_path: Path) -> None:
    path = tmp_path / "full.yaml"
    path.write_bytes(b"a: 1 #".ljust(MAX_BYTES, b"x"))
    assert read_yaml(path) == {"a": 1}
    assert parse_yaml(f"a: {(1 << 63) - 1}".encode()) == {"a": (1 << 63) - 1}
    row = "{operation: all_reduce, up_to: 9, algorithm: one_shot, protocol: LL, blocks: 1, tile_lines: 4, depth: 0}"
    table = f"device: x\nworld_size: 2\nmax_message_bytes: 99\nrows: [{row}]\nmeasured: "
    most = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    path.write_bytes(f"{table}{most} #".encode().ljust(MAX_BYTES, b"x"))
    assert load_table(path).device == "x"
    assert f"line 5: more than {MAX_DEPTH} levels" in error_of_table(f"{table}[{most}]", path)
    parse_yaml(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    parse_yaml(b"{a: " * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH)
    for begin, end in ((b"[", b"]"), (b"{a: ", b"}")):
        with pytest.raises(InvalidYamlError, match=f"line 1: more than {MAX_DEPTH} levels"):
            parse_yaml(begin * (MAX_DEPTH + 1) + end * (MAX_DEPTH + 1))


@pytest.mark.parametrize("reader", READERS)
def test_values_are_not_repeated_at_length(reader: str, tmp_path: Path) -> None:
    for text in (f"{KEYS[reader]}: {'x' * 50_000}", f"{'x' * 900}: 1", f"{KEYS[reader]}: [{'x, ' * 30_000}]"):
        assert len(READERS[reader](HEAD[reader] + text, tmp_path / "file.yaml")) < LONGEST_ERROR


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_ordinary_file(reader: str, tmp_path: Path) -> None:
    """A pipe would be waited for, and zeros have no end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for name in (str(pipe), "/dev/zero", str(tmp_path), "a\0b", "x" * 100_000):
        read = load_table if reader == "table" else lambda path: Config.load({"LLM_COMM_CONFIG": str(path)})
        with pytest.raises(ConfigError) as error:
            read(Path(name))
        assert name[:100] in str(error.value)
        assert len(str(error.value)) < LONGEST_ERROR


def test_values_of_files_are_named_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    assert f"option timeout_s is 'soon' ({path}:3); valid: " in error_of_config("# a\npdl: true\ntimeout_s: soon", path)
    assert f"unknown option 'timeout' ({path}:2) (did you" in error_of_config("pdl: true\ntimeout: 3", path)
    assert f"{path}:2: workspace_bytes: '1Q' is not" in error_of_config("pdl: true\nworkspace_bytes: 1Q", path)
    path.write_text(f"pdl: true\ntable: {tmp_path / 'no.yaml'}")
    with pytest.raises(ConfigError, match=rf"option table \({path}:2\): tuning table .*no\.yaml: No such file"):
        catalogue.check_table_option(Config.load({"LLM_COMM_CONFIG": str(path)}))


def test_rows_of_tables_are_named_with_their_lines(tmp_path: Path) -> None:
    head = "device: x\nworld_size: 2\nmax_message_bytes: 99\n"
    row = (
        "{operation: all_reduce, up_to: 9, algorithm: one_shot, protocol: LL, blocks: BLOCKS, tile_lines: 4, depth: 0}"
    )
    path = tmp_path / "table.yaml"
    two = f"{head}rows:\n- {row.replace('BLOCKS', '1')}\n\n- {row.replace('BLOCKS', '0').replace('9', '99')}"
    assert "table.yaml: line 7: row 2, " in error_of_table(two, path)
    assert "table.yaml: line 4: rows is 'none'; it must be" in error_of_table(f"{head}rows: none", path)
    assert "table.yaml: line 4: fused_blocks is -1; it" in error_of_table(f"{head}fused_blocks: -1\nrows: []", path)
    assert "table.yaml: line 5: it has no such key as x" in error_of_table(f"{head}rows: []\nx: 1", path)


def test_words_that_other_readers_take_for_dates(tmp_path: Path) -> None:
    """PyYAML alone ends in ValueError on the second."""
    for word in ("2026-11-22", "2026-13-45"):
        assert f"option timeout_s is '{word}'" in error_of_config(f"timeout_s: {word}", tmp_path / "config.yaml")


VARIABLES: dict[str, Callable[[str], dict[str, str]]] = {
    "a value": lambda text: {"LLM_COMM_TIMEOUT_S": text},
    "a size": lambda text: {"LLM_COMM_WORKSPACE_BYTES": text},
    "a truth value": lambda text: {"LLM_COMM_PDL": text},
    "an algorithm": lambda text: {"LLM_COMM_ALGORITHM": text},
    "a path": lambda text: {"LLM_COMM_TABLE": text},
    "a file": lambda text: {"LLM_COMM_CONFIG": text},
    "an unknown name": lambda text: {f"LLM_COMM_{text}": "1"},
}


TEXTS = {
    "digits": DIGITS,
    "negative": f"-{DIGITS}",
    "NUL": "a\0b",
    "no characters": "\udcff" * 5000,
    "like a service": "SERVICE_PORT_" * 5000 + "!",
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("variable", VARIABLES)
def test_hostile_variables(variable: str, text: str) -> None:
    environ = VARIABLES[variable](TEXTS[text])
    with pytest.raises(ConfigError) as error:
        catalogue.check_table_option(Config.load(environ))
    assert "LLM_COMM_" in str(error.value)
    assert len(str(error.value)) < LONGEST_ERROR


class Mute:
    """Can neither be compared nor written."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise TypeError

    def __repr__(self) -> str:
        raise TypeError


HOSTILE_VALUES = {
    "huge": 10**5000,
    "-huge": -(10**5000),
    "word": "x" * 10**6,
    "NUL": "a\0b",
    "list": ["x"] * 10**5,
    "array": numpy.array(["info", "auto"]),
    "mute": Mute(),
}


@pytest.mark.parametrize("option", ["timeout_s", "workspace_bytes", "max_message_bytes", "log", "table", "pdl"])
@pytest.mark.parametrize("value", HOSTILE_VALUES.values(), ids=HOSTILE_VALUES)
def test_hostile_values_in_python(option: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        Config.load({}, **{option: value})
    assert f"option {option} is " in str(error.value)
    assert len(str(error.value)) < LONGEST_ERROR


def test_a_file_costs_no_more_memory_than_it_has(tmp_path: Path) -> None:
    """Aliases of aliases made 58 MB of a small file."""
    text, _ = HOSTILE["aliases"]
    tracemalloc.start()
    try:
        error_of_config(text, tmp_path / "config.yaml")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20
