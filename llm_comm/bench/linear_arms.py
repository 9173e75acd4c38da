"""The ways to compute linear layers that ``llm-comm bench linear`` times, and what judges their results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from llm_comm import _core, registry
from llm_comm.bench.fused import EPS, Outputs, norm_error
from llm_comm.bench.reference import worst
from llm_comm.bench.report import OURS, dtype_name
from llm_comm.communicator import Communicator
from llm_comm.errors import ConfigError, LlmCommError
from llm_comm.planning.layers import inputs_multiple, takes_features

#: Layer, sum over the ranks, add and norm as one call.
FUSED = f"{OURS} fused"
#: Standard deviation of FP8 operands: small ones lose no more than others.
FP8_SPREAD = 16.0
_ALIKE_SEED, _X_SEED, _WEIGHTS_SEED, _SCALES_SEED = 1, 1000, 2000, 3000
_BLOCK_OUTPUTS = range(8, 65, 8)
# Of the ring in shared memory: how many stages, of how many boxes each.
_RINGS = (
    *((stages, 2) for stages in (3, 4, 5, 6, 8, 10, 12, 16)),
    *((stages, 4) for stages in (3, 4, 5, 7)),
    (3, 8),
)


class Names(NamedTuple):
    """Column heads of what llm_comm is compared with."""

    layer: str
    layer_and_ours: str
    layer_and_other: str
    layer_and_norm: str

    @staticmethod
    def of(on_gpu: bool, silu: bool = False, fp8: bool = False) -> Names:
        """On emulated devices neither cuBLAS nor NCCL takes part.

        Args:
            silu: Whether silu-and-mul stands behind the layer.
            fp8: Whether its operands are FP8.
        """
        layer, other = ("scaled_mm" if fp8 else "cublas", "nccl") if on_gpu else ("mm", "gloo")
        layer += " + silu" if silu else ""
        return Names(layer, f"{layer} + {OURS}", f"{layer} + {other}", f"{layer} + norm")


@dataclass(frozen=True)
class Operands:
    """What layers work on. ``x`` and the weights differ by rank; residual and weight of the norm do not.

    Attributes:
        weights: [outputs, inputs] each, or [2 * outputs, inputs], of gate and up.
        x: [tokens, inputs].
        residual: [tokens, outputs].
        norm_weight: [outputs].
        out, residual_out: [tokens, outputs], for results; NaN until there is one.
        scales: Of FP8: those of x, and of a weight, the same for all of them.
    """

    weights: Sequence[Tensor]
    x: Tensor
    residual: Tensor
    norm_weight: Tensor
    out: Tensor
    residual_out: Tensor
    scales: tuple[Tensor, Tensor] | None = None

    @property
    def silu(self) -> bool:
        """Whether the weights are of gate and up."""
        return self.weights[0].shape[0] != self.out.shape[1]

    @staticmethod
    def of(weights: Sequence[Tensor], tokens: int, rank: int, silu: bool = False) -> Operands:
        """For some tokens of a rank; ``silu``: of weights of gate and up."""
        like = weights[0]
        rows, inputs = like.shape
        outputs = rows // 2 if silu else rows
        alike = _generator(like.device, _ALIKE_SEED)
        return Operands(
            weights,
            like.new_empty(tokens, inputs).normal_(generator=_generator(like.device, _X_SEED + rank)),
            like.new_empty(tokens, outputs).normal_(generator=alike),
            like.new_empty(outputs).normal_(1, 0.1, generator=alike),
            like.new_full((tokens, outputs), math.nan),
            like.new_full((tokens, outputs), math.nan),
        )

    @staticmethod
    def of_fp8(weights: Sequence[Tensor], tokens: int, rank: int, dtype: torch.dtype, per_row: bool) -> Operands:
        """The same of FP8 weights, as ``make_weights`` makes them.

        Args:
            dtype: Of results.
            per_row: Whether each row of x and of the weight has a scale of its own; else each tensor.
        """
        like = weights[0]
        inputs = like.shape[1]
        plain = [torch.empty(like.shape, dtype=dtype, device=like.device)]
        others = Operands.of(plain, tokens, rank)
        random = _generator(like.device, _SCALES_SEED + rank)

        def scale(rows: int, value: float) -> Tensor:
            shape = (rows, 1) if per_row else (1,)
            return value * torch.empty(shape, device=like.device).uniform_(0.5, 1.5, generator=random)

        scales = scale(tokens, 1 / FP8_SPREAD), scale(like.shape[0], inputs**-0.5 / FP8_SPREAD)
        return dataclasses.replace(others, weights=weights, x=(others.x * FP8_SPREAD).to(like.dtype), scales=scales)


def make_weights(
    count: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, rank: int
) -> list[Tensor]:
    """Weights of so many layers of [outputs, inputs]; what a layer makes of normal inputs has a variance of 1, of FP8
    with its scales."""
    whole = torch.empty(count, *shape, dtype=dtype, device=device)
    random = _generator(device, _WEIGHTS_SEED + rank)
    if dtype.itemsize == 1:
        for weight in whole:
            weight.copy_(torch.empty(shape, device=device).normal_(0, FP8_SPREAD, generator=random))
    else:
        whole.normal_(0, shape[1] ** -0.5, generator=random)
    if device.type == "cuda":
        # llm_comm's layers read weights before what is ahead in the stream has ended.
        torch.cuda.synchronize(device)
    return list(whole)


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


class _Exact(NamedTuple):
    """In float64, [layers, tokens, outputs] each: a result, or its sum over the ranks; the sum of the magnitudes of the
    ranks' results; and of all products in them."""

    total: Tensor
    results: Tensor
    products: Tensor


class JudgeOfLayers(Protocol):
    """Judges what layers alone return."""

    def layer(self, out: Tensor, index: int, rounds_once: bool) -> float:
        """As ``Judge.layer``."""


class Judge:
    """The results of all layers in float64, of this rank and summed over the ranks, which judge those of an arm.

    Collective, where there is more than one rank.
    """

    def __init__(self, operands: Operands, group: dist.ProcessGroup) -> None:
        self._operands, self._world = operands, dist.get_world_size(group)
        x = operands.x.double()
        total = torch.stack([x @ weight.double().t() for weight in operands.weights])
        products = torch.stack([x.abs() @ weight.double().abs().t() for weight in operands.weights])
        self._alone = _Exact(total, total.abs(), products)
        self._of_ranks = self._alone
        if self._world > 1:
            self._of_ranks = _Exact(*(tensor.clone() for tensor in self._alone))
            for tensor in self._of_ranks:
                dist.all_reduce(tensor, group=group)

    def layer(self, out: Tensor, index: int, rounds_once: bool) -> float:
        """How far off the result of one layer is, as a fraction of what rounding explains; above 1 it is wrong.

        Args:
            rounds_once: Allow a float32 accumulation and one rounding to the dtype; otherwise every partial sum may be
                rounded, as cuBLAS may where it splits the products.
        """
        allowed = self._allowed(self._alone, index, out.dtype, rounds_once)
        return worst(out.double() - self._alone.total[index], allowed)

    def chain(self, outputs: Outputs, index: int, layer_rounds_once: bool, sum_rounds_once: bool) -> float:
        """The same of layer, sum over the ranks, add and norm."""
        return self._normed(self._of_ranks, self._world, outputs, index, layer_rounds_once, sum_rounds_once)

    def chain_without_sum(self, outputs: Outputs, index: int) -> float:
        """The same without the sum over the ranks."""
        return self._normed(self._alone, 0, outputs, index, False, True)

    def _normed(
        self, exact: _Exact, addends: int, outputs: Outputs, index: int, layer_rounds_once: bool, sum_rounds_once: bool
    ) -> float:
        normed, new_residual = outputs
        epsilon = torch.finfo(normed.dtype).eps
        total = exact.total[index]
        expected = total + self._operands.residual.double()
        summing = addends * (torch.finfo(torch.float32).eps if sum_rounds_once else epsilon)
        allowed = self._allowed(exact, index, normed.dtype, layer_rounds_once) + exact.results[index] * summing
        # The sum is rounded, and the new residual; of both what is off already is rounded.
        allowed += (total.abs() + expected.abs() + epsilon) * (epsilon / 2) * 1.01
        error = worst(new_residual.double() - expected, allowed)
        return max(error, norm_error(normed, new_residual, self._operands.norm_weight))

    def _allowed(self, exact: _Exact, index: int, dtype: torch.dtype, rounds_once: bool) -> Tensor:
        """By which the layers themselves may be off."""
        epsilon = torch.finfo(dtype).eps
        if not rounds_once:
            return exact.products[index] * epsilon
        accumulation = self._operands.x.shape[1] * torch.finfo(torch.float32).eps / 2
        return exact.results[index] * (epsilon / 2) + exact.products[index] * accumulation


@dataclass(frozen=True)
class Arm:
    """One way to do it.

    Attributes:
        name: Column head.
        call: Enqueues a layer, and what comes behind it, by its weight, and returns the results.
        error: How far off the results of the layer of an index are; above 1 they are wrong.
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
    """Raises ConfigError unless there are kernels for such layers: outputs and inputs, which ``option`` has named."""
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
    """Whether only ``Communicator.linear_of_any_batch`` takes so many."""
    return tokens > _core.linear_max_tokens


def our_arms(comm: Communicator, operands: Operands, judge: Judge) -> list[Arm]:
    """Those of a communicator."""
    x, residual, norm_weight = operands.x, operands.residual, operands.norm_weight
    out, residual_out = operands.out, operands.residual_out
    summand = torch.empty_like(out)
    linear = comm.linear_of_any_batch if are_many(len(x)) else comm.linear

    def layer(weight: Tensor) -> tuple[Tensor, ...]:
        linear(x, weight, out=out)
        return (out,)

    def fused(weight: Tensor) -> tuple[Tensor, ...]:
        comm.linear_all_reduce_add_rms_norm(x, weight, residual, norm_weight, EPS, out=out, residual_out=residual_out)
        return out, residual_out

    def layer_and_ours(weight: Tensor) -> tuple[Tensor, ...]:
        torch.mm(x, weight.t(), out=summand)
        comm.all_reduce_add_rms_norm(summand, residual, norm_weight, EPS, out=out, residual_out=residual_out)
        return out, residual_out

    arms = [Arm(OURS, layer, lambda found, index: judge.layer(found[0], index, True))]
    if comm.world_size > 1:
        names = Names.of(not comm.is_emulated)
        arms += [
            Arm(FUSED, fused, lambda found, index: judge.chain(_pair(found), index, True, True)),
            Arm(
                names.layer_and_ours,
                layer_and_ours,
                lambda found, index: judge.chain(_pair(found), index, False, True),
            ),
        ]
    return arms


def other_arms(
    comm: Communicator, group: dist.ProcessGroup, operands: Operands, judge: Judge, norm: Callable[..., Outputs]
) -> list[Arm]:
    """Those that no communicator takes part in; ``comm`` says where they run, and ``norm`` is ``add_rms_norm``."""
    x, residual, norm_weight, out = operands.x, operands.residual, operands.norm_weight, operands.out
    names = Names.of(not comm.is_emulated)

    def layer(weight: Tensor) -> tuple[Tensor, ...]:
        torch.mm(x, weight.t(), out=out)
        return (out,)

    def layer_and_other(weight: Tensor) -> tuple[Tensor, ...]:
        torch.mm(x, weight.t(), out=out)
        dist.all_reduce(out, group=group)
        return norm(out, residual, norm_weight)

    def layer_and_norm(weight: Tensor) -> tuple[Tensor, ...]:
        torch.mm(x, weight.t(), out=out)
        return norm(out, residual, norm_weight)

    arms = [Arm(names.layer, layer, lambda found, index: judge.layer(found[0], index, False))]
    if comm.world_size > 1:
        arms += [
            Arm(
                names.layer_and_other,
                layer_and_other,
                lambda found, index: judge.chain(_pair(found), index, False, False),
            ),
            Arm(
                names.layer_and_norm,
                layer_and_norm,
                lambda found, index: judge.chain_without_sum(_pair(found), index),
            ),
        ]
    return arms


def _pair(found: tuple[Tensor, ...]) -> Outputs:
    normed, new_residual = found
    return normed, new_residual


# ---- Choices of the layer's kernel ----------------------------------------------------------------------------------


def choices_of(rows: int, sm_count: int, silu: bool = False) -> Iterator[tuple[int, int, int]]:
    """Rows of the weight for a block, stages, and boxes of a stage that are worth a try: between half as many and twice
    as many blocks as multiprocessors, or what comes nearest.

    Args:
        rows: Of the weight.
        silu: Whether they are of gate and up, of which a block has as many.
    """
    blocks = [block for block in _BLOCK_OUTPUTS if not silu or block % 16 == 0]

    def blocks_each(block_outputs: int) -> float:
        return -(-rows // block_outputs) / sm_count

    fitting = [block for block in blocks if 0.5 <= blocks_each(block) <= 2]
    for block in fitting or [min(blocks, key=lambda block: abs(math.log(blocks_each(block))))]:
        for stages, boxes in _RINGS:
            yield block, stages, boxes


def arm_of_choice(
    comm: Communicator, operands: Operands, judge: JudgeOfLayers, choice: tuple[int, int, int]
) -> Arm | None:
    """The layer by a choice of its kernel; None where there is no such kernel. ``Communicator.linear`` takes none."""
    block, stages, boxes = choice
    x, out, scales = operands.x, operands.out, operands.scales or ()
    try:
        run = comm._handle.core().prepare_linear(
            tokens=x.shape[0],
            inputs=x.shape[1],
            outputs=out.shape[1],
            data_type=tuple(registry.data_types()).index(dtype_name(out.dtype)),
            silu_and_mul=operands.silu,
            choice=_core.LinearChoice(block_outputs=block, stages=stages, stage_boxes=boxes),
            scales=None if not scales else (scales[0].numel() > 1, scales[1].numel() > 1),
        )
    except ValueError:
        return None

    def call(weight: Tensor) -> tuple[Tensor, ...]:
        stream = 0 if comm.is_emulated else torch.cuda.current_stream(comm.device).cuda_stream
        of_scales = (scale.data_ptr() for scale in scales)
        if not run(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *of_scales, stream):
            comm.check()
            raise LlmCommError("the communicator has failed")
        return (out,)

    name = f"{block} outputs, {stages} of {boxes}"
    return Arm(name, call, lambda found, index: judge.layer(found[0], index, True))
