"""One configuration, from four places: defaults < file < environment < Python."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llm_comm import _core
from llm_comm.errors import ConfigError
from llm_comm.option_sources import OnUnknown, check_names, resolve
from llm_comm.options import OPTIONS, arguments_in_words
from llm_comm.quoting import quoted
from llm_comm.sizes import MIB

#: From this size of a rank's input on ``max_blocks`` bounds an operation; of one on parts, from this size of the whole
#: tensor on. Smaller ones are over before a computation beside them would notice.
LARGE_BYTES = MIB

#: Variables by which a machine says that NVLink multicast must not be used, and the value that says so.
MULTICAST_OFF_VARIABLES = {
    name: off for name, off in _core.multicast_switches.items() if not name.startswith("LLM_COMM_")
}


def _resolving(cls: type[Config]) -> type[Config]:
    """Makes the constructor, which dataclass wrote, look for what it is not given in the file and the environment, and
    fills in the docstring."""
    take: Callable[..., None] = vars(cls)["__init__"]

    @functools.wraps(take)
    def __init__(self: Config, *positional: object, **given: Any) -> None:
        if positional:
            raise ConfigError(
                f"Config takes options by name, as timeout_s=5; found {quoted(positional[0])} without one"
            )
        if "origins" in given:  # the copy of a configuration: nothing is left to look for
            check_names(name for name in given if name != "origins")
            take(self, **given)
        else:
            take(self, **resolve(os.environ, given))

    cls.__init__ = __init__  # type: ignore[method-assign]
    cls.__doc__ = (cls.__doc__ or "").replace("    {arguments}", arguments_in_words())
    return cls


@_resolving
@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of a communicator.

    Each is also an environment variable, ``LLM_COMM_`` and the name in capitals, and a key of the YAML file that
    ``LLM_COMM_CONFIG`` names. A variable that is empty counts as not set. The constructor looks in all four places:
    defaults < file < environment < the arguments. ``Config.load({}, ...)`` looks at no file and no environment.

    The section ``Args`` comes from ``llm_comm/options.py`` (``help(llm_comm.Config)``, docs/options.md). It says for
    each option whether all ranks of a group must have the same value; that is compared when a communicator is made.

    {arguments}

    Raises:
        ConfigError: An unknown option or variable, a value that is not allowed, or a file that cannot be read.
    """

    enable: bool = True
    multicast: str = "auto"
    sum: str = "rank_order"
    timeout_s: float = 30.0
    log: str = "warning"
    workspace_bytes: int = 64 * MIB
    max_message_bytes: int | None = None
    max_blocks: int | None = None
    algorithm: str = "auto"
    pdl: bool = True
    fuse: bool = True
    fuse_linear: bool | str = "auto"
    all_gather: bool = True
    reduce_scatter: bool = True
    deterministic: bool = False
    batch_invariant_norm: str = "engine"
    batch_invariant_linear: str = "engine"
    untested: bool = False
    debug: bool = False
    share_gpu: bool = False
    sleep: bool = False
    stats: bool = False
    stats_port: int | None = None
    stats_host: str = "127.0.0.1"
    nvtx: bool = False
    multi_node: bool = False
    node: str | None = None
    node_transport: str = "auto"
    table: str | None = None
    dsl: str | None = None
    dsl_max_bytes: int = 8 * MIB
    dsl_schedules: int | None = None
    #: Where each value comes from; what is not named is a default. Given to the constructor, as ``dataclasses.replace``
    #: does, it says that all options are: file and environment are not read again.
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if not option.kind.is_valid(value):
                raise ConfigError(
                    f"option {name} is {quoted(value)} ({self.origins.get(name, 'Python')}); "
                    f"valid: {option.kind.valid_values}"
                )
        # What dataclasses.replace was given was chosen too.
        given = {f.name for f in dataclasses.fields(self) if f.name in OPTIONS and getattr(self, f.name) != f.default}
        object.__setattr__(self, "origins", {**dict.fromkeys(sorted(given), "Python"), **self.origins})

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """As the constructor, with the variables to read: ``os.environ`` if None.

        Raises:
            ConfigError: As of the constructor.
        """
        if not isinstance(environ, Mapping | None):
            raise ConfigError(f"Config.load takes a mapping of variables, or options by name; found {quoted(environ)}")
        return cls(**resolve(os.environ if environ is None else environ, overrides))

    @property
    def sums_in_any_order(self) -> bool:
        """Whether sums may be made in the NVLink switch."""
        return self.sum == "any" and not self.deterministic

    def replace(self, **changes: Any) -> Config:
        """A copy with some options changed. File and environment are not read again."""
        origins = {**self.origins, **dict.fromkeys(changes, "Python")}
        return dataclasses.replace(self, **changes, origins=origins)


def load_with_unknown(on_unknown: OnUnknown, **options: Any) -> Config:
    """As ``Config(**options)``, but unknown variables and unknown options of the file go to ``on_unknown``.

    Raises:
        ConfigError: As of the constructor, and whatever ``on_unknown`` raises.
    """
    return Config(**resolve(os.environ, options, on_unknown))


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
