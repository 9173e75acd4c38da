"""Sleep mode of engines: workspaces are released when the engine falls asleep, and restored when it wakes up.

Release and restore are collective. All ranks of an engine sleep and wake together, and each rank takes its groups in
the order of their creation, so the collectives match.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from llm_comm.communicator import Communicator
from llm_comm.errors import LlmCommError, MissingRankError
from llm_comm.integrations.engine_config import options_of
from llm_comm.options import MIB

#: Kinds of groups that are released: the part of the group's name before ":". Empty: all groups. vLLM restricts this
#: where the ranks of a group belong to several engines, which sleep independently.
only: tuple[str, ...] = ()

#: Groups of this process by the id of their communicator, the oldest first: name, communicator, logger.
_groups: dict[int, tuple[str, weakref.ref[Communicator], logging.Logger]] = {}


def follow(group_name: str, communicator: Communicator, log: logging.Logger) -> None:
    """Register a group for ``release_all`` and ``restore_all``, until ``leave``.

    Args:
        group_name: The engine's name of the group.
        communicator: Communicator of the group. A weak reference is kept.
        log: Logger whose messages appear in the engine's log.
    """
    _groups[id(communicator)] = (group_name, weakref.ref(communicator), log)


def leave(communicator: Communicator) -> None:
    """Remove a group that ``follow`` has registered. A communicator that is not registered is ignored."""
    _groups.pop(id(communicator), None)


def release_first(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement of an engine's sleep method: release workspaces, then call the method.

    The release is first because the method (vLLM's) logs how much memory is free.
    """
    release_all()
    return theirs(*args, **kwargs)


def release_last(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement of an engine's sleep method: call the method, then release workspaces.

    The release is last because the method (SGLang's) refuses while requests are running.
    """
    result = theirs(*args, **kwargs)
    release_all()
    return result


def restore_first(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement of an engine's wake-up method: restore workspaces, then call the method."""
    restore_all()
    return theirs(*args, **kwargs)


def release_all() -> None:
    """Release the workspaces of every registered group whose kind is in ``only``. Collective over each group.

    Raises:
        MissingRankError: A rank did not come. The group is lost, so the engine cannot go on.
    """
    for group_name, reference, log in list(_groups.values()):
        communicator = reference()
        if communicator is not None and (not only or group_name.split(":", maxsplit=1)[0] in only):
            release(group_name, communicator, log)


def restore_all() -> None:
    """Restore the workspaces of every released group of this process. Collective over each group.

    Raises:
        RendezvousError: A step failed on a rank, for example for lack of memory. Raised on all ranks; the engine stays
            asleep and may try again.
        MissingRankError: A rank did not come.
    """
    for group_name, reference, log in list(_groups.values()):
        communicator = reference()
        if communicator is not None:
            restore(group_name, communicator, log)


def release(group_name: str, communicator: Communicator, log: logging.Logger) -> None:
    """Release the workspaces of a group to the device. Collective.

    If a rank cannot release, all ranks keep their workspaces, and rank 0 logs the reason.

    Raises:
        MissingRankError: A rank did not come. The group is lost, so the engine cannot go on.
    """
    if not options_of(communicator).sleep or communicator.is_released:
        return
    nbytes, why_not = communicator.workspace_bytes, communicator.why_not_releasable
    if not why_not:
        try:
            communicator.release()
        except MissingRankError:
            raise
        except LlmCommError as error:  # the same on all ranks
            why_not = str(error)
    if communicator.rank != 0:
        return
    size = f"{nbytes / MIB:g} MiB on each rank"
    if why_not:
        log.warning("llm_comm: group %s keeps its workspaces (%s) while it sleeps: %s", group_name, size, why_not)
    else:
        log.info("llm_comm: group %s sleeps: its workspaces (%s) are released", group_name, size)


def restore(group_name: str, communicator: Communicator, log: logging.Logger) -> None:
    """Restore the workspaces of a group, if they are released. Collective.

    Raises:
        RendezvousError: A step failed on a rank, for example for lack of memory. Raised on all ranks; the engine stays
            asleep and may try again.
        MissingRankError: A rank did not come.
    """
    if not communicator.is_released:
        return
    communicator.restore()
    if communicator.rank == 0:
        log.info("llm_comm: group %s is awake: its workspaces are restored", group_name)
