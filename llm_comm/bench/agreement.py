"""Agreement between the ranks of a command: same request, no failure, same set of libraries.

Ranks with different libraries would wait for each other in different collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from llm_comm.bench.report import first_line
from llm_comm.cli import launch
from llm_comm.errors import ConfigError, LlmCommError, MissingRankError, RendezvousError, UnsupportedInputError, quoted
from llm_comm.runtime.rendezvous import Rendezvous

_T = TypeVar("_T")

# Longest wait in a vote. A failed rank votes early, while the others are still in a library's own set-up, which ends at
# the limit of the process group.
_VOTE_TIMEOUT_S = 2 * launch.GROUP_TIMEOUT.total_seconds()


def require_alike(asked: Callable[[], Mapping[str, Any]], group: dist.ProcessGroup) -> None:
    """Compare the request of all ranks, by name. Collective.

    Args:
        asked: Returns this rank's request; may raise ConfigError.
        group: Process group of the ranks.

    Raises:
        ConfigError: The requests differ, or ``asked`` raised it on a rank. Raised on all ranks alike, since a rank that
            continued alone would wait for the others.
    """
    mine, failure = {}, ""
    try:
        mine = dict(asked())
    except ConfigError as error:
        failure = str(error)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (mine, failure), group=group)
    for _, text in everyone:
        if text:
            raise ConfigError(text)
    first, _ = everyone[0]
    for rank, (theirs, _) in enumerate(everyone):
        told = difference(first, theirs, "on rank 0", f"on rank {rank}")
        if told:
            raise ConfigError(f"the ranks were asked different things: {told}; start all with the same command line")


def difference(one: Mapping[str, Any], other: Mapping[str, Any], of_one: str, of_other: str) -> str:
    """Return the difference between two requests in words, or ""."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return ", ".join(
        f"{name} is {quoted(one.get(name))} {of_one} and {quoted(other.get(name))} {of_other}" for name in names
    )


def first_failure(failure: str, error: float, group: dist.ProcessGroup) -> tuple[str, float]:
    """Return the failure of the first failed rank, or "", and the largest error of all ranks. Collective, on the
    host."""
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, (failure, error), group=group)
    return next((text for text, _ in outcomes if text), ""), max(worst for _, worst in outcomes)


def checked(check: Callable[[], float], group: dist.ProcessGroup) -> tuple[str, float]:
    """Check results on this rank. Collective.

    Args:
        check: Returns the error of the results. Raises RuntimeError if a library cannot compute them.
        group: Process group of the ranks.

    Returns:
        The failure of a rank's library, or "", and the largest error of all ranks.

    Raises:
        LlmCommError: The communicator has failed.
    """
    failure, error = "", 0.0
    try:
        error = check()
    except RuntimeError as reason:
        if isinstance(reason, LlmCommError) and not isinstance(reason, UnsupportedInputError):
            raise
        failure = first_line(reason)
    return first_failure(failure, error, group)


def on_all(call: Callable[[], _T], group: dist.ProcessGroup) -> _T:
    """Run ``call`` on every rank and return its result if no rank failed. Otherwise the others would wait in the next
    collective. Collective.

    Raises:
        LlmCommError: Another rank failed. On the failed rank: its own exception.
    """
    failure: Exception | None = None
    try:
        result = call()
    except Exception as error:
        failure = error
    has_failed = any_rank(failure is not None, group)
    if failure is not None:
        raise failure
    if has_failed:
        raise LlmCommError("another rank has failed: its message says why")
    return result


def any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    """Return whether ``flag`` is true on any rank. Collective, on the host."""
    flags = torch.tensor([int(flag)])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return bool(flags)


class NotUsableError(RuntimeError):
    """A library could not be set up on a rank. Raised on all ranks with the same text."""


def set_up(what: str, step: Callable[[], _T], group: dist.ProcessGroup) -> _T:
    """Run ``step`` on every rank and return its result if all succeeded. Collective.

    An action that can fail on one rank, such as an import, should be a step of its own. A step in which ranks wait for
    each other comes after it.

    Raises:
        NotUsableError: A rank failed. The text names ``what``, the ranks and the reasons.
        MissingRankError: A rank did not arrive at the vote.
    """
    result, failure = None, None
    try:
        result = step()
    except Exception as error:  # any error: the peers must be notified
        failure = first_line(error)
    try:
        Rendezvous(group, _VOTE_TIMEOUT_S).vote(what, failure)
    except MissingRankError:  # without a vote, other ranks may not know about the failure
        raise
    except RendezvousError as error:
        raise NotUsableError(str(error)) from None
    return result  # type: ignore[return-value]
