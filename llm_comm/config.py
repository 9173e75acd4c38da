"""Configuration from four sources, in order of precedence: arguments in Python, environment, file, defaults."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from llm_comm import _core
from llm_comm.errors import ConfigError, guess, quoted, shortened
from llm_comm.files import InvalidYamlError, YamlMapping, kind_of, read_yaml
from llm_comm.options import MIB, OPTIONS, arguments_in_words, is_int, parse_option, parse_size

_PREFIX = "LLM_COMM_"
_MAX_NAME = 256
_CONFIG_VARIABLE = f"{_PREFIX}CONFIG"
# Names after the prefix that are no options, but are not reported as misspelt either.
_RESERVED = re.compile(
    r"CONFIG"
    # Variables of this project's tests and benchmarks for their own processes.
    r"|(TEST|BENCH)_\w+"
    # Variables of the NCCL library only (csrc/nccl, docs/reference/nccl.md).
    r"|NCCL_(DEBUG|LIBRARY)"
    # Directory of compiled DSL programs (llm_comm/dsl/compiler/cache.py).
    r"|CACHE_DIR"
    # Directory of the user's tuning tables (csrc/host/table_choice.h).
    r"|TABLE_DIR"
    # Options of the build (CMake), which some users export, and variables that authors of images like to set.
    r"|CUDA|HIP|PYTHON|BUILT|WERROR|SPLIT_KERNELS|PTXAS_VERBOSE|UNBOUNDED_WAITS|SANITIZE|VERSION"
    # Kubernetes sets these in every container of a namespace with a Service whose name begins with llm-comm.
    r"|(\w+_)?SERVICE_(HOST|PORT(_\w+)?)|(\w+_)?PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?"
)
_SIZES = [name for name, option in OPTIONS.items() if option.kind.parse is parse_size]


def _is_reserved(name: str) -> bool:
    return len(name) <= _MAX_NAME and _RESERVED.fullmatch(name) is not None


#: Handler of an unknown name. Arguments: what is unknown (name, place, guess), and advice. A handler that returns makes
#: the name be ignored.
OnUnknown = Callable[[str, str], None]


def refuse(what: str, advice: str) -> None:
    """Raise ConfigError for an unknown name. A misspelt option must not be ignored silently."""
    raise ConfigError(what + advice)


def resolve(
    environ: Mapping[str, str], given: Mapping[str, Any], names: Collection[str], on_unknown: OnUnknown = refuse
) -> dict[str, Any]:
    """Return constructor arguments: the options among ``names`` that are set somewhere, and their ``origins``.

    Args:
        environ: Environment variables. LLM_COMM_CONFIG may name a file.
        given: Options from Python, which take precedence over environment and file.
        names: Options of the class. Options of the other class are ignored in file and environment.
        on_unknown: Called for unknown variables and unknown options of the file. Unknown names in ``given`` raise.

    Raises:
        ConfigError: An option or variable is unknown, a text is no value of its option, or the file cannot be read.
    """
    _check_variables(environ, on_unknown)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    path = environ.get(_CONFIG_VARIABLE)
    if path:
        values, origins = _read_file(path, on_unknown)
    found = _read_environment(environ)
    _check_given(given, names)
    values = {**values, **found, **given}
    origins = {**origins, **{name: _variable(name) for name in found}, **dict.fromkeys(given, "Python")}
    return {
        **{name: value for name, value in values.items() if name in names},
        "origins": {name: origin for name, origin in origins.items() if name in names},
    }


def _check_given(given: Iterable[str], names: Collection[str]) -> None:
    """Raise ConfigError for an unknown option, or one that is not among ``names``."""
    check_names(given)
    others = [name for name in given if name not in names]
    if others:
        raise ConfigError(
            f"only engine integrations read option {', '.join(others)}: leave it out of Config, and set "
            f"{', '.join(map(_variable, others))} for the engine (docs/options.md)"
        )


def check_names(
    names: Iterable[Any], origins: Mapping[Any, str] = MappingProxyType({}), on_unknown: OnUnknown = refuse
) -> None:
    """Report each name that is no option. ``origins`` gives the place of each name."""
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
    """Return the options of a file, and the line of each."""
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
    values = dict(content)
    # YAML reads 0 and 1 as numbers; this option takes words.
    if is_int(values.get("multicast")):
        values["multicast"] = str(values["multicast"])
    for option in _SIZES:
        if isinstance(values.get(option), str):
            values[option] = parse_option(option, values[option], f"{origins[option]}: {option}: ")
    return values, origins


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in OPTIONS:
        text = environ.get(_variable(name))
        if not text:  # compose files can set a variable to an empty text but not leave it out
            continue
        values[name] = parse_option(name, text, f"{_variable(name)}=")
    return values


def _variable(name: str) -> str:
    return f"{_PREFIX}{name.upper()}"


#: Message size in bytes from which ``max_blocks`` applies: a rank's input, or the whole tensor of an all-gather or
#: reduce-scatter. Smaller operations end before they delay a concurrent computation.
LARGE_BYTES = MIB

#: Environment variables of other libraries that forbid NVLink multicast, and the value that does.
MULTICAST_OFF_VARIABLES = {
    name: off for name, off in _core.multicast_switches.items() if not name.startswith("LLM_COMM_")
}


_Options = TypeVar("_Options", bound="Config")


def _resolving(cls: type[_Options]) -> type[_Options]:
    """Replace the constructor: options that are not passed come from file and environment. Also add the section
    ``Args`` to the docstring."""
    take: Callable[..., None] = vars(cls)["__init__"]

    @functools.wraps(take)
    def __init__(self: _Options, *positional: object, **given: Any) -> None:
        if positional:
            raise ConfigError(
                f"{cls.__name__} takes options by name, as timeout_s=5; found {quoted(positional[0])} without one"
            )
        if "origins" in given:  # dataclasses.replace copies a configuration: all values are known
            _check_given([name for name in given if name != "origins"], _names_of(cls))
            take(self, **given)
        else:
            take(self, **resolve(os.environ, given, _names_of(cls)))

    cls.__init__ = __init__  # type: ignore[method-assign, assignment]
    arguments = arguments_in_words(vars(cls)["__annotations__"])
    cls.__doc__ = (cls.__doc__ or "").replace("    Raises:", f"{arguments}\n\n    Raises:")
    return cls


def _names_of(cls: type[Config]) -> tuple[str, ...]:
    """Return the options that are fields of a class."""
    return tuple(field.name for field in dataclasses.fields(cls) if field.name in OPTIONS)


def refuse_wire(config: Config, is_on: str, remedy: str) -> None:
    """Raise ConfigError if option ``wire`` is set beside a batch-invariant mode.

    Args:
        config: Options with their origins.
        is_on: Mode that is on, for the error.
        remedy: Change that permits ``wire``, for the error.
    """
    if config.wire != "none":
        origin = config.origins.get("wire", "Python")
        raise ConfigError(
            f"option wire is {config.wire!r} ({origin}), and {is_on}: quantized sums of a token depend on its batch. "
            f"Set wire to 'none', or {remedy}"
        )


@_resolving
@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of a communicator. ``EngineOptions`` adds options that only engine integrations read.

    Each option is also an environment variable, ``LLM_COMM_`` and the name in capitals, and a key of the YAML file that
    ``LLM_COMM_CONFIG`` names. An empty variable counts as not set. The constructor reads all four sources, with
    increasing precedence: defaults, file, environment, arguments. ``Config.load({}, ...)`` reads neither file nor
    environment.

    docs/options.md and ``help(llm_comm.Config)`` say what each option does, and whether all ranks of a group must have
    the same value. Ranks compare these values when a communicator is made.

    Raises:
        ConfigError: An option is unknown, a value is not allowed, or the file cannot be read.
    """

    multicast: str = "auto"
    sum: str = "rank_order"
    wire: str = "none"
    wire_min_bytes: int = 8 * MIB
    timeout_s: float = 30.0
    log: str = "warning"
    workspace_bytes: int = 64 * MIB
    max_message_bytes: int | None = None
    max_blocks: int | None = None
    algorithm: str = "auto"
    pdl: bool = True
    fuse_linear: bool | str = "auto"
    deterministic: bool = False
    batch_invariant_norm: str = "engine"
    debug: bool = False
    share_gpu: bool = False
    nvtx: bool = False
    node: str | None = None
    node_transport: str = "auto"
    table: str | None = None
    dsl: str | None = None
    dsl_max_bytes: int = 8 * MIB
    #: Source of each value; options not listed have their default. A constructor call with ``origins``, as by
    #: ``dataclasses.replace``, takes all values as given and reads neither file nor environment.
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in _names_of(type(self)):
            value, kind = getattr(self, name), OPTIONS[name].kind
            if not kind.is_valid(value):
                raise ConfigError(
                    f"option {name} is {quoted(value)} ({self.origins.get(name, 'Python')}); valid: {kind.valid_values}"
                )
        if self.deterministic:
            is_on = f"deterministic is on ({self.origins.get('deterministic', 'Python')})"
            refuse_wire(self, is_on, "deterministic to false")
        # Values passed to dataclasses.replace count as set in Python.
        given = {f.name for f in dataclasses.fields(self) if f.name in OPTIONS and getattr(self, f.name) != f.default}
        object.__setattr__(self, "origins", {**dict.fromkeys(sorted(given), "Python"), **self.origins})

    @classmethod
    def load(cls: type[_Options], environ: Mapping[str, str] | None = None, **overrides: Any) -> _Options:
        """Load like the constructor, from the variables ``environ``; None means ``os.environ``.

        Raises:
            ConfigError: See the constructor.
        """
        if not isinstance(environ, Mapping | None):
            raise ConfigError(f"Config.load takes a mapping of variables, or options by name; found {quoted(environ)}")
        return cls(**resolve(os.environ if environ is None else environ, overrides, _names_of(cls)))

    @property
    def sums_in_any_order(self) -> bool:
        """True if sums may be computed in the NVLink switch."""
        return self.sum == "any" and not self.deterministic

    def replace(self: _Options, **changes: Any) -> _Options:
        """Return a copy with some options changed. File and environment are not read again."""
        origins = {**self.origins, **dict.fromkeys(changes, "Python")}
        return dataclasses.replace(self, **changes, origins=origins)


@_resolving
@dataclass(frozen=True, kw_only=True)
class EngineOptions(Config):
    """Options of an engine integration: those of ``Config`` and options that only engines read (docs/options.md).

    Raises:
        ConfigError: See ``Config``.
    """

    enable: bool = True
    fuse: bool = True
    fuse_experts: bool | str = "auto"
    tune_at_start: str | float = "auto"
    all_gather: bool = True
    reduce_scatter: bool = True
    batch_invariant_linear: str = "engine"
    untested: bool = False
    sleep: bool = False
    stats: bool | int = False
    stats_host: str = "127.0.0.1"
    multi_node: bool = False


def load_with_unknown(on_unknown: OnUnknown, **options: Any) -> EngineOptions:
    """Load ``EngineOptions(**options)``, but pass unknown variables and unknown options of the file to ``on_unknown``.

    Raises:
        ConfigError: See the constructor; also whatever ``on_unknown`` raises.
    """
    return EngineOptions(**resolve(os.environ, options, _names_of(EngineOptions), on_unknown))


def multicast_state(config: Config | None = None, environ: Mapping[str, str] | None = None) -> tuple[bool, str]:
    """Return whether variables and options permit NVLink multicast on this rank, and the reason.

    The driver is not asked. The conditions of the tuning table are in ``planning/multicast.py``.
    """
    environ = os.environ if environ is None else environ
    config = Config.load(environ) if config is None else config
    switches = {name: _printable(environ[name]) for name in _core.multicast_switches if name in environ}
    by = _core.multicast_switched_off(switches)
    if by:
        return False, by
    origin = config.origins.get("multicast", "default")
    return config.multicast != "0", f"multicast is {config.multicast!r} ({origin})"


def _printable(text: str) -> str:
    """Escape undecodable bytes of a variable's value."""
    return text.encode(errors="backslashreplace").decode()
