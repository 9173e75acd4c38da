"""Operands of the linear layers that ``llm-comm bench linear`` times, and what judges their results.

Tensor cores of Hopper multiply FP8 exactly, but add with fewer bits than fp32 has: an instruction aligns its 32
products and the sum so far to the largest of them, and keeps 13 bits behind its leading one ("around 14 bits", 3.3.2 of
DeepSeek-V3, arXiv 2412.19437). What a sum may be off by follows from that, for operands that are known.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from llm_comm.bench.layer_chains import FP8_SPREAD
from llm_comm.bench.reference import Outputs, norm_error, worst

_ALIKE_SEED, _X_SEED, _SCALES_SEED = 1, 1000, 3000
# How far silu moves at most where its gate moves by 1.
_STEEPEST = 1.1
#: Columns of an instruction, and of a box: boxes of even number are added by one team, the others by another.
_STEP, _BOX = 32, 128
#: What one addend of an instruction may lose, relative to the largest.
_CUT = 2.0**-13
#: By how much more kernels may be off that add in another order: one chain in place of two, or many.
_ANY_ORDER = 4.0


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


class SiluJudge:
    """The results of all layers in float64, which judge those of an arm."""

    def __init__(self, operands: Operands) -> None:
        x = operands.x.double()
        self._inputs = x.shape[1]
        self._products = [x @ weight.double().t() for weight in operands.weights]
        self._magnitudes = [x.abs() @ weight.double().abs().t() for weight in operands.weights]

    def layer(self, out: Tensor, index: int, rounds_once: bool) -> float:
        """How far off a result is, as a fraction of what rounding explains.

        Args:
            rounds_once: Allow gate and up a float32 accumulation and one rounding each, and one of the result;
                otherwise every partial sum may be rounded, and silu.
        """
        epsilon, single = torch.finfo(out.dtype).eps, torch.finfo(torch.float32).eps
        products, magnitudes = self._products[index], self._magnitudes[index]
        if rounds_once:
            allowed = products.abs() * (epsilon / 2) + magnitudes * (self._inputs * single / 2)
        else:
            allowed = magnitudes * epsilon
        (gate, up), (of_gate, of_up) = products.chunk(2, dim=-1), allowed.chunk(2, dim=-1)
        silu = torch.nn.functional.silu(gate)
        drift = _STEEPEST * of_gate * (up.abs() + of_up) + silu.abs() * of_up
        rounding = (epsilon / 2 if rounds_once else epsilon) + 3 * single
        return worst(out.double() - silu * up, drift + ((silu * up).abs() + drift) * rounding)


def sums_and_errors(x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """``x @ weight.T`` in float64, and what tensor cores may be off by in llm_comm's order.

    Args:
        x: [tokens, inputs], FP8. Inputs are whole boxes.
        weight: [outputs, inputs], FP8.
        scales: Of blocks, of x and of the weight: the sums are of scaled products then. None: sums are not scaled.
    """
    x, weight = x.double(), weight.double()
    total = torch.zeros(len(x), len(weight), dtype=torch.float64, device=x.device)
    allowed = torch.zeros_like(total)
    for team in range(2):
        partial, error = torch.zeros_like(total), torch.zeros_like(total)
        for box in range(team * _BOX, x.shape[1], 2 * _BOX):
            if scales is not None:
                products, cut = torch.zeros_like(total), torch.zeros_like(total)
                _add_box(x, weight, box, products, cut)
                scale = scale_of_block(*scales, box // _BOX, len(weight))
                partial += scale * products
                # The scale is rounded, and the sum.
                error += scale * (cut + products.abs() * 2.0**-24) + (partial.abs() + error) * 2.0**-24
            else:
                _add_box(x, weight, box, partial, error)
        total += partial
        allowed += error + partial.abs() * 2.0**-23
    return total, allowed


def _add_box(x: Tensor, weight: Tensor, box: int, partial: Tensor, error: Tensor) -> None:
    """Add what the tensor cores sum of a box to ``partial``, and what they cut to ``error``."""
    for first in range(box, box + _BOX, _STEP):
        of_x, of_weight = x[:, first : first + _STEP], weight[:, first : first + _STEP]
        largest = of_x.abs().amax(1, keepdim=True) * of_weight.abs().amax(1)
        error += (_STEP + 1) * _CUT * torch.maximum(largest, partial.abs() + error)
        partial += of_x @ of_weight.t()


def scale_of_block(x_scale: Tensor, weight_scale: Tensor, block: int, rows: int) -> Tensor:
    """Return the products of the scales of one block of inputs, [tokens, rows], in float64."""
    of_rows = weight_scale[:, block].double().repeat_interleave(_BOX)[:rows]
    return x_scale[:, block].double().view(-1, 1) * of_rows


def bound_of(total: Tensor, allowed: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A result in float64, and what it may be off by.

    Args:
        total, allowed: Of ``sums_and_errors``.
        scale: Of x times that of the weight, float64, like ``total`` or to be broadcast.
        dtype: To which results are rounded, once, behind two products with scales.
    """
    info = torch.finfo(dtype)
    exact = total * scale
    return exact, allowed * scale + exact.abs() * (info.eps / 2 + 2.0**-22) + info.tiny * info.eps


class Fp8Judge:
    """The results of all layers in float64, which judge those of an arm."""

    def __init__(self, operands: Operands) -> None:
        assert operands.scales is not None
        x_scale, weight_scale = operands.scales
        scale = x_scale.double().view(-1, 1) * weight_scale.double().view(1, -1)
        self._bounds = [
            bound_of(*sums_and_errors(operands.x, weight), scale, operands.out.dtype) for weight in operands.weights
        ]

    def layer(self, out: Tensor, index: int, rounds_once: bool) -> float:
        """How far off a result is, as a fraction of what may be.

        Args:
            rounds_once: In llm_comm's order; otherwise in any.
        """
        exact, allowed = self._bounds[index]
        return worst(out.double() - exact, allowed * (1.0 if rounds_once else _ANY_ORDER))
