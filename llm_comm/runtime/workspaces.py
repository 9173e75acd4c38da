"""Memory shared by the ranks of a group: each rank allocates its own and maps that of its peers. Steps are
collective."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from llm_comm import _core
from llm_comm.errors import MissingRankError, RendezvousError
from llm_comm.runtime.rendezvous import Rendezvous

logger = logging.getLogger("llm_comm")


class _Memory(NamedTuple):
    """Memory to be shared, and the functions that allocate and map it.

    Attributes:
        name: Name of this rank's memory in errors.
        of_peers: Name of the peers' memory in errors.
        create: Allocates the memory of this rank and returns (file descriptor, cudaIpc handle). The argument asks for
            cudaIpc instead of VMM.
        map_peer: Maps the memory of a peer: rank, file descriptor or -1, cudaIpc handle or b"".
    """

    name: str
    of_peers: str
    create: Callable[[bool], tuple[int, bytes]]
    map_peer: Callable[[int, int, bytes], None]


def share_window(rendezvous: Rendezvous, core: _core.Core, window: int, nbytes: int, use_ipc: bool) -> None:
    """Allocate a window of the symmetric heap on every rank, and map the windows of the peers.

    Raises:
        RendezvousError: Memory cannot be allocated or shared. Raised on all ranks alike. The caller must close the part
            of the window that this rank has.
    """
    memory = _Memory(
        f"{nbytes} bytes of symmetric memory",
        "symmetric memory",
        lambda use_ipc: core.create_window(window, nbytes, use_ipc),
        lambda peer, fd, handle: core.map_window(window, peer, fd, handle),
    )
    (_map_by_ipc if use_ipc else _map_by_descriptor)(rendezvous, memory)


def map_workspaces(rendezvous: Rendezvous, core: _core.Core, is_emulated: bool) -> str:
    """Allocate the workspace of this rank and map those of its peers. Return the kind of memory.

    VMM is tried first. If a rank may not use it, all ranks use cudaIpc.

    Returns:
        "VMM", "cudaIpc", or "POSIX shared memory" for emulated devices.

    Raises:
        RendezvousError: Memory cannot be allocated or shared. Raised on all ranks alike.
    """
    workspace = _Memory("the workspace", "memory", core.create_workspace, core.map_peer)
    if is_emulated:
        _map_by_descriptor(rendezvous, workspace)
        return "POSIX shared memory"
    try:
        _map_by_descriptor(rendezvous, workspace)
        return "VMM"
    except MissingRankError:
        raise
    except RendezvousError as error:  # raised on all ranks alike: all fall back
        logger.info("VMM is not permitted here, using cudaIpc: %s", error)
        why_not_vmm = str(error)
    try:
        _map_by_ipc(rendezvous, workspace)
    except MissingRankError:
        raise
    except RendezvousError as error:
        raise RendezvousError(f"{error}. Before that, by VMM: {why_not_vmm}") from error
    return "cudaIpc"


def _map_by_descriptor(rendezvous: Rendezvous, memory: _Memory) -> None:
    def map_peers(peers: dict[int, int]) -> None:
        for peer, descriptor in peers.items():
            memory.map_peer(peer, descriptor, b"")

    allocation, mapping = f"allocation of {memory.name}", f"mapping of the peers' {memory.of_peers}"
    rendezvous.share_descriptors(allocation, lambda: memory.create(False)[0], mapping, map_peers)


def _map_by_ipc(rendezvous: Rendezvous, memory: _Memory) -> None:
    _, handle = rendezvous.attempt(f"allocation of {memory.name}", lambda: memory.create(True))
    handles = rendezvous.collect("handles of cudaIpc", handle.hex)

    def map_peers() -> None:
        for peer, peer_handle in enumerate(handles):
            if peer != rendezvous.rank:
                memory.map_peer(peer, -1, bytes.fromhex(peer_handle))

    rendezvous.attempt(f"mapping of the peers' {memory.of_peers}", map_peers)


def check_reachable(rendezvous: Rendezvous, core: _core.Core) -> None:
    """Store to every peer and check that the stores arrive. Some links can be mapped but carry no data, such as a PCIe
    bridge that blocks P2P.

    Raises:
        RendezvousError: The stores of a rank do not arrive. Raised on all ranks alike.
    """
    rendezvous.attempt("peer-to-peer write", core.send_marks)

    def look() -> None:
        unseen = core.peers_unseen()
        if unseen:
            whose = rendezvous.names.each(unseen)
            raise RuntimeError(f"stores of {whose} did not arrive: the devices cannot write to each other")

    rendezvous.attempt("peer-to-peer test", look)
