"""The operations as torch custom operators, so that models which call them compile with ``fullgraph=True``, and torch's
dispatcher finds what to do with tensors that stand for others.

An operator names its communicator by a string, since a compiled graph holds no Python objects.

Calls in a compiled graph stay in the order of the program, on every rank. Ranks compile for themselves, and nothing but
the flow of data keeps two nodes of a graph in order: passes and schedulers may turn round calls that do not depend on
each other, and what they choose can rest on what a rank has measured. So each call that does not depend on the call
before is given a result of that one as a last operand, ``after``, which nobody reads. It happens when torch.compile
traces, before any pass of it. Calls that depend on each other anyway, as in most models, stay as they are.

torch has effect tokens for this (``torch.library._register_effectful_op``). With them torch 2.13 compiles neither
``torch.cond`` nor ``torch.while_loop`` around a call, and keeps no compiled graph on disk.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from llm_comm.errors import UnsupportedInputError
from llm_comm.operations.all_reduce import AllReduce
from llm_comm.operations.all_reduce_add_rms_norm import AllReduceAddRmsNorm, check_quantization
from llm_comm.operations.fp8 import FP8, GROUPS, empty_scales, makes_scales
from llm_comm.operations.linear import Linear
from llm_comm.operations.linear_all_reduce import LinearAllReduce, LinearAllReduceAddRmsNorm
from llm_comm.operations.operands import check_constant, why_not_writable
from llm_comm.operations.parts import AllGather, PartsOperation, ReduceScatter, Sizes

_Node = torch.fx.Node

#: The operand, last in the schema of an operator whose calls are kept in order.
OPERAND = "Tensor? after=None"

_in_order: set[torch._ops.OpOverload] = set()
_library = torch.library.Library("llm_comm", "DEF")
# Rank and world stand in the graph: the shapes of results rest on them, and ranks, or other worlds, may share compiled
# graphs on disk.
_PARTS = "Tensor x, int dim, SymInt[]? sizes, int rank, int world_size, str communicator"

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


def keep_in_order(called: torch._ops.OpOverload) -> None:
    """Calls of an operator, which has ``OPERAND``, keep their place among all such calls of a graph."""

    def trace(mode: ProxyTorchDispatchMode, *arguments: Any, **options: Any) -> Any:
        with mode:  # which is off in a rule
            result = called._op_dk(torch._C.DispatchKey.Python, *arguments, **options)
        _order_last_call(mode.tracer.graph)
        return result

    _in_order.add(called)
    called.py_impl(ProxyTorchDispatchMode)(trace)


def _order_last_call(graph: torch.fx.Graph) -> None:
    """Makes the last call of the graph depend on the one before it, if there is one and it does not."""
    call: _Node | None = None
    later: list[_Node] = []  # than the call before, last to first
    for node in reversed(graph.nodes):
        if node.target in _in_order:
            if call is not None:
                _order(node, call, later)
                return
            call = node
        if call is not None:
            later.append(node)


def _order(before: _Node, call: _Node, later: list[_Node]) -> None:
    dependent = {before}
    for node in reversed(later):
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    if call in dependent:
        return
    others = len(cast(torch._ops.OpOverload, call.target)._schema.arguments) - 1
    result = _result_of(before)
    call.args = (*call.args[:others], result)
    if "eager_input_vals" in call.meta:  # by which inductor keeps the strides of operands
        arguments, options = call.meta["eager_input_vals"]
        call.meta["eager_input_vals"] = ((*arguments[:others], result.meta["val"]), options)


def _result_of(call: _Node) -> _Node:
    """A result of a call, the last one where there are several: the smallest, or one that lives long anyway."""
    if isinstance(call.meta["val"], torch.Tensor):
        return call
    results = [user for user in call.users if user.target is operator.getitem]
    return max(results, key=lambda node: cast(int, node.args[1]))


@dataclass(frozen=True, eq=False)
class Operations:
    """Those of one communicator."""

    all_reduce: AllReduce
    all_reduce_add_rms_norm: AllReduceAddRmsNorm
    all_gather: AllGather
    reduce_scatter: ReduceScatter
    linear: Linear
    linear_silu_and_mul: Linear
    linear_gelu_tanh_and_mul: Linear
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


def add_rms_norm(
    operation: str,
    operands: Mapping[str, Any],
    eps: float,
    weight_bias: float,
    out: Any,
    residual_out: Any,
    quantize: str | None,
    scale: Any,
    communicator: str,
) -> _Results:
    """The same for a method whose operation has an operator for each quantization.

    Args:
        operation: Name of the method.
        operands: By name, in the order in which the operators take them. Only ``"residual"`` and scales of a layer may
            be None.
    """
    check_tensors(
        operation, {**operands, "scale": scale}, optional=("residual", "scale", "bias", "x_scale", "weight_scale")
    )
    check_quantization(operation, quantize, scale)
    check_outputs(operation, out=out, residual_out=residual_out, scale=scale if makes_scales(quantize) else None)
    operator = getattr(torch.ops.llm_comm, operation + OF_QUANTIZATION[quantize])
    of_operator = (scale,) if quantize == "static" else (quantize,) if quantize in GROUPS else ()
    results = operator(*operands.values(), eps, weight_bias, communicator, *of_operator)
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


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any], *, in_order: bool = True) -> None:
    """Define an operator: what it does, what fake tensors it returns, and the refusal of operands with a derivative.

    Args:
        in_order: Its calls keep their places in graphs: other ranks take part in them. The schema ends in ``OPERAND``.
    """
    _library.define(schema)
    name = schema.partition("(")[0]
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


def define_norms(operation: str, operands: str, total_of: Callable[[Mapping[str, Any]], torch.Tensor]) -> None:
    """Define the operators of an operation that ends in a norm, one for each quantization. Only ``static`` has a scale
    for an operand. ``group`` stands for all with groups, of which the operator is told.

    Args:
        operation: Name of the method, and of the attribute of ``Operations``.
        operands: Their schema, before epsilon. ``run`` of the operation takes the same names.
        total_of: Return a tensor like the sum, for fake tensors.
    """
    schema = f"{operands}, float eps, float weight_bias, str communicator"
    names = [argument.split()[-1] for argument in schema.split(",")]

    def define_norm(quantize: str | None, own_operand: str, results: str) -> None:
        def bound(arguments: tuple[Any, ...]) -> tuple[dict[str, Any], str | None]:
            """Operands by name, and the quantization. ``after`` comes last, where it is given."""
            own = arguments[len(names) :]
            given = dict(zip(names, arguments, strict=False))
            if quantize == "static":
                given["scale"] = own[0]
            return given, own[0] if quantize in GROUPS else quantize

        def run(*arguments: Any) -> _Results:
            given, of_call = bound(arguments)
            communicator = given.pop("communicator")
            found: _Results = getattr(find(communicator), operation).run(**given, quantize=of_call)
            return found

        def fake(*arguments: Any) -> _Results:
            given, of_call = bound(arguments)
            total = total_of(given)
            check_quantization(operation, of_call, None, total.shape)
            if of_call is None:
                return torch.empty_like(total), total
            normed = torch.empty_like(total, dtype=FP8)
            return (normed, total, empty_scales(of_call, total)) if makes_scales(of_call) else (normed, total)

        name = operation + OF_QUANTIZATION[quantize]
        define(f"{name}({schema}, {own_operand}{OPERAND}) -> ({results})", run, fake)

    define_norm(None, "", "Tensor, Tensor")
    define_norm("static", "Tensor scale, ", "Tensor, Tensor")
    define_norm("dynamic", "", "Tensor, Tensor, Tensor")
    define_norm("group", "str quantize, ", "Tensor, Tensor, Tensor")


def _all_reduce_of_batch(_info: Any, in_dims: Any, x: _Tensor, communicator: str, after: _After = None) -> Any:
    """For torch.vmap: sums go element by element, so one sum does for the batch."""
    return torch.ops.llm_comm.all_reduce(x.contiguous(), communicator), in_dims[0]


define(f"all_reduce(Tensor x, str communicator, {OPERAND}) -> Tensor", _all_reduce, _all_reduce_fake)
torch.library.register_vmap("llm_comm::all_reduce", _all_reduce_of_batch, lib=_library)


def _define_parts(name: str, length: Callable[[int, Sizes | None, int, int], int]) -> None:
    """Define the operator of an operation on parts.

    Args:
        length: Of the result along the dimension, for that of x, the sizes, the rank and the number of ranks.
    """

    def run(x: _Tensor, dim: int, sizes: Sizes | None, rank: int, world_size: int, *others: Any) -> _Tensor:
        operation: PartsOperation = getattr(find(others[0]), name)  # the communicator; what the call comes after
        if (rank, world_size) != (operation.rank, operation.world_size):
            raise UnsupportedInputError(
                f"{name}: the call is that of rank {rank} of {world_size}; this is rank {operation.rank} of "
                f"{operation.world_size}"
            )
        result: _Tensor = operation.run(x, dim, sizes)
        return result

    def fake(x: _Tensor, dim: int, sizes: Sizes | None, rank: int, world_size: int, *others: Any) -> _Tensor:
        shape = list(x.shape)
        shape[dim] = length(shape[dim], sizes, rank, world_size)
        return x.new_empty(shape)

    def of_batch(_info: Any, in_dims: Any, x: _Tensor, dim: int, *others: Any, after: _After = None) -> Any:
        """For torch.vmap: the batch is a further dimension of the parts."""
        batch = in_dims[0] % x.dim()
        logical = dim % (x.dim() - 1)
        physical = logical + (logical >= batch)
        return getattr(torch.ops.llm_comm, name)(x.contiguous(), physical, *others), batch

    define(f"{name}({_PARTS}, {OPERAND}) -> Tensor", run, fake)
    torch.library.register_vmap(f"llm_comm::{name}", of_batch, lib=_library)


_define_parts("all_gather", lambda part, sizes, _, world: part * world if sizes is None else sum(sizes))
_define_parts("reduce_scatter", lambda whole, sizes, rank, world: whole // world if sizes is None else sizes[rank])
define_norms(
    "all_reduce_add_rms_norm",
    "Tensor x, Tensor? residual, Tensor weight",
    lambda operands: torch.empty_like(operands["x"]),
)
