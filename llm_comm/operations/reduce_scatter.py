"""Reduce-scatter: this rank's part of the one sum. ``Communicator.reduce_scatter`` says more."""

from __future__ import annotations

from llm_comm.operations.parts import PartsOperation
from llm_comm.planning.planner import Planner
from llm_comm.planning.tables import REDUCE_SCATTER
from llm_comm.runtime.core_handle import CoreHandle


class ReduceScatter(PartsOperation):
    """The reduce-scatters of one communicator."""

    takes_whole = True

    def __init__(self, handle: CoreHandle, planner: Planner, rank: int) -> None:
        super().__init__(REDUCE_SCATTER, handle, planner, rank)
