"""What torch must know of calls that its dispatcher does not see: who watches, who differentiates, what is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

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
