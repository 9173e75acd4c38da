"""Options from a file and from the environment: which were chosen there, and where."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llm_comm.errors import ConfigError
from llm_comm.options import OPTIONS, is_int, parse_option
from llm_comm.quoting import quoted, shortened
from llm_comm.sizes import parse_size
from llm_comm.spelling import guess
from llm_comm.yaml_files import InvalidYamlError, YamlMapping, kind_of, read_yaml

_PREFIX = "LLM_COMM_"
_MAX_NAME = 256
_CONFIG_VARIABLE = f"{_PREFIX}CONFIG"
# Names after the prefix that are no options, and yet no misspelt ones.
_RESERVED = re.compile(
    r"CONFIG"
    # Whatever tests and benchmarks of this project want to tell their own processes.
    r"|(TEST|BENCH)_\w+"
    # Of the NCCL library alone (csrc/nccl, docs/nccl.md).
    r"|NCCL_(DEBUG|LIBRARY)"
    # Where compiled programs are kept (llm_comm/dsl/compiler/cache.py).
    r"|CACHE_DIR"
    # Where the user's tuning tables are (csrc/host/table_choice.h).
    r"|TABLE_DIR"
    # Options of the build (CMake), which some export; and what the authors of images like to set.
    r"|CUDA|PYTHON|BUILT|WERROR|SPLIT_KERNELS|PTXAS_VERBOSE|UNBOUNDED_WAITS|SANITIZE|VERSION"
    # Kubernetes sets these in every container beside a Service whose name begins with llm-comm.
    r"|(\w+_)?SERVICE_(HOST|PORT(_\w+)?)|(\w+_)?PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?"
)
_SIZES = [name for name, option in OPTIONS.items() if option.kind.parse is parse_size]


def _is_reserved(name: str) -> bool:
    return len(name) <= _MAX_NAME and _RESERVED.fullmatch(name) is not None


#: Takes a name that is no option, where it stands and what may be meant, in words; and what to do about it. Whoever
#: returns leaves it out.
OnUnknown = Callable[[str, str], None]


def refuse(what: str, advice: str) -> None:
    """Raise ConfigError for an unknown name: who misspells an option believes that it holds."""
    raise ConfigError(what + advice)


def resolve(environ: Mapping[str, str], given: Mapping[str, Any], on_unknown: OnUnknown = refuse) -> dict[str, Any]:
    """What the constructor of ``Config`` is to take: all options that are not defaults, and their ``origins``.

    Args:
        environ: Variables. One of them may name a file.
        given: Options from Python, which come before both.
        on_unknown: For unknown variables and unknown options of the file; those of ``given`` are refused.

    Raises:
        ConfigError: An unknown option or variable, text that is no value of its option, or a file that cannot be read.
    """
    _check_variables(environ, on_unknown)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    path = environ.get(_CONFIG_VARIABLE)
    if path:
        values, origins = _read_file(path, on_unknown)
    found = _read_environment(environ)
    check_names(given)
    return {
        **values,
        **found,
        **given,
        "origins": {**origins, **{name: _variable(name) for name in found}, **dict.fromkeys(given, "Python")},
    }


def check_names(
    names: Iterable[Any], origins: Mapping[Any, str] = MappingProxyType({}), on_unknown: OnUnknown = refuse
) -> None:
    """Report each name that is no option; ``origins`` says where it stands."""
    for name in names:
        if name not in OPTIONS:
            what = f"unknown option {quoted(name)} ({origins.get(name, 'Python')}){guess(str(name), OPTIONS)}"
            on_unknown(what, f"; valid: {', '.join(OPTIONS)}")


def _check_variables(environ: Mapping[str, str], on_unknown: OnUnknown) -> None:
    """Report each variable with the prefix that is no option."""
    valid = [name.upper() for name in OPTIONS] + [_CONFIG_VARIABLE.removeprefix(_PREFIX)]
    for variable, text in sorted(environ.items()):
        name = variable.removeprefix(_PREFIX)
        if not variable.startswith(_PREFIX) or not text or name in valid or _is_reserved(name):
            continue
        what = f"unknown variable {shortened(variable)}{guess(name.upper(), valid, _PREFIX)}"
        on_unknown(what, f": unset it; valid: {', '.join(_PREFIX + known for known in valid)}")


def _read_file(path: str, on_unknown: OnUnknown) -> tuple[dict[str, Any], dict[str, str]]:
    """Options of a file, and in which line of it each stands."""
    name = f"{_CONFIG_VARIABLE}={shortened(path)}"
    try:
        content = read_yaml(Path(path))
    except InvalidYamlError as error:
        raise ConfigError(f"{name}: cannot read the configuration: {error}") from error
    if content is None:
        return {}, {}
    if not isinstance(content, YamlMapping):
        raise ConfigError(f"{name}: expected 'option: value' lines, found {kind_of(content)}")
    origins = {option: f"{shortened(path)}:{line}" for option, line in content.lines.items()}
    check_names(content, origins, on_unknown)
    known = {option: value for option, value in content.items() if option in OPTIONS}
    # YAML reads 0 and 1 as numbers where the option is spelt as a word.
    if is_int(known.get("multicast")):
        known["multicast"] = str(known["multicast"])
    for option in _SIZES:
        if isinstance(known.get(option), str):
            known[option] = parse_option(option, known[option], f"{origins[option]}: {option}: ")
    return known, {option: origins[option] for option in known}


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in OPTIONS:
        text = environ.get(_variable(name))
        if not text:  # compose files cannot leave a variable out, only leave it empty
            continue
        values[name] = parse_option(name, text, f"{_variable(name)}=")
    return values


def _variable(name: str) -> str:
    return f"{_PREFIX}{name.upper()}"
