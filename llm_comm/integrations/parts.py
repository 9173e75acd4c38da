"""All-gathers and reduce-scatters of a group of an engine: what llm_comm serves of them, and the lines that say so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llm_comm.errors import UnsupportedInputError
from llm_comm.integrations.engine_config import options_of
from llm_comm.integrations.members import Member

#: Logged once by rank 0 for each method of the engine, and again where parts differ in size: with the method, the
#: group, number of ranks, shape, and how the sizes are. That a group is served does not mean that anything is gathered.
FIRST_CALL = "llm_comm: first %s of group %s (%d ranks, shape %s%s)"


class Parts:
    """One group's, as far as ``EngineOptions.all_gather`` and ``EngineOptions.reduce_scatter`` say.

    Each method returns None, the same on all ranks, for what is not served: nothing has been exchanged then, and the
    engine goes its own way.

    Args:
        member: This rank's part in the group.
        log: Comes out where the engine's messages do.
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
        """Whether any all-gather is served."""
        return self._gathers is not None

    @property
    def scatters(self) -> bool:
        """Whether any reduce-scatter is served."""
        return self._scatters is not None

    def all_gather(
        self,
        method: str,
        x: torch.Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """The parts of all ranks along ``dim``: ``out``, or a new tensor.

        Args:
            method: The engine's name of the call.
            x: This rank's part, of any layout.
            dim, sizes: As of ``Communicator.all_gather``.
            out: Of any layout, and of any shape with as many elements. It decides nothing: ranks may differ in it.
        """
        return self._call(self._gathers, method, x, dim, sizes, out)

    def reduce_scatter(
        self,
        method: str,
        x: torch.Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """This rank's part along ``dim`` of the sum over the group; the rest as of ``all_gather``."""
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
        if operation is None:
            return None
        # Before anyone decides: ranks whose parts differ in size can differ in layout. One row is always contiguous.
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
        """Closes llm_comm; whoever asks from now on is served by the engine."""
        self._gathers = self._scatters = None
        self._member.close()


class _Operation(NamedTuple):
    """Methods of a communicator for one operation."""

    run: Callable[..., Any]
    accepts: Callable[..., bool]
    attempt: Callable[..., torch.Tensor | None]


def _into(
    operation: Callable[..., Any], x: torch.Tensor, dim: int, sizes: Sequence[int] | None, out: torch.Tensor
) -> torch.Tensor:
    """The result of an accepted call, in ``out``."""
    try:
        operation(x, dim, sizes, out)
    except UnsupportedInputError:  # of ``out``, which is looked at before anything is sent: it has gaps or overlaps x
        out.copy_(operation(x, dim, sizes).view(out.shape))
    return out
