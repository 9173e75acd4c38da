"""Base classes of operations in which no other rank takes part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from llm_comm import _core, registry
from llm_comm.errors import UnsupportedInputError, quoted
from llm_comm.operations.fp8 import FP8
from llm_comm.operations.operands import ALIGNMENT, check_memory, check_unwatched, why_not_buffers
from llm_comm.operations.operation import TORCH_TYPES, keep, within_range
from llm_comm.planning.layers import inputs_multiple, takes_features
from llm_comm.planning.plan import NONE
from llm_comm.planning.planner import Planner
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.devices import current_stream_of

#: Makes a function of the core that counts its calls.
_Prepare = Callable[[_core.Counter], Callable[..., bool]]
#: Data types of results. Must equal ``serves`` in csrc/algorithms/linear/layer.h.
_SERVED = ("bf16", "fp16")


class OneRank:
    """An operation of one communicator, with results in bfloat16 and float16.

    Args:
        handle: Handle of the core that launches it.
        planner: Planner of the communicator.
    """

    #: Name of the algorithm in statistics and NVTX ranges.
    algorithm: str

    def __init__(self, handle: CoreHandle, planner: Planner) -> None:
        self._handle = handle
        self._planner = planner
        self._device = handle.device
        self._current_stream = current_stream_of(handle.device)
        numbers = {name: number for number, name in enumerate(registry.data_types())}
        #: Number in the core of each data type that has kernels.
        self._data_types = {TORCH_TYPES[name]: numbers[name] for name in _SERVED}
        #: This device and build have kernels for FP8 operands.
        self.has_fp8 = handle.core().multiplies_fp8()

    def _why_no_fp8(self) -> str:
        """Return why FP8 operands are not supported, or ""."""
        return "" if self.has_fp8 else f"{FP8} needs a GPU of sm_89 or later, and a build of llm_comm for it"

    def _counted(self, name: str, nbytes: int, prepare: _Prepare) -> Callable[..., bool]:
        """Return the function of the core that ``prepare`` makes, with a counter of its calls, within an NVTX range if
        these are on.

        Args:
            name: Operation, for statistics.
            nbytes: Size of the message, for statistics.
            prepare: Called with the counter.
        """
        kind = name, nbytes, self.algorithm, NONE
        run = prepare(self._handle.statistics.counter(*kind))
        return within_range(run, self._device, *kind) if self._planner.config.nvtx else run


class FewTokens(OneRank):
    """An operation on few tokens, for bfloat16 and float16. Args: as of ``OneRank``."""

    #: Name of the method of ``Communicator``.
    name: str

    def __init__(self, handle: CoreHandle, planner: Planner) -> None:
        super().__init__(handle, planner)
        #: Functions of the core by shapes, dtype and settings.
        self._prepared: dict[tuple[Any, ...], Callable[..., bool]] = {}

    def forget(self) -> None:
        """Drop the prepared calls, which hold references to the core."""
        self._prepared.clear()

    def accepts(self, *arguments: Any) -> bool:
        """Return whether ``why_not`` is "", and count a decline."""
        self._handle.check_open()
        why = self.why_not(*arguments)
        if why:
            self._handle.statistics.decline(self.name, why)
        return not why

    def why_not(self, *arguments: Any) -> str:
        """Return why the arguments of a call are not supported, or "". The answer ignores addresses."""
        raise NotImplementedError

    def _why_not_tensors(
        self,
        tensors: dict[str, torch.Tensor],
        dimensions: dict[str, int],
        like_x: tuple[str, ...],
        dtypes: dict[str, torch.dtype],
    ) -> str:
        """Return why tensors cannot be operands, or "".

        Args:
            tensors: Operands by name; one is ``x``.
            dimensions: How many sizes an operand must have; 2 if not given.
            like_x: Names of those that must have the dtype of ``x``.
            dtypes: Dtypes that others must have.
        """
        x = {"x": tensors["x"]}
        why = why_not_buffers(x, dimensions, {}, self._device)
        if why:
            return why
        dtype = x["x"].dtype
        if dtype not in self._data_types:
            return f"x is {dtype}, which is not one of {', '.join(map(str, self._data_types))}"
        return why_not_buffers(tensors, dimensions, dict.fromkeys(like_x, dtype) | dtypes, self._device)

    def _check(self, why_not: str, operands: dict[str, Any], weights: tuple[str, ...]) -> None:
        """Check the operands of a call by address.

        Args:
            why_not: Result of ``why_not``.
            operands: Tensors by name; None if not given.
            weights: Names of those that must begin at a line boundary.

        Raises:
            UnsupportedInputError: ``why_not`` is not "", a weight is not aligned, or torch's dispatcher must see the
                call.
        """
        check_unwatched(self.name)
        self._handle.check_open()
        if not why_not:
            check_memory(self.name, **operands)
            why_not = next(filter(None, (_why_not_aligned(name, operands[name]) for name in weights)), "")
        if why_not:
            self._refuse(why_not)

    def _refuse(self, why: str) -> NoReturn:
        """Raise UnsupportedInputError, and count a decline."""
        self._handle.statistics.decline(self.name, why)
        raise UnsupportedInputError(f"{self.name}: {why}")

    def _prepare(self, key: tuple[Any, ...], nbytes: int, prepare: _Prepare) -> Callable[..., bool]:
        """Return the function of the core for ``key``. ``prepare`` makes it; ``nbytes`` is the size for statistics.

        Raises:
            UnsupportedInputError: The device cannot run it.
        """
        try:
            return self._known(key, nbytes, prepare)
        except ValueError as error:  # more shared memory than the device has
            self._refuse(str(error))

    def _known(self, key: tuple[Any, ...], nbytes: int, prepare: _Prepare) -> Callable[..., bool]:
        """Return what ``_prepare`` returns. Counts no decline.

        Raises:
            ValueError: The kernels or the device do not support the operation.
        """
        run = self._prepared.get(key)
        if run is None:
            run = self._counted(self.name, nbytes, prepare)
            keep(self._prepared, key, run)
        return run

    def _enqueue(self, run: Callable[..., bool], *addresses: int) -> None:
        """Launch on the current stream.

        Raises:
            CommunicatorError: The communicator has failed.
        """
        if not run(*addresses, self._current_stream()):
            self._handle.check()


def aligned(rows: torch.Tensor) -> torch.Tensor:
    """Return a tensor that begins at a line boundary. The copy may be freed before the kernel has run: later users of
    its memory follow in the stream."""
    return rows if rows.data_ptr() % ALIGNMENT == 0 else rows.clone()


def why_not_sizes(tokens: int, experts: int, top_k: Any, columns: dict[str, int], fp8: bool = False) -> str:
    """Return why kernels of experts do not take these sizes, or "".

    Args:
        tokens: Number of tokens.
        experts: Number of experts.
        top_k: Number of experts of a token.
        columns: Numbers of columns, by the name of what has them.
        fp8: Weights are FP8.
    """
    multiple = inputs_multiple(fp8)
    for name, size in columns.items():
        if not takes_features(size, multiple):
            return f"{size} columns of {name}: it takes multiples of {multiple} up to {_core.linear_max_features}"
    limits = {
        "tokens": (tokens, _core.linear_max_tokens),
        "experts": (experts, _core.experts_max),
        "experts of a token": (top_k, _core.experts_max_top_k),
    }
    for name, (value, most) in limits.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            return f"{quoted(value)} {name}: it takes 1 to {most}"
    return ""


def _why_not_aligned(name: str, weight: torch.Tensor) -> str:
    if weight.data_ptr() % ALIGNMENT == 0:
        return ""
    return f"{name} begins at {weight.data_ptr():#x}, which is no multiple of {ALIGNMENT} bytes: pass a copy, made once"
