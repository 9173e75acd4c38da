"""How the ranks of a group set up their cores together: all of them, or none."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llm_comm import _core
from llm_comm.config import Config
from llm_comm.errors import ConfigError, MissingRankError, RendezvousError
from llm_comm.planning.multicast import Multicast
from llm_comm.planning.planner import Planner
from llm_comm.planning.tables import TuningTable
from llm_comm.quoting import quoted
from llm_comm.runtime import devices, multicast, self_test
from llm_comm.runtime.comparison import compare_ranks, compare_tables
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.rendezvous import Rendezvous
from llm_comm.runtime.status import StatusBoard
from llm_comm.runtime.watchdog import KERNEL_SHARE_OF_TIMEOUT, Watchdog
from llm_comm.runtime.workspaces import check_reachable, map_workspaces

logger = logging.getLogger("llm_comm")


class Agreed(NamedTuple):
    """What a rank sets out with, once all ranks can."""

    rendezvous: Rendezvous
    device: torch.device
    config: Config


class Compared(NamedTuple):
    """What ranks have in common once they are known to fit together."""

    limits: _core.Limits
    table: TuningTable


class Connected(NamedTuple):
    """What a rank has once all ranks are set up."""

    handle: CoreHandle
    planner: Planner
    #: Of the workspaces: "VMM", "cudaIpc" or "POSIX shared memory".
    memory_kind: str


def agree(group: dist.ProcessGroup, device: torch.device | str | int | None, config: Config | None) -> Agreed:
    """Finds the options and the device of this rank, on all ranks or on none. Collective.

    Args:
        group: The ranks.
        device, config: As of ``Communicator``.

    Raises:
        ConfigError, UnsupportedInputError, RendezvousError: Those of a rank are wrong. Raised on all ranks alike.
    """
    options, found, objection = None, None, None
    try:
        options = _options(config)
        found = devices.resolve(device)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        objection = error
    # A rank that cannot read how long it is to wait takes the usual time.
    timeout_s = Config.load({}).timeout_s if options is None else options.timeout_s
    rendezvous = Rendezvous(group, timeout_s, found)

    def answer() -> tuple[torch.device, Config]:
        if objection is not None:
            raise objection
        assert found is not None
        assert options is not None
        return found, options

    return Agreed(rendezvous, *rendezvous.attempt("reading of the options", answer))


def _options(config: Any) -> Config:
    if config is None:
        return Config.load()
    if not isinstance(config, Config):
        raise ConfigError(f"config is {quoted(config)}, which is no llm_comm.Config")
    return config


def compare(rendezvous: Rendezvous, device: torch.device, config: Config, connected: int) -> Compared:
    """Compares the ranks. Collective.

    Whatever can fail on one rank is a step of the rendezvous: see there.

    Args:
        rendezvous: Of all ranks of the group.
        device, config: Of this rank.
        connected: How many of the ranks are to be connected: those of one machine.

    Raises:
        ConfigError: A tuning table cannot be used. Raised on all ranks alike.
        RendezvousError: The ranks do not fit together or a step has failed on one. Raised on all ranks alike.
    """
    limits = compare_ranks(rendezvous, device, config)
    table = rendezvous.attempt("choice of a tuning table", lambda: devices.find_table(device, connected, config))
    compare_tables(rendezvous, table)
    return Compared(limits, table)


def connect(
    rendezvous: Rendezvous,
    device: torch.device,
    config: Config,
    compared: Compared,
) -> Connected:
    """Makes the core of this rank, and maps the memory of the others. Collective.

    Args:
        rendezvous: Of the ranks to connect, which are on one machine.
        device, config: Of this rank.
        compared: What ``compare`` returned.

    Raises:
        RendezvousError: A step has failed on a rank. Raised on all ranks alike.
    """
    limits, table = compared

    def planner_of(limits: _core.Limits, is_allowed: Multicast) -> Planner:
        return Planner(rendezvous.world_size, table, config, limits, is_allowed)

    wanted = multicast.agree(rendezvous, device, config, table)
    core, limits_of_all, memory_kind = _set_up(rendezvous, device, planner_of(limits, wanted))
    found = multicast.set_up(rendezvous, core, wanted) if wanted.is_up else wanted
    if found.is_up:
        why = self_test.run(rendezvous, core, device, config, limits_of_all)
        if why:
            # A test that ran out of time has ended the core: all ranks make another one.
            found = multicast.failed(rendezvous, why)
            del core
            core, limits_of_all, memory_kind = _set_up(rendezvous, device, planner_of(limits, found))
    multicast.tell(rendezvous, config, found)
    watchdog = _watch(rendezvous, core, config.timeout_s)
    return Connected(CoreHandle(core, device, watchdog), planner_of(limits_of_all, found), memory_kind)


def _set_up(rendezvous: Rendezvous, device: torch.device, planner: Planner) -> tuple[_core.Core, _core.Limits, str]:
    """The core, with the memory of the others mapped, what bounds the launches of all ranks, and the kind of memory.

    ``planner`` knows the limits of this rank alone.
    """
    core, most_blocks = rendezvous.attempt("set-up of the device", lambda: _make_core(rendezvous.rank, device, planner))
    clusters: list[int] = rendezvous.gather("comparison of clusters", most_blocks)
    memory_kind = map_workspaces(rendezvous, core, device.type == "cpu")
    check_reachable(rendezvous, core)
    limits = planner.limits
    limits_of_all = devices.make_limits(
        planner.config.workspace_bytes, limits.sm_count, min(clusters), limits.compute_capability
    )
    return core, limits_of_all, memory_kind


def _make_core(rank: int, device: torch.device, planner: Planner) -> tuple[_core.Core, int]:
    """The core, with the kernels that plans can name, and the most blocks of a cluster that its device has room for."""
    is_emulated = device.type == "cpu"
    config, limits = planner.config, planner.limits
    options = _core.CoreOptions(
        rank=rank,
        world_size=planner.world_size,
        slot_bytes=limits.slot_bytes,
        staging_bytes=limits.staging_bytes,
        timeout_s=config.timeout_s * KERNEL_SHARE_OF_TIMEOUT,
        dependent_launch=config.pdl,
        check_calls=config.debug or is_emulated,
        multicast=planner.multicast.is_up,
    )
    core = _core.make_emulated_core(options) if is_emulated else _core.make_cuda_core(options, device.index)
    core.load(planner.choosable())
    return core, core.max_cluster_blocks()


def _watch(rendezvous: Rendezvous, core: _core.Core, timeout_s: float) -> Watchdog | None:
    """A watchdog over the core, started; None for the only rank of a group."""
    if rendezvous.names.size == 1:
        return None
    board = None
    try:
        if rendezvous.world_size > 1:
            board = StatusBoard.open(rendezvous)
    except MissingRankError:
        raise
    except RendezvousError as error:  # the same on all ranks
        logger.info("%s: errors will tell nothing of the other ranks: %s", rendezvous.names.of_group, error)
    if not _core.bounded_waits:
        logger.warning("this build of llm_comm is for measuring only: its kernels wait for ever")
    watchdog = Watchdog(core, rendezvous.rank, timeout_s, board, rendezvous.names)
    try:
        rendezvous.attempt("start of the watchdog", watchdog.start)
    except BaseException:
        watchdog.stop()
        raise
    return watchdog
