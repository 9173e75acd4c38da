"""What a communicator over several nodes declines: operations by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llm_comm.errors import UnsupportedInputError
from llm_comm.operations.generic import GenericOperations
from llm_comm.planning.plan import Plan, declined

WHY = "works only within a node, and the ranks are on several"


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
