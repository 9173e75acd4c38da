"""Mixin of ``Communicator``: methods of all-gather, reduce-scatter and all-to-all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llm_comm import arrays
from llm_comm.errors import UnsupportedInputError
from llm_comm.operations import torch_operators
from llm_comm.operations.operands import is_traced
from llm_comm.operations.operands import is_watched as _is_watched
from llm_comm.operations.shards import ShardsOperation, Sizes
from llm_comm.planning.plan import Plan

# Global names are cheaper to look up than attributes.
_is_compiling = torch.compiler.is_compiling
_Tensor = torch.Tensor


class GatherScatter:
    """Mixin of ``Communicator``: all-gather, reduce-scatter and all-to-all, with ``accepts`` and ``plan`` queries."""

    name: str
    _operations: torch_operators.Operations
    # ``run`` of the operations, bound at set-up to save attribute look-ups.
    _all_gather: Callable[..., Any]
    _lossy_all_gather: Callable[..., Any]
    _reduce_scatter: Callable[..., Any]
    _all_to_all: Callable[..., Any]

    # ---- Operations ---------------------------------------------------------------------------------------------

    def all_gather(self, x: Any, dim: int = 0, sizes: Sizes | None = None, out: Any = None, lossy: bool = False) -> Any:
        """Concatenate the shards of all ranks along a dimension, in rank order. The bytes are copied without
        conversion, unless ``lossy`` permits otherwise.

        Args:
            x: Shard of this rank: contiguous tensor of at least one dimension, of any dtype (bool, integers, FP8 and
                complex included), on this communicator's device; or an array with DLPack or
                ``__cuda_array_interface__``. Equal dtype and shape on all ranks, except the size along ``dim`` if
                ``sizes`` are given.
            dim: Dimension to concatenate. A negative one counts from the last.
            sizes: Size along ``dim`` of each rank's shard, by rank; 0 is allowed. None: all shards have the size of
                this one.
            out: Output: contiguous, with the number of elements of the result and the dtype of ``x``. ``x`` may be
                exactly this rank's shard of ``out``; any other overlap is an error. None: a new tensor.
            lossy: Option ``wire`` may quantize the values, as it quantizes reduce-scatters: bfloat16, float16 and
                float32, results of ``wire_min_bytes`` and more, ranks on one node. All ranks get the same bits, of
                their own shard too. Equal on all ranks.

        Returns:
            ``out``, or a new tensor (array). Its size along ``dim`` is the sum of all shards' sizes; the other
            dimensions are those of ``x``.

        Raises:
            UnsupportedInputError: ``accepts_all_gather`` is false, or ``out`` does not fit.
            CommunicatorError: This or an earlier call has failed, see ``all_reduce``.
        """
        # Host time of a call is measured and bounded: this path avoids every Python call that it can.
        if _is_compiling() or type(x) is not _Tensor or _is_watched():
            return self._dispatch(self._gathers(lossy), x, dim, sizes, out)
        return self._lossy_all_gather(x, dim, sizes, out) if lossy else self._all_gather(x, dim, sizes, out)

    def reduce_scatter(self, x: Any, dim: int = 0, sizes: Sizes | None = None, out: Any = None) -> Any:
        """Sum ``x`` over all ranks and return this rank's shard along a dimension, bitwise equal to that part of
        ``all_reduce(x)`` without option ``wire``.

        Args:
            x: Contiguous tensor of at least one dimension, bfloat16, float16 or float32, on this communicator's device.
                Or an array with DLPack or ``__cuda_array_interface__``. Equal shape on all ranks.
            dim: Dimension to scatter. A negative one counts from the last.
            sizes: Size along ``dim`` of each rank's shard, by rank; 0 is allowed. The sum must be the size of ``x``
                along ``dim``. None: equal shards.
            out: Output: contiguous, with the number of elements of the result and the dtype of ``x``. It may be exactly
                this rank's shard of ``x``; any other overlap is an error. None: a new tensor.

        Returns:
            ``out``, or a new tensor (array). Its size along ``dim`` is that of this rank's shard; the other dimensions
            are those of ``x``.

        Raises:
            UnsupportedInputError: ``accepts_reduce_scatter(x, dim, sizes)`` is false, or ``out`` does not fit.
            CommunicatorError: This or an earlier call has failed, see ``all_reduce``.
        """
        if _is_compiling() or type(x) is not _Tensor or _is_watched():
            return self._dispatch(self._operations.reduce_scatter, x, dim, sizes, out)
        return self._reduce_scatter(x, dim, sizes, out)

    def all_to_all(
        self,
        x: Any,
        send_sizes: Any = None,
        recv_sizes: Any = None,
        max_rows: int | None = None,
        out: Any = None,
    ) -> Any:
        """Send the part of ``x`` for each rank, and return the parts that the ranks have for this one, in rank order.

        Parts are along the first dimension, in rank order and densely packed, as in
        ``torch.distributed.all_to_all_single``. Without sizes they are equal. With sizes, kernels read them from device
        memory: the host does not wait, and a replayed CUDA graph takes the sizes of that time. The bytes are copied
        without conversion, in one hop.

        Args:
            x: Contiguous tensor of any dtype, on this communicator's device; or an array with DLPack or
                ``__cuda_array_interface__``. Equal dtype and shape on all ranks, unless ``max_rows`` is given: then the
                first dimension may differ. Without sizes it must be a multiple of the number of ranks.
            send_sizes: Rows for each rank: int64 or int32, contiguous, one number a rank, on the device. The sum must
                not exceed the rows of ``x``.
            recv_sizes: Rows from each rank, of the dtype of ``send_sizes``. It must equal what the ranks send.
            max_rows: Most rows of any part on any rank, below 2^32 - 1. Equal on all ranks. It shapes the launch: a
                tight bound is faster. None: the rows of ``x``.
            out: Output: contiguous, of the dtype of ``x``. Without sizes: with the number of elements of ``x``. It may
                be ``x``; any other overlap is an error. With sizes: rows like those of ``x``, as many as ``recv_sizes``
                add up to or more, without overlap. Rows behind the last part keep their values. None: a new tensor.

        Returns:
            ``out``, or a new tensor (array) of the shape of ``x``. With sizes the new tensor has ``max_rows`` rows for
            each rank; rows behind the last part are not initialised.

        Raises:
            UnsupportedInputError: ``accepts_all_to_all`` is false, or ``out`` does not fit. Ranks on several nodes
                decline every call.
            MismatchError: On all ranks, by this or a later call: sizes of two ranks disagree, or sizes exceed
                ``max_rows``, ``x`` or ``out``. The content of ``out`` is then unspecified.
            CommunicatorError: This or an earlier call has failed, see ``all_reduce``.
        """
        if send_sizes is not None or recv_sizes is not None or max_rows is not None:
            return self._exchange(x, send_sizes, recv_sizes, max_rows, out)
        if _is_compiling() or type(x) is not _Tensor or _is_watched():
            return self._dispatch(self._operations.all_to_all, x, 0, None, out)
        return self._all_to_all(x, 0, None, out)

    def try_all_gather(
        self, x: torch.Tensor, dim: int = 0, sizes: Sizes | None = None, lossy: bool = False
    ) -> torch.Tensor | None:
        """``all_gather(x, dim, sizes, lossy=lossy)`` if it is accepted, else None. ``x`` is checked once, for engines
        that have their own fallback. All ranks get a tensor or all get None.

        Raises:
            CommunicatorError: ``x`` is accepted, and this or an earlier call has failed, see ``all_reduce``.
        """
        if _is_compiling() or type(x) is not _Tensor or _is_watched():
            return self._try(self._gathers(lossy), x, dim, sizes)
        run = self._lossy_all_gather if lossy else self._all_gather
        result: torch.Tensor | None = run(x, dim, sizes, None, True)
        return result

    def try_reduce_scatter(self, x: torch.Tensor, dim: int = 0, sizes: Sizes | None = None) -> torch.Tensor | None:
        """``reduce_scatter(x, dim, sizes)`` if it is accepted, else None; see ``try_all_gather``."""
        if _is_compiling() or type(x) is not _Tensor or _is_watched():
            return self._try(self._operations.reduce_scatter, x, dim, sizes)
        result: torch.Tensor | None = self._reduce_scatter(x, dim, sizes, None, True)
        return result

    def try_all_to_all(
        self, x: torch.Tensor, send_sizes: Any = None, recv_sizes: Any = None, max_rows: int | None = None
    ) -> torch.Tensor | None:
        """``all_to_all(x, send_sizes, recv_sizes, max_rows)`` if it is accepted, else None; see ``try_all_gather``."""
        if send_sizes is not None or recv_sizes is not None or max_rows is not None:
            is_accepted = self.accepts_all_to_all(x, send_sizes, recv_sizes, max_rows)
            return self._exchange(x, send_sizes, recv_sizes, max_rows, None) if is_accepted else None
        if _is_compiling() or type(x) is not _Tensor or _is_watched():
            return self._try(self._operations.all_to_all, x, 0, None)
        result: torch.Tensor | None = self._all_to_all(x, 0, None, None, True)
        return result

    def _try(self, operation: ShardsOperation, x: torch.Tensor, dim: int, sizes: Sizes | None) -> torch.Tensor | None:
        result: torch.Tensor | None = None
        if _accepts(operation, x, dim, sizes):
            result = self._dispatch(operation, x, dim, sizes, None)
        return result

    def _gathers(self, lossy: bool) -> ShardsOperation:
        return self._operations.lossy_all_gather if lossy else self._operations.all_gather

    def _dispatch(self, operation: ShardsOperation, x: Any, dim: int, sizes: Sizes | None, out: Any) -> Any:
        """Handle arrays, tensor subclasses and traced tensors: through the registered torch operator, or as an
        array."""
        if not isinstance(x, _Tensor):
            return arrays.call(lambda x, out: self._dispatch(operation, x, dim, sizes, out), x, out)
        if _is_compiling() or type(x) is not _Tensor or _is_watched():
            return torch_operators.on_shards(operation, x, dim, sizes, out, self.name)
        return operation.run(x, dim, sizes, out)

    def _exchange(self, x: Any, send_sizes: Any, recv_sizes: Any, max_rows: int | None, out: Any) -> Any:
        """Implement ``all_to_all`` with sizes, for plain tensors and for what ``_dispatch`` handles."""
        operation = self._operations.all_to_all_v
        send_sizes, recv_sizes = _as_sizes(send_sizes), _as_sizes(recv_sizes)
        if not isinstance(x, _Tensor):
            return arrays.call(lambda x, out: self._exchange(x, send_sizes, recv_sizes, max_rows, out), x, out)
        are_wrapped = any(isinstance(one, _Tensor) and type(one) is not _Tensor for one in (x, send_sizes, recv_sizes))
        if _is_compiling() or are_wrapped or _is_watched():
            return torch_operators.on_parts(operation, x, send_sizes, recv_sizes, max_rows, out, self.name)
        return operation.run(x, send_sizes, recv_sizes, max_rows, out)

    # ---- Queries ------------------------------------------------------------------------------------------------

    def accepts_all_gather(self, x: Any, dim: int = 0, sizes: Sizes | None = None, lossy: bool = False) -> bool:
        """Return whether ``all_gather(x, dim, sizes, lossy=lossy)`` is served.

        ``dim`` and ``sizes`` must fit ``x``. The whole tensor, which is the result of an all-gather and the input of a
        reduce-scatter, must not exceed ``max_message_bytes``. If that option is not set, no shard may exceed the tuning
        table's bound. The answer depends on these and on what ``accepts`` depends on. Ranks that run the same program
        with the same kind of tensor therefore get the same answer.

        Raises:
            UnsupportedInputError: ``x`` is neither a tensor nor an array that torch can use.
        """
        return _accepts(self._gathers(lossy), x, dim, sizes)

    def accepts_reduce_scatter(self, x: Any, dim: int = 0, sizes: Sizes | None = None) -> bool:
        """Return whether ``reduce_scatter(x, dim, sizes)`` is served, by the rules of ``accepts_all_gather``."""
        return _accepts(self._operations.reduce_scatter, x, dim, sizes)

    def accepts_all_to_all(
        self, x: Any, send_sizes: Any = None, recv_sizes: Any = None, max_rows: int | None = None
    ) -> bool:
        """Return whether ``all_to_all(x, send_sizes, recv_sizes, max_rows)`` is served, by the rules of
        ``accepts_all_gather``. Values of sizes are not read; parts count as having ``max_rows`` rows."""
        if send_sizes is None and recv_sizes is None and max_rows is None:
            return _accepts(self._operations.all_to_all, x, 0, None)
        operation = self._operations.all_to_all_v
        tensor = x if isinstance(x, torch.Tensor) else arrays.as_tensor(x)
        accepts = operation.accepts_traced if is_traced(tensor) else operation.accepts
        return accepts(tensor, _as_sizes(send_sizes), _as_sizes(recv_sizes), max_rows)

    def plan_all_gather(self, x: Any, dim: int = 0, sizes: Sizes | None = None, lossy: bool = False) -> Plan:
        """Return the plan of ``all_gather(x, dim, sizes, lossy=lossy)``. The algorithm is ``"declined"`` for an input
        that is not served.

        Raises:
            UnsupportedInputError: See ``accepts_all_gather``.
        """
        return self._gathers(lossy).plan(arrays.as_tensor(x), dim, sizes)

    def plan_reduce_scatter(self, x: Any, dim: int = 0, sizes: Sizes | None = None) -> Plan:
        """Return the plan of ``reduce_scatter(x, dim, sizes)``, see ``plan_all_gather``."""
        return self._operations.reduce_scatter.plan(arrays.as_tensor(x), dim, sizes)

    def plan_all_to_all(
        self, x: Any, send_sizes: Any = None, recv_sizes: Any = None, max_rows: int | None = None
    ) -> Plan:
        """Return the plan of ``all_to_all(x, send_sizes, recv_sizes, max_rows)``, see ``plan_all_gather``."""
        tensor = arrays.as_tensor(x)
        if send_sizes is None and recv_sizes is None and max_rows is None:
            return self._operations.all_to_all.plan(tensor, 0, None)
        sizes = _as_sizes(send_sizes), _as_sizes(recv_sizes)
        return self._operations.all_to_all_v.plan(tensor, *sizes, max_rows)


def _as_sizes(sizes: Any) -> Any:
    """Return an array of sizes as a tensor. Anything else stays as it is: the operation says what it lacks."""
    if sizes is None or isinstance(sizes, torch.Tensor):
        return sizes
    try:
        return arrays.as_tensor(sizes)
    except UnsupportedInputError:
        return sizes


def _accepts(calls: ShardsOperation, x: Any, dim: int, sizes: Sizes | None) -> bool:
    tensor = x if isinstance(x, torch.Tensor) else arrays.as_tensor(x)
    return calls.accepts_traced(tensor, dim, sizes) if is_traced(tensor) else calls.accepts(tensor, dim, sizes)
