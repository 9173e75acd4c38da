"""Operations on shards of a tensor along a dimension: all-gather concatenates the shards, reduce-scatter makes them,
all-to-all exchanges them.

Validation, cache of prepared calls, and launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch

from llm_comm import _core, arrays
from llm_comm.config import Config
from llm_comm.errors import UnsupportedInputError, quoted
from llm_comm.operations.operands import Operands, check_memory, count_write, why_not_operand, why_not_out
from llm_comm.operations.operation import Operation, keep
from llm_comm.planning.plan import Plan, Problem, declined, without_kernel
from llm_comm.planning.planner import Planner
from llm_comm.planning.selection import Layout, limits_whole_tensor, wire_of
from llm_comm.planning.tables import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from llm_comm.runtime.core_handle import CoreHandle

# Global names are cheaper to look up than attributes.
_Tensor = torch.Tensor
_strided = torch.strided
_is_grad_enabled = torch.is_grad_enabled
_is_inference = torch.is_inference_mode_enabled
_is_writable = _core.is_writable

INTEGERS: tuple[type, ...] = (Integral, torch.SymInt)
#: Largest accepted size along a dimension; larger than any memory.
_MOST = 1 << 48
#: Non-zero address for an empty tensor. No kernel accesses it, since the tensor has no element.
SPARE = 16

Sizes = Sequence[int]


class Shards(NamedTuple):
    """Division of a tensor into shards (csrc/algorithms/shards.h)."""

    #: Product of the sizes before the dimension.
    rows: int
    #: Elements of each rank's shard of a row.
    row_sizes: tuple[int, ...]
    #: Shape of the result on this rank.
    shape: tuple[int, ...]

    def whole(self) -> int:
        """Return the number of elements of the whole tensor."""
        return self.rows * sum(self.row_sizes)

    def limited(self, config: Config) -> int:
        """Return the number of elements that ``message_limit`` bounds."""
        return self.whole() if limits_whole_tensor(config) else self.rows * max(self.row_sizes)


class PreparedShards(NamedTuple):
    """Prepared call."""

    plan: Plan
    #: See ``Prepared.run``.
    run: Callable[..., bool] | None
    #: Shape of the result, and its number of elements.
    shape: tuple[int, ...]
    elements: int
    #: Offset in bytes from ``x`` to ``out`` for a call in place. Either ``x`` is this rank's shard of ``out``, or
    #: ``out`` is this rank's shard of ``x``. None if the shard is strided, so that no contiguous tensor can be it.
    in_place: int | None
    #: Addresses for ``x`` and ``out`` if they are empty. 0 if they are not: then an address of 0 is an error.
    spare_x: int
    spare_out: int


class ShardsOperation(Operation):
    """All-gather, reduce-scatter or all-to-all of one communicator.

    Args:
        handle, planner: Arguments of ``Operation``.
        rank: Rank of this process.
    """

    #: Name in the registry, and of the torch operator.
    name: str
    operator: str
    #: True if the input is a whole tensor, false if only the output is (all-gather).
    takes_whole: bool

    def __init__(self, handle: CoreHandle, planner: Planner, rank: int) -> None:
        super().__init__(self.name, handle, planner)
        self.rank, self.world_size = rank, planner.world_size
        self._operands = Operands(self.name, reads=("x",), writes=("out",))
        self._prepared: dict[tuple[torch.Size, torch.dtype, int, tuple[int, ...] | None], PreparedShards] = {}

    # ---- Calls --------------------------------------------------------------------------------------------------

    def run(
        self, x: torch.Tensor, dim: int = 0, sizes: Sizes | None = None, out: Any = None, or_none: bool = False
    ) -> Any:
        """Run the operation. ``x`` must have memory of its own: no tracer, mode or wrapper is handled here.

        Args:
            x, dim, sizes, out: Arguments of ``Communicator.all_gather`` and ``reduce_scatter``.
            or_none: Return None if ``x`` is declined, instead of raising.

        Raises:
            UnsupportedInputError: ``x`` is declined, or ``out`` does not fit.
            CommunicatorError: This or an earlier call has failed.
        """
        # Host time of a call is measured and bounded: this path avoids every Python call that it can.
        dtype = x.dtype
        differentiates = _is_grad_enabled()
        try:
            # Asking a nested tensor for its shape raises.
            key = None if x.is_nested else (x.shape, dtype, dim, None if sizes is None else tuple(sizes))
            prepared = self._prepared.get(key)  # type: ignore[arg-type]
        except TypeError:  # dim or sizes are no numbers: _prepare says so
            prepared = None
        if (
            prepared is None
            or (differentiates and x.requires_grad)
            or x.device != self._device
            or x.layout is not _strided
            or not x.is_contiguous()
            or x.is_neg()
            or x.is_conj()
        ):
            found = self._prepare(x, dim, sizes)
            if isinstance(found, str):
                self._count_declined(found)
                if or_none:
                    return None
                raise self._error(found)
            prepared = found
        try:
            # A cheap test first. Only if it fails does _check_out find the exact reason.
            if out is not None and (
                not isinstance(out, _Tensor)
                or (out.is_inference() and not _is_inference())
                or out.numel() != prepared.elements
                or out.dtype is not dtype
                or out.device != self._device
                or not out.is_contiguous()
                or out.is_neg()
                or out.is_conj()
                or (differentiates and out.requires_grad)
                or (
                    # An empty tensor has address 0.
                    -out.nbytes < (gap := out.data_ptr() - x.data_ptr()) < x.nbytes
                    # In place: each line of the shard is written by the thread that has read it, or with its old value.
                    and gap != prepared.in_place
                )
                or (self._is_emulated and not _is_writable(out.data_ptr(), out.nbytes))
            ):
                self._check_out(prepared, x, out)
        except UnsupportedInputError:
            raise
        except RuntimeError:
            check_memory(self.name, x=x, out=out)
            raise
        run = prepared.run
        if run is None:  # one rank, or an empty tensor
            self._handle.check()
            self._count_unlaunched(prepared.plan)
            result = x.new_empty(prepared.shape) if out is None else out
            return result.copy_(x.view(result.shape)) if prepared.elements else result
        try:
            result = x.new_empty(prepared.shape) if out is None else out
            is_enqueued = run(
                x.data_ptr() or prepared.spare_x, result.data_ptr() or prepared.spare_out, self._current_stream()
            )
            if out is not None:
                count_write((out,))
        except ValueError:  # an address is 0; nothing was launched
            check_memory(self.name, x=x, out=out)
            raise
        except RuntimeError as error:
            check_memory(self.name, x=x, out=out)
            self._handle.end_after_launch_error(error)
            raise
        if not is_enqueued:
            self._handle.check()
        return result

    def _check_out(self, prepared: PreparedShards, x: torch.Tensor, out: Any) -> None:
        """Raise UnsupportedInputError unless the result can be written to ``out``."""
        why = why_not_out(out, prepared.shape, x.dtype, self._device)
        if why:
            raise self._error(why)
        in_place = None if prepared.in_place is None else {("out", "x"): prepared.in_place}
        self._operands.check_written(x, out, in_place=in_place)

    def check_numbers(self, x: torch.Tensor, dim: int, sizes: Sizes | None) -> None:
        """Validate dimension and sizes before a graph is built.

        Raises:
            UnsupportedInputError: The dimension does not exist, the sizes are invalid, or sizes are missing where equal
                shards are impossible.
        """
        why = self._why_not_numbers(x, dim, sizes)
        if why:
            raise self._error(why)
        if all_sizes(x.shape[dim], sizes, self.world_size, self.takes_whole) is None:
            raise self._error(self._why_not_equal(x.shape[dim], dim))

    # ---- Queries ------------------------------------------------------------------------------------------------

    def accepts(self, x: torch.Tensor, dim: int, sizes: Sizes | None) -> bool:
        """Return whether ``run`` serves ``x``."""
        found = self._prepare(x, dim, sizes)
        if isinstance(found, str):
            self._count_declined(found)
            return False
        return True

    def accepts_traced(self, x: torch.Tensor, dim: int, sizes: Sizes | None) -> bool:
        """Return whether ``run`` serves ``x``, for torch.compile. It can trace neither the planning nor texts with
        sizes."""
        if not arrays.is_dense_on(x, self._device) or (x.requires_grad and torch.is_grad_enabled()):
            return False
        if self._why_not_type(x.dtype) or self._why_not_numbers(x, dim, sizes):
            return False
        world = self.world_size
        shards = self._divide(x.shape, dim, all_sizes(x.shape[dim], sizes, world, self.takes_whole))
        if shards is None:
            return False
        limit = self._planner.message_limit(self.name)
        return world == 1 or shards.limited(self._planner.config) * x.element_size() <= limit

    def plan(self, x: torch.Tensor, dim: int, sizes: Sizes | None) -> Plan:
        """Return the plan of ``run`` for ``x``."""
        found = self._prepare(x, dim, sizes)
        if not isinstance(found, str):
            return found.plan
        shards = self._shards(x, dim, sizes)
        if isinstance(shards, str):
            return declined(self.name, x.numel() * x.element_size(), shards)
        return self._layout(shards, x.dtype).plan

    def _prepare(self, x: torch.Tensor, dim: int, sizes: Sizes | None) -> PreparedShards | str:
        """Prepare the launch for ``x``. Return the reason as text if ``x`` is declined."""
        why = self._why_not(x)
        if why:
            return why
        try:
            key = (x.shape, x.dtype, dim, None if sizes is None else tuple(sizes))
            found = self._prepared.get(key) or self._reasons.get(key)
        except TypeError:  # dim or sizes are no numbers
            return self._why_not_numbers(x, dim, sizes)
        if found is not None:
            return found
        shards = self._shards(x, dim, sizes)
        if isinstance(shards, str):  # not cached: the key of the invalid size 1.0 would equal that of 1
            return shards
        call = self._prepare_call(self._layout(shards, x.dtype))
        if isinstance(call, str):
            keep(self._reasons, key, call)
            return call
        spare = 0 if shards.row_sizes[self.rank] else SPARE
        prepared = PreparedShards(
            *call,
            shards.shape,
            math.prod(shards.shape),
            self._in_place(shards, x.dtype),
            spare_x=0 if self.takes_whole else spare,
            spare_out=spare if self.takes_whole else 0,
        )
        keep(self._prepared, key, prepared)
        return prepared

    def _layout(self, shards: Shards, dtype: torch.dtype) -> Layout:
        data_type, scale = self._core_type(shards, dtype)
        world = self.world_size
        longest = shards.rows * max(shards.row_sizes) * scale
        if world == 1:
            nbytes = shards.whole() * dtype.itemsize
            return Layout(without_kernel(self.name, "none", nbytes, "one rank"), None)
        # Sizes of ranks beyond the world size are omitted; the core takes them as 0.
        parameters = (float(shards.rows), *(float(size * scale) for size in shards.row_sizes))
        return self._planner.lay_out(self.name, longest, 0, data_type, parameters)

    def _core_type(self, shards: Shards, dtype: torch.dtype) -> tuple[str, int]:
        """Return the core's data type for a call, and how many elements of it one element of ``dtype`` has."""
        return self._data_types[dtype], 1

    def _in_place(self, shards: Shards, dtype: torch.dtype) -> int | None:
        of_row, own = sum(shards.row_sizes), shards.row_sizes[self.rank]
        if shards.rows > 1 and own != of_row:
            return None
        before = sum(shards.row_sizes[: self.rank]) * dtype.itemsize
        return before if self.takes_whole else -before

    # ---- Validation ---------------------------------------------------------------------------------------------

    def _shards(self, x: torch.Tensor, dim: int, sizes: Sizes | None) -> Shards | str:
        """Return the division of the whole tensor, or why the arguments are invalid."""
        why = self._why_not(x) or self._why_not_numbers(x, dim, sizes)
        if why:
            return why
        length = x.shape[dim]
        world = self.world_size
        all_of_them = all_sizes(length, sizes and tuple(map(int, sizes)), world, self.takes_whole)
        if all_of_them is None:
            return self._why_not_equal(length, dim)
        return self._divide(x.shape, dim, all_of_them) or self._why_not_sizes(length, dim, all_of_them)

    def _why_not(self, x: torch.Tensor) -> str:
        """Return why ``x`` cannot be an input, whatever its shape, or ""."""
        return why_not_operand(x, self._device) or self._why_not_type(x.dtype)

    def _why_not_numbers(self, x: torch.Tensor, dim: Any, sizes: Any) -> str:
        """Return why the dimension does not exist or the sizes are invalid, or ""."""
        if not isinstance(dim, int):
            return f"dim is {quoted(dim)}; it must be an int"
        if not -x.dim() <= dim < x.dim():
            return f"dim is {quoted(dim)}; x has {x.dim()} dimensions"
        if sizes is None:
            return ""
        if not isinstance(sizes, Sequence):
            return f"sizes is a {type(sizes).__name__}; it must be a list or tuple of one int for each rank"
        if len(sizes) != self.world_size:
            return f"sizes has {len(sizes)} numbers; there are {self.world_size} ranks"
        for rank, size in enumerate(sizes):
            if not (isinstance(size, INTEGERS) and 0 <= size <= _MOST):  # type: ignore[operator]
                return f"sizes[{rank}] is {quoted(size)}; it must be an int from 0 to 2**48"
        return ""

    def _divide(self, shape: Sequence[int], dim: int, sizes: Sizes | None) -> Shards | None:
        """Return the division, or None if the sizes do not fit ``shape`` of the input. Builds no text, for
        torch.compile."""
        if sizes is None or shape[dim] != (sum(sizes) if self.takes_whole else sizes[self.rank]):
            return None
        dim %= len(shape)
        behind = math.prod(shape[dim + 1 :])
        result = (*shape[:dim], sizes[self.rank] if self.takes_whole else sum(sizes), *shape[dim + 1 :])
        return Shards(math.prod(shape[:dim]), tuple(size * behind for size in sizes), result)

    def _why_not_equal(self, length: int, dim: int) -> str:
        return f"x has {length} along dim {dim}, of which {self.world_size} ranks cannot have equal shards: pass sizes"

    def _why_not_sizes(self, length: int, dim: int, sizes: Sizes) -> str:
        if self.takes_whole:
            return f"x has {length} along dim {dim}; sizes, {list(sizes)}, add up to {sum(sizes)}"
        return f"x has {length} along dim {dim}; sizes[{self.rank}], of this rank, is {sizes[self.rank]}"


def all_sizes(length: int, sizes: Sizes | None, world: int, takes_whole: bool) -> Sizes | None:
    """Return the sizes of all ranks' shards for an input of ``length`` along the dimension; None if equal ones are
    impossible."""
    if sizes is not None:
        return sizes
    if not takes_whole:
        return (length,) * world
    return None if length % world != 0 else (length // world,) * world


_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def why_not_bytes(dtype: torch.dtype) -> str:
    """Return why elements of a dtype cannot be moved as bytes, or ""."""
    # The values of a quantized tensor depend on a scale that is not in its memory.
    return f"{dtype} is quantized: pass x.int_repr()" if dtype in _QUANTIZED else ""


class AllGather(ShardsOperation):
    """All-gather of one communicator."""

    name, takes_whole = ALL_GATHER, False
    operator = ALL_GATHER

    def _core_type(self, shards: Shards, dtype: torch.dtype) -> tuple[str, int]:
        return "byte", dtype.itemsize

    def _why_not_type(self, dtype: torch.dtype) -> str:
        return why_not_bytes(dtype)


class LossyAllGather(AllGather):
    """All-gather of one communicator whose values option ``wire`` may quantize. Other calls move bytes."""

    operator = "lossy_all_gather"

    def _core_type(self, shards: Shards, dtype: torch.dtype) -> tuple[str, int]:
        data_type = self._data_types.get(dtype)
        if data_type is not None:
            longest = shards.rows * max(shards.row_sizes)
            parameters = (float(shards.rows), *map(float, shards.row_sizes))
            problem = Problem(self.name, longest, 0, data_type, self.world_size, parameters)
            if wire_of(problem, self._planner.config):
                return data_type, 1
        return super()._core_type(shards, dtype)


class ReduceScatter(ShardsOperation):
    """Reduce-scatter of one communicator."""

    name, takes_whole = REDUCE_SCATTER, True
    operator = REDUCE_SCATTER


class AllToAll(AllGather):
    """All-to-all of one communicator. Like all-gather it moves bytes.

    Args:
        handle, planner, rank: Arguments of ``ShardsOperation``.
        why_none: Reason why the communicator has no all-to-all, or "".
    """

    name, takes_whole = ALL_TO_ALL, True
    operator = ALL_TO_ALL

    def __init__(self, handle: CoreHandle, planner: Planner, rank: int, why_none: str = "") -> None:
        super().__init__(handle, planner, rank)
        self._why_none = why_none

    def _divide(self, shape: Sequence[int], dim: int, sizes: Sizes | None) -> Shards | None:
        shards = super()._divide(shape, dim, sizes)
        return None if shards is None else shards._replace(shape=tuple(shape))

    def _in_place(self, shards: Shards, dtype: torch.dtype) -> int | None:
        # LL: a thread loads a line of a shard before it stores that line. HB: a chunk is stored `depth` steps after it
        # was loaded, behind a barrier of the block.
        return 0

    def _why_not_type(self, dtype: torch.dtype) -> str:
        return self._why_none or super()._why_not_type(dtype)
