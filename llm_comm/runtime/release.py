"""Workspaces whose memory is given back while nobody uses them, and taken again later. Steps are collective.

Addresses stay reserved on every rank, so whatever holds them (CUDA graphs, prepared calls) is good again afterwards. A
rank that cannot take a step leaves all ranks where they were, if nothing has been given back yet.
"""

from __future__ import annotations

from llm_comm.errors import UnsupportedInputError
from llm_comm.planning.multicast import Multicast
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.devices import is_capturing
from llm_comm.runtime.rendezvous import Rendezvous


def why_not_releasable(memory_kind: str, multicast: Multicast) -> str:
    """Why workspaces of this kind keep their memory, the same on all ranks, or "".

    Args:
        memory_kind: As of ``connect.Connected``.
        multicast: Of the communicator.
    """
    if memory_kind == "cudaIpc":
        return "the workspaces are shared by cudaIpc (VMM is not permitted here), which cannot keep addresses"
    if multicast.is_up:
        return "NVLink multicast is set up over the workspaces (LLM_COMM_MULTICAST=0 does without)"
    return ""


def release(rendezvous: Rendezvous, handle: CoreHandle, why_not: str) -> None:
    """Gives the memory of all workspaces back. Collective.

    Args:
        why_not: ``why_not_releasable``.

    Raises:
        UnsupportedInputError: ``why_not``, or a CUDA graph is being captured. Nothing has changed.
        RendezvousError: A rank could not. Nothing has changed, unless the communicator has failed since.
        MissingRankError: A rank did not come. Nothing has changed here.
    """
    core = handle.core()

    def begin() -> None:
        handle.check()
        if why_not:
            raise UnsupportedInputError(f"release: {why_not}")
        if is_capturing(handle.device):
            raise UnsupportedInputError("release: a CUDA graph is being captured: make the call before or after")
        try:
            core.begin_release()
        except RuntimeError:
            core.end_release()
            raise

    rendezvous.attempt("release: waiting for the operations", begin, undo=lambda _: core.end_release())
    handle.is_released = True
    try:
        rendezvous.attempt("release of the workspaces", core.release_workspaces)
    except BaseException:
        handle.fail("the workspaces could not be released on all ranks")
        raise


def restore(rendezvous: Rendezvous, handle: CoreHandle) -> None:
    """Takes memory for all workspaces again, at the addresses of before. Collective.

    Raises:
        RendezvousError: A rank has no memory, or could not map that of a peer. The workspaces are released on all
            ranks, as before.
        MissingRankError: A rank did not come. As before on this one.
    """
    core = handle.core_of_released()

    def map_peers(peers: dict[int, int]) -> None:
        for peer, descriptor in peers.items():
            core.restore_peer(peer, descriptor)

    steps = "restoring the workspace", "mapping of the peers' memory"
    try:
        rendezvous.share_descriptors(steps[0], core.restore_workspace, steps[1], map_peers)
    except BaseException:
        try:
            core.release_workspaces()
        except RuntimeError:
            handle.fail("the workspace could neither be restored nor released")
        raise
    try:
        rendezvous.attempt("restoring the proxies", core.end_release)
    except BaseException:
        handle.fail("the proxy of port channels did not start again on all ranks")
        raise
    handle.is_released = False
