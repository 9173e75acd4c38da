"""Validation of tensor arguments: which operands a call reads, which it writes, and the conditions on them.

A call with a torch operator first asks ``is_watched``, and leaves wrappers, modes and transforms to torch's dispatcher.
A call without one uses ``check_unwatched`` and ``why_not_buffer``. Written operands must pass
``Operands.check_written``, and ``count_write`` reports the write to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import forward_ad

from llm_comm import _core, arrays
from llm_comm.errors import UnsupportedInputError

# Global names are cheaper to look up than attributes: every call runs this code.
_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_is_tracing = torch._C._is_tracing
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_BEFORE_DISPATCH = torch._C.DispatchKey.PreDispatch

#: Types of plain weights; ``PLAIN`` adds None for optional operands. Other types are wrappers, which torch's dispatcher
#: unwraps.
PLAIN_WEIGHTS = frozenset({torch.Tensor, torch.nn.Parameter})
PLAIN = PLAIN_WEIGHTS | {type(None)}

#: Increments the version counter by which autograd detects writes, in about 0.1 us. Inference tensors have no counter.
count_write = torch._C._increment_version

#: Alignment in bytes that kernels of linear layers, experts and dispatch require of rows, weights and outputs.
ALIGNMENT = 16

_Result = TypeVar("_Result")

_REQUIRES_GRAD = (
    "the tensor requires grad, and nothing is differentiated: call under torch.no_grad(), or pass x.detach()"
)
_HAS_TANGENT = "the tensor has a tangent, and nothing is differentiated: pass x.detach()"
#: Permitted overlaps: (written operand, read operand) -> offset in bytes of the written one from the read one. They are
#: safe because the thread that writes an element is the one that has read it.
InPlace = Mapping[tuple[str, str], int]

_LOST = (
    "a TorchDispatchMode, torch.jit.trace, a transform of torch.func, or forward-mode differentiation is active, and "
    "would miss the call: make it outside"
)
_OF_INFERENCE = (
    "the tensor was made in inference mode, and is written outside of it, which torch allows of none: call under "
    "torch.inference_mode(), or pass a clone"
)
_READ_ONLY = "the tensor lies in read-only memory: pass a copy"


def is_watched() -> bool:
    """Return whether calls of this thread must go through torch's dispatcher.

    True under a TorchDispatchMode (make_fx, fake tensors), torch.jit.trace, a transform of torch.func, or forward-mode
    differentiation. These would not see a direct call, or wrap tensors in objects that look ordinary.
    """
    return (
        _modes() > 0
        or _transform() is not None
        or _is_tracing()
        or forward_ad._current_level >= 0
        # make_fx(pre_dispatch=True) installs modes that the stack length does not count
        or _is_included(_BEFORE_DISPATCH)
    )


def is_traced(x: torch.Tensor) -> bool:
    """Return whether the sizes of ``x`` may be symbolic. A cache cannot be searched with symbolic sizes."""
    return torch.compiler.is_compiling() or isinstance(x.numel(), torch.SymInt)


def why_not_constant(tensor: torch.Tensor) -> str:
    """Return why the call would lose a derivative with respect to ``tensor``, or ""."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return _REQUIRES_GRAD
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return _HAS_TANGENT
    return ""


def check_constant(operation: str, **tensors: Any) -> None:
    """Raise UnsupportedInputError if the call would lose a derivative. Arguments that are no tensors pass."""
    for name, tensor in tensors.items():
        why = why_not_constant(tensor) if isinstance(tensor, torch.Tensor) else ""
        if why:
            raise UnsupportedInputError(f"{operation}: {name}: {why}")


def attempt(accepts: Callable[[], bool], call: Callable[[], _Result]) -> _Result | None:
    """Return the result of ``call``, or None if its operands are not served.

    Args:
        accepts: Query whether the operands are served. Used under torch.compile only, which cannot trace the exception.
        call: Validates its operands before any other action, and raises UnsupportedInputError.
    """
    if torch.compiler.is_compiling() and not accepts():
        return None
    try:
        return call()
    except UnsupportedInputError:
        return None


def check_memory(operation: str, **tensors: Any) -> None:
    """Raise UnsupportedInputError if torch does not give the address of a tensor, as for wrappers of torch.func
    transforms. The result is equal on all ranks."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            try:
                address = tensor.data_ptr()
            except RuntimeError as error:
                raise UnsupportedInputError(f"{operation}: {name} has no memory of its own: {error}") from error
            if address == 0 and tensor.numel() > 0:
                raise UnsupportedInputError(
                    f"{operation}: {name} has no memory of its own: it is a {type(tensor).__name__}"
                )


class Operands(NamedTuple):
    """Operands of an operation, by the names used in errors.

    Attributes:
        operation: Name of the operation in errors.
        reads: Operands that are read. Optional ones may be None.
        writes: Operands that are written, if the caller passes them.
    """

    operation: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def check_written(self, *tensors: torch.Tensor | None, in_place: InPlace | None = None) -> None:
        """Check the operands that a call writes: writable, and without overlap with other operands.

        Args:
            tensors: All operands in the order ``reads``, ``writes``; None if not given.
            in_place: Permitted overlaps.

        Raises:
            UnsupportedInputError: An operand cannot be written, or shares memory with another one.
        """
        named = zip(self.reads + self.writes, tensors, strict=True)
        given = {name: tensor for name, tensor in named if tensor is not None}
        for name, tensor in given.items():
            if not isinstance(tensor, torch.Tensor):
                raise UnsupportedInputError(f"{self.operation}: {name} is a {type(tensor).__name__}, not a tensor")
        check_memory(self.operation, **given)
        spans = {name: (begin := tensor.data_ptr(), begin + extent(tensor)) for name, tensor in given.items()}
        for name in self.writes:
            if name not in given:
                continue
            tensor, (begin, end) = given[name], spans[name]
            why = arrays.why_not_plain(tensor) or why_not_constant(tensor) or why_not_writable(tensor)
            if why:
                raise UnsupportedInputError(f"{self.operation}: {name}: {why}")
            for other, (other_begin, other_end) in spans.items():
                if other == name or begin >= other_end or other_begin >= end:
                    continue
                if in_place is None or in_place.get((name, other)) != begin - other_begin:
                    raise UnsupportedInputError(f"{self.operation}: {name} overlaps {other}")


def check_unwatched(operation: str) -> None:
    """Reject a call without a torch operator if torch's dispatcher must see it.

    torch.compile breaks its graph here, and the call runs between the two graphs.

    Raises:
        UnsupportedInputError: A mode, tracer or transform of torch would miss the call.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=f"{operation} has no torch operator")
    if is_watched():
        raise UnsupportedInputError(f"{operation}: {_LOST}")


def why_not_operand(tensor: torch.Tensor, device: torch.device, strided: bool = False) -> str:
    """Return why a tensor cannot be read on the communicator's device, whatever its shape and dtype, or "".

    Args:
        strided: Whether the tensor may have any strides.
    """
    if tensor.device != device:
        return f"the tensor is on {tensor.device}, the communicator on {device}"
    why = arrays.why_not_plain(tensor)
    if why:
        return why
    if not strided and not tensor.is_contiguous():
        return f"the tensor is not contiguous: shape {tuple(tensor.shape)}, strides {tensor.stride()}"
    return why_not_constant(tensor)


def why_not_buffer(tensor: Any, device: torch.device) -> str:
    """Return why an object cannot be an operand of a call without a torch operator, or "". Wrappers are rejected:
    without the dispatcher nothing unwraps them."""
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__} is not a tensor"
    why = why_not_operand(tensor, device)
    if not why and type(tensor) not in PLAIN_WEIGHTS:
        return f"a {type(tensor).__name__} is a wrapper of other tensors"
    return why


def why_not_buffers(
    tensors: Mapping[str, Any], dimensions: Mapping[str, int], dtypes: Mapping[str, torch.dtype], device: torch.device
) -> str:
    """Return why objects cannot be operands, as ``why_not_buffer``, or do not have a number of sizes or a dtype, or "".

    Args:
        tensors: The objects by name.
        dimensions: How many sizes each must have; 2 if not given.
        dtypes: Dtypes that some must have.
        device: Device of the communicator.
    """
    for name, tensor in tensors.items():
        why = why_not_buffer(tensor, device)
        if why:
            return f"{name}: {why}"
        sizes = dimensions.get(name, 2)
        if tensor.dim() != sizes:
            return f"{name} has shape {tuple(tensor.shape)}; it must have {sizes} sizes"
        dtype = dtypes.get(name, tensor.dtype)
        if tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}; it must be {dtype}"
    return ""


def why_not_out(out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    """Return why a result of ``shape`` cannot be written to ``out``, or "". Overlaps are not checked here."""
    if not isinstance(out, torch.Tensor):
        return f"x is a tensor, out a {type(out).__name__}; they must be of one library"
    why = arrays.why_not_plain(out)
    if why:
        return f"out: {why}"
    count = torch.Size(shape).numel()
    if out.numel() != count or out.dtype != dtype or out.device != device or not out.is_contiguous():
        return (
            f"out ({tuple(out.shape)}, {out.dtype}, {out.device}) must be contiguous and like the result "
            f"({tuple(shape)}, {dtype}, {device})"
        )
    return ""


def output_for(out: torch.Tensor | None, new: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return what a kernel writes to: ``out`` if it begins at a multiple of ``ALIGNMENT``, else a new tensor."""
    return out if out is not None and out.data_ptr() % ALIGNMENT == 0 else new()


def delivered(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return ``out`` with the result of a kernel that wrote to ``output_for(out, ...)``. None: the result itself.

    A result that is copied may be freed before the kernel has run: later users of its memory follow in the stream.
    """
    if out is None:
        return result
    if result is out:
        count_write((out,))
    else:
        out.copy_(result.view(out.shape))
    return out


def why_not_writable(tensor: torch.Tensor) -> str:
    """Return why the memory of a tensor must not be written, or "".

    Always "" under torch.compile, which cannot trace the question. The operator in the graph asks again.
    """
    if torch.compiler.is_compiling():
        return ""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return _OF_INFERENCE
    if tensor.device.type == "cpu" and type(tensor) in PLAIN_WEIGHTS:
        try:
            begin = tensor.data_ptr()
        except RuntimeError:
            begin = 0
        # A wrapper of a torch.func transform has no address: torch writes it.
        if begin and not _core.is_writable(begin, extent(tensor)):
            return _READ_ONLY
    return ""


def extent(tensor: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first element to the end of its last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
