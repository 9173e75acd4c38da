"""The methods of a communicator that tell which all-reduces, fused ones and calls by name would be served."""

from __future__ import annotations

from typing import Any

import torch

from llm_comm import arrays
from llm_comm.operations import torch_operators
from llm_comm.operations.generic import GenericOperations
from llm_comm.operations.watched import is_traced as _is_traced
from llm_comm.planning.plan import Plan


class Answers:
    """What ``Communicator`` inherits."""

    _operations: torch_operators.Operations
    _other_operations: GenericOperations

    def accepts(self, x: Any) -> bool:
        """Whether ``all_reduce(x)`` is served. Depends on shape, dtype, layout, kind of device, and whether a gradient
        by ``x`` would be asked for (not under no_grad or inference_mode), so all ranks that run the same program with
        the same kind of tensor get the same answer.

        Raises:
            UnsupportedInputError: ``x`` is neither a tensor nor an array that torch can use.
        """
        tensor = x if isinstance(x, torch.Tensor) else arrays.as_tensor(x)
        calls = self._operations.all_reduce
        return calls.accepts_traced(tensor) if _is_traced(tensor) else calls.accepts(tensor)

    def accepts_all_reduce_add_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, quantize: str | None = None
    ) -> bool:
        """Whether ``all_reduce_add_rms_norm`` of ``x`` and ``weight`` is served. Depends on the same as ``accepts``, of
        both, so all ranks that run the same program with the same kinds of tensors get the same answer."""
        calls = self._operations.all_reduce_add_rms_norm
        if _is_traced(x):
            return calls.accepts_traced(x, weight, quantize)
        return calls.accepts(x, weight, quantize)

    def plan(self, x: Any) -> Plan:
        """What ``all_reduce(x)`` would run, and why; ``"declined"`` is the algorithm of an input that is not served.

        Raises:
            UnsupportedInputError: As of ``accepts``.
        """
        return self._operations.all_reduce.plan(arrays.as_tensor(x))

    def plan_all_reduce_add_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, quantize: str | None = None) -> Plan:
        """What ``all_reduce_add_rms_norm`` of ``x`` and ``weight`` would run, and why; ``"declined"`` is the algorithm
        of an input that is not served."""
        return self._operations.all_reduce_add_rms_norm.plan(x, weight, quantize)

    #: Names of before each operation had its own in them, for a release.
    accepts_fused = accepts_all_reduce_add_rms_norm
    plan_fused = plan_all_reduce_add_rms_norm

    def plan_for(self, operation: str, x: torch.Tensor, *, row: int = 0, **parameters: float) -> Plan:
        """What ``run`` of an operation would do for buffers like ``x``, and why.

        Raises:
            UnsupportedInputError: There is no such operation, or a parameter is missing or unknown.
        """
        return self._other_operations.plan(operation, x, row, parameters)
