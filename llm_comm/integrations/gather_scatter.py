"""All-gathers and reduce-scatters of an engine's group: calls that llm_comm serves, and their log lines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llm_comm.errors import UnsupportedInputError
from llm_comm.integrations.engine_config import options_of
from llm_comm.integrations.members import Member

#: Log line of global rank 0 for the first call of each engine method, and for the first call with shards of different
#: sizes. The start line alone does not prove that anything is gathered. Values: method, group, ranks, shape, sizes.
FIRST_CALL = "llm_comm: first %s of group %s (%d ranks, shape %s%s)"


class EngineGatherScatter:
    """All-gather and reduce-scatter of one group. Options ``all_gather`` and ``reduce_scatter`` switch them off.

    Each method returns None if llm_comm declines the call. All ranks decline alike, and a declined call has exchanged
    nothing, so the engine can run its own collective.

    Args:
        member: This rank's membership in the group.
        log: Logger whose messages appear in the engine's log.
    """

    def __init__(self, member: Member, log: logging.Logger) -> None:
        communicator, config = member.communicator, options_of(member.communicator)
        self._member = member
        self._log = log
        self._gathers = (
            _Operation(communicator.all_gather, communicator.accepts_all_gather, communicator.try_all_gather)
            if config.all_gather
            else None
        )
        self._lossy_gathers = self._gathers and _Operation._make(partial(one, lossy=True) for one in self._gathers)
        self._scatters = (
            _Operation(
                communicator.reduce_scatter, communicator.accepts_reduce_scatter, communicator.try_reduce_scatter
            )
            if config.reduce_scatter
            else None
        )
        self._said: set[tuple[str, bool]] = set()

    @property
    def gathers(self) -> bool:
        """True if llm_comm serves all-gathers of this group."""
        return self._gathers is not None

    @property
    def scatters(self) -> bool:
        """True if llm_comm serves reduce-scatters of this group."""
        return self._scatters is not None

    def all_gather(
        self,
        method: str,
        x: torch.Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        lossy: bool = False,
    ) -> torch.Tensor | None:
        """Concatenate the shards of all ranks along ``dim``, into ``out`` or a new tensor; None if declined.

        Args:
            method: Name of the engine's method, for the log.
            x: Shard of this rank, of any layout.
            dim: Dimension along which shards are concatenated.
            sizes: Size of each rank's shard along ``dim``; None if all are equal.
            out: Tensor of any layout, and of any shape with the right number of elements. It does not influence the
                decision, since ranks may differ in its layout.
            lossy: Option ``wire`` may quantize the values.
        """
        return self._call(self._lossy_gathers if lossy else self._gathers, method, x, dim, sizes, out)

    def reduce_scatter(
        self,
        method: str,
        x: torch.Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Sum ``x`` over the group, and return this rank's shard of the sum along ``dim``; None if declined.

        Args:
            method: Name of the engine's method, for the log.
            x: Tensor of the whole shape, of any layout.
            dim: Dimension along which the sum is split.
            sizes: Size of each rank's shard along ``dim``; None if all are equal.
            out: Tensor of any layout for the shard; None for a new tensor.
        """
        return self._call(self._scatters, method, x, dim, sizes, out)

    def _call(
        self,
        operation: _Operation | None,
        method: str,
        x: torch.Tensor,
        dim: int,
        sizes: Sequence[int] | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run an operation if it is accepted, and log the first call of each method; None if it is declined."""
        if operation is None:
            return None
        # Must precede the decision, which reads the layout: ranks with different sizes can differ in it. A shard of one
        # row is always contiguous, one of several rows may not be.
        x = x.contiguous()
        if out is None:
            result = operation.attempt(x, dim, sizes)
        elif operation.accepts(x, dim, sizes):
            result = _into(operation.run, x, dim, sizes, out)
        else:
            return None
        kind = (method, sizes is not None and len(set(sizes)) > 1)
        if result is not None and kind not in self._said:
            self._said.add(kind)
            if dist.get_rank() == 0:
                uneven = f", sizes {list(sizes)}" if sizes is not None and kind[1] else ""
                world = self._member.communicator.world_size
                self._log.info(FIRST_CALL, method, self._member.group_name, world, tuple(x.shape), uneven)
        return result

    def leave(self) -> None:
        """Close the group's communicator. The engine serves all further calls."""
        self._gathers = self._lossy_gathers = self._scatters = None
        self._member.close()


class _Operation(NamedTuple):
    """Methods of a communicator for one operation.

    Attributes:
        run: Compute the call, or raise.
        accepts: Return whether the call is served.
        attempt: Compute the call, or return None if it is declined.
    """

    run: Callable[..., Any]
    accepts: Callable[..., bool]
    attempt: Callable[..., torch.Tensor | None]


def _into(
    operation: Callable[..., Any], x: torch.Tensor, dim: int, sizes: Sequence[int] | None, out: torch.Tensor
) -> torch.Tensor:
    """Run a call that was accepted, and write the result to ``out``."""
    try:
        operation(x, dim, sizes, out)
    except UnsupportedInputError:  # ``out`` has gaps or overlaps x. It is checked before anything is sent.
        out.copy_(operation(x, dim, sizes).view(out.shape))
    return out
