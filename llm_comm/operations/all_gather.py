"""All-gather: any bits of any type. ``Communicator.all_gather`` says more."""

from __future__ import annotations

import torch

from llm_comm.operations.parts import PartsOperation
from llm_comm.planning.planner import Planner
from llm_comm.planning.tables import ALL_GATHER
from llm_comm.runtime.core_handle import CoreHandle


class AllGather(PartsOperation):
    """The all-gathers of one communicator."""

    takes_whole = False

    def __init__(self, handle: CoreHandle, planner: Planner, rank: int) -> None:
        super().__init__(ALL_GATHER, handle, planner, rank)

    def _core_type(self, dtype: torch.dtype) -> tuple[str, int]:
        return "byte", dtype.itemsize

    def _why_not_type(self, dtype: torch.dtype) -> str:
        # Their values rest on a scale that is no part of the memory.
        return f"{dtype} is quantized: pass x.int_repr()" if dtype in _QUANTIZED else ""


_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
