"""Release the memory of a communicator's workspaces while it is idle, and restore it later. Both calls are collective.

Every rank keeps its virtual address range reserved. CUDA graphs and prepared calls hold addresses of the range and are
therefore valid again after ``restore``. If a rank cannot take a step, all ranks keep their earlier state, provided that
no memory has been freed yet.
"""

from __future__ import annotations

from llm_comm import _core
from llm_comm.errors import UnsupportedInputError
from llm_comm.planning.multicast import Multicast
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.devices import is_capturing
from llm_comm.runtime.rendezvous import Rendezvous
from llm_comm.runtime.workspaces import share_memory


def why_not_releasable(memory_kind: str, multicast: Multicast) -> str:
    """Return why the workspaces cannot be released, equal on all ranks, or "" if they can.

    Args:
        memory_kind: ``connect.Connected.memory_kind``.
        multicast: NVLink multicast state of the communicator.
    """
    if memory_kind == "cudaIpc":
        return "the workspaces are shared by cudaIpc (VMM is not permitted here), which cannot keep addresses"
    if multicast.is_up:
        return "NVLink multicast is set up over the workspaces (LLM_COMM_MULTICAST=0 does without)"
    return ""


def release(rendezvous: Rendezvous, handle: CoreHandle, why_not: str) -> None:
    """Free the memory of all workspaces. Collective.

    Args:
        why_not: Result of ``why_not_releasable``.

    Raises:
        UnsupportedInputError: ``why_not`` is not empty, or a CUDA graph is being captured. Nothing has changed.
        RendezvousError: A rank failed. Nothing has changed, unless memory was already being freed: then the
            communicator has failed.
        MissingRankError: A rank did not arrive. Nothing has changed on this rank, unless memory was already being
            freed.
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


def restore(rendezvous: Rendezvous, handle: CoreHandle, sharing: _core.Sharing) -> None:
    """Allocate the memory of all workspaces again, at their old addresses. Collective.

    Args:
        sharing: How peers get the memory, as at set-up.

    Raises:
        RendezvousError: A rank has no memory, or could not map the memory of a peer. The workspaces stay released on
            all ranks.
        MissingRankError: A rank did not arrive. The workspace of this rank stays released.
    """
    core = handle.core_of_released()
    steps = "restoring the workspace", "mapping of the peers' memory"
    try:
        share_memory(rendezvous, sharing, steps, core.restore_workspace, core.restore_peer)
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
