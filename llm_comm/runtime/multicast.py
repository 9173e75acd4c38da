"""Set up NVLink multicast over the workspaces of all ranks: on all ranks or on none. The steps are collective."""

from __future__ import annotations

import logging
import os

import torch

from llm_comm import _core, registry
from llm_comm.config import Config
from llm_comm.errors import MissingRankError, RendezvousError
from llm_comm.planning.multicast import EMULATED, Multicast, why_not, wish
from llm_comm.planning.tables import TuningTable
from llm_comm.runtime.rendezvous import Rendezvous

logger = logging.getLogger("llm_comm")


def driver_of(device: torch.device) -> str:
    """Return the CUDA version that the driver supports, in the spelling of tuning tables ("CUDA 13.0")."""
    if device.type == "cpu":
        return EMULATED
    version = int(_core.device_report(device.index)["driver_version"])
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def name_of(device: torch.device) -> str:
    """Return the name of the GPU in the spelling of tuning tables."""
    return EMULATED if device.type == "cpu" else torch.cuda.get_device_name(device)


def agree(rendezvous: Rendezvous, device: torch.device, config: Config, table: TuningTable) -> Multicast:
    """Decide whether the ranks set multicast up: only if every rank wants it. No multicast call is made here."""

    def own_wish() -> tuple[bool, str]:
        if rendezvous.spans_hosts:
            return False, "the ranks are on several hosts of an NVLink domain, whose multicast is not built"
        return wish(config, table, name_of(device), driver_of(device), rendezvous.world_size)

    wishes = [Multicast(*said) for said in rendezvous.collect("wish for NVLink multicast", own_wish)]
    against = {rank: said.why for rank, said in enumerate(wishes) if not said.is_up}
    if not against:
        return wishes[0]
    if len(against) == len(wishes):
        return wishes[0]._replace(is_up=False)
    names = rendezvous.names
    objection = f"not on all ranks: {'; '.join(f'{names.full(rank)}: {why}' for rank, why in against.items())}"
    if rendezvous.rank == 0:
        logger.warning("llm_comm: %s: NVLink multicast is not used: %s", names.of_group, objection)
    return Multicast(False, objection)


def set_up(rendezvous: Rendezvous, core: _core.Core, wanted: Multicast) -> Multicast:
    """Set up multicast over the workspaces of ``core``. Each step begins once all ranks have finished the previous one.

    If a step fails on a rank, all ranks drop multicast, rank 0 logs one warning, and the core stays usable without it.

    Raises:
        MissingRankError: A rank did not arrive at a step.
    """
    try:
        _share_object(rendezvous, core)
        rendezvous.attempt("adding of a device to the multicast object", core.add_multicast_device)
        rendezvous.attempt("binding of the workspace to the multicast object", core.bind_multicast)
    except MissingRankError:
        core.drop_multicast()
        raise
    except RendezvousError as error:  # raised on all ranks alike
        core.drop_multicast()
        return failed(rendezvous, str(error))
    return wanted


def failed(rendezvous: Rendezvous, why: str) -> Multicast:
    """Return the state without multicast, after a failed set-up or self-test. Rank 0 logs the reason."""
    if rendezvous.rank == 0:
        text = "llm_comm: %s: NVLink multicast is not used, all ranks go on without: %s"
        logger.warning(text, rendezvous.names.of_group, why)
    return Multicast(False, why)


def _share_object(rendezvous: Rendezvous, core: _core.Core) -> None:
    """Create the multicast object on rank 0 and import it on the other ranks.

    The exchange takes a descriptor from every rank, so the other ranks pass one of /dev/null.
    """
    is_first = rendezvous.rank == 0
    rendezvous.share_descriptors(
        "creation of the multicast object",
        lambda: core.create_multicast() if is_first else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC),
        "import of the multicast object",
        lambda received: None if is_first else core.join_multicast(received[0]),
    )


def tell(rendezvous: Rendezvous, config: Config, multicast: Multicast) -> None:
    """Log on rank 0 whether multicast is used, and warn if the option ``algorithm`` names an algorithm that cannot be
    used."""
    if rendezvous.rank != 0:
        return
    logger.info("llm_comm: %s: %s", rendezvous.names.of_group, multicast.describe(config))
    for operation in registry.operations().values():
        for algorithm in operation.algorithms:
            why = why_not(algorithm, config, multicast, is_forced=True) if algorithm.name == config.algorithm else ""
            if why:
                group = rendezvous.names.of_group
                logger.warning("llm_comm: %s: algorithm %s cannot be used: %s", group, config.algorithm, why)
                return
