"""Arms of ``llm-comm bench linear``: implementations of linear layers, and of chains with an all-reduce and a norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from llm_comm import _core
from llm_comm.bench.fused import add_rms_norm, as_engines_run
from llm_comm.bench.layer_chains import call_of_choice, choices_of, layer_by_torch, layer_by_vllm
from llm_comm.bench.linear_operands import Judge, JudgeOfLayers, Operands
from llm_comm.bench.reference import EPS, Outputs
from llm_comm.bench.report import OURS
from llm_comm.communicator import Communicator
from llm_comm.errors import ConfigError
from llm_comm.planning.layers import inputs_multiple, takes_features

#: Column head of the arm that computes layer, all-reduce, add and norm in one call.
FUSED = f"{OURS} fused"
#: Column head of vLLM's FP8 kernel.
CUTLASS = "vllm cutlass"
FP8_REMARK = "scaled_mm: torch._scaled_mm with fast accumulation"
SILU_REMARK = "silu-and-mul behind cublas: what torch.compile makes one kernel of"
#: Number of tilings of a layer that are timed. For 90 % of layers the best of the first 12 is within 1.1 % of the best
#: of all (docs/experiments/linear.md, "The kernel's own choice").
_MOST_CHOICES = 12


class Names(NamedTuple):
    """Column heads of the arms that llm_comm is compared with."""

    layer: str
    layer_and_ours: str
    layer_and_other: str
    layer_and_norm: str

    @staticmethod
    def of(on_gpu: bool, silu: bool = False, fp8: bool = False) -> Names:
        """Return the column heads for a device. On emulated GPUs torch's CPU code and gloo replace cuBLAS and NCCL.

        Args:
            on_gpu: Whether the device is a GPU.
            silu: Whether silu-and-mul follows the layer.
            fp8: Whether the operands are FP8.
        """
        layer, other = ("scaled_mm" if fp8 else "cublas", "nccl") if on_gpu else ("mm", "gloo")
        layer += " + silu" if silu else ""
        return Names(layer, f"{layer} + {OURS}", f"{layer} + {other}", f"{layer} + norm")


@dataclass(frozen=True)
class Arm:
    """Implementation of a layer or of a chain.

    Attributes:
        name: Column head.
        call: Function that enqueues the layer with a given weight, and all that follows in a chain. Returns the
            results.
        error: Function that returns the error of results, given the index of the weight. Above 1 they are wrong.
    """

    name: str
    call: Callable[[Tensor], tuple[Tensor, ...]]
    error: Callable[[tuple[Tensor, ...], int], float]


def check_layers(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    option: str,
    fp8: bool = False,
    most_tokens: int = _core.linear_max_tokens,
) -> None:
    """Check that llm_comm has kernels for these layers.

    Args:
        shapes: Outputs and inputs of each layer.
        tokens: Batch sizes.
        option: Name of the option that gave ``shapes``, for the error.
        fp8: Whether operands are FP8.
        most_tokens: Maximum batch size.

    Raises:
        ConfigError: A layer or a batch size has no kernel.
    """
    multiple = inputs_multiple(fp8)
    for outputs, inputs in shapes:
        if not (takes_features(outputs) and takes_features(inputs, multiple)):
            raise ConfigError(
                f"{option} {outputs}x{inputs}: outputs and inputs are multiples of {_core.linear_multiple}"
                f"{f', inputs of {multiple},' if fp8 else ''} up to {_core.linear_max_features}"
            )
    if not all(0 < count <= most_tokens for count in tokens):
        raise ConfigError(f"--tokens {','.join(map(str, tokens))}: 1 to {most_tokens} each")


def are_many(tokens: int) -> bool:
    """Return whether a batch is too large for ``Communicator.linear``, and needs ``batch_invariant_linear``."""
    return tokens > _core.linear_max_tokens


def layer_arm(name: str, call: Callable[[Tensor], tuple[Tensor, ...]], judge: JudgeOfLayers, rounds_once: bool) -> Arm:
    """Return an arm with a layer alone."""
    return Arm(name, call, lambda found, index: judge.layer(found[0], index, rounds_once))


def our_layer(comm: Communicator, operands: Operands, judge: JudgeOfLayers) -> Arm:
    """Return the arm with llm_comm's layer alone: plain, FP8, or with silu-and-mul, according to the operands."""
    x, out = operands.x, operands.out
    linear: Callable[..., Tensor] = comm.batch_invariant_linear if are_many(len(x)) else comm.linear
    if operands.silu:
        linear = comm.linear_silu_and_mul
    elif operands.scales is not None:
        x_scale, weight_scale = operands.scales
        linear = partial(linear, x_scale=x_scale, weight_scale=weight_scale)
    return layer_arm(OURS, lambda weight: (linear(x, weight, out=out),), judge, True)


def our_chains(comm: Communicator, operands: Operands, judge: Judge) -> list[Arm]:
    """Return two arms with layer, all-reduce, add and norm: all by llm_comm in one call, and with cuBLAS's layer."""
    x, residual, norm_weight = operands.x, operands.residual, operands.norm_weight
    out, residual_out = operands.out, operands.residual_out
    summand = torch.empty_like(out)

    def fused(weight: Tensor) -> tuple[Tensor, ...]:
        comm.linear_all_reduce_add_rms_norm(x, weight, residual, norm_weight, EPS, out=out, residual_out=residual_out)
        return out, residual_out

    def layer_and_ours(weight: Tensor) -> tuple[Tensor, ...]:
        torch.mm(x, weight.t(), out=summand)
        comm.all_reduce_add_rms_norm(summand, residual, norm_weight, EPS, out=out, residual_out=residual_out)
        return out, residual_out

    return [
        Arm(FUSED, fused, lambda found, index: judge.chain(_pair(found), index, True, True)),
        Arm(
            Names.of(not comm.is_emulated).layer_and_ours,
            layer_and_ours,
            lambda found, index: judge.chain(_pair(found), index, False, True),
        ),
    ]


def other_layers(comm: Communicator, operands: Operands, judge: JudgeOfLayers) -> Iterator[Arm]:
    """Yield the arms with other libraries' layers alone.

    FP8 layers: torch's kernel, and vLLM's if vLLM can be imported. Other layers: cuBLAS, with a kernel for silu-and-mul
    if the operands need it.
    """
    x, out, scales = operands.x, operands.out, operands.scales
    name = Names.of(not comm.is_emulated, operands.silu, scales is not None).layer
    if scales is not None:
        by_torch = layer_by_torch(x, out, scales)
        yield layer_arm(name, lambda weight: (by_torch(weight),), judge, False)
        if not comm.is_emulated and _has_cutlass():
            by_vllm = layer_by_vllm(x, out, scales)
            yield layer_arm(CUTLASS, lambda weight: (by_vllm(weight),), judge, False)
        return
    products = out.new_empty(len(out), operands.weights[0].shape[0]) if operands.silu else out
    activation = as_engines_run(silu_and_mul, comm) if operands.silu else None

    def layer(weight: Tensor) -> tuple[Tensor, ...]:
        torch.mm(x, weight.t(), out=products)
        return (products if activation is None else activation(products),)

    yield layer_arm(name, layer, judge, False)


def other_chains(comm: Communicator, group: dist.ProcessGroup, operands: Operands, judge: Judge) -> list[Arm]:
    """Return two arms with cuBLAS's layer: with NCCL's (gloo's) all-reduce, add and norm, and with add and norm
    alone."""
    x, residual, norm_weight, out = operands.x, operands.residual, operands.norm_weight, operands.out
    names, norm = Names.of(not comm.is_emulated), as_engines_run(add_rms_norm, comm)

    def layer_and_other(weight: Tensor) -> tuple[Tensor, ...]:
        torch.mm(x, weight.t(), out=out)
        dist.all_reduce(out, group=group)
        return norm(out, residual, norm_weight)

    def layer_and_norm(weight: Tensor) -> tuple[Tensor, ...]:
        torch.mm(x, weight.t(), out=out)
        return norm(out, residual, norm_weight)

    return [
        Arm(
            names.layer_and_other, layer_and_other, lambda found, index: judge.chain(_pair(found), index, False, False)
        ),
        Arm(names.layer_and_norm, layer_and_norm, lambda found, index: judge.chain_without_sum(_pair(found), index)),
    ]


def _has_cutlass() -> bool:
    try:
        from vllm import _custom_ops  # noqa: F401
    except ImportError:
        return False
    return hasattr(torch.ops._C, "cutlass_scaled_mm")


def silu_and_mul(products: Tensor) -> Tensor:
    """Compute ``silu(gate) * up``. ``gate`` and ``up`` are the two halves of each row."""
    gate, up = products.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _pair(found: tuple[Tensor, ...]) -> Outputs:
    normed, new_residual = found
    return normed, new_residual


# ---- Choices of the layer's kernel ----------------------------------------------------------------------------------


def arms_of_choices(
    comm: Communicator, operands: Operands, judge: JudgeOfLayers
) -> Iterator[tuple[_core.LinearChoice, Arm]]:
    """Yield arms with llm_comm's layer by the most promising tilings, each with its tiling."""
    layer = operands.x, operands.out, operands.scales or (), operands.silu
    for choice in choices_of(comm, *layer)[:_MOST_CHOICES]:
        name = f"{choice.block_outputs} outputs, {choice.stages} of {choice.stage_boxes}"
        yield choice, layer_arm(name, call_of_choice(comm, *layer, choice), judge, True)
