"""Set-up of the cores of a group: it succeeds on all ranks or on none."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llm_comm import _core
from llm_comm.config import Config
from llm_comm.errors import ConfigError, MissingRankError, RendezvousError, quoted
from llm_comm.planning.multicast import Multicast
from llm_comm.planning.planner import Planner
from llm_comm.planning.tables import TuningTable
from llm_comm.runtime import devices, multicast, self_test
from llm_comm.runtime.comparison import compare_ranks, compare_tables
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.linked_status import LinkedBoard
from llm_comm.runtime.rendezvous import Rendezvous
from llm_comm.runtime.status import StatusBoard
from llm_comm.runtime.watchdog import KERNEL_SHARE_OF_TIMEOUT, Watchdog
from llm_comm.runtime.workspaces import check_reachable, map_workspaces, ways_to_share

logger = logging.getLogger("llm_comm")


class Agreed(NamedTuple):
    """Options and device of this rank, valid on all ranks."""

    rendezvous: Rendezvous
    device: torch.device
    config: Config


class Compared(NamedTuple):
    """Properties that all ranks have in common after ``compare``."""

    limits: _core.Limits
    table: TuningTable


class Connected(NamedTuple):
    """Connection of a rank, once all ranks are set up."""

    handle: CoreHandle
    planner: Planner
    #: Memory of the workspaces, one of ``workspaces.SHARING``.
    memory_kind: str


def agree(group: dist.ProcessGroup, device: torch.device | str | int | None, config: Config | None) -> Agreed:
    """Resolve the options and the device of this rank, on all ranks or on none. Collective.

    Args:
        group: The ranks.
        device, config: Arguments of ``Communicator``.

    Raises:
        ConfigError, UnsupportedInputError, RendezvousError: Options or device of a rank are wrong. Raised on all ranks
            alike.
    """
    options, found, objection = None, None, None
    try:
        options = _options(config)
        found = devices.resolve(device)
    except Exception as error:  # any error: the peers must be notified at the rendezvous
        objection = error
    # A rank whose options cannot be read uses the default timeout_s for the rendezvous.
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
    """Compare the ranks. Collective.

    Every action that can fail on one rank is a step of the rendezvous (``Rendezvous.attempt``).

    Args:
        rendezvous: Rendezvous of all ranks of the group.
        device, config: Device and options of this rank.
        connected: Number of ranks that will share memory: those of one machine.

    Raises:
        ConfigError: A tuning table cannot be used. Raised on all ranks alike.
        RendezvousError: The ranks do not fit together, or a step failed on one. Raised on all ranks alike.
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
    """Create the core of this rank and map the memory of its peers. Collective.

    Args:
        rendezvous: Rendezvous of the ranks to connect, which are on one machine or in one NVLink domain.
        device, config: Device and options of this rank.
        compared: Result of ``compare``.

    Raises:
        RendezvousError: A step failed on a rank. Raised on all ranks alike.
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
            # A self-test that timed out has ended the core, so all ranks create a new one.
            found = multicast.failed(rendezvous, why)
            del core
            core, limits_of_all, memory_kind = _set_up(rendezvous, device, planner_of(limits, found))
    multicast.tell(rendezvous, config, found)
    watchdog = _watch(rendezvous, core, config.timeout_s)
    return Connected(CoreHandle(core, device, watchdog), planner_of(limits_of_all, found), memory_kind)


def _set_up(rendezvous: Rendezvous, device: torch.device, planner: Planner) -> tuple[_core.Core, _core.Limits, str]:
    """Create the core and map the workspaces. Return the core, the limits that hold on all ranks, and the kind of
    memory.

    ``planner`` has the limits of this rank only. Cluster sizes can differ between GPUs of a model, so the minimum is
    used.
    """
    core, most_blocks = rendezvous.attempt("set-up of the device", lambda: _make_core(rendezvous.rank, device, planner))
    clusters: list[int] = rendezvous.gather("comparison of clusters", most_blocks)
    memory_kind = map_workspaces(rendezvous, core, ways_to_share(device.type == "cpu", rendezvous.spans_hosts))
    check_reachable(rendezvous, core)
    limits = planner.limits
    limits_of_all = devices.make_limits(
        planner.config.workspace_bytes, limits.sm_count, min(clusters), limits.compute_capability
    )
    return core, limits_of_all, memory_kind


def _make_core(rank: int, device: torch.device, planner: Planner) -> tuple[_core.Core, int]:
    """Create the core with the kernels that plans can name. Return it and the largest cluster its device has room
    for."""
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
    """Start a watchdog for the core. Return None for a group of one rank."""
    if rendezvous.names.size == 1:
        return None
    board: StatusBoard | LinkedBoard | None = None
    try:
        if rendezvous.world_size > 1:
            board = (LinkedBoard if rendezvous.spans_hosts else StatusBoard).open(rendezvous)
    except MissingRankError:
        raise
    except RendezvousError as error:  # raised on all ranks alike
        # Between hosts it is a matter of addresses and routes, which an operator can mend.
        level = logging.WARNING if rendezvous.spans_hosts and rendezvous.rank == 0 else logging.INFO
        logger.log(level, "%s: errors will tell nothing of the other ranks: %s", rendezvous.names.of_group, error)
    if not _core.bounded_waits:
        logger.warning("this build of llm_comm is for measuring only: its kernels wait for ever")
    watchdog = Watchdog(core, rendezvous.rank, timeout_s, board, rendezvous.names)
    try:
        rendezvous.attempt("start of the watchdog", watchdog.start)
    except BaseException:
        watchdog.stop()
        raise
    return watchdog
