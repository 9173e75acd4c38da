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
from llm_comm.option_sources import check_names, resolve
from llm_comm.options import OPTIONS
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
    """Makes the constructor, which dataclass wrote, look for what it is not given in the file and the environment."""
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
            in batches of any size.
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
        stats_host: Address on which ``stats_port`` is opened. Whoever reaches it reads the metrics; ``"0.0.0.0"`` is
            every address of the machine.
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
            if not option.is_valid(value):
                raise ConfigError(
                    f"option {name} is {quoted(value)} ({self.origins.get(name, 'Python')}); "
                    f"valid: {option.valid_values}"
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
