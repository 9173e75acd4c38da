"""Agreement of the ranks of a command: all were asked the same, none has failed, and all compare the same libraries.

Ranks that compared different libraries would wait for each other in collectives of which the other knows nothing.
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

# A rank that has failed waits in the vote for those that wait for it in the library's own set-up: until the limit of
# the group ends that, and then some.
_VOTE_TIMEOUT_S = 2 * launch.GROUP_TIMEOUT.total_seconds()


def require_alike(asked: Callable[[], Mapping[str, Any]], group: dist.ProcessGroup) -> None:
    """Compares what ranks were asked, by name. Collective.

    Args:
        asked: Tells that of this rank; may raise ConfigError.

    Raises:
        ConfigError: They differ, or a rank's ``asked`` raised it. On all ranks alike: one that went on alone would wait
            for the others.
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
    """What tells two apart, or ""."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return ", ".join(
        f"{name} is {quoted(one.get(name))} {of_one} and {quoted(other.get(name))} {of_other}" for name in names
    )


def first_failure(failure: str, error: float, group: dist.ProcessGroup) -> tuple[str, float]:
    """The first rank's failure, if any, and the largest error of all ranks. Collective, on the host."""
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, (failure, error), group=group)
    return next((text for text, _ in outcomes if text), ""), max(worst for _, worst in outcomes)


def checked(check: Callable[[], float], group: dist.ProcessGroup) -> tuple[str, float]:
    """Run a check of results on this rank. Collective.

    Args:
        check: Return how far off results are; raise RuntimeError where a library cannot compute them.

    Returns:
        Why a rank's library cannot, or "", and the largest error of all ranks.

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
    """Calls it, and returns only if no rank has failed: others would wait for that one in what comes next. Collective.

    Raises:
        LlmCommError: It failed on another rank. On that rank: what it raised.
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
    """Whether it is true on a rank. Collective, on the host."""
    flags = torch.tensor([int(flag)])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return bool(flags)


class NotUsableError(RuntimeError):
    """A library could not be set up on some rank. Raised on all ranks, with the same text."""


def set_up(what: str, step: Callable[[], _T], group: dist.ProcessGroup) -> _T:
    """Runs ``step``, and returns its result once it has succeeded on every rank. Collective.

    What can fail on one rank alone, such as an import, should be a step before the one in which ranks wait for each
    other.

    Raises:
        NotUsableError: It failed somewhere; the text names ``what``, the ranks and the reasons.
        MissingRankError: A rank did not come to the vote.
    """
    result, failure = None, None
    try:
        result = step()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = first_line(error)
    try:
        Rendezvous(group, _VOTE_TIMEOUT_S).vote(what, failure)
    except MissingRankError:  # no vote: the others may not know that there is none
        raise
    except RendezvousError as error:
        raise NotUsableError(str(error)) from None
    return result  # type: ignore[return-value]
