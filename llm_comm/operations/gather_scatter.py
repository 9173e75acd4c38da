"""The methods of a communicator for all-gather and reduce-scatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llm_comm import arrays
from llm_comm.operations import torch_operators
from llm_comm.operations.operands import is_traced
from llm_comm.operations.operands import is_watched as _is_watched
from llm_comm.operations.parts import PartsOperation, Sizes
from llm_comm.planning.plan import Plan

# Global names cost less than attributes.
_is_compiling = torch.compiler.is_compiling
_Tensor = torch.Tensor


class GatherScatter:
    """Mixin of ``Communicator``: all-gather and reduce-scatter, and their ``accepts`` and ``plan``."""

    name: str
    _operations: torch_operators.Operations
    # ``run`` of two of them, found with one look-up each.
    _all_gather: Callable[..., Any]
    _reduce_scatter: Callable[..., Any]

    # ---- Operations ---------------------------------------------------------------------------------------------

    def all_gather(self, x: Any, dim: int = 0, sizes: Sizes | None = None, out: Any = None) -> Any:
        """Puts the parts of all ranks together along a dimension, in rank order. Bits stay what they are.

        Args:
            x: This rank's part: contiguous tensor of at least one dimension and any dtype (bool, integers, FP8, complex
                too), on this communicator's device; or an array with DLPack or ``__cuda_array_interface__``. Alike on
                all ranks, but for its size along ``dim`` where ``sizes`` are given.
            dim: Along which the parts are put together; below 0 it counts from the last.
            sizes: How long each rank's part is along ``dim``, by rank; it may be 0. None: all are as long as this one.
            out: Where the result goes: contiguous, of as many elements as that and the dtype of ``x``. ``x`` may lie
                exactly where it belongs in ``out``; else they must not overlap. None: a new tensor.

        Returns:
            ``out``, or a new tensor (array): as long along ``dim`` as all parts together, otherwise shaped like ``x``.

        Raises:
            UnsupportedInputError: ``accepts_all_gather(x, dim, sizes)`` is false, or ``out`` does not fit.
            CommunicatorError: This or an earlier call has failed, as of ``all_reduce``.
        """
        # Host time of a call is a bar: this path makes no Python call that it can do without.
        if _is_compiling() or type(x) is not _Tensor or _is_watched():
            return self._dispatch(self._operations.all_gather, x, dim, sizes, out)
        return self._all_gather(x, dim, sizes, out)

    def reduce_scatter(self, x: Any, dim: int = 0, sizes: Sizes | None = None, out: Any = None) -> Any:
        """Sums ``x`` over all ranks and hands each its part along a dimension: bitwise that of ``all_reduce(x)``.

        Args:
            x: Of the same shape on all ranks: contiguous tensor of at least one dimension, bfloat16, float16 or
                float32, on this communicator's device; or an array with DLPack or ``__cuda_array_interface__``.
            dim: Along which it is handed out; below 0 it counts from the last.
            sizes: How long each rank's part is along ``dim``, by rank; it may be 0, and all add up to the length of
                ``x``. None: all are alike.
            out: Where the part goes: contiguous, of as many elements as that and the dtype of ``x``. It may be exactly
                this rank's part of ``x``; else they must not overlap. None: a new tensor.

        Returns:
            ``out``, or a new tensor (array): as long along ``dim`` as this rank's part, otherwise shaped like ``x``.

        Raises:
            UnsupportedInputError: ``accepts_reduce_scatter(x, dim, sizes)`` is false, or ``out`` does not fit.
            CommunicatorError: This or an earlier call has failed, as of ``all_reduce``.
        """
        if _is_compiling() or type(x) is not _Tensor or _is_watched():
            return self._dispatch(self._operations.reduce_scatter, x, dim, sizes, out)
        return self._reduce_scatter(x, dim, sizes, out)

    def try_all_gather(self, x: torch.Tensor, dim: int = 0, sizes: Sizes | None = None) -> torch.Tensor | None:
        """``all_gather(x, dim, sizes)`` where it is accepted, else None: in one look at ``x``, for engines that then go
        their own way. The same on all ranks.

        Raises:
            CommunicatorError: ``x`` is accepted, and this or an earlier call has failed, as of ``all_reduce``.
        """
        if _is_compiling() or type(x) is not _Tensor or _is_watched():
            return self._try(self._operations.all_gather, x, dim, sizes)
        result: torch.Tensor | None = self._all_gather(x, dim, sizes, None, True)
        return result

    def try_reduce_scatter(self, x: torch.Tensor, dim: int = 0, sizes: Sizes | None = None) -> torch.Tensor | None:
        """The same for ``reduce_scatter(x, dim, sizes)``."""
        if _is_compiling() or type(x) is not _Tensor or _is_watched():
            return self._try(self._operations.reduce_scatter, x, dim, sizes)
        result: torch.Tensor | None = self._reduce_scatter(x, dim, sizes, None, True)
        return result

    def _try(self, operation: PartsOperation, x: torch.Tensor, dim: int, sizes: Sizes | None) -> torch.Tensor | None:
        result: torch.Tensor | None = None
        if _accepts(operation, x, dim, sizes):
            result = self._dispatch(operation, x, dim, sizes, None)
        return result

    def _dispatch(self, operation: PartsOperation, x: Any, dim: int, sizes: Sizes | None, out: Any) -> Any:
        """What is no ordinary tensor, or not one yet."""
        if isinstance(x, _Tensor):
            return torch_operators.on_parts(operation, x, dim, sizes, out, self.name)
        method: Callable[..., Any] = getattr(self, operation.name)
        return arrays.call(lambda x, out: method(x, dim, sizes, out), x, out)

    # ---- What would be served -----------------------------------------------------------------------------------

    def accepts_all_gather(self, x: Any, dim: int = 0, sizes: Sizes | None = None) -> bool:
        """Whether ``all_gather(x, dim, sizes)`` is served: ``dim`` and ``sizes`` fit ``x``, and the whole tensor is not
        larger than ``max_message_bytes``, or without that option no part larger than the tuning table goes. Depends on
        these and what ``accepts`` depends on, so all ranks that run the same program with the same kind of tensor get
        the same answer.

        Raises:
            UnsupportedInputError: ``x`` is neither a tensor nor an array that torch can use.
        """
        return _accepts(self._operations.all_gather, x, dim, sizes)

    def accepts_reduce_scatter(self, x: Any, dim: int = 0, sizes: Sizes | None = None) -> bool:
        """The same for ``reduce_scatter(x, dim, sizes)``."""
        return _accepts(self._operations.reduce_scatter, x, dim, sizes)

    def plan_all_gather(self, x: Any, dim: int = 0, sizes: Sizes | None = None) -> Plan:
        """What ``all_gather(x, dim, sizes)`` would run, and why; ``"declined"`` is the algorithm of an input that is
        not served.

        Raises:
            UnsupportedInputError: As of ``accepts_all_gather``.
        """
        return self._operations.all_gather.plan(arrays.as_tensor(x), dim, sizes)

    def plan_reduce_scatter(self, x: Any, dim: int = 0, sizes: Sizes | None = None) -> Plan:
        """The same for ``reduce_scatter(x, dim, sizes)``."""
        return self._operations.reduce_scatter.plan(arrays.as_tensor(x), dim, sizes)


def _accepts(calls: PartsOperation, x: Any, dim: int, sizes: Sizes | None) -> bool:
    tensor = x if isinstance(x, torch.Tensor) else arrays.as_tensor(x)
    return calls.accepts_traced(tensor, dim, sizes) if is_traced(tensor) else calls.accepts(tensor, dim, sizes)
