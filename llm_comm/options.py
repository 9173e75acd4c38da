"""Which options there are, what each may be, and how it is written in variables and on command lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llm_comm import registry
from llm_comm.errors import ConfigError
from llm_comm.quoting import quoted
from llm_comm.sizes import MIB, parse_size

_MAX_PATH = 4096
_MAX_NODE = 64
_MAX_PROGRAMS = 1000
_PROGRAMS = re.compile(r"(?a:[\w.]+:\w+(, *[\w.]+:\w+)*)")


def _boolean(text: str) -> bool:
    values = {
        "0": False,
        "false": False,
        "off": False,
        "no": False,
        "1": True,
        "true": True,
        "on": True,
        "yes": True,
    }
    return values[text.lower()]


@dataclass(frozen=True)
class Option:
    """How an option is read and judged.

    Attributes:
        parse: Reads it from text. Raises ValueError or KeyError.
        is_valid: Whether it may have a value.
        valid_values: These, in words.
    """

    parse: Callable[[str], Any]
    is_valid: Callable[[Any], bool]
    valid_values: str


def _one_of(*values: str) -> Option:
    return Option(str, lambda v: isinstance(v, str) and v in values, " or ".join(repr(v) for v in values))


def is_int(value: Any) -> bool:
    """Whether it is a whole number. To Python True is one."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value and len(value) <= _MAX_PATH


def _is_algorithm(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    return value in ("auto", *registry.algorithm_names()) or registry.is_program(value)


def _is_list_of_programs(value: Any) -> bool:
    # Ranks compare the options in one message.
    return isinstance(value, str) and len(value) <= _MAX_PROGRAMS and _PROGRAMS.fullmatch(value) is not None


_AS_TEXT = "environment and file: 64M is 64 MiB"


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_NODE and value.isprintable() and value.isascii()


_BOOLEAN = Option(_boolean, lambda v: isinstance(v, bool), "true or false (environment: 1 or 0)")

_BOOLEAN_OR_AUTO = Option(
    lambda text: text if text == "auto" else _boolean(text),
    lambda v: isinstance(v, bool) or (isinstance(v, str) and v == "auto"),
    "'auto', true or false (environment: auto, 1 or 0)",
)

#: By name, in the order of ``Config``.
OPTIONS: dict[str, Option] = {
    "enable": _BOOLEAN,
    "multicast": _one_of("auto", "0", "1"),
    "sum": _one_of("rank_order", "any"),
    "timeout_s": Option(
        float,
        lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < 1e6,
        "a number of seconds above 0 and below 1000000",
    ),
    "log": _one_of("debug", "info", "warning", "error"),
    "workspace_bytes": Option(
        parse_size,
        lambda v: is_int(v) and MIB <= v <= 4096 * MIB,
        f"bytes, 1 MiB to 4 GiB ({_AS_TEXT})",
    ),
    "max_message_bytes": Option(
        parse_size,
        lambda v: v is None or (is_int(v) and 0 <= v < 1 << 63),
        f"bytes >= 0 and below 8 EiB ({_AS_TEXT}; default: that of the tuning table)",
    ),
    "max_blocks": Option(
        int, lambda v: v is None or (is_int(v) and 8 <= v < 1 << 16), "a number of blocks, 8 to 65535 (default: none)"
    ),
    "algorithm": Option(
        str,
        _is_algorithm,
        f"{_one_of('auto', *registry.algorithm_names()).valid_values}, or {registry.PROGRAM_PREFIX}NAME for a program "
        "of option dsl",
    ),
    "pdl": _BOOLEAN,
    "fuse": _BOOLEAN,
    "fuse_linear": _BOOLEAN_OR_AUTO,
    "all_gather": _BOOLEAN,
    "reduce_scatter": _BOOLEAN,
    "deterministic": _BOOLEAN,
    "batch_invariant_norm": _one_of("engine", "llm_comm"),
    "batch_invariant_linear": _one_of("engine", "llm_comm"),
    "debug": _BOOLEAN,
    "share_gpu": _BOOLEAN,
    "sleep": _BOOLEAN,
    "stats": _BOOLEAN,
    "stats_port": Option(
        int, lambda v: v is None or (is_int(v) and 1 <= v < 1 << 16), "a port, 1 to 65535 (default: none)"
    ),
    "stats_host": Option(str, _is_name, f"an address or host name of 1 to {_MAX_NODE} printable ASCII characters"),
    "nvtx": _BOOLEAN,
    "multi_node": _BOOLEAN,
    "node": Option(
        str,
        lambda v: v is None or _is_name(v),
        f"a name of 1 to {_MAX_NODE} printable ASCII characters (default: by the boot id of the machine)",
    ),
    "node_transport": _one_of("auto", "nccl", "gloo", "ucx"),
    "table": Option(str, lambda v: v is None or _is_path(v), "path of a tuning table"),
    "dsl": Option(
        str,
        lambda v: v is None or _is_list_of_programs(v),
        f"programs as MODULE:PROGRAM, with commas between them, up to {_MAX_PROGRAMS} characters",
    ),
    "dsl_max_bytes": Option(
        parse_size, lambda v: is_int(v) and 1 <= v <= 4096 * MIB, f"bytes, 1 to 4 GiB ({_AS_TEXT})"
    ),
    "dsl_schedules": Option(
        int,
        lambda v: v is None or (is_int(v) and 0 <= v <= 1_000_000),
        "a number of schedules, 0 to 1000000 (default: by the size of the program)",
    ),
}


def parse_option(name: str, text: str, source: str = "") -> Any:
    """Reads an option from text, as variables and command lines have it.

    Raises:
        ConfigError: It is not allowed; ``source`` comes before the text.
    """
    option = OPTIONS[name]
    try:
        value = option.parse(text)
    except (ValueError, KeyError):
        is_valid = False
    else:
        is_valid = option.is_valid(value)
    if not is_valid:
        raise ConfigError(f"{source}{quoted(text)} is not allowed; valid: {option.valid_values}")
    return value
