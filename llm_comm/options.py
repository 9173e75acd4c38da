"""Table of all options: values, meaning, text form, and whether all ranks of a group must have the same value.

Derived from this table: the docstrings of ``Config`` and ``EngineOptions``, ``docs/options.md``
(``tools/options_page.py``), the comparison of ranks at set-up, and the test that sets each option on one rank only
(``tests/emulated/options_on_one_rank.py``).
"""

from __future__ import annotations

import enum
import re
import textwrap
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from llm_comm import registry
from llm_comm.errors import ConfigError, quoted

MIB = 1 << 20
_UNITS = {"": 1, "K": 1 << 10, "M": MIB, "G": 1 << 30}
_MAX_PATH = 4096
_MAX_NODE = 64
_MAX_PROGRAMS = 1000
_PROGRAMS = re.compile(r"(?a:[\w.]+:\w+(, *[\w.]+:\w+)*)")


def parse_size(text: str) -> int:
    """Parse a size such as ``512``, ``64K``, ``64KB`` or ``64 KiB``. Units are powers of 1024; case does not matter.

    Raises:
        ValueError: The text is no size.
    """
    match = re.fullmatch(r"([0-9]+)\s*(?:([KMG])I?)?B?", text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write 512, 64K or 8M")
    return int(match[1]) * _UNITS[match[2] or ""]


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


class Alike(enum.Enum):
    """Requirement on the values of an option across ranks. The enum values are the words in docs/options.md."""

    #: Values must be equal; ``runtime/comparison.py`` compares them at set-up.
    YES = "yes"
    #: Files named by the values must be equal; ``runtime/comparison.py`` compares their digests.
    CONTENT = "yes, the content of the file"
    #: Set on all ranks or on none; ``nodes/topology.py`` compares this.
    ALL_OR_NONE = "on all ranks or on none"
    #: Ranks vote at set-up: a rank with the option off turns it off on all.
    OFF_COUNTS = "no, off on one rank is off on all"
    #: Ranks are independent of each other in this option.
    NO = "no"

    @property
    def is_error(self) -> bool:
        """True if a value that only one rank has makes the set-up fail on all ranks."""
        return self in (Alike.YES, Alike.CONTENT, Alike.ALL_OR_NONE)


@dataclass(frozen=True)
class Kind:
    """Parser and validation of an option's values.

    Attributes:
        parse: Converts text to a value. Raises ValueError or KeyError.
        is_valid: Returns whether a value is allowed.
        valid_values: Allowed values, in words.
        values_on_page: Allowed values for docs/options.md, if ``valid_values`` depends on the build.
    """

    parse: Callable[[str], Any]
    is_valid: Callable[[Any], bool]
    valid_values: str
    values_on_page: str = ""


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        kind: Parser and validation of its values.
        alike: Requirement on the values across ranks.
        why: Reason for ``alike``: the harm of different values, or why they do no harm.
        meaning: Effect of the option, for the docstring of its class and docs/options.md.
        of_engines: True for an option of ``EngineOptions`` that ``Config`` does not have.
    """

    kind: Kind
    alike: Alike
    why: str
    meaning: str
    of_engines: bool = False


def _one_of(*values: str) -> Kind:
    return Kind(str, lambda v: isinstance(v, str) and v in values, " or ".join(repr(v) for v in values))


def is_int(value: Any) -> bool:
    """Return whether ``value`` is an int and no bool, which is a subclass of int."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return is_int(value) and 0 <= value < 1 << 63


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value and len(value) <= _MAX_PATH


def _is_algorithm(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    return value in ("auto", *registry.algorithm_names()) or registry.is_program(value)


def _is_list_of_programs(value: Any) -> bool:
    # Bounded, since ranks compare all options in one message.
    return isinstance(value, str) and len(value) <= _MAX_PROGRAMS and _PROGRAMS.fullmatch(value) is not None


_AS_TEXT = "environment and file: 64M is 64 MiB"


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_NODE and value.isprintable() and value.isascii()


_BOOLEAN = Kind(_boolean, lambda v: isinstance(v, bool), "true or false (environment: 1 or 0)")

_BOOLEAN_OR_AUTO = Kind(
    lambda text: text if text == "auto" else _boolean(text),
    lambda v: isinstance(v, bool) or (isinstance(v, str) and v == "auto"),
    "'auto', true or false (environment: auto, 1 or 0)",
)

_A_PROGRAM = f"{registry.PROGRAM_PREFIX}NAME for a program of option dsl"

_SIZE = Kind(parse_size, lambda v: is_int(v) and MIB <= v <= 4096 * MIB, f"bytes, 1 MiB to 4 GiB ({_AS_TEXT})")

_KERNELS = "ranks would run different kernels"
_CALLS = "one rank would make calls that the others do not make"
_WAITS = "ranks would give up at different times"
_OWN_LOG = "each rank writes its own log"
_OWN_HOST = "only the host of this rank acts on it"

#: Options by name. ``Config`` and ``EngineOptions`` have them as fields.
OPTIONS: dict[str, Option] = {
    "enable": Option(
        _BOOLEAN,
        Alike.OFF_COUNTS,
        "the ranks of an engine vote. A rank whose variable is 0 does not come to the vote: the others end with an "
        "error",
        "Whether engine integrations use llm_comm. A ``Communicator`` of your own ignores it.",
        of_engines=True,
    ),
    "multicast": Option(
        _one_of("auto", "0", "1"),
        Alike.OFF_COUNTS,
        "the ranks vote; multicast needs all of them",
        "Whether NVLink multicast may be used (docs/operate/multicast.md). ``auto``: where ``llm-comm tune "
        "--multicast`` has made the tuning table on such a machine. ``1``: also without such a table, for algorithms "
        "that an option or a row names. ``0``: never. ``NCCL_NVLS_ENABLE=0``, ``TORCH_SYMM_MEM_DISABLE_MULTICAST=1`` "
        "or ``NVSHMEM_DISABLE_NVLS=1`` turns it off whatever the option says.",
    ),
    "sum": Option(
        _one_of("rank_order", "any"),
        Alike.YES,
        _KERNELS,
        "``rank_order``: every exact sum is made in rank order, bitwise the same by any algorithm. ``any``: the NVLink "
        "switch may sum too, in fp32 and in an order of its own. ``deterministic`` overrides ``any``.",
    ),
    "wire": Option(
        _one_of("none", "fp8", "int8"),
        Alike.YES,
        _KERNELS,
        "Type to which all-reduces, with ``fp8`` also reduce-scatters and ``lossy`` all-gathers, are quantized on the "
        "wire. Lossy (docs/operate/tuning.md#quantized-all-reduces). An error with ``deterministic`` and in "
        "batch-invariant modes.",
    ),
    "wire_min_bytes": Option(
        Kind(parse_size, _is_size, f"bytes >= 0 and below 8 EiB ({_AS_TEXT})"),
        Alike.YES,
        _KERNELS,
        "Smallest message that ``wire`` quantizes. None is, if exact messages of this size are declined.",
    ),
    "timeout_s": Option(
        Kind(
            float,
            lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < 1e6,
            "a number of seconds above 0 and below 1000000",
        ),
        Alike.YES,
        _WAITS,
        "Bound in seconds of every wait for a peer, at set-up and in kernels. The default of engines is 600.",
    ),
    "log": Option(
        _one_of("debug", "info", "warning", "error"),
        Alike.NO,
        _OWN_LOG,
        "Level of the ``llm_comm`` logger. Where nobody chooses a level, a level that the application has set stays. A "
        "script of your own must call ``logging.basicConfig()`` to see the lines.",
    ),
    "workspace_bytes": Option(
        _SIZE,
        Alike.YES,
        "slots of messages would lie at different addresses",
        "Device memory of each rank for one communicator, outside torch's pool: a header of 128 KiB and two slots for "
        "messages in flight. A slot bounds what one kernel launch can carry: half of it for two-shot, ``1 / "
        "world_size`` of it for one-shot. A longer message takes several launches.",
    ),
    "max_message_bytes": Option(
        Kind(
            parse_size,
            lambda v: v is None or _is_size(v),
            f"bytes >= 0 and below 8 EiB ({_AS_TEXT}; default: that of the tuning table)",
        ),
        Alike.YES,
        "a message between the bounds would be served on some ranks alone",
        "Larger messages are declined. None: the tuning table's bound, 256 MiB for quantized messages.",
    ),
    "max_blocks": Option(
        Kind(
            int,
            lambda v: v is None or (is_int(v) and 8 <= v < 1 << 16),
            "a number of blocks, 8 to 65535 (default: none)",
        ),
        Alike.YES,
        "grids and tiles would differ: wrong sums by HB algorithms",
        "Maximum thread blocks of an operation of 1 MiB or more. Bounds the multiprocessors that a collective takes "
        "from a computation beside it. Its cost: docs/operate/tuning.md#fewer-multiprocessors. None: as the tuning "
        "table says.",
    ),
    "algorithm": Option(
        Kind(
            str,
            _is_algorithm,
            f"{_one_of('auto', *registry.algorithm_names()).valid_values}, or {_A_PROGRAM}",
            f"'auto', a name that `llm-comm algorithms` lists, or {_A_PROGRAM}",
        ),
        Alike.YES,
        _KERNELS,
        "``auto`` selects by the tuning table. A name forces that algorithm at every size, for each operation that has "
        "it; other operations use the table. ``dsl:NAME``: a program, for the calls of its operation that it serves "
        "(docs/reference/dsl.md#select-a-program).",
    ),
    "pdl": Option(
        _BOOLEAN,
        Alike.YES,
        "measurements of linear layers, which select code paths, depend on it",
        "Programmatic dependent launch, on GPUs that have it (sm_90 and later). In vLLM it is off by default for "
        "models without linear layers that llm_comm may compute.",
    ),
    "fuse": Option(
        _BOOLEAN,
        Alike.YES,
        _CALLS,
        "Whether engine integrations put the residual add and the RMSNorm after an all-reduce into its kernel.",
        of_engines=True,
    ),
    "fuse_linear": Option(
        _BOOLEAN_OR_AUTO,
        Alike.YES,
        _CALLS,
        "Whether engine integrations compute the linear layer before a fused all-reduce with llm_comm too "
        "(docs/reference/linear.md). ``auto``: where it is faster, as the tuning table says, or as measured at start. "
        "True: wherever it is served; ``pdl`` is then on in engines too, unless it was chosen.",
    ),
    "fuse_experts": Option(
        _BOOLEAN_OR_AUTO,
        Alike.YES,
        "ranks might choose different experts, and parts would be rounded differently",
        "Whether engine integrations compute the experts of up to 64 tokens with llm_comm "
        "(docs/experiments/experts.md), and in SGLang their router. ``auto``: batches that each rank has measured "
        "to be faster, and routers of sizes for which measurements are committed; none if ``tune_at_start`` is 0. "
        "True: all.",
        of_engines=True,
    ),
    "tune_at_start": Option(
        Kind(
            lambda text: text if text == "auto" else float(text),
            lambda v: v == "auto" or (isinstance(v, (int, float)) and not isinstance(v, bool) and 0 <= v <= 3600),
            "'auto', or seconds from 0 to 3600",
        ),
        Alike.YES,
        "ranks measure together",
        "Seconds that engine integrations may measure at start: linear layers (docs/reference/linear.md), and "
        "all-reduces where no tuning table is of the machine (docs/operate/tuning.md). ``auto``: 10 and 20, on GPUs "
        "of which each has one rank. 0: none, and results of earlier starts are ignored.",
        of_engines=True,
    ),
    "all_gather": Option(
        _BOOLEAN,
        Alike.YES,
        _CALLS,
        "Whether engine integrations gather with llm_comm (docs/reference/all_gather.md).",
        of_engines=True,
    ),
    "reduce_scatter": Option(
        _BOOLEAN,
        Alike.YES,
        _CALLS,
        "Whether engine integrations reduce-scatter with llm_comm (docs/reference/all_gather.md).",
        of_engines=True,
    ),
    "deterministic": Option(
        _BOOLEAN,
        Alike.YES,
        "with ``sum`` any, some ranks alone would use the NVLink switch",
        "Use llm_comm instead of NCCL in SGLang's deterministic mode "
        "(docs/engines/sglang.md#deterministic-inference). Sums are accumulated in rank order with it and without it, "
        "unless ``sum`` is ``any``.",
    ),
    "batch_invariant_norm": Option(
        _one_of("engine", "llm_comm"),
        Alike.YES,
        _CALLS,
        "Whose RMSNorms follow the all-reduces in a batch-invariant mode: vLLM's "
        "(docs/engines/vllm.md#batch-invariant-serving) or SGLang's deterministic mode. ``engine``: the engine's, and "
        "none is fused. ``llm_comm``: fused ones, at every message size; ``max_fused_bytes`` of the tuning table "
        "bounds nothing. In any other mode engine integrations take the option for ``engine``.",
    ),
    "batch_invariant_linear": Option(
        _one_of("engine", "llm_comm"),
        Alike.YES,
        _CALLS,
        "Whose linear layers without quantization run in a batch-invariant mode. ``llm_comm``: its own for served "
        "shapes, in batches of any size.",
        of_engines=True,
    ),
    "untested": Option(
        _BOOLEAN,
        Alike.YES,
        _CALLS,
        "Whether engine integrations use features whose functions in this release of the engine are there but were not "
        "tested (docs/operate/troubleshooting.md#an-engine-that-is-newer). The all-reduce does not depend on it.",
        of_engines=True,
    ),
    "debug": Option(
        _BOOLEAN,
        Alike.YES,
        "a rank would wait for calls that the others do not send",
        "The ranks compare each call before they run it, and two operations at once are noticed: MismatchError and "
        "ConcurrentUseError in place of wrong sums (docs/operate/failures.md#when-ranks-disagree). Always on where "
        "GPUs are emulated.",
    ),
    "share_gpu": Option(
        _BOOLEAN,
        Alike.YES,
        "a shared GPU is that of several ranks",
        "Ranks may use one GPU together. For tests only: the driver gives them time slices in turn, so an operation "
        "takes milliseconds (docs/develop/testing.md#tests-on-one-gpu).",
    ),
    "sleep": Option(
        _BOOLEAN,
        Alike.YES,
        "a rank would release its workspace alone, and wait for the others",
        "Whether engine integrations give the memory of the workspaces back while the engine sleeps "
        "(``Communicator.release``; docs/engines/common.md#sleep-mode).",
        of_engines=True,
    ),
    "stats": Option(
        Kind(
            lambda text: int(text) if text.isdecimal() and len(text) > 1 else _boolean(text),
            lambda v: isinstance(v, bool) or (is_int(v) and 1024 <= v < 1 << 16),
            "true or false (environment: 1 or 0), or a port, 1024 to 65535",
        ),
        Alike.NO,
        _OWN_LOG,
        "Whether engine integrations log the statistics of llm_comm, at the end and on SIGUSR2, and give them to "
        "prometheus_client (docs/operate/statistics.md). A port: they also serve them to Prometheus, each process of "
        "an engine at this port plus its rank. ``Communicator.stats`` needs no option.",
        of_engines=True,
    ),
    "stats_host": Option(
        Kind(str, _is_name, f"an address or host name of 1 to {_MAX_NODE} printable ASCII characters"),
        Alike.NO,
        _OWN_HOST,
        "Address at which the ports of ``stats`` are opened. Whoever reaches the address reads the statistics; "
        "``0.0.0.0`` is every address of the machine.",
        of_engines=True,
    ),
    "nvtx": Option(_BOOLEAN, Alike.NO, _OWN_HOST, "An NVTX range around each launch on a GPU, for Nsight Systems."),
    "multi_node": Option(
        _BOOLEAN,
        Alike.OFF_COUNTS,
        "the ranks of an engine vote",
        "Whether engine integrations serve groups whose ranks are on several nodes (docs/operate/nodes.md). A "
        "``Communicator`` of your own does so without it.",
        of_engines=True,
    ),
    "node": Option(
        Kind(
            str,
            lambda v: v is None or _is_name(v),
            f"a name of 1 to {_MAX_NODE} printable ASCII characters (default: by the boot id of the machine)",
        ),
        Alike.ALL_OR_NONE,
        "names and boot ids do not compare",
        "Name of this rank's node, for tests: ranks of one name are a node, so one machine can stand for several. "
        "None: ranks of one machine, by its boot id, are a node.",
    ),
    "node_transport": Option(
        _one_of("auto", "nccl", "gloo", "ucx"),
        Alike.YES,
        "nodes could not exchange data",
        "What carries data between nodes (docs/operate/nodes.md#what-carries-the-data). ``auto``: NCCL on GPUs, gloo "
        "where GPUs are emulated or shared by ranks. ``ucx``: UCX, with port channels; it has to be installed.",
    ),
    "table": Option(
        Kind(str, lambda v: v is None or _is_path(v), "path of a tuning table"),
        Alike.CONTENT,
        _KERNELS,
        "Tuning table to use in place of one that ``llm-comm tune --install`` has written or that is shipped "
        "(docs/operate/tuning.md#which-table-a-start-takes).",
    ),
    "dsl": Option(
        Kind(
            str,
            lambda v: v is None or _is_list_of_programs(v),
            f"programs as MODULE:PROGRAM, with commas between them, up to {_MAX_PROGRAMS} characters",
        ),
        Alike.YES,
        "programs are compiled by all ranks together",
        "Programs of ``llm_comm.dsl`` to import, check and compile when a communicator is made: ``algorithm`` and "
        "tables can name them then, as ``dsl:program`` (docs/reference/dsl.md#select-a-program).",
    ),
    "dsl_max_bytes": Option(
        Kind(parse_size, lambda v: is_int(v) and 1 <= v <= 4096 * MIB, f"bytes, 1 to 4 GiB ({_AS_TEXT})"),
        Alike.YES,
        "memory of programs would lie at different addresses",
        "Programs serve messages up to this size. Each takes workspace memory for it, in addition to "
        "``workspace_bytes``; log level info says how much.",
    ),
}


def arguments_in_words(names: Collection[str]) -> str:
    """Return the section ``Args`` for the docstring of a class with the options ``names``."""
    wrapped = (
        textwrap.fill(
            f"{name}: {option.meaning} Alike on all ranks: {option.alike.value}.",
            120,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, option in OPTIONS.items()
        if name in names
    )
    return "\n".join(["    Args:", *wrapped])


def parse_option(name: str, text: str, source: str = "") -> Any:
    """Parse the value of an option from text, as variables and command lines give it.

    Raises:
        ConfigError: The value is not allowed. ``source`` is the beginning of the error text.
    """
    kind = OPTIONS[name].kind
    try:
        value = kind.parse(text)
    except (ValueError, KeyError):
        is_valid = False
    else:
        is_valid = kind.is_valid(value)
    if not is_valid:
        raise ConfigError(f"{source}{quoted(text)} is not allowed; valid: {kind.valid_values}")
    return value
