"""What the engine integrations share: when to step in, how to join a group, what to log, when to give up."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from llm_comm import _core, registry
from llm_comm.communicator import Communicator
from llm_comm.config import MIB, Config
from llm_comm.errors import CommunicatorError, ConfigError, LlmCommError, MissingRankError
from llm_comm.installation import VERSION
from llm_comm.integrations import sleeping, statistics
from llm_comm.nodes.all_reduce_add_rms_norm import WHY_NOT_ALONE
from llm_comm.nodes.placement import find as placement_of
from llm_comm.planning.catalogue import check_table_option
from llm_comm.planning.multicast import NO_MULTICAST, Multicast, why_not
from llm_comm.planning.programs import NO_PROGRAMS, Kernels
from llm_comm.planning.selection import message_limit
from llm_comm.planning.tables import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, TuningTable, of_programs
from llm_comm.runtime.rendezvous import Rendezvous

logger = logging.getLogger("llm_comm")

#: Bound of waits in seconds where the operator set none. Longer than the library's own: the ranks of an engine compile
#: and tune kernels at different speeds, and whoever is first waits in an all-reduce. torch gives NCCL as long.
ENGINE_TIMEOUT_S = 600.0

#: Bound in seconds of the wait for the other ranks to say whether they use llm_comm. They make the group together: just
#: before, gloo has connected all of them and the engine's own communicators have talked to each other, so what is
#: waited for is an import and the reading of a file. Who is not there by then has no llm_comm, or it is switched off.
JOIN_TIMEOUT_S = 120.0

#: Logged once by rank 0, with number of ranks and shape: that norms are set up to be fused does not mean that any is.
FIRST_FUSED = "llm_comm: first all-reduce fused with its RMSNorm (%d ranks, shape %s)"

#: For ``max_message_bytes``, where a sum must not depend on its size: larger than any message.
EVERY_SIZE = 1 << 60

#: What the line at start says of norms that are fused in an engine's batch-invariant mode.
AT_EVERY_SIZE = " at every size (batch_invariant_norm)"

# The options that switch them, and their names in the log.
_PARTS = {ALL_GATHER: "all-gather", REDUCE_SCATTER: "reduce-scatter"}

_HOW_TO_SPAN_NODES = "LLM_COMM_MULTI_NODE=1 on all ranks serves groups over several nodes, docs/nodes.md"

# ASCII characters of what a rank can say in a vote: they fit in a message of the rendezvous, also if all are escaped.
_MAX_WORD = 600
_EXIT_CODE = 1


class NotJoinedError(LlmCommError):
    """The ranks of a group agreed to do without llm_comm. The text says why and is the same on all of them."""


class SwitchedOffError(NotJoinedError):
    """They do without it because the operator wants it so."""


class AbsentRanksError(LlmCommError):
    """Some ranks of a group never asked for llm_comm. The engine cannot go on: an operation that they have no part in
    is pending in its group of CPU ranks, and the next one of the engine's own would be matched with that."""


def switched_off() -> bool:
    """Whether ``LLM_COMM_ENABLE`` says that the engine is to be left alone, whatever the other options are."""
    name = "LLM_COMM_ENABLE"
    try:
        return name in os.environ and not Config.load({name: os.environ[name]}).enable
    except ConfigError:
        return False  # told when the ranks join


def served_device(device: torch.device) -> torch.device:
    """An engine's device as llm_comm takes it: where torch has no CUDA, an emulated GPU."""
    return device if torch.cuda.is_available() else torch.device("cpu")


def join(group: dist.ProcessGroup, device: torch.device, load_config: Callable[[], Config]) -> Communicator:
    """A communicator for ``group``, on all of its ranks or on none. Collective.

    Args:
        group: gloo group of the ranks.
        device: CUDA device of this rank; emulated GPUs take its place where torch has no CUDA.
        load_config: Returns the options of this rank.

    Raises:
        ConfigError: A rank has a wrong option. Raised on all ranks.
        NotJoinedError: A rank does without llm_comm, cannot use it, or failed to set it up. Raised on all ranks.
        AbsentRanksError: A rank did not come. Raised on those that did.
    """
    device = served_device(device)
    rendezvous = Rendezvous(group, JOIN_TIMEOUT_S)
    config, objection = None, None
    try:
        config = load_config()
        _check(config, device, rendezvous.world_size)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        objection = error
    _vote(rendezvous, objection)
    assert config is not None
    _vote(rendezvous, _objection_to_nodes(rendezvous, config))

    communicator = None
    try:
        communicator = Communicator(group, device, config)
    except MissingRankError as error:  # it has voted, and is lost since: there is nobody to vote with
        raise AbsentRanksError(f"a rank of the engine was lost while llm_comm was set up: {error}") from error
    except Exception as error:
        logger.debug("set-up failed", exc_info=True)
        objection = error
    try:
        # Communicator fails on all ranks or on none. If it ever did not, the others would wait in an all-reduce for a
        # rank that takes the engine's own way. A rank may have waited for others in there, as long as an engine waits.
        _vote(Rendezvous(group, ENGINE_TIMEOUT_S), objection)
    except LlmCommError:
        if communicator is not None:
            communicator.close()
        raise
    assert communicator is not None
    return communicator


def _check(config: Config, device: torch.device, world_size: int) -> None:
    """Raises if this rank does without llm_comm, as far as it can tell alone."""
    if not config.enable:
        raise SwitchedOffError(f"enable is false ({config.origins.get('enable', 'Python')})")
    if world_size > _core.max_world_size and not config.multi_node:
        raise NotJoinedError(
            f"the group has {world_size} ranks, llm_comm serves up to {_core.max_world_size} of one machine "
            f"({_HOW_TO_SPAN_NODES})"
        )
    if device.type == "cuda" and not _core.cuda_archs:
        raise NotJoinedError("this build of llm_comm has no CUDA kernels; install it where nvcc is found")
    check_table_option(config)


def _objection_to_nodes(rendezvous: Rendezvous, config: Config) -> Exception | None:
    """What this rank has against where the ranks are. Collective.

    Raises:
        AbsentRanksError: A rank is lost.
    """
    try:
        placement = placement_of(rendezvous, config)
    except MissingRankError as error:
        raise AbsentRanksError(f"a rank of the engine was lost while llm_comm was set up: {error}") from error
    except LlmCommError as error:
        return error
    if placement is None or config.multi_node:
        return None
    origin = config.origins.get("multi_node", "default")
    return NotJoinedError(
        f"the ranks are on {len(placement.nodes)} nodes ({', '.join(placement.hosts)}), and multi_node is false "
        f"({origin}); {_HOW_TO_SPAN_NODES}"
    )


# What a rank can object with, most important first: an error of the operator is not to hide behind anything else.
_OBJECTIONS: tuple[type[LlmCommError], ...] = (ConfigError, SwitchedOffError, NotJoinedError)


def _vote(rendezvous: Rendezvous, objection: Exception | None) -> None:
    """Raises one of ``_OBJECTIONS``, the same on all ranks, if a rank has an objection.

    Raises:
        AbsentRanksError: A rank did not come.
    """
    word = None
    if objection is not None:
        kind = next((i for i, error in enumerate(_OBJECTIONS) if isinstance(objection, error)), len(_OBJECTIONS) - 1)
        word = [kind, _fit(_in_words(objection))]
    try:
        words = rendezvous.gather("vote on llm_comm", word)
    except LlmCommError as missing:
        text = str(missing).replace(" (LLM_COMM_TIMEOUT_S)", "")  # which does not bound this wait
        raise AbsentRanksError(
            f"not every rank of the engine came to set up llm_comm ({text}). On each node, check that llm_comm is "
            "installed in the environment of the engine, and that LLM_COMM_ENABLE, VLLM_PLUGINS and SGLANG_PLUGINS are "
            "set as on the others. LLM_COMM_ENABLE=0 on all of them starts the engine without it."
        ) from missing
    said = {rank: word for rank, word in enumerate(words) if word is not None}
    if not said:
        return
    kind = min(kind for kind, _ in said.values())
    texts = {rank: text for rank, (its_kind, text) in said.items() if its_kind == kind}
    raise _OBJECTIONS[kind](_together(texts, len(words)))


def check_parts_wanted(config: Config, group_name: str) -> Config:
    """``config``, for a group that gathers and scatters and never sums.

    Raises:
        SwitchedOffError: Neither is wanted.
    """
    if not (config.all_gather or config.reduce_scatter):
        raise SwitchedOffError(f"all_gather and reduce_scatter are false, and group {group_name} does nothing else")
    return config


def share_memory(config: Config, kind: str, served: Sequence[str]) -> Config:
    """``config`` with this group's share of ``workspace_bytes``, which by default all groups of a process take
    together: the first one, that of tensor parallelism, a half, the others equal parts of the other half.

    Args:
        config: What an operator has chosen in there is for each group.
        kind: Which group it is for.
        served: All groups that llm_comm is going to serve in this process, in the order in which they are made.
    """
    if len(served) < 2 or "workspace_bytes" in config.origins:
        return config
    half = config.workspace_bytes // 2
    return config.replace(workspace_bytes=half if kind == served[0] else half // (len(served) - 1) // MIB * MIB)


def objection_of_any(group: dist.ProcessGroup, objection: str | None, about: str = "norms") -> str | None:
    """What the ranks of ``group`` have against going on, in words; None if nobody has anything. Collective.

    Args:
        group: gloo group of the ranks.
        objection: Of this rank.
        about: What they vote on.

    Raises:
        RendezvousError: A rank is gone.
    """
    word = None if objection is None else _fit(objection)
    words = Rendezvous(group, ENGINE_TIMEOUT_S).gather(f"vote on {about}", word)
    said = {rank: word for rank, word in enumerate(words) if word is not None}
    return _together(said, len(words)) if said else None


def _together(texts: Mapping[int, str], world_size: int) -> str:
    """What some ranks say, in one line; once, if all say the same."""
    if len(texts) == world_size and len(set(texts.values())) == 1:
        return texts[0]
    return "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())


def _fit(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()[:_MAX_WORD]


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, LlmCommError) else f"{type(error).__name__}: {error}"


class Member:
    """This rank's part in a group that llm_comm serves: its communicator, and the watchdog over it.

    Args:
        communicator: Closed by ``close``.
        group_name: The engine's name of the group.
        log: Comes out where the engine's messages do. It takes the last words of the process, if it has to end.
    """

    def __init__(self, communicator: Communicator, group_name: str, log: logging.Logger) -> None:
        self.communicator = communicator
        self.group_name = group_name
        self._log = log
        self._watchdog = Watchdog(communicator, lambda last_words: log.critical("llm_comm: %s", last_words))
        self._watchdog.start()

    def summary(self, engine: str, *, sums: bool = True) -> str:
        """The line for the log of rank 0 that says what llm_comm does from now on.

        Args:
            engine: Its name.
            sums: Whether the group sums; else it gathers and scatters alone.
        """
        communicator = self.communicator
        config, table = communicator.config, communicator.table
        where = "emulated GPUs" if communicator.is_emulated else communicator.memory_kind
        if communicator.nodes > 1:
            where = f"{communicator.nodes} nodes, {where}"
        if sums and communicator.nodes > 1:
            limit = format_bytes(message_limit(ALL_REDUCE, table, config))
            plans = f"hierarchical to {limit}, then {engine}'s own"
            what = f"all-reduce {plans} ({table.describe()} in each node); {describe_parts(table, config)}"
        elif sums:
            plans = describe_plans(table, config, f"{engine}'s own", communicator.multicast, communicator.programs)
            what = f"all-reduce {plans} ({table.describe()}); {describe_parts(table, config)}"
        else:
            beyond = f", then {engine}'s own"
            what = f"{describe_parts(table, config, beyond)} ({table.describe()})"
        return (
            f"llm_comm {VERSION} is active for group {self.group_name} ({communicator.world_size} ranks, {where}): "
            f"{what}; timeout {config.timeout_s:g} s; {communicator.multicast.describe(config)}"
        )

    def close(self) -> None:
        """Makes no use of the group, which may be gone."""
        with contextlib.ExitStack() as last:
            last.callback(self._watchdog.stop)
            # It waits for the GPU: for ever, where a kernel of NCCL waits for a dead rank.
            last.callback(self.communicator.close)
            statistics.leave(self.group_name, self.communicator, self._log)
            sleeping.leave(self.communicator)


def enter(
    group_name: str,
    group: dist.ProcessGroup,
    device: torch.device,
    load_config: Callable[[], Config],
    *,
    engine: str,
    log: logging.Logger,
) -> Member | None:
    """Joins ``group``; None, on all of its ranks, if they do without llm_comm, and a line in ``log`` that says why.

    Args:
        group_name: The engine's name of the group.
        engine: Name of the engine.
        log: Comes out where the engine's messages do.
        group, device, load_config: See ``join``.

    Raises:
        ConfigError: A rank has a wrong option. Raised on all ranks, so that the engine does not start.
        AbsentRanksError: A rank did not come. Raised on those that did, so that the engine does not start.
    """
    try:
        communicator = join(group, device, load_config)
    except SwitchedOffError as error:
        if dist.get_rank() == 0:
            log.info("llm_comm is not active: %s. %s's own collectives are used.", error, engine)
        return None
    except NotJoinedError as error:
        # Every rank says so: whichever log is read, it tells why decoding is slower than hoped for.
        text = "llm_comm %s is not active for group %s: %s. %s's own collectives are used."
        log.warning(text, VERSION, group_name, error, engine)
        return None
    statistics.follow(group_name, communicator, dist.get_rank(), log)
    sleeping.follow(group_name, communicator, log)
    return Member(communicator, group_name, log)


def why_not_fused(communicator: Communicator) -> str | None:
    """Why no all-reduce of the group is fused with its norm, if so: the same on all ranks."""
    return f"it {WHY_NOT_ALONE}" if communicator.nodes == communicator.world_size > 1 else None


def in_rank_order(config: Config, mode: str, log: logging.Logger) -> Config:
    """``config`` for a mode of an engine in which sums must not depend on who makes them: not in the NVLink switch,
    whatever option ``sum`` says."""
    if config.sum == "rank_order":
        return config
    log.info("llm_comm: sum is %r, but %s is on: sums are made in rank order", config.sum, mode)
    return config.replace(sum="rank_order")


def for_batch_invariance(config: Config, mode: str, is_on: bool, log: logging.Logger) -> Config:
    """``config`` for an engine that has a mode in which a token's result must not depend on its batch.

    Args:
        mode: Its name, for the log.
        is_on: Whether the engine is in it.
    """
    if not is_on:
        is_usual = config.batch_invariant_norm == config.batch_invariant_linear == "engine"
        return config if is_usual else config.replace(batch_invariant_norm="engine", batch_invariant_linear="engine")
    config = in_rank_order(config, mode, log)
    if "max_message_bytes" not in config.origins:
        # A sum must not depend on the size of its batch. llm_comm sums alike at every size; to change over to the
        # engine's all-reduce at some size would change the order of summation there.
        config = config.replace(max_message_bytes=EVERY_SIZE)
    return config


def why_not_at_every_size(config: Config, engine: str) -> str | None:
    """Why norms of some messages would be the engine's, which have other bits than those of llm_comm, if so.

    Args:
        config: What ``for_batch_invariance`` returned.
        engine: Its name.
    """
    limit = config.max_message_bytes
    if limit is not None and limit >= EVERY_SIZE:
        return None
    origin = config.origins.get("max_message_bytes", "default")
    return f"max_message_bytes is {limit} ({origin}), and norms of larger batches would be {engine}'s, with other bits"


def describe_plans(
    table: TuningTable,
    config: Config,
    engine: str,
    multicast: Multicast = NO_MULTICAST,
    programs: Mapping[str, Kernels] = NO_PROGRAMS,
) -> str:
    """Which algorithm serves which message sizes, in words: "one_shot to 48 KiB, two_shot to 48 MiB, then vLLM"."""
    limit = message_limit(ALL_REDUCE, table, config)
    algorithms = registry.operations()[ALL_REDUCE].algorithms
    usable = [a for a in algorithms if not why_not(a, config, multicast, is_forced=a.name == config.algorithm)]
    forced = {a.name for a in usable} & {config.algorithm}
    known = {(a.name, a.protocol) for a in usable}
    parts: list[tuple[str, int]] = []
    for row in table.rows.get(ALL_REDUCE, ()):
        if (row.algorithm, row.protocol) not in known or (parts and row.up_to <= parts[-1][1]):
            continue
        algorithm = config.algorithm if forced else row.algorithm
        if parts and parts[-1][0] == algorithm:
            parts.pop()
        parts.append((algorithm, min(row.up_to, limit)))
        if row.up_to >= limit:
            break
    if not parts:
        parts = [("what no table chose", limit)]
    parts[-1] = (parts[-1][0], limit)  # the last row serves all larger messages
    words = [f"{algorithm} to {format_bytes(up_to)}" for algorithm, up_to in parts]
    by_programs = _describe_programs(table, config, limit, programs)
    if limit >= EVERY_SIZE:
        return by_programs + ", ".join([*words[:-1], f"{parts[-1][0]} at all {'other ' * (len(parts) > 1)}sizes"])
    return by_programs + ", ".join(words) + f", then {engine}"


def _describe_programs(table: TuningTable, config: Config, limit: int, programs: Mapping[str, Kernels]) -> str:
    """The same of programs of llm_comm.dsl that go before: "dsl:two_shot to 8 MiB, else "; "" for none."""
    sizes = {row.algorithm: row.up_to for row in table.rows.get(of_programs(ALL_REDUCE), ())}
    if config.algorithm != "auto":
        is_of_others = config.algorithm in programs and programs[config.algorithm].operation != ALL_REDUCE
        sizes = {config.algorithm: limit} if registry.is_program(config.algorithm) and not is_of_others else {}
    words = [f"{name} to {format_bytes(min(up_to, limit, config.dsl_max_bytes))}" for name, up_to in sizes.items()]
    return f"{', '.join(words)}, else " if words else ""


def describe_parts(table: TuningTable, config: Config, beyond: str = "") -> str:
    """Up to which size all-gathers and reduce-scatters are served, in words, then ``beyond``; and why not, if so."""
    on = [words for name, words in _PARTS.items() if getattr(config, name)]
    off = [f"{name} is false ({config.origins.get(name, 'Python')})" for name in _PARTS if not getattr(config, name)]
    limit = message_limit(ALL_GATHER, table, config)
    size = "at all sizes" if limit >= EVERY_SIZE else f"to {format_bytes(limit)}{beyond}"
    return "; ".join([*([f"{' and '.join(on)} {size}"] if on else []), *off])


def format_bytes(count: int) -> str:
    """1536 as "1.5 KiB"."""
    for unit, size in (("TiB", MIB << 20), ("GiB", MIB << 10), ("MiB", MIB), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


class Watchdog:
    """Ends this process when ``communicator`` fails.

    A CUDA graph is replayed without Python, so nobody would see the error, and the engine would serve sums that lack a
    peer. An engine notices when one of its processes ends, and stops with an error; torch's watchdog of NCCL relies on
    the same. Wrong results go unnoticed for less than 0.6 s.

    Args:
        communicator: What to watch, until ``stop``.
        report: Takes the last words of the process, which name the peer.
    """

    def __init__(self, communicator: Communicator, report: Callable[[str], None]) -> None:
        self._communicator = communicator
        self._report = report
        self._is_stopped = False

    def start(self) -> None:
        # Whoever waits for that rank: kernels of other libraries would do so without end, and hold up this process.
        self._communicator.on_error(self._end, exits=True)

    def stop(self) -> None:
        """An error of the communicator does not end the process any more."""
        self._is_stopped = True

    def _end(self, error: CommunicatorError) -> None:
        if self._is_stopped:
            return
        self._report(f"{error}\nEnding this process: what the engine computes from here on would be wrong.")
        # Not sys.exit: the main thread may be waiting for the GPU or for another rank.
        os._exit(_EXIT_CODE)
