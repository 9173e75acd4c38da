"""One configuration, from four places: defaults < file < environment < Python."""

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
# Names after the prefix that are no options, and yet no misspelt ones.
_RESERVED = re.compile(
    r"CONFIG"
    # Whatever tests and benchmarks of this project want to tell their own processes.
    r"|(TEST|BENCH)_\w+"
    # Of the NCCL library alone (csrc/nccl, docs/reference/nccl.md).
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


def resolve(
    environ: Mapping[str, str], given: Mapping[str, Any], names: Collection[str], on_unknown: OnUnknown = refuse
) -> dict[str, Any]:
    """Arguments of a constructor: all options among ``names`` that are not defaults, and their ``origins``.

    Args:
        environ: Variables. One of them may name a file.
        given: Options from Python, which come before both.
        names: Options of the class. File and environment may have others, which are those of the other class.
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
    _check_given(given, names)
    values = {**values, **found, **given}
    origins = {**origins, **{name: _variable(name) for name in found}, **dict.fromkeys(given, "Python")}
    return {
        **{name: value for name, value in values.items() if name in names},
        "origins": {name: origin for name, origin in origins.items() if name in names},
    }


def _check_given(given: Iterable[str], names: Collection[str]) -> None:
    """Raise ConfigError for an option that there is not, or that is not among ``names``."""
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
    values = dict(content)
    # YAML reads 0 and 1 as numbers where the option is spelt as a word.
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
        if not text:  # compose files cannot leave a variable out, only leave it empty
            continue
        values[name] = parse_option(name, text, f"{_variable(name)}=")
    return values


def _variable(name: str) -> str:
    return f"{_PREFIX}{name.upper()}"


#: From this size of a rank's input on ``max_blocks`` bounds an operation; of one on parts, from this size of the whole
#: tensor on. Smaller ones are over before a computation beside them would notice.
LARGE_BYTES = MIB

#: Variables by which a machine says that NVLink multicast must not be used, and the value that says so.
MULTICAST_OFF_VARIABLES = {
    name: off for name, off in _core.multicast_switches.items() if not name.startswith("LLM_COMM_")
}


_Options = TypeVar("_Options", bound="Config")


def _resolving(cls: type[_Options]) -> type[_Options]:
    """Makes the constructor, which dataclass wrote, look for what it is not given in the file and the environment, and
    fills in the docstring."""
    take: Callable[..., None] = vars(cls)["__init__"]

    @functools.wraps(take)
    def __init__(self: _Options, *positional: object, **given: Any) -> None:
        if positional:
            raise ConfigError(
                f"{cls.__name__} takes options by name, as timeout_s=5; found {quoted(positional[0])} without one"
            )
        if "origins" in given:  # the copy of a configuration: nothing is left to look for
            _check_given([name for name in given if name != "origins"], _names_of(cls))
            take(self, **given)
        else:
            take(self, **resolve(os.environ, given, _names_of(cls)))

    cls.__init__ = __init__  # type: ignore[method-assign, assignment]
    cls.__doc__ = (cls.__doc__ or "").replace("    {arguments}", arguments_in_words(vars(cls)["__annotations__"]))
    return cls


def _names_of(cls: type[Config]) -> tuple[str, ...]:
    """Options that a class has."""
    return tuple(field.name for field in dataclasses.fields(cls) if field.name in OPTIONS)


@_resolving
@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of a communicator. ``EngineOptions`` adds those that only engine integrations read.

    Each is also an environment variable, ``LLM_COMM_`` and the name in capitals, and a key of the YAML file that
    ``LLM_COMM_CONFIG`` names. A variable that is empty counts as not set. The constructor looks in all four places:
    defaults < file < environment < the arguments. ``Config.load({}, ...)`` looks at no file and no environment.

    The section ``Args`` comes from ``llm_comm/options.py`` (``help(llm_comm.Config)``, docs/options.md). It says for
    each option whether all ranks of a group must have the same value; that is compared when a communicator is made.

    {arguments}

    Raises:
        ConfigError: An unknown option or variable, a value that is not allowed, or a file that cannot be read.
    """

    multicast: str = "auto"
    sum: str = "rank_order"
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
    #: Where each value comes from; what is not named is a default. Given to the constructor, as ``dataclasses.replace``
    #: does, it says that all options are: file and environment are not read again.
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in _names_of(type(self)):
            value, kind = getattr(self, name), OPTIONS[name].kind
            if not kind.is_valid(value):
                raise ConfigError(
                    f"option {name} is {quoted(value)} ({self.origins.get(name, 'Python')}); valid: {kind.valid_values}"
                )
        # What dataclasses.replace was given was chosen too.
        given = {f.name for f in dataclasses.fields(self) if f.name in OPTIONS and getattr(self, f.name) != f.default}
        object.__setattr__(self, "origins", {**dict.fromkeys(sorted(given), "Python"), **self.origins})

    @classmethod
    def load(cls: type[_Options], environ: Mapping[str, str] | None = None, **overrides: Any) -> _Options:
        """As the constructor, with the variables to read: ``os.environ`` if None.

        Raises:
            ConfigError: As of the constructor.
        """
        if not isinstance(environ, Mapping | None):
            raise ConfigError(f"Config.load takes a mapping of variables, or options by name; found {quoted(environ)}")
        return cls(**resolve(os.environ if environ is None else environ, overrides, _names_of(cls)))

    @property
    def sums_in_any_order(self) -> bool:
        """Whether sums may be made in the NVLink switch."""
        return self.sum == "any" and not self.deterministic

    def replace(self: _Options, **changes: Any) -> _Options:
        """A copy with some options changed. File and environment are not read again."""
        origins = {**self.origins, **dict.fromkeys(changes, "Python")}
        return dataclasses.replace(self, **changes, origins=origins)


@_resolving
@dataclass(frozen=True, kw_only=True)
class EngineOptions(Config):
    """Options of an engine integration: those of ``Config``, and those below, from the same four places.

    {arguments}

    Raises:
        ConfigError: As of ``Config``.
    """

    enable: bool = True
    fuse: bool = True
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
    """As ``EngineOptions(**options)``, but unknown variables and unknown options of the file go to ``on_unknown``.

    Raises:
        ConfigError: As of the constructor, and whatever ``on_unknown`` raises.
    """
    return EngineOptions(**resolve(os.environ, options, _names_of(EngineOptions), on_unknown))


def multicast_state(config: Config | None = None, environ: Mapping[str, str] | None = None) -> tuple[bool, str]:
    """Whether this rank may set up NVLink multicast, as far as variables and options say, and why (not). Never asks the
    driver. What the tuning table has to say is in ``planning/multicast.py``."""
    environ = os.environ if environ is None else environ
    config = Config.load(environ) if config is None else config
    switches = {name: _printable(environ[name]) for name in _core.multicast_switches if name in environ}
    by = _core.multicast_switched_off(switches)
    if by:
        return False, by
    origin = config.origins.get("multicast", "default")
    return config.multicast != "0", f"multicast is {config.multicast!r} ({origin})"


def _printable(text: str) -> str:
    """A variable's value with escapes for what is no character."""
    return text.encode(errors="backslashreplace").decode()
