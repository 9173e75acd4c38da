"""The guard of all callables that take tensors: which operands are read, which are written, and what must hold of them.

Calls that have a torch operator ask ``is_watched`` first, and leave wrappers, modes and transforms to torch's
dispatcher. Calls that have none ask ``check_unwatched`` and ``why_not_buffer``. Whatever is written passes
``Operands.check_written``, and torch is told of it by ``count_write``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import forward_ad

from llm_comm import _core, arrays
from llm_comm.errors import UnsupportedInputError

# Global names cost less than attributes: this lies on the path of every call.
_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_is_tracing = torch._C._is_tracing
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_BEFORE_DISPATCH = torch._C.DispatchKey.PreDispatch

#: Types of weights that are what they seem, and of operands that may also be left out. Others are wrappers, which
#: torch's dispatcher knows how to open.
PLAIN_WEIGHTS = frozenset({torch.Tensor, torch.nn.Parameter})
PLAIN = PLAIN_WEIGHTS | {type(None)}

#: Tells autograd that tensors have been written, in about 0.1 us. Those of inference mode have no version to count up.
count_write = torch._C._increment_version

_Result = TypeVar("_Result")

_REQUIRES_GRAD = (
    "the tensor requires grad, and nothing is differentiated: call under torch.no_grad(), or pass x.detach()"
)
_HAS_TANGENT = "the tensor has a tangent, and nothing is differentiated: pass x.detach()"
#: By names of a written and a read operand: bytes from the first byte of the read one at which the written one may lie.
#: The thread that writes there is the one that has read what was there.
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
    """Whether calls of this thread have to go by torch's dispatcher, because someone would miss them or has wrappers
    that look like ordinary tensors: a TorchDispatchMode (make_fx, fake tensors), torch.jit.trace, a transform of
    torch.func, or forward-mode differentiation."""
    return (
        _modes() > 0
        or _transform() is not None
        or _is_tracing()
        or forward_ad._current_level >= 0
        or _is_included(_BEFORE_DISPATCH)  # modes of make_fx(pre_dispatch=True) are not among those that are counted
    )


def is_traced(x: torch.Tensor) -> bool:
    """Whether the sizes of ``x`` may be symbols, by which nothing can be looked up."""
    return torch.compiler.is_compiling() or isinstance(x.numel(), torch.SymInt)


def why_not_constant(tensor: torch.Tensor) -> str:
    """Why a derivative by a tensor would be lost, or ""."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return _REQUIRES_GRAD
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return _HAS_TANGENT
    return ""


def check_constant(operation: str, **tensors: Any) -> None:
    """Raises UnsupportedInputError if a derivative by one of the tensors would be lost. Whatever is none passes."""
    for name, tensor in tensors.items():
        why = why_not_constant(tensor) if isinstance(tensor, torch.Tensor) else ""
        if why:
            raise UnsupportedInputError(f"{operation}: {name}: {why}")


def attempt(accepts: Callable[[], bool], call: Callable[[], _Result]) -> _Result | None:
    """Return what ``call`` returns, or None if what it is given is not served.

    Args:
        accepts: Whether it is served: asked under torch.compile alone, which cannot trace the error of a call.
        call: Looks at its operands before anything else, and raises UnsupportedInputError.
    """
    if torch.compiler.is_compiling() and not accepts():
        return None
    try:
        return call()
    except UnsupportedInputError:
        return None


def check_memory(operation: str, **tensors: Any) -> None:
    """Raise UnsupportedInputError if torch does not tell where one of the tensors lies: of wrappers, such as those of a
    transform of torch.func. All ranks have the same."""
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
    """The tensors of an operation, by the names that errors give them.

    Attributes:
        operation: As errors name it.
        reads: Operands that are read. Those that a call does not have are None.
        writes: Operands that are written where the caller gives them.
    """

    operation: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def check_written(self, *tensors: torch.Tensor | None, in_place: InPlace | None = None) -> None:
        """Check all that a call writes to: tensors that can be written, apart from each other and from what is read.

        Args:
            tensors: All operands, those that are read first, in the order of the declaration; None: not given.
            in_place: What may lie in the memory of what is read.

        Raises:
            UnsupportedInputError: An operand must not be written, or shares memory with another one.
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
    """Refuse a call that has no torch operator where torch's dispatcher would have to see it.

    torch.compile breaks its graph here, and the call runs between the parts.

    Raises:
        UnsupportedInputError: A mode, tracer or transform of torch would miss the call.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=f"{operation} has no torch operator")
    if is_watched():
        raise UnsupportedInputError(f"{operation}: {_LOST}")


def why_not_operand(tensor: torch.Tensor, device: torch.device, strided: bool = False) -> str:
    """Why a tensor cannot be read on a communicator's device, whatever its shape and type, or "".

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
    """Why an object is no operand of a call without a torch operator, or "". Nobody would open a wrapper."""
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__} is not a tensor"
    why = why_not_operand(tensor, device)
    if not why and type(tensor) not in PLAIN_WEIGHTS:
        return f"a {type(tensor).__name__} is a wrapper of other tensors"
    return why


def why_not_out(out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    """Why a result of this shape cannot go to ``out``, whatever lies there, or ""."""
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


def why_not_writable(tensor: torch.Tensor) -> str:
    """Why the memory of a tensor must not be written, or "".

    Under torch.compile, which cannot trace the question, it is left to torch: what a graph has made is copied there.
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
        # A wrapper that a transform of torch.func has made has no address: torch writes it.
        if begin and not _core.is_writable(begin, extent(tensor)):
            return _READ_ONLY
    return ""


def extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
