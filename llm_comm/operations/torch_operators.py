"""The operations as torch custom operators, so that models which call them compile with ``fullgraph=True``, and torch's
dispatcher finds what to do with tensors that stand for others.

An operator names its communicator by a string, since a compiled graph holds no Python objects. ``after`` keeps calls in
order (graph_order.py).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llm_comm.errors import UnsupportedInputError
from llm_comm.operations.all_gather import AllGather
from llm_comm.operations.all_reduce import AllReduce
from llm_comm.operations.all_reduce_add_rms_norm import AllReduceAddRmsNorm, check_quantization
from llm_comm.operations.graph_order import OPERAND, keep_in_order
from llm_comm.operations.linear import Linear
from llm_comm.operations.linear_all_reduce import LinearAllReduce, LinearAllReduceAddRmsNorm
from llm_comm.operations.operands import why_not_writable
from llm_comm.operations.parts import PartsOperation, Sizes
from llm_comm.operations.quantization import FP8, GROUPS, empty_scales, makes_scales
from llm_comm.operations.reduce_scatter import ReduceScatter
from llm_comm.operations.watched import check_constant

_library = torch.library.Library("llm_comm", "DEF")
_library.define(f"all_reduce(Tensor x, str communicator, {OPERAND}) -> Tensor")
_FUSED = "Tensor x, Tensor? residual, Tensor weight, float eps, str communicator"
_library.define(f"all_reduce_add_rms_norm({_FUSED}, {OPERAND}) -> (Tensor, Tensor)")
_library.define(f"all_reduce_add_rms_norm_static_fp8({_FUSED}, Tensor scale, {OPERAND}) -> (Tensor, Tensor)")
_library.define(f"all_reduce_add_rms_norm_dynamic_fp8({_FUSED}, {OPERAND}) -> (Tensor, Tensor, Tensor)")
_library.define(f"all_reduce_add_rms_norm_group_fp8({_FUSED}, str quantize, {OPERAND}) -> (Tensor, Tensor, Tensor)")
# Rank and world stand in the graph: the shapes of results rest on them, and ranks, or other worlds, may share compiled
# graphs on disk.
_PARTS = "Tensor x, int dim, SymInt[]? sizes, int rank, int world_size, str communicator"
_library.define(f"all_gather({_PARTS}, {OPERAND}) -> Tensor")
_library.define(f"reduce_scatter({_PARTS}, {OPERAND}) -> Tensor")

#: What follows an operation's name in that of its operator, by ``quantize``.
OF_QUANTIZATION: dict[str | None, str] = {
    None: "",
    "static": "_static_fp8",
    "dynamic": "_dynamic_fp8",
    **dict.fromkeys(GROUPS, "_group_fp8"),
}

_Tensor = torch.Tensor
_Results = tuple[torch.Tensor, ...]
_After = torch.Tensor | None


# ---- The register ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Operations:
    """Those of one communicator."""

    all_reduce: AllReduce
    all_reduce_add_rms_norm: AllReduceAddRmsNorm
    all_gather: AllGather
    reduce_scatter: ReduceScatter
    linear: Linear
    linear_silu_and_mul: Linear
    linear_of_any_batch: Linear
    linear_all_reduce: LinearAllReduce
    linear_all_reduce_add_rms_norm: LinearAllReduceAddRmsNorm


_operations: weakref.WeakValueDictionary[str, Operations] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(operations: Operations) -> str:
    """A name for a communicator by which operators find its operations as long as they live: the same on all ranks
    that make their communicators in the same order."""
    name = f"llm_comm.{next(_numbers)}"
    _operations[name] = operations
    return name


def find(communicator: str) -> Operations:
    """The operations of the communicator that was registered by a name.

    Raises:
        RuntimeError: It is not in this process, or not any more.
    """
    found = _operations.get(communicator)
    if found is None:
        raise RuntimeError(f"there is no communicator {communicator!r} in this process (any more)")
    return found


# ---- Calls that go by the dispatcher --------------------------------------------------------------------------------


def all_reduce(x: _Tensor, out: Any, communicator: str) -> Any:
    """``Communicator.all_reduce`` of a tensor that is no ordinary one, or not one yet.

    torch's dispatcher knows what to make of it: a graph while compiling, a fake result for a fake tensor, a wait for
    one that is still on its way (AsyncCollectiveTensor), an error for a part of a DTensor.
    """
    check_outputs("all_reduce", out=out)
    result = torch.ops.llm_comm.all_reduce(x, communicator)
    return result if out is None else put(result, "all_reduce: out", out)


def all_reduce_add_rms_norm(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    eps: float,
    out: Any,
    residual_out: Any,
    quantize: str | None,
    scale: _Tensor | None,
    communicator: str,
) -> _Results:
    """The same for ``Communicator.all_reduce_add_rms_norm``."""
    operands = {"x": x, "residual": residual, "weight": weight}
    return add_rms_norm("all_reduce_add_rms_norm", operands, eps, out, residual_out, quantize, scale, communicator)


def add_rms_norm(
    operation: str,
    operands: Mapping[str, Any],
    eps: float,
    out: Any,
    residual_out: Any,
    quantize: str | None,
    scale: Any,
    communicator: str,
) -> _Results:
    """The same for an operation that has an operator for each quantization.

    Args:
        operands: By name, in the order in which the operators take them. Only ``"residual"`` and scales of a layer may
            be None.
    """
    check_tensors(operation, {**operands, "scale": scale}, optional=("residual", "scale", "x_scale", "weight_scale"))
    check_quantization(operation, quantize, scale)
    check_outputs(operation, out=out, residual_out=residual_out, scale=scale if makes_scales(quantize) else None)
    operator = getattr(torch.ops.llm_comm, operation + OF_QUANTIZATION[quantize])
    of_operator = (scale,) if quantize == "static" else (quantize,) if quantize in GROUPS else ()
    results = operator(*operands.values(), eps, communicator, *of_operator)
    given = (out, residual_out, scale if makes_scales(quantize) else None)
    names = ("out", "residual_out", "scale")
    return tuple(
        made if wanted is None else put(made, f"{operation}: {name}", wanted)
        for made, name, wanted in zip(results, names, given, strict=False)
    )


def check_tensors(operation: str, operands: Mapping[str, Any], optional: Container[str] = ()) -> None:
    """Raises UnsupportedInputError if one of the operands is no tensor, nor None where it is optional."""
    for name, operand in operands.items():
        if not isinstance(operand, _Tensor) and (operand is not None or name not in optional):
            raise UnsupportedInputError(f"{operation}: {name} is a {type(operand).__name__}, not a tensor")


def on_parts(operation: PartsOperation, x: _Tensor, dim: int, sizes: Sizes | None, out: Any, communicator: str) -> Any:
    """The same for ``Communicator.all_gather`` and ``reduce_scatter``."""
    name = operation.name
    check_outputs(name, out=out)
    operation.check_numbers(x, dim, sizes)
    if sizes is not None and not torch.compiler.is_compiling() and torch._C._is_tracing():
        # An assertion of torch's tracer would fail.
        raise UnsupportedInputError(f"{name}: torch.jit.trace cannot record sizes: use torch.compile or make_fx")
    operator = getattr(torch.ops.llm_comm, name)
    result: _Tensor = operator(x, dim, sizes, operation.rank, operation.world_size, communicator)
    return result if out is None else put(result, f"{name}: out", out)


def check_outputs(operation: str, **outputs: Any) -> None:
    """Raise UnsupportedInputError, before anything is sent, unless what is given can be written."""
    check_tensors(operation, outputs, optional=outputs)
    check_constant(operation, **outputs)
    for name, tensor in outputs.items():
        why = "" if tensor is None else why_not_writable(tensor)
        if why:
            raise UnsupportedInputError(f"{operation}: {name}: {why}")


def put(made: _Tensor, name: str, out: _Tensor) -> _Tensor:
    """Puts what an operator has made where the caller wants it; ``copy_`` alone would convert and repeat it."""
    if out.numel() != made.numel() or out.dtype != made.dtype or out.device != made.device:
        raise UnsupportedInputError(
            f"{name} ({tuple(out.shape)}, {out.dtype}, {out.device}) must be like what goes there "
            f"({tuple(made.shape)}, {made.dtype}, {made.device})"
        )
    out.copy_(made.view(out.shape))  # which may return another object, of the class of what was made
    return out


# ---- The operators --------------------------------------------------------------------------------------------------


def _all_reduce(x: _Tensor, communicator: str, after: _After = None) -> _Tensor:
    result: _Tensor = find(communicator).all_reduce.run(x)
    return result


def _all_reduce_fake(x: _Tensor, communicator: str, after: _After = None) -> _Tensor:
    return torch.empty_like(x)


def _fused(
    x: _Tensor, residual: _Tensor | None, weight: _Tensor, eps: float, name: str, after: _After = None
) -> _Results:
    return find(name).all_reduce_add_rms_norm.run(x, residual, weight, eps)


def _fused_fake(
    x: _Tensor, residual: _Tensor | None, weight: _Tensor, eps: float, communicator: str, after: _After = None
) -> _Results:
    return torch.empty_like(x), torch.empty_like(x)


def _fused_static(
    x: _Tensor, residual: _Tensor | None, weight: _Tensor, eps: float, name: str, scale: _Tensor, after: _After = None
) -> _Results:
    return find(name).all_reduce_add_rms_norm.run(x, residual, weight, eps, quantize="static", scale=scale)


def _fused_static_fake(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    eps: float,
    communicator: str,
    scale: _Tensor,
    after: _After = None,
) -> _Results:
    return torch.empty_like(x, dtype=FP8), torch.empty_like(x)


def _fused_dynamic(
    x: _Tensor, residual: _Tensor | None, weight: _Tensor, eps: float, name: str, after: _After = None
) -> _Results:
    return find(name).all_reduce_add_rms_norm.run(x, residual, weight, eps, quantize="dynamic")


def _fused_dynamic_fake(
    x: _Tensor, residual: _Tensor | None, weight: _Tensor, eps: float, communicator: str, after: _After = None
) -> _Results:
    return torch.empty_like(x, dtype=FP8), torch.empty_like(x), empty_scales("dynamic", x)


def _fused_group(
    x: _Tensor, residual: _Tensor | None, weight: _Tensor, eps: float, name: str, quantize: str, after: _After = None
) -> _Results:
    return find(name).all_reduce_add_rms_norm.run(x, residual, weight, eps, quantize=quantize)


def _fused_group_fake(
    x: _Tensor,
    residual: _Tensor | None,
    weight: _Tensor,
    eps: float,
    communicator: str,
    quantize: str,
    after: _After = None,
) -> _Results:
    check_quantization("all_reduce_add_rms_norm", quantize, None, x.shape)
    return torch.empty_like(x, dtype=FP8), torch.empty_like(x), empty_scales(quantize, x)


def _all_gather(
    x: _Tensor, dim: int, sizes: Sizes | None, rank: int, world_size: int, communicator: str, after: _After = None
) -> _Tensor:
    return _run_on_parts(find(communicator).all_gather, x, dim, sizes, rank, world_size)


def _all_gather_fake(
    x: _Tensor, dim: int, sizes: Sizes | None, rank: int, world_size: int, communicator: str, after: _After = None
) -> _Tensor:
    return _empty_with_length(x, dim, x.shape[dim] * world_size if sizes is None else sum(sizes))


def _reduce_scatter(
    x: _Tensor, dim: int, sizes: Sizes | None, rank: int, world_size: int, communicator: str, after: _After = None
) -> _Tensor:
    return _run_on_parts(find(communicator).reduce_scatter, x, dim, sizes, rank, world_size)


def _reduce_scatter_fake(
    x: _Tensor, dim: int, sizes: Sizes | None, rank: int, world_size: int, communicator: str, after: _After = None
) -> _Tensor:
    return _empty_with_length(x, dim, x.shape[dim] // world_size if sizes is None else sizes[rank])


def _run_on_parts(
    operation: PartsOperation, x: _Tensor, dim: int, sizes: Sizes | None, rank: int, world_size: int
) -> _Tensor:
    if (rank, world_size) != (operation.rank, operation.world_size):
        raise UnsupportedInputError(
            f"{operation.name}: the call is that of rank {rank} of {world_size}; this is rank {operation.rank} of "
            f"{operation.world_size}"
        )
    result: _Tensor = operation.run(x, dim, sizes)
    return result


def _empty_with_length(x: _Tensor, dim: int, length: int) -> _Tensor:
    shape = list(x.shape)
    shape[dim] = length
    return x.new_empty(shape)


def define(schema: str) -> str:
    """Defines an operator; returns its name."""
    _library.define(schema)
    return schema.partition("(")[0]


def implement(name: str, function: Callable[..., Any], fake: Callable[..., Any], *, in_order: bool = True) -> None:
    """Give an operator what it does, what fake tensors it returns, and the refusal of operands with a derivative.

    Args:
        in_order: Its calls keep their places in graphs: other ranks take part in them.
    """
    operator: torch._ops.OpOverload = getattr(torch.ops.llm_comm, name).default
    names = [argument.name for argument in operator._schema.arguments if argument.name != "after"]

    def check_and_redispatch(keys: torch._C.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        # Only autograd's key sees requires_grad and tangents as the caller does: transforms of torch.func too.
        check_constant(name, **dict(zip(names, arguments, strict=False)))
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments, **options)

    _library.impl(name, check_and_redispatch, "Autograd", with_keyset=True)
    for device in ("CPU", "CUDA"):
        _library.impl(name, function, device)
    torch.library.register_fake(f"llm_comm::{name}", fake, lib=_library)
    if in_order:
        keep_in_order(operator)


def _all_reduce_of_batch(_info: Any, in_dims: Any, x: _Tensor, communicator: str, after: _After = None) -> Any:
    """For torch.vmap: sums go element by element, so one sum does for the batch."""
    return torch.ops.llm_comm.all_reduce(x.contiguous(), communicator), in_dims[0]


implement("all_reduce", _all_reduce, _all_reduce_fake)
torch.library.register_vmap("llm_comm::all_reduce", _all_reduce_of_batch, lib=_library)


def _of_batch(operator: str) -> Callable[..., Any]:
    """For torch.vmap: the batch is a further dimension of the parts."""

    def call(_info: Any, in_dims: Any, x: _Tensor, dim: int, *others: Any, after: _After = None) -> Any:
        batch = in_dims[0] % x.dim()
        logical = dim % (x.dim() - 1)
        physical = logical + (logical >= batch)
        return getattr(torch.ops.llm_comm, operator)(x.contiguous(), physical, *others), batch

    return call


implement("all_gather", _all_gather, _all_gather_fake)
implement("reduce_scatter", _reduce_scatter, _reduce_scatter_fake)
for _operator in ("all_gather", "reduce_scatter"):
    torch.library.register_vmap(f"llm_comm::{_operator}", _of_batch(_operator), lib=_library)
implement("all_reduce_add_rms_norm", _fused, _fused_fake)
implement("all_reduce_add_rms_norm_static_fp8", _fused_static, _fused_static_fake)
implement("all_reduce_add_rms_norm_dynamic_fp8", _fused_dynamic, _fused_dynamic_fake)
implement("all_reduce_add_rms_norm_group_fp8", _fused_group, _fused_group_fake)
