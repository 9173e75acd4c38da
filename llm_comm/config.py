"""One configuration, from four places: defaults < file < environment < Python."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llm_comm import _core, registry
from llm_comm.errors import ConfigError
from llm_comm.quoting import quoted, shortened
from llm_comm.sizes import parse_size
from llm_comm.spelling import guess
from llm_comm.yaml_files import InvalidYamlError, YamlMapping, kind_of, read_yaml

MIB = 1 << 20

#: From this size of a rank's input on ``max_blocks`` bounds an operation; of one on parts, from this size of the whole
#: tensor on. Smaller ones are over before a computation beside them would notice.
LARGE_BYTES = MIB

#: Variables by which a machine says that NVLink multicast must not be used, and the value that says so.
MULTICAST_OFF_VARIABLES = {
    name: off for name, off in _core.multicast_switches.items() if not name.startswith("LLM_COMM_")
}

_PREFIX = "LLM_COMM_"
_MAX_NAME = 256
_MAX_PATH = 4096
_MAX_NODE = 64
_MAX_PROGRAMS = 1000
_PROGRAMS = re.compile(r"(?a:[\w.]+:\w+(, *[\w.]+:\w+)*)")
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
    # Where the user's tuning tables are (llm_comm/planning/installed.py).
    r"|TABLE_DIR"
    # Options of the build (CMake), which some export; and what the authors of images like to set.
    r"|CUDA|PYTHON|BUILT|WERROR|SPLIT_KERNELS|PTXAS_VERBOSE|UNBOUNDED_WAITS|SANITIZE|VERSION"
    # Kubernetes sets these in every container beside a Service whose name begins with llm-comm.
    r"|(\w+_)?SERVICE_(HOST|PORT(_\w+)?)|(\w+_)?PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?"
)


def _is_reserved(name: str) -> bool:
    return len(name) <= _MAX_NAME and _RESERVED.fullmatch(name) is not None


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
class _Option:
    parse: Callable[[str], Any]
    is_valid: Callable[[Any], bool]
    valid_values: str


def _one_of(*values: str) -> _Option:
    return _Option(str, lambda v: isinstance(v, str) and v in values, " or ".join(repr(v) for v in values))


def _is_int(value: Any) -> bool:
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


_BOOLEAN = _Option(_boolean, lambda v: isinstance(v, bool), "true or false (environment: 1 or 0)")

_BOOLEAN_OR_AUTO = _Option(
    lambda text: text if text == "auto" else _boolean(text),
    lambda v: isinstance(v, bool) or (isinstance(v, str) and v == "auto"),
    "'auto', true or false (environment: auto, 1 or 0)",
)

_OPTIONS: dict[str, _Option] = {
    "enable": _BOOLEAN,
    "multicast": _one_of("auto", "0", "1"),
    "sum": _one_of("rank_order", "any"),
    "timeout_s": _Option(
        float,
        lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < 1e6,
        "a number of seconds above 0 and below 1000000",
    ),
    "log": _one_of("debug", "info", "warning", "error"),
    "workspace_bytes": _Option(
        parse_size,
        lambda v: _is_int(v) and MIB <= v <= 4096 * MIB,
        f"bytes, 1 MiB to 4 GiB ({_AS_TEXT})",
    ),
    "max_message_bytes": _Option(
        parse_size,
        lambda v: v is None or (_is_int(v) and 0 <= v < 1 << 63),
        f"bytes >= 0 and below 8 EiB ({_AS_TEXT}; default: that of the tuning table)",
    ),
    "max_blocks": _Option(
        int, lambda v: v is None or (_is_int(v) and 8 <= v < 1 << 16), "a number of blocks, 8 to 65535 (default: none)"
    ),
    "algorithm": _Option(
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
    "stats_port": _Option(
        int, lambda v: v is None or (_is_int(v) and 1 <= v < 1 << 16), "a port, 1 to 65535 (default: none)"
    ),
    "nvtx": _BOOLEAN,
    "multi_node": _BOOLEAN,
    "node": _Option(
        str,
        lambda v: v is None or _is_name(v),
        f"a name of 1 to {_MAX_NODE} printable ASCII characters (default: by the boot id of the machine)",
    ),
    "node_transport": _one_of("auto", "nccl", "gloo", "ucx"),
    "table": _Option(str, lambda v: v is None or _is_path(v), "path of a tuning table"),
    "dsl": _Option(
        str,
        lambda v: v is None or _is_list_of_programs(v),
        f"programs as MODULE:PROGRAM, with commas between them, up to {_MAX_PROGRAMS} characters",
    ),
    "dsl_max_bytes": _Option(
        parse_size, lambda v: _is_int(v) and 1 <= v <= 4096 * MIB, f"bytes, 1 to 4 GiB ({_AS_TEXT})"
    ),
    "dsl_schedules": _Option(
        int,
        lambda v: v is None or (_is_int(v) and 0 <= v <= 1_000_000),
        "a number of schedules, 0 to 1000000 (default: by the size of the program)",
    ),
}

_SIZES = [name for name, option in _OPTIONS.items() if option.parse is parse_size]


def _resolving(cls: type[Config]) -> type[Config]:
    """Makes the constructor, which dataclass wrote, look for what it is not given in the file and the environment."""
    take: Callable[..., None] = vars(cls)["__init__"]

    @functools.wraps(take)
    def __init__(self: Config, *positional: object, **given: Any) -> None:
        if positional:
            raise ConfigError(
                f"Config takes options by name, as timeout_s=5; found {quoted(positional[0])} without one"
            )
        if "origins" in given:  # the copy of a configuration: nothing is left to look for
            _check_names(name for name in given if name != "origins")
            take(self, **given)
        else:
            take(self, **_resolve(os.environ, given))

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


@_resolving
@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of a communicator; every rank of a group must have the same, but for ``node``.

    Each is also an environment variable, ``LLM_COMM_`` and the name in capitals, and a key of the YAML file that
    ``LLM_COMM_CONFIG`` names. A variable that is empty counts as not set. The constructor looks in all four places:
    defaults < file < environment < what it is given. ``Config.load({}, ...)`` looks at no file and no environment.

    Args:
        enable: Whether engine integrations use llm_comm.
        multicast: Whether NVLink multicast may be used: ``"auto"``: where the tuning table was made by ``llm-comm tune
            --multicast`` on such a machine; ``"1"``: set it up without such a table too, for algorithms that an option
            or a row names; ``"0"``: never. Any of the variables in ``MULTICAST_OFF_VARIABLES`` turns it off whatever is
            said here, on all ranks if one rank has it.
        sum: ``"rank_order"``: every sum is made in rank order, bitwise the same by any algorithm. ``"any"``: the NVLink
            switch may sum too, in fp32 and in an order of its own. Not where ``deterministic`` is on.
        timeout_s: Bound in seconds of every wait for a peer, at set-up and in kernels.
        log: Level of the ``llm_comm`` logger. Where it is not chosen, a level that the application has set stays.
        workspace_bytes: Device memory of each rank: a header of 64 KiB and two slots for messages in flight. A slot
            bounds what one kernel launch can carry: half of it for two-shot, ``1 / world_size`` of it for one-shot. A
            longer message takes several launches.
        max_message_bytes: Larger messages are declined; None takes the bound of the tuning table.
        max_blocks: Operations of at least 1 MiB take so many blocks at most, and so as many multiprocessors at most,
            for computation beside them. ``docs/tuning.md`` says what it costs. None: what the tuning table says.
        algorithm: ``"auto"`` selects by the table; a name (``llm-comm algorithms`` lists them) forces that algorithm
            at every size, for each operation that has it. The others go by the table. ``"dsl:NAME"``: a program, for
            the calls of its operation that it serves (docs/dsl.md).
        pdl: Programmatic dependent launch, on GPUs that have it.
        fuse: Whether engine integrations put the residual add and the RMSNorm after an all-reduce into its kernel.
        fuse_linear: Whether engine integrations compute the linear layer before a fused all-reduce by llm_comm too.
            ``"auto"``: where the tuning table has measured that it is faster. True: wherever it is served; ``pdl`` is
            then on in engines too, if it was not chosen.
        all_gather: Whether engine integrations gather by llm_comm too.
        reduce_scatter: The same for reduce-scatter.
        deterministic: Whether llm_comm also sums in SGLang's deterministic mode, in place of NCCL. It changes no sum:
            each is accumulated in rank order anyway.
        batch_invariant_norm: Whose RMSNorms follow the sums where an engine is in the mode in which the result of a
            token must not depend on its batch (VLLM_BATCH_INVARIANT, SGLang's deterministic mode). ``"engine"``: its
            own, and none is fused. ``"llm_comm"``: fused ones, at every message size; ``max_fused_bytes`` of the tuning
            table bounds nothing. In any other mode engine integrations take it for ``"engine"``.
        batch_invariant_linear: The same of linear layers without quantization. ``"llm_comm"``: those of served shapes,
            in batches of any size, 64 tokens at a time: faster in small batches, and slower in prefills.
        debug: The ranks compare each call before they run it, and two operations at once are noticed: MismatchError and
            ConcurrentUseError in place of wrong sums. Emulated devices always do.
        share_gpu: Ranks may use one GPU together. For tests only: the driver gives them time slices in turn, so that an
            operation takes milliseconds.
        sleep: Whether engine integrations give the memory of the workspaces back while the engine sleeps
            (``Communicator.release``). Off until it has run on GPUs.
        stats: Whether engine integrations log what llm_comm was called for, at the end and on SIGUSR2, and give it to
            prometheus_client (docs/statistics.md). ``Communicator.stats`` needs no option.
        stats_port: This port plus the rank, of each process of an engine, answers Prometheus; ``stats`` is on then.
            None: no port is opened.
        nvtx: An NVTX range around each launch on a GPU, for Nsight Systems.
        multi_node: Whether engine integrations serve groups whose ranks are on several nodes (docs/nodes.md). A
            ``Communicator`` of your own does so without it.
        node: Name of the node that this rank is on, for tests: ranks of one name are taken for the ranks of a node, so
            that one machine can stand for several. All ranks have a name or none has. None: ranks of one machine, by
            its boot id, are a node.
        node_transport: What carries data between nodes (docs/nodes.md). ``"auto"``: NCCL on GPUs, gloo where they are
            emulated or shared by ranks. ``"ucx"``: UCX, with port channels; it has to be installed.
        table: Tuning table to use in place of one that ``llm-comm tune --install`` has written or that is shipped.
        dsl: Programs of ``llm_comm.dsl`` to import, check and compile when a communicator is made, as
            ``module:program,module:program``: ``algorithm`` and tables can name them then, as ``dsl:program``.
        dsl_max_bytes: Programs serve messages up to this size. Each takes workspace memory for it, in addition to
            ``workspace_bytes``; log level info says how much.
        dsl_schedules: Under how many schedules of the deterministic emulator a program is run before it is compiled,
            where there is a C++ compiler. None: by its size. 0: none.

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
    debug: bool = False
    share_gpu: bool = False
    sleep: bool = False
    stats: bool = False
    stats_port: int | None = None
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
        for name, option in _OPTIONS.items():
            value = getattr(self, name)
            if not option.is_valid(value):
                raise ConfigError(
                    f"option {name} is {quoted(value)} ({self.origins.get(name, 'Python')}); "
                    f"valid: {option.valid_values}"
                )
        # What dataclasses.replace was given was chosen too.
        given = {f.name for f in dataclasses.fields(self) if f.name in _OPTIONS and getattr(self, f.name) != f.default}
        object.__setattr__(self, "origins", {**dict.fromkeys(sorted(given), "Python"), **self.origins})

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """As the constructor, with the variables to read: ``os.environ`` if None.

        Raises:
            ConfigError: As of the constructor.
        """
        if not isinstance(environ, Mapping | None):
            raise ConfigError(f"Config.load takes a mapping of variables, or options by name; found {quoted(environ)}")
        return cls(**_resolve(os.environ if environ is None else environ, overrides))

    @property
    def sums_in_any_order(self) -> bool:
        """Whether sums may be made in the NVLink switch."""
        return self.sum == "any" and not self.deterministic

    def replace(self, **changes: Any) -> Config:
        """A copy with some options changed. File and environment are not read again."""
        origins = {**self.origins, **dict.fromkeys(changes, "Python")}
        return dataclasses.replace(self, **changes, origins=origins)


def option_names() -> tuple[str, ...]:
    """The names of all options, in the order of ``Config``."""
    return tuple(_OPTIONS)


def parse_option(name: str, text: str, source: str = "") -> Any:
    """Reads an option from text, as variables and command lines have it.

    Raises:
        ConfigError: It is not allowed; ``source`` comes before the text.
    """
    option = _OPTIONS[name]
    try:
        value = option.parse(text)
    except (ValueError, KeyError):
        is_valid = False
    else:
        is_valid = option.is_valid(value)
    if not is_valid:
        raise ConfigError(f"{source}{quoted(text)} is not allowed; valid: {option.valid_values}")
    return value


def _variable(name: str) -> str:
    return f"{_PREFIX}{name.upper()}"


def _resolve(environ: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """What the constructor is to take: all options that are not defaults, and their ``origins``."""
    _check_variables(environ)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    path = environ.get(_CONFIG_VARIABLE)
    if path:
        values, origins = _read_file(path)
    found = _read_environment(environ)
    _check_names(given)
    return {
        **values,
        **found,
        **given,
        "origins": {**origins, **{name: _variable(name) for name in found}, **dict.fromkeys(given, "Python")},
    }


def _check_names(names: Iterable[Any], origins: Mapping[Any, str] = MappingProxyType({})) -> None:
    for name in names:
        if name not in _OPTIONS:
            raise ConfigError(
                f"unknown option {quoted(name)} ({origins.get(name, 'Python')}){guess(str(name), _OPTIONS)}; "
                f"valid: {', '.join(_OPTIONS)}"
            )


def _check_variables(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a variable that would be passed over: who misspells one believes that it holds."""
    valid = [name.upper() for name in _OPTIONS] + [_CONFIG_VARIABLE.removeprefix(_PREFIX)]
    for variable, text in sorted(environ.items()):
        name = variable.removeprefix(_PREFIX)
        if not variable.startswith(_PREFIX) or not text or name in valid or _is_reserved(name):
            continue
        raise ConfigError(
            f"unknown variable {shortened(variable)}{guess(name.upper(), valid, _PREFIX)}: unset it; "
            f"valid: {', '.join(_PREFIX + known for known in valid)}"
        )


def _read_file(path: str) -> tuple[dict[str, Any], dict[str, str]]:
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
    _check_names(content, origins)
    # YAML reads 0 and 1 as numbers where the option is spelt as a word.
    if _is_int(content.get("multicast")):
        content["multicast"] = str(content["multicast"])
    for option in _SIZES:
        if isinstance(content.get(option), str):
            content[option] = parse_option(option, content[option], f"{origins[option]}: {option}: ")
    return content, origins


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in _OPTIONS:
        text = environ.get(_variable(name))
        if not text:  # compose files cannot leave a variable out, only leave it empty
            continue
        values[name] = parse_option(name, text, f"{_variable(name)}=")
    return values


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
