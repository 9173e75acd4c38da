"""Memory shared by the ranks of a group: each rank allocates its own and maps that of its peers. Steps are
collective."""

from __future__ import annotations

import logging
from collections.abc import Callable

from llm_comm import _core
from llm_comm.errors import MissingRankError, RendezvousError
from llm_comm.runtime.rendezvous import Rendezvous

logger = logging.getLogger("llm_comm")


class UnsharedMemoryError(RendezvousError):
    """The ranks cannot share memory in any of the ways that were tried. Raised on all ranks alike."""


#: How memory of each kind is shared, by the names of ``Communicator.memory_kind``.
SHARING: dict[str, _core.Sharing] = {
    "VMM": "descriptor",
    "VMM fabric": "fabric",
    "cudaIpc": "cudaIpc",
    "POSIX shared memory": "descriptor",
    "POSIX shared memory by name": "fabric",
}


def ways_to_share(is_emulated: bool, spans_hosts: bool) -> tuple[str, ...]:
    """Return the kinds of memory to try, the preferred one first.

    Args:
        is_emulated: The devices are emulated.
        spans_hosts: The ranks are on several hosts of an NVLink domain, which fabric handles alone connect.
    """
    if is_emulated:
        return ("POSIX shared memory by name",) if spans_hosts else ("POSIX shared memory",)
    # On one host, fabric handles serve ranks that cannot pass descriptors, as in containers with networks of their own.
    return ("VMM fabric",) if spans_hosts else ("VMM", "VMM fabric", "cudaIpc")


def map_workspaces(rendezvous: Rendezvous, core: _core.Core, kinds: tuple[str, ...]) -> str:
    """Allocate the workspace of this rank and map those of its peers. Return the kind of memory, one of ``kinds``.

    The kinds are tried in order. If one fails on a rank, all ranks go on to the next one.

    Raises:
        UnsharedMemoryError: Memory cannot be allocated or shared. Raised on all ranks alike.
    """
    why_not: list[str] = []
    for kind in kinds:
        sharing = SHARING[kind]
        steps = "allocation of the workspace", "mapping of the peers' memory"
        try:
            share_memory(rendezvous, sharing, steps, lambda: core.create_workspace(sharing), core.map_peer)  # noqa: B023
            return kind
        except MissingRankError:
            raise
        except RendezvousError as error:  # raised on all ranks alike: all go on
            logger.info("memory cannot be shared by %s here: %s", kind, error)
            why_not.append(f"by {kind}: {error}")
    raise UnsharedMemoryError(f"memory cannot be shared. {'. '.join(why_not)}")


def share_memory(
    rendezvous: Rendezvous,
    sharing: _core.Sharing,
    steps: tuple[str, str],
    create: Callable[[], tuple[int, bytes]],
    map_peer: Callable[[int, int, bytes], object],
) -> None:
    """Create memory on every rank, and map that of every peer.

    Args:
        rendezvous: Rendezvous of the ranks.
        sharing: How peers get the memory.
        steps: Names of the two steps in errors.
        create: Creates the memory of this rank. Returns a file descriptor or -1, and the bytes of a handle or b"".
        map_peer: Maps the memory of a peer: rank, file descriptor or -1, and the bytes of a handle or b"".

    Raises:
        RendezvousError: A step failed on a rank. Raised on all ranks alike.
    """
    made, mapped = steps
    if sharing == "descriptor":

        def map_descriptors(peers: dict[int, int]) -> None:
            for peer, descriptor in peers.items():
                map_peer(peer, descriptor, b"")

        rendezvous.share_descriptors(made, lambda: create()[0], mapped, map_descriptors)
        return
    _, handle = rendezvous.attempt(made, create)
    handles = rendezvous.collect(f"{sharing} handles", handle.hex)

    def map_handles() -> None:
        for peer, peer_handle in enumerate(handles):
            if peer != rendezvous.rank:
                map_peer(peer, -1, bytes.fromhex(peer_handle))

    rendezvous.attempt(mapped, map_handles)


def check_reachable(rendezvous: Rendezvous, core: _core.Core) -> None:
    """Store to every peer and check that the stores arrive. Some links can be mapped but carry no data, such as a PCIe
    bridge that blocks P2P.

    Raises:
        UnsharedMemoryError: The stores of a rank do not arrive. Raised on all ranks alike.
    """

    def look() -> None:
        unseen = core.peers_unseen()
        if unseen:
            whose = rendezvous.names.each(unseen)
            raise RuntimeError(f"stores of {whose} did not arrive: the devices cannot write to each other")

    try:
        rendezvous.attempt("peer-to-peer write", core.send_marks)
        rendezvous.attempt("peer-to-peer test", look)
    except MissingRankError:
        raise
    except RendezvousError as error:
        raise UnsharedMemoryError(str(error)) from error
