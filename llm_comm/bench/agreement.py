"""What the ranks of a command have to know of each other: that all were asked the same, and that none has failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from llm_comm.errors import ConfigError, LlmCommError, quoted

_T = TypeVar("_T")


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
