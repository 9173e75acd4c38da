"""What a communicator over several nodes declines: fused all-reduces, and operations by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from llm_comm.errors import UnsupportedInputError
from llm_comm.operations.all_reduce_add_rms_norm import AllReduceAddRmsNorm
from llm_comm.operations.generic import GenericOperations
from llm_comm.planning.plan import Plan, declined
from llm_comm.planning.tables import FUSED

WHY = "works only within a node, and the ranks are on several"


class NoAllReduceAddRmsNorm(AllReduceAddRmsNorm):
    """The fused calls of one communicator, all declined: the norm needs whole rows of the sum, and no kernel makes them
    in the last phase yet."""

    def plan(self, x: torch.Tensor, weight: torch.Tensor, quantize: str | None) -> Plan:
        self._handle.check_open()
        return declined(FUSED, x.nbytes, WHY)

    def takes(self, count: int, element_size: int, row: int, dimensions: int, quantize: str | None) -> bool:
        return False

    def count_declined_result(self, shape: Sequence[int], dtype: torch.dtype, quantize: str | None) -> None:
        self._count_declined(WHY)


class NoGenericOperations(GenericOperations):
    """Operations by name, of which there are none."""

    def run(
        self,
        operation: str,
        buffers: Mapping[str, torch.Tensor | None],
        row: int,
        parameters: Mapping[str, float],
    ) -> None:
        raise UnsupportedInputError(f"{operation}: Communicator.run {WHY}")

    def plan(self, operation: str, x: torch.Tensor, row: int, parameters: Mapping[str, float]) -> Plan:
        return declined(operation, x.nbytes, WHY)
