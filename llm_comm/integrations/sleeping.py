"""What engines do with workspaces while they sleep: their memory goes back to the device, and comes again.

All ranks of an engine fall asleep and wake up together, so releases and restores come in the same order on all of them:
that in which the groups were made.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from llm_comm.communicator import Communicator
from llm_comm.errors import LlmCommError, MissingRankError
from llm_comm.integrations.engine_config import options_of
from llm_comm.options import MIB

#: Kinds of groups, as their names begin, whose ranks all fall asleep together; (): all groups. An engine sets it.
only: tuple[str, ...] = ()

#: Of this process, the oldest first: the engine's name of the group, and where it logs.
_groups: dict[int, tuple[str, weakref.ref[Communicator], logging.Logger]] = {}


def follow(group_name: str, communicator: Communicator, log: logging.Logger) -> None:
    """From now on the group is one of those of ``release_all``, until ``leave``.

    Args:
        group_name: The engine's name of the group.
        log: Comes out where the engine's messages do.
    """
    _groups[id(communicator)] = (group_name, weakref.ref(communicator), log)


def leave(communicator: Communicator) -> None:
    """The opposite of ``follow``; for one that is not followed, nothing."""
    _groups.pop(id(communicator), None)


def release_first(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method by which an engine falls asleep, behind ``release_all``: it logs how much memory is free."""
    release_all()
    return theirs(*args, **kwargs)


def release_last(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method by which an engine falls asleep, then ``release_all``: it refuses where requests are under way."""
    result = theirs(*args, **kwargs)
    release_all()
    return result


def restore_first(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method by which an engine wakes up, behind ``restore_all``."""
    restore_all()
    return theirs(*args, **kwargs)


def release_all() -> None:
    """Releases every group of this process that falls asleep. Collective over each of them.

    Raises:
        MissingRankError: As of ``release``.
    """
    for group_name, reference, log in list(_groups.values()):
        communicator = reference()
        if communicator is not None and (not only or group_name.split(":", maxsplit=1)[0] in only):
            release(group_name, communicator, log)


def restore_all() -> None:
    """Restores every group of this process that is released. Collective over each of them.

    Raises:
        RendezvousError: As of ``restore``.
    """
    for group_name, reference, log in list(_groups.values()):
        communicator = reference()
        if communicator is not None:
            restore(group_name, communicator, log)


def release(group_name: str, communicator: Communicator, log: logging.Logger) -> None:
    """Gives the workspaces of a group back. Where that cannot be, they stay on all ranks, and the log says why.

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
    """Takes memory for the workspaces of a group again, if they are released.

    Raises:
        RendezvousError: A rank has no memory, say: the same on all. The engine has not woken up, and can try again.
        MissingRankError: A rank did not come.
    """
    if not communicator.is_released:
        return
    communicator.restore()
    if communicator.rank == 0:
        log.info("llm_comm: group %s is awake: its workspaces are restored", group_name)
