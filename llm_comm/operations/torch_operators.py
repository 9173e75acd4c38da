"""The operations as torch custom operators.

Models that call them compile with ``fullgraph=True``, and torch's dispatcher handles tensor subclasses, such as fake
tensors. An operator names its communicator by a string, since a compiled graph holds no Python objects.

Collective calls in a compiled graph must run in the same order on all ranks. Each rank compiles for itself, and only
data dependencies keep two nodes of a graph in order. Passes and schedulers may reorder independent calls, and their
choice can depend on timings of one rank. So a call that is independent of the previous collective call gets a result of
that call as its last operand. No kernel reads this operand, ``after``. It is added while torch.compile traces, before
any of its passes. In most models calls depend on each other, and stay as they are.

torch's effect tokens (``torch.library._register_effectful_op``) have the same purpose, but are not used. With them
torch 2.13 cannot compile ``torch.cond`` or ``torch.while_loop`` around a call, and keeps no compiled graph on disk.
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
from llm_comm.operations.all_to_all_v import AllToAllV
from llm_comm.operations.fp8 import BLOCKS, GROUPS, empty_normed, empty_scales, makes_scales
from llm_comm.operations.linear import Linear
from llm_comm.operations.linear_all_reduce import LinearAllReduce, LinearAllReduceAddRmsNorm
from llm_comm.operations.operands import check_constant, why_not_writable
from llm_comm.operations.shards import AllGather, AllToAll, ReduceScatter, ShardsOperation, Sizes

_Node = torch.fx.Node

#: Operand that orders calls. It is last in the schema of each operator whose calls are kept in order.
OPERAND = "Tensor? after=None"

_in_order: set[torch._ops.OpOverload] = set()
_library = torch.library.Library("llm_comm", "DEF")
# Schema of operations on shards. Shapes of results depend on rank and world size, and graphs on disk may be
# shared between ranks and world sizes. So both are operands, which the operator checks.
_SHARDS = "Tensor x, int dim, SymInt[]? sizes, int rank, int world_size, str communicator"

#: Suffix of the operator's name after the operation's name, by ``quantize``.
OF_QUANTIZATION: dict[str | None, str] = {
    None: "",
    "static": "_static_fp8",
    "dynamic": "_dynamic_fp8",
    **dict.fromkeys(GROUPS, "_group_fp8"),
    **dict.fromkeys(BLOCKS, "_block_scaled"),
}

_Tensor = torch.Tensor
_Results = tuple[torch.Tensor, ...]
_After = torch.Tensor | None


# ---- The register ---------------------------------------------------------------------------------------------------


def keep_in_order(called: torch._ops.OpOverload) -> None:
    """Keep the calls of an operator in program order among all such calls of a graph. The schema must end in
    ``OPERAND``."""

    def trace(mode: ProxyTorchDispatchMode, *arguments: Any, **options: Any) -> Any:
        with mode:  # torch switches the mode off inside a rule such as this one
            result = called._op_dk(torch._C.DispatchKey.Python, *arguments, **options)
        _order_last_call(mode.tracer.graph)
        return result

    _in_order.add(called)
    called.py_impl(ProxyTorchDispatchMode)(trace)


def _order_last_call(graph: torch.fx.Graph) -> None:
    """Make the last ordered call of the graph depend on the previous one, unless it already does."""
    call: _Node | None = None
    later: list[_Node] = []  # nodes from the last ordered call back to the previous one
    for node in reversed(graph.nodes):
        if node.target in _in_order:
            if call is not None:
                _order(node, call, later)
                return
            call = node
        if call is not None:
            later.append(node)


def _order(before: _Node, call: _Node, later: list[_Node]) -> None:
    """Give ``call`` a result of ``before`` as its last operand, unless ``call`` already depends on ``before``.

    Args:
        before: Previous ordered call.
        call: Last ordered call.
        later: All nodes after ``before``, from last to first.
    """
    dependent = {before}
    for node in reversed(later):
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    if call in dependent:
        return
    others = len(cast(torch._ops.OpOverload, call.target)._schema.arguments) - 1
    result = _result_of(before)
    call.args = (*call.args[:others], result)
    if "eager_input_vals" in call.meta:  # inductor reads it to keep the strides of operands
        arguments, options = call.meta["eager_input_vals"]
        call.meta["eager_input_vals"] = ((*arguments[:others], result.meta["val"]), options)


def _result_of(call: _Node) -> _Node:
    """Return the result of a call, or the last one of several, which is the smallest or lives long anyway.

    The choice matters because the dependency keeps the tensor alive until the next call.
    """
    if isinstance(call.meta["val"], torch.Tensor):
        return call
    results = [user for user in call.users if user.target is operator.getitem]
    return max(results, key=lambda node: cast(int, node.args[1]))


@dataclass(frozen=True, eq=False)
class Operations:
    """Operations of one communicator, one attribute for each operator."""

    all_reduce: AllReduce
    all_reduce_add_rms_norm: AllReduceAddRmsNorm
    all_gather: AllGather
    lossy_all_gather: AllGather
    reduce_scatter: ReduceScatter
    all_to_all: AllToAll
    all_to_all_v: AllToAllV
    linear: Linear
    linear_silu_and_mul: Linear
    linear_gelu_tanh_and_mul: Linear
    batch_invariant_linear: Linear
    linear_all_reduce: LinearAllReduce
    linear_all_reduce_add_rms_norm: LinearAllReduceAddRmsNorm


_operations: weakref.WeakValueDictionary[str, Operations] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(operations: Operations) -> str:
    """Register the operations of a communicator, and return the name by which operators find them.

    Only a weak reference is kept. Ranks that make their communicators in the same order get equal names, so they can
    share compiled graphs.
    """
    name = f"llm_comm.{next(_numbers)}"
    _operations[name] = operations
    return name


def find(communicator: str) -> Operations:
    """Return the operations of the communicator with this name.

    Raises:
        RuntimeError: No such communicator was made in this process, or it no longer exists.
    """
    found = _operations.get(communicator)
    if found is None:
        raise RuntimeError(f"there is no communicator {communicator!r} in this process")
    return found


# ---- Calls through torch's dispatcher -------------------------------------------------------------------------------


def all_reduce(x: _Tensor, out: Any, communicator: str) -> Any:
    """Run ``Communicator.all_reduce`` through torch's dispatcher, for tensors that are no plain ones, or are traced.

    The dispatcher adds a node while compiling, and makes a fake result for a fake tensor. It waits for an
    AsyncCollectiveTensor, and raises an error for a DTensor.
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
    global_scale: Any = None,
) -> _Results:
    """Run an operation that ends in a norm through torch's dispatcher. It has an operator for each quantization.

    Args:
        operation: Name of the communicator's method.
        operands: Operands by name, in the order of the operator's schema. Optional ones, such as ``"residual"``, may be
            None.
        eps, weight_bias, out, residual_out, quantize, scale, global_scale: Arguments of the method.
        communicator: Name from ``register``.
    """
    optional = ("residual", "scale", "global_scale", "bias", "x_scale", "weight_scale")
    check_tensors(operation, {**operands, "scale": scale, "global_scale": global_scale}, optional=optional)
    check_quantization(operation, quantize, scale, global_scale=global_scale)
    check_outputs(operation, out=out, residual_out=residual_out, scale=scale if makes_scales(quantize) else None)
    operator = getattr(torch.ops.llm_comm, operation + OF_QUANTIZATION[quantize])
    of_operator: tuple[Any, ...] = (scale,) if quantize == "static" else (quantize,) if quantize in GROUPS else ()
    if quantize in BLOCKS:
        of_operator = (quantize, global_scale)
    results = operator(*operands.values(), eps, weight_bias, communicator, *of_operator)
    given = (out, residual_out, scale if makes_scales(quantize) else None)
    names = ("out", "residual_out", "scale")
    return tuple(
        made if wanted is None else put(made, f"{operation}: {name}", wanted)
        for made, name, wanted in zip(results, names, given, strict=False)
    )


def check_tensors(operation: str, operands: Mapping[str, Any], optional: Container[str] = ()) -> None:
    """Raise UnsupportedInputError if an operand is no tensor. Operands named in ``optional`` may be None."""
    for name, operand in operands.items():
        if not isinstance(operand, _Tensor) and (operand is not None or name not in optional):
            raise UnsupportedInputError(f"{operation}: {name} is a {type(operand).__name__}, not a tensor")


def on_shards(
    operation: ShardsOperation, x: _Tensor, dim: int, sizes: Sizes | None, out: Any, communicator: str
) -> Any:
    """Run ``Communicator.all_gather``, ``reduce_scatter`` or ``all_to_all`` through torch's dispatcher."""
    name = operation.name
    check_outputs(name, out=out)
    operation.check_numbers(x, dim, sizes)
    if sizes is not None and not torch.compiler.is_compiling() and torch._C._is_tracing():
        # Raise a clear error: otherwise an assertion in torch's tracer would fail.
        raise UnsupportedInputError(f"{name}: torch.jit.trace cannot record sizes: use torch.compile or make_fx")
    operator = getattr(torch.ops.llm_comm, operation.operator)
    result: _Tensor = operator(x, dim, sizes, operation.rank, operation.world_size, communicator)
    return result if out is None else put(result, f"{name}: out", out)


def on_parts(
    operation: AllToAllV,
    x: _Tensor,
    send_sizes: Any,
    recv_sizes: Any,
    max_rows: int | None,
    out: Any,
    communicator: str,
) -> Any:
    """Run ``Communicator.all_to_all`` with sizes on the device through torch's dispatcher.

    The operator returns a new tensor. It reads ``out`` for the rows behind the last part, which keep their values.
    """
    check_tensors("all_to_all", {"send_sizes": send_sizes, "recv_sizes": recv_sizes})
    check_outputs("all_to_all", out=out)
    operation.check_numbers(x, max_rows)
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        # It would record the rows of this x.
        raise UnsupportedInputError("all_to_all: torch.jit.trace cannot record sizes: use torch.compile or make_fx")
    most = x.shape[0] if max_rows is None else max_rows
    result = torch.ops.llm_comm.all_to_all_v(x, send_sizes, recv_sizes, most, out, operation.world_size, communicator)
    return result if out is None else put(result, "all_to_all: out", out)


def check_outputs(operation: str, **outputs: Any) -> None:
    """Raise UnsupportedInputError unless all given output tensors can be written. Called before anything is sent."""
    check_tensors(operation, outputs, optional=outputs)
    check_constant(operation, **outputs)
    for name, tensor in outputs.items():
        why = "" if tensor is None else why_not_writable(tensor)
        if why:
            raise UnsupportedInputError(f"{operation}: {name}: {why}")


def put(made: _Tensor, name: str, out: _Tensor) -> _Tensor:
    """Copy the result of an operator into the caller's tensor. Unlike ``copy_`` alone, never convert or broadcast.

    Raises:
        UnsupportedInputError: The tensors differ in number of elements, dtype or device.
    """
    if out.numel() != made.numel() or out.dtype != made.dtype or out.device != made.device:
        raise UnsupportedInputError(
            f"{name} ({tuple(out.shape)}, {out.dtype}, {out.device}) must be like what goes there "
            f"({tuple(made.shape)}, {made.dtype}, {made.device})"
        )
    out.copy_(made.view(out.shape))
    return out  # copy_ may return another object, of the class of ``made``


# ---- The operators --------------------------------------------------------------------------------------------------


def _all_reduce(x: _Tensor, communicator: str, after: _After = None) -> _Tensor:
    result: _Tensor = find(communicator).all_reduce.run(x)
    return result


def _all_reduce_fake(x: _Tensor, communicator: str, after: _After = None) -> _Tensor:
    return torch.empty_like(x)


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any], *, in_order: bool = True) -> None:
    """Define an operator. Its calls raise an error for operands that require a gradient.

    Args:
        schema: Schema as torch writes it, from the operator's name on.
        function: Implementation on CPU and CUDA.
        fake: Implementation for fake tensors.
        in_order: Whether calls keep their order in graphs, as collectives must. Then the schema ends in ``OPERAND``.
    """
    _library.define(schema)
    name = schema.partition("(")[0]
    operator: torch._ops.OpOverload = getattr(torch.ops.llm_comm, name).default
    names = [argument.name for argument in operator._schema.arguments if argument.name != "after"]

    def check_and_redispatch(keys: torch._C.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        """Kernel of autograd's key: refuse operands that require a gradient, then call the implementation."""
        # Check here: only under autograd's key do operands show requires_grad and tangents as the caller sees them,
        # also within transforms of torch.func.
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
    """Define the operators of an operation that ends in a norm, one for each quantization.

    Only the operator of ``static`` has operand ``scale``. One operator serves all quantizations by groups, and one all
    with blocks. Both have operand ``quantize``, and the latter ``global_scale``.

    Args:
        operation: Name of the communicator's method, and of the attribute of ``Operations``.
        operands: Schema of the operands before epsilon. ``run`` of the operation has parameters of the same names.
        total_of: Function that returns a tensor like the sum, given fake operands by name.
    """
    schema = f"{operands}, float eps, float weight_bias, str communicator"
    names = [argument.split()[-1] for argument in schema.split(",")]

    def define_norm(quantize: str | None, own_operand: str, results: str) -> None:
        def bound(arguments: tuple[Any, ...]) -> tuple[dict[str, Any], str | None]:
            """Return the operands by name, and the quantization. Operand ``after`` is dropped."""
            own = arguments[len(names) :]
            given = dict(zip(names, arguments, strict=False))
            if quantize == "static":
                given["scale"] = own[0]
            if quantize in BLOCKS:
                given["global_scale"] = own[1]
            return given, own[0] if quantize in GROUPS or quantize in BLOCKS else quantize

        def run(*arguments: Any) -> _Results:
            given, of_call = bound(arguments)
            communicator = given.pop("communicator")
            found: _Results = getattr(find(communicator), operation).run(**given, quantize=of_call)
            return found

        def fake(*arguments: Any) -> _Results:
            given, of_call = bound(arguments)
            total = total_of(given)
            check_quantization(operation, of_call, None, total.shape, given.get("global_scale"))
            if of_call is None:
                return torch.empty_like(total), total
            normed = empty_normed(of_call, total)
            return (normed, total, empty_scales(of_call, total)) if makes_scales(of_call) else (normed, total)

        name = operation + OF_QUANTIZATION[quantize]
        define(f"{name}({schema}, {own_operand}{OPERAND}) -> ({results})", run, fake)

    define_norm(None, "", "Tensor, Tensor")
    define_norm("static", "Tensor scale, ", "Tensor, Tensor")
    define_norm("dynamic", "", "Tensor, Tensor, Tensor")
    define_norm("group", "str quantize, ", "Tensor, Tensor, Tensor")
    define_norm("nvfp4", "str quantize, Tensor? global_scale, ", "Tensor, Tensor, Tensor")


def _all_reduce_of_batch(_info: Any, in_dims: Any, x: _Tensor, communicator: str, after: _After = None) -> Any:
    """Rule for torch.vmap: an all-reduce works element by element, so one call serves the whole batch."""
    return torch.ops.llm_comm.all_reduce(x.contiguous(), communicator), in_dims[0]


define(f"all_reduce(Tensor x, str communicator, {OPERAND}) -> Tensor", _all_reduce, _all_reduce_fake)
torch.library.register_vmap("llm_comm::all_reduce", _all_reduce_of_batch, lib=_library)


def _define_shards(name: str, result_length: Callable[[int, Sizes | None, int, int], int]) -> None:
    """Define the operator of an operation on shards.

    Args:
        name: Name of the operation.
        result_length: Function that returns the result's size along the dimension, given the size of x, the sizes of
            shards, the rank and the number of ranks.
    """

    def run(x: _Tensor, dim: int, sizes: Sizes | None, rank: int, world_size: int, *others: Any) -> _Tensor:
        operation: ShardsOperation = getattr(find(others[0]), name)  # others: communicator's name, ``after``
        if (rank, world_size) != (operation.rank, operation.world_size):
            raise UnsupportedInputError(
                f"{name}: the call is that of rank {rank} of {world_size}; this is rank {operation.rank} of "
                f"{operation.world_size}"
            )
        result: _Tensor = operation.run(x, dim, sizes)
        return result

    def fake(x: _Tensor, dim: int, sizes: Sizes | None, rank: int, world_size: int, *others: Any) -> _Tensor:
        shape = list(x.shape)
        shape[dim] = result_length(shape[dim], sizes, rank, world_size)
        return x.new_empty(shape)

    def of_batch(_info: Any, in_dims: Any, x: _Tensor, dim: int, *others: Any, after: _After = None) -> Any:
        """Rule for torch.vmap: the batch is one more dimension of the shards, so one call serves the whole batch."""
        batch = in_dims[0] % x.dim()
        logical = dim % (x.dim() - 1)
        physical = logical + (logical >= batch)
        return getattr(torch.ops.llm_comm, name)(x.contiguous(), physical, *others), batch

    define(f"{name}({_SHARDS}, {OPERAND}) -> Tensor", run, fake)
    torch.library.register_vmap(f"llm_comm::{name}", of_batch, lib=_library)


for _gather in ("all_gather", "lossy_all_gather"):
    _define_shards(_gather, lambda shard, sizes, _, world: shard * world if sizes is None else sum(sizes))
_define_shards("reduce_scatter", lambda whole, sizes, rank, world: whole // world if sizes is None else sizes[rank])
_define_shards("all_to_all", lambda whole, *_: whole)


def _all_to_all_v(
    x: _Tensor,
    send_sizes: _Tensor,
    recv_sizes: _Tensor,
    max_rows: int,
    out: _Tensor | None,
    world_size: int,
    communicator: str,
    after: _After = None,
) -> _Tensor:
    operation = find(communicator).all_to_all_v
    if world_size != operation.world_size:
        raise UnsupportedInputError(f"all_to_all: the call is one of {world_size} ranks, not {operation.world_size}")
    result: _Tensor = operation.run(x, send_sizes, recv_sizes, max_rows, None if out is None else out.clone())
    return result


def _all_to_all_v_fake(
    x: _Tensor,
    send_sizes: _Tensor,
    recv_sizes: _Tensor,
    max_rows: int,
    out: _Tensor | None,
    world_size: int,
    *others: Any,
) -> _Tensor:
    return x.new_empty((world_size * max_rows, *x.shape[1:])) if out is None else torch.empty_like(out)


define(
    "all_to_all_v(Tensor x, Tensor send_sizes, Tensor recv_sizes, SymInt max_rows, Tensor? out, int world_size, "
    f"str communicator, {OPERAND}) -> Tensor",
    _all_to_all_v,
    _all_to_all_v_fake,
)
define_norms(
    "all_reduce_add_rms_norm",
    "Tensor x, Tensor? residual, Tensor weight",
    lambda operands: torch.empty_like(operands["x"]),
)
