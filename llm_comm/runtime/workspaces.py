"""The workspaces of a group: each rank allocates its own and maps those of the others. All steps are collective."""

from __future__ import annotations

import logging
import os

from llm_comm import _core
from llm_comm.errors import MissingRankError, RendezvousError
from llm_comm.runtime.rendezvous import Rendezvous

logger = logging.getLogger("llm_comm")


def map_workspaces(rendezvous: Rendezvous, core: _core.Core, is_emulated: bool) -> str:
    """Allocates the workspace of this rank and maps those of its peers. Returns by which kind of memory.

    Raises:
        RendezvousError: Memory cannot be allocated, or not be shared. Raised on all ranks alike.
    """
    if is_emulated:
        _map_by_descriptor(rendezvous, core)
        return "POSIX shared memory"
    try:
        _map_by_descriptor(rendezvous, core)
        return "VMM"
    except MissingRankError:
        raise
    except RendezvousError as error:  # the same on all ranks: all fall back
        logger.info("VMM is not permitted here, using cudaIpc: %s", error)
        why_not_vmm = str(error)
    try:
        _map_by_ipc(rendezvous, core)
    except MissingRankError:
        raise
    except RendezvousError as error:
        raise RendezvousError(f"{error}. Before that, by VMM: {why_not_vmm}") from error
    return "cudaIpc"


def _map_by_descriptor(rendezvous: Rendezvous, core: _core.Core) -> None:
    descriptors: list[int] = []
    try:
        rendezvous.attempt("allocation of the workspace", lambda: descriptors.append(core.create_workspace(False)[0]))
        peers = rendezvous.exchange_descriptors(descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)

    def map_peers() -> None:
        for peer, fd in peers.items():
            core.map_peer(peer, fd, b"")

    try:
        rendezvous.attempt("mapping of the peers' memory", map_peers)
    finally:
        for fd in peers.values():
            os.close(fd)


def _map_by_ipc(rendezvous: Rendezvous, core: _core.Core) -> None:
    _, handle = rendezvous.attempt("allocation of the workspace", lambda: core.create_workspace(True))
    handles = rendezvous.collect("handles of workspaces", handle.hex)

    def map_peers() -> None:
        for peer, peer_handle in enumerate(handles):
            if peer != rendezvous.rank:
                core.map_peer(peer, -1, bytes.fromhex(peer_handle))

    rendezvous.attempt("mapping of the peers' memory", map_peers)


def check_reachable(rendezvous: Rendezvous, core: _core.Core) -> None:
    """A store from every rank to every other one: links that map but do not carry (a bridge that blocks P2P) exist.

    Raises:
        RendezvousError: Stores of a rank do not arrive. Raised on all ranks alike.
    """
    rendezvous.attempt("peer-to-peer write", core.send_marks)

    def look() -> None:
        unseen = core.peers_unseen()
        if unseen:
            raise RuntimeError(f"stores of ranks {unseen} did not arrive: the devices cannot write to each other")

    rendezvous.attempt("peer-to-peer test", look)
