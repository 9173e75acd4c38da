"""Hooks in SGLang that compute linear layers of few tokens by llm_comm, in models whose all-reduces are fused with
norms (``fused_norm.py``).

Which layers. A decode step is a chain of layers, all-reduces and norms. llm_comm's linear kernel fetches its weight
while earlier kernels run, if those trigger early, as llm_comm's all-reduce kernels do. So llm_comm computes the layers
before and after an all-reduce of the tensor-parallel group: ``RowParallelLinear`` and ``ColumnParallelLinear``. The
classes of qkv and of gate and up derive from the latter. Of ``ReplicatedLinear``, layers with the shape of the model's
router. All ranks have the same router and the same x, and must choose the same experts, so all use the same kernel.

Hooks. Two methods of ``UnquantizedLinearMethod`` are hooked. ``create_weights`` marks suitable layers once, so that
compiled graphs have a constant. ``apply`` calls llm_comm for marked layers, and SGLang's method if llm_comm declines.
A second mark is for gate and up with silu-and-mul (``gated_mlps.py``). q, k and v with RoPE need no mark
(``attention.py``). A layer involves no other rank, so ranks that chose differently would not hang. They choose alike:
the mark depends on the layer's shape, the options and the table, which the ranks have compared.

Early reads. llm_comm reads weight and bias before earlier kernels of the stream have ended, so a kernel just before the
layer must not write them. Weights that SGLang copies from the host for each pass (``--cpu-offload-gb``,
``--offload-group-size``) are plain tensors in place of parameters. Layers with such a weight or bias use SGLang's
method. SGLang passes the bias of a row-parallel layer on rank 0 only.

FP8. All of SGLang's methods with a scale for each output of the weight, its default on Hopper, quantize x and call
``fp8_scaled_mm`` of ``fp8_utils``. That function is hooked. It does not receive the layer, so replicated layers of a
preferred shape are computed by llm_comm too. Layers with block scales or one scale for the weight use other functions
of SGLang, which are not hooked. Graphs of torch.compile keep SGLang's FP8 operator.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from llm_comm import _core
from llm_comm.communicator import Communicator
from llm_comm.integrations.linear import prefers_some
from llm_comm.integrations.sglang.fused_norm import State, all_sums_are_of_the_group
from llm_comm.planning.models import Layer

logger = logging.getLogger("sglang.llm_comm")

_LAYERS = "sglang.srt.layers.linear"
_UNQUANTIZED = "sglang.srt.layers.quantization.unquant"

# Values of ``--bf16-gemm-backend`` with which SGLang uses torch, and so cuBLAS.
_CUBLAS = ("auto", "torch")

#: Types of a bias that llm_comm may read early: a parameter, or no bias. The stream may still be writing a plain
#: tensor.
BIASES = (torch.nn.Parameter, type(None))

# The operator is opaque to torch.compile: a graph is traced with one number of tokens and runs with others.
_library = torch.library.Library("llm_comm_sglang", "FRAGMENT")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,))


class _SGLang:
    """Objects of SGLang that the hooks use. ``set_up`` fills them in.

    Attributes:
        replicated: Class of layers that each rank has as a whole.
        row_parallel: Class of layers whose results are summed over ranks.
        column_parallel: Class of layers whose outputs are split over ranks.
        unquantized: Module with SGLang's kernels for layers without quantization.
    """

    replicated: Any = None
    row_parallel: Any = None
    column_parallel: Any = None
    unquantized: Any = None


def set_up() -> None:
    """Look up the objects of SGLang that the hooks use.

    Raises:
        Exception: SGLang lacks a name.
    """
    layers = importlib.import_module(_LAYERS)
    _SGLang.row_parallel, _SGLang.column_parallel = layers.RowParallelLinear, layers.ColumnParallelLinear
    _SGLang.replicated = layers.ReplicatedLinear
    _SGLang.unquantized = importlib.import_module(_UNQUANTIZED)
    _their_backend()  # fails here rather than when a model is made


def activate(router: Layer | None) -> None:
    """Let llm_comm compute the layers of models that are created after this call. Call it on all ranks.

    Args:
        router: The model's router; None if it has none.
    """
    State.computes_linears, _Router.shape = True, None if router is None else (router.outputs, router.inputs)
    _say_that_fuse_linear_is_off.cache_clear()


class _Router:
    """The model's router.

    Attributes:
        shape: Of its weight; None if there is no router.
    """

    shape: tuple[int, int] | None = None


# ---- Which layers ---------------------------------------------------------------------------------------------------


def create_weights(theirs: Any, method: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    theirs(method, layer, *args, **kwargs)
    # Attributes of the layer, because its forward may be compiled: there they are constants.
    may_compute = _may_compute(layer)
    layer.llm_comm_computes = may_compute and _wants(layer)
    layer.llm_comm_activates = may_compute and _is_gate_and_up(layer) and _wants(layer, silu_and_mul=True)


def batches_with_rope(layer: Any) -> frozenset[int]:
    """Return the numbers of tokens at which llm_comm is preferred for ``layer``, which computes q, k and v, with RoPE
    and the write to the KV cache."""
    communicator = _communicator_for(layer) if _may_compute(layer) else None
    if communicator is None:
        return frozenset()
    outputs, inputs = layer.weight.shape
    tokens = range(1, _core.rope_max_tokens + 1)
    found = frozenset(each for each in tokens if communicator.prefers_linear_rope(outputs, inputs, each))
    return found if found and _is_compared_with_theirs(communicator) else frozenset()


def _may_compute(layer: Any) -> bool:
    return State.is_active and State.computes_linears and _is_of_the_kind(layer)


def _is_of_the_kind(layer: Any) -> bool:
    """Return whether ``layer`` is split over the tensor-parallel group, by columns or by rows, or is the router."""
    if not all_sums_are_of_the_group():
        return False
    if isinstance(layer, _SGLang.replicated):
        return tuple(layer.weight.shape) == _Router.shape
    if _ranks_of(layer) != State.group.world_size:
        return False
    if isinstance(layer, _SGLang.column_parallel):
        return True
    return isinstance(layer, _SGLang.row_parallel) and not layer.use_dp_attention_reduce


def _is_gate_and_up(layer: Any) -> bool:
    """Return whether ``layer`` has two outputs of equal size. Its MLP confirms that they are gate and up."""
    sizes: Any = getattr(layer, "output_sizes", ())
    return len(sizes) == 2 and sizes[0] == sizes[1] and not layer.gather_output


def _wants(layer: Any, silu_and_mul: bool = False) -> bool:
    """Return whether llm_comm is preferred for ``layer``, alone or with silu-and-mul, at some number of tokens."""
    communicator = _communicator_for(layer)
    if communicator is None:
        return False
    rows, inputs = layer.weight.shape
    outputs = rows // 2 if silu_and_mul else rows
    is_preferred = prefers_some(communicator, outputs, inputs, communicator.max_preferred_tokens, silu_and_mul)
    return is_preferred and _is_compared_with_theirs(communicator)


def _communicator_for(layer: Any) -> Communicator | None:
    """Return the group's communicator; None if it is closed or does not serve the dtype of ``layer``."""
    communicator: Communicator | None = getattr(State.group.ca_comm, "communicator", None)
    return communicator if layer.weight.dtype in (torch.bfloat16, torch.float16) else None


def _is_compared_with_theirs(communicator: Communicator) -> bool:
    """Return whether measurements of layers compare with SGLang's kernels, or need not. Say so if they do not."""
    backend = _their_backend()
    if communicator.config.fuse_linear == "auto" and backend not in _CUBLAS:
        _say_that_fuse_linear_is_off(backend)
        return False
    return True


def _ranks_of(layer: Any) -> int | None:
    """Return the number of ranks that ``layer`` is split over; None if this version of SGLang does not tell."""
    if not hasattr(layer, "tp_group"):  # before 0.5.22
        return getattr(layer, "tp_size", None)
    return 1 if layer.tp_group is None else int(layer.tp_group.world_size)


def _their_backend() -> str:
    """Return SGLang's backend for bf16 layers. SGLang sets it before it creates a model."""
    return str(_SGLang.unquantized.get_bf16_gemm_backend().value)


@functools.cache
def _say_that_fuse_linear_is_off(backend: str) -> None:
    if dist.get_rank() == 0:
        logger.info(
            "llm_comm: fuse_linear is off: the tuning table was measured against cuBLAS, this layer uses backend %s",
            backend,
        )


# ---- Their computation ----------------------------------------------------------------------------------------------


def apply(theirs: Any, method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    if getattr(layer, "llm_comm_computes", False):
        weight = layer.weight
        # Parameters only: the stream may still be writing a plain tensor.
        if type(weight) is torch.nn.Parameter and type(bias) in BIASES:
            if not torch.compiler.is_compiling():
                result = by_llm_comm("linear", x, weight, bias)
                if result is not None:
                    return result
            elif not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))):
                return torch.ops.llm_comm_sglang.linear(x, weight, bias)
    return theirs(method, layer, x, bias)


def by_llm_comm(operation: str, *operands: torch.Tensor | None, **options: Any) -> torch.Tensor | None:
    """Call ``operation`` of the group's communicator.

    Returns:
        A new tensor. None: llm_comm declines, or has left the group.
    """
    group = State.group
    compute = None if group is None else getattr(group.ca_comm, operation, None)
    result: torch.Tensor | None = None if compute is None else compute(*operands, **options)
    return result


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Implementation of the operator of compiled graphs: llm_comm, or SGLang's kernels if it declines."""
    result = by_llm_comm("linear", x, weight, bias)
    if result is None:
        # A layer without the mark, so that apply() calls SGLang's kernels.
        result = _SGLang.unquantized.UnquantizedLinearMethod().apply(SimpleNamespace(weight=weight), x, bias)
    return result


def _fake_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("llm_comm_sglang::linear", _fake_linear, lib=_library)


# ---- FP8 ------------------------------------------------------------------------------------------------------------


def around_fp8_scaled_mm(
    theirs: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> Any:
    """Compute the scaled ``x @ weight`` by llm_comm, or by SGLang (``theirs``) if llm_comm declines.

    ``weight`` is [inputs, outputs], the transpose of a contiguous tensor.
    """
    if (
        State.is_active
        and State.computes_linears
        and not torch.compiler.is_compiling()
        # Parameters only: the stream may still be writing a plain tensor.
        and type(weight) is torch.nn.Parameter
        and type(weight_scale) is torch.nn.Parameter
        and type(bias) in BIASES
    ):
        linear = getattr(getattr(State.group, "ca_comm", None), "linear", None)
        result = None if linear is None else linear(x, weight.t(), bias, (x_scale, weight_scale), out_dtype)
        if result is not None:
            return result
    return theirs(x, weight, x_scale, weight_scale, out_dtype, bias)
