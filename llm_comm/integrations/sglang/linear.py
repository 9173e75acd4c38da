"""SGLang's linear layers by llm_comm: of a few tokens, where norms sum (``fused_norm.py``).

A decode step is a chain of layers, sums and norms. The kernel of llm_comm begins to fetch its weight while the kernels
before it still run, where those let it; llm_comm's sums do. So it computes the layers in front of sums over the
tensor-parallel group, and those behind, of the norm's output: ``RowParallelLinear`` and ``ColumnParallelLinear``, which
the layers of qkv and of gate and up are kinds of. Whether a sum is left to a norm or made at once cannot be told where
the matrix is multiplied; either is the next kernel, and begins early too.

Two methods of ``UnquantizedLinearMethod`` are hooked. ``create_weights`` marks a layer that is of the kind, once, so
that compiled graphs know; ``apply`` asks llm_comm for marked layers, and goes SGLang's way where that declines.
A second mark is for gate and up with silu-and-mul (``gated_mlps.py``).
A layer takes no other rank: nothing would wait if ranks chose differently. They do not: the mark depends on the layer's
shape, the options and the table, which ranks have compared.

The weight is read before the kernels ahead have ended, so it must not be written in the stream of the layer just
before: weights that SGLang fetches from the host for each pass (``--cpu-offload-gb``, ``--offload-group-size``) are
tensors in place of parameters, and left alone. So is a layer with such a bias. The bias of a layer split by rows is
given by SGLang on rank 0 alone.

All of SGLang's methods for FP8 with a scale for each output of the weight (its default on Hopper) quantize x and call
``fp8_scaled_mm`` of ``fp8_utils``: that function is hooked. It is not told which layer it computes, and need not be. So
replicated layers go by llm_comm too, where their shape is preferred. Scales of blocks, and one scale for the whole
weight, go other ways in SGLang, and stay there. So do graphs of torch.compile, which keep SGLang's operator.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from llm_comm.integrations.linear import prefers_some
from llm_comm.integrations.sglang.fused_norm import State, all_sums_are_of_the_group

logger = logging.getLogger("sglang.llm_comm")

_LAYERS = "sglang.srt.layers.linear"
_UNQUANTIZED = "sglang.srt.layers.quantization.unquant"

# Those of ``--bf16-gemm-backend`` by which SGLang leaves a layer to torch, and so to cuBLAS.
_CUBLAS = ("auto", "torch")

# Types of a bias that llm_comm reads, or that there is none. A tensor in place of a parameter may have just been made.
_BIASES = (torch.nn.Parameter, type(None))

# Opaque to torch.compile: graphs are traced with one number of tokens and run with others.
_library = torch.library.Library("llm_comm_sglang", "FRAGMENT")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,))


class _SGLang:
    """What of SGLang the hooks need.

    Attributes:
        row_parallel: The class of the layers that are summed over ranks.
        column_parallel: That of the layers whose outputs are split over ranks.
        unquantized: The module with SGLang's own kernels for layers without quantization.
    """

    row_parallel: Any = None
    column_parallel: Any = None
    unquantized: Any = None


def set_up() -> None:
    """Look up what the hooks need.

    Raises:
        Exception: SGLang lacks a name.
    """
    layers = importlib.import_module(_LAYERS)
    _SGLang.row_parallel, _SGLang.column_parallel = layers.RowParallelLinear, layers.ColumnParallelLinear
    _SGLang.unquantized = importlib.import_module(_UNQUANTIZED)
    _their_backend()  # fails here rather than when a model is made


def activate() -> None:
    """llm_comm computes the layers of models that are made from now on. To be called on all ranks."""
    State.computes_linears = True
    _say_that_they_are_sglangs.cache_clear()


# ---- Which layers ---------------------------------------------------------------------------------------------------


def create_weights(theirs: Any, method: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    theirs(method, layer, *args, **kwargs)
    # Kept with the layer: its forward may be compiled.
    may_compute = State.is_active and State.computes_linears and _is_of_the_kind(layer)
    layer.llm_comm_computes = may_compute and _wants(layer)
    layer.llm_comm_activates = may_compute and _is_gate_and_up(layer) and _wants(layer, silu_and_mul=True)


def _is_of_the_kind(layer: Any) -> bool:
    """Whether ``layer``, which has its weight by now, is split over the group, by columns or by rows."""
    if _ranks_of(layer) != State.group.world_size or not all_sums_are_of_the_group():
        return False
    if isinstance(layer, _SGLang.column_parallel):
        return True
    return isinstance(layer, _SGLang.row_parallel) and not layer.use_dp_attention_reduce


def _is_gate_and_up(layer: Any) -> bool:
    """Return whether ``layer`` has two outputs of one size. That they are gate and up, only its MLP knows."""
    sizes: Any = getattr(layer, "output_sizes", ())
    return len(sizes) == 2 and sizes[0] == sizes[1] and not layer.gather_output


def _wants(layer: Any, silu_and_mul: bool = False) -> bool:
    """Return whether llm_comm is to compute ``layer``, alone or with silu-and-mul, for some number of tokens."""
    communicator = getattr(State.group.ca_comm, "communicator", None)
    if communicator is None or layer.weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    rows, inputs = layer.weight.shape
    outputs = rows // 2 if silu_and_mul else rows
    if not prefers_some(communicator, outputs, inputs, communicator.max_preferred_tokens, silu_and_mul):
        return False
    backend = _their_backend()
    if communicator.config.fuse_linear == "auto" and backend not in _CUBLAS:
        _say_that_they_are_sglangs(backend)
        return False
    return True


def _ranks_of(layer: Any) -> int | None:
    """Over how many ranks ``layer`` is split; None if this SGLang does not tell."""
    if not hasattr(layer, "tp_group"):  # before 0.5.22
        return getattr(layer, "tp_size", None)
    return 1 if layer.tp_group is None else int(layer.tp_group.world_size)


def _their_backend() -> str:
    """Who computes such layers in SGLang: known before there is a model."""
    return str(_SGLang.unquantized.get_bf16_gemm_backend().value)


@functools.cache
def _say_that_they_are_sglangs(backend: str) -> None:
    if dist.get_rank() == 0:
        logger.info(
            "llm_comm: linear layers are SGLang's after all: the tuning table compared with cuBLAS, not with "
            "--bf16-gemm-backend %s",
            backend,
        )


# ---- Their computation ----------------------------------------------------------------------------------------------


def apply(theirs: Any, method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    if getattr(layer, "llm_comm_computes", False):
        weight = layer.weight
        # Not a tensor in its place: someone may have just made that.
        if type(weight) is torch.nn.Parameter and type(bias) in _BIASES:
            if not torch.compiler.is_compiling():
                result = by_llm_comm("linear", x, weight, bias)
                if result is not None:
                    return result
            elif not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))):
                return torch.ops.llm_comm_sglang.linear(x, weight, bias)
    return theirs(method, layer, x, bias)


def by_llm_comm(operation: str, *operands: torch.Tensor | None) -> torch.Tensor | None:
    """By the method ``operation`` of llm_comm, in a new tensor; None if it declines, or has left the group."""
    group = State.group
    compute = None if group is None else getattr(group.ca_comm, operation, None)
    result: torch.Tensor | None = None if compute is None else compute(*operands)
    return result


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The operator of compiled graphs."""
    result = by_llm_comm("linear", x, weight, bias)
    if result is None:
        # A layer without our mark: SGLang's own kernels.
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
    """``x @ weight``, scaled: weight is [inputs, outputs], the transpose of a contiguous tensor."""
    if (
        State.is_active
        and State.computes_linears
        and not torch.compiler.is_compiling()
        # Not a tensor in its place: someone may have just made that.
        and type(weight) is torch.nn.Parameter
        and type(weight_scale) is torch.nn.Parameter
        and type(bias) in _BIASES
    ):
        linear = getattr(getattr(State.group, "ca_comm", None), "linear", None)
        result = None if linear is None else linear(x, weight.t(), bias, (x_scale, weight_scale), out_dtype)
        if result is not None:
            return result
    return theirs(x, weight, x_scale, weight_scale, out_dtype, bias)
