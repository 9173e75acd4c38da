"""Operands of the linear layers that ``llm-comm bench linear`` times, and checks of their results.

Results are compared with float64 references. The allowed error of FP8 layers needs a model of the hardware: tensor
cores of Hopper multiply FP8 exactly, but add with fewer bits than fp32. An instruction aligns its 32 products and the
accumulator to the largest of them. It keeps 13 bits after the leading one ("around 14 bits", 3.3.2 of DeepSeek-V3,
arXiv 2412.19437). This gives a bound of the error for known operands.
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
# Maximum slope of silu.
_STEEPEST = 1.1
#: Columns of an instruction, and of a TMA tile. In llm_comm's kernel one group of warps accumulates the tiles with even
#: numbers, and another group those with odd numbers.
_STEP, _BOX = 32, 128
#: Maximum error of one addend of an instruction, relative to the largest addend.
_CUT = 2.0**-13
#: Factor by which the allowed error is larger for kernels that add in another order than llm_comm's.
_ANY_ORDER = 4.0


@dataclass(frozen=True)
class Operands:
    """Operands of a chain of layers. ``x`` and the weights differ between ranks; ``residual`` and ``norm_weight`` are
    equal.

    Attributes:
        weights: Weights of the layers, [outputs, inputs] each; [2 * outputs, inputs] for gate and up.
        x: Input of all layers, [tokens, inputs].
        residual: Residual of the norm, [tokens, outputs].
        norm_weight: Weight of the norm, [outputs].
        out, residual_out: Output buffers, [tokens, outputs], filled with NaN at first.
        scales: Scale of x and scale of the weights for FP8 operands, else None. All weights share one scale tensor.
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
        """True if the weights are those of gate and up."""
        return self.weights[0].shape[0] != self.out.shape[1]

    @staticmethod
    def of(weights: Sequence[Tensor], tokens: int, rank: int, silu: bool = False) -> Operands:
        """Make random operands for one rank.

        Args:
            weights: Weights of the layers.
            tokens: Batch size.
            rank: Rank, which selects the seed of ``x``.
            silu: Whether the weights are those of gate and up.
        """
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
        """Make random operands with FP8 weights for one rank.

        Args:
            weights: FP8 weights of ``make_weights``.
            tokens: Batch size.
            rank: Rank, which selects the seeds.
            dtype: Dtype of results.
            per_row: Whether each row of x and of the weight has a scale; otherwise each tensor has one.
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
    """Float64 references of all layers, [layers, tokens, outputs] each: of this rank, or summed over ranks.

    Attributes:
        total: Results, or their sum over ranks.
        results: Magnitudes of results, summed over ranks.
        products: Magnitudes of all products in the results, summed over ranks.
    """

    total: Tensor
    results: Tensor
    products: Tensor


class JudgeOfLayers(Protocol):
    """Check of results of layers alone."""

    def layer(self, out: Tensor, index: int, rounds_once: bool) -> float:
        """Return the error of one layer's result, as a fraction of the allowed error; above 1 it is wrong."""


class Judge:
    """Check of results of unquantized layers and chains, by float64 references of this rank and summed over ranks.

    The constructor is collective if there are several ranks.
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
        """Return the error of one layer's result, as a fraction of what rounding explains; above 1 it is wrong.

        Args:
            out: Result of the layer.
            index: Index of the weight.
            rounds_once: Whether only fp32 accumulation and one rounding to the dtype are allowed. Otherwise every
                partial sum may be rounded, as in split-K kernels of cuBLAS.
        """
        allowed = self._allowed(self._alone, index, out.dtype, rounds_once)
        return worst(out.double() - self._alone.total[index], allowed)

    def chain(self, outputs: Outputs, index: int, layer_rounds_once: bool, sum_rounds_once: bool) -> float:
        """Return the error of a chain of layer, all-reduce, add and norm, as a fraction of what rounding explains.

        Args:
            outputs: Normed rows and new residual.
            index: Index of the weight.
            layer_rounds_once: Whether the layer may round only once, as in ``layer``.
            sum_rounds_once: Whether the all-reduce adds in fp32 and rounds once. Otherwise each addition may round.
        """
        return self._normed(self._of_ranks, self._world, outputs, index, layer_rounds_once, sum_rounds_once)

    def chain_without_sum(self, outputs: Outputs, index: int) -> float:
        """Return the error of a chain of layer, add and norm without all-reduce, as a fraction of what rounding
        explains."""
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
        # The sum and the new residual are rounded. The factor 1.01 covers the rounding of their earlier errors.
        allowed += (total.abs() + expected.abs() + epsilon) * (epsilon / 2) * 1.01
        error = worst(new_residual.double() - expected, allowed)
        return max(error, norm_error(normed, new_residual, self._operands.norm_weight))

    def _allowed(self, exact: _Exact, index: int, dtype: torch.dtype, rounds_once: bool) -> Tensor:
        """Return the allowed error of the layer alone, for each element."""
        epsilon = torch.finfo(dtype).eps
        if not rounds_once:
            return exact.products[index] * epsilon
        accumulation = self._operands.x.shape[1] * torch.finfo(torch.float32).eps / 2
        return exact.results[index] * (epsilon / 2) + exact.products[index] * accumulation


class SiluJudge:
    """Check of results of gate-and-up layers with silu-and-mul, by float64 references."""

    def __init__(self, operands: Operands) -> None:
        x = operands.x.double()
        self._inputs = x.shape[1]
        self._products = [x @ weight.double().t() for weight in operands.weights]
        self._magnitudes = [x.abs() @ weight.double().abs().t() for weight in operands.weights]

    def layer(self, out: Tensor, index: int, rounds_once: bool) -> float:
        """Return the error of one layer's result, as a fraction of what rounding explains; above 1 it is wrong.

        Args:
            out: Result of the layer with silu-and-mul.
            index: Index of the weight.
            rounds_once: Whether gate and up may have only fp32 accumulation and one rounding each, and the result one
                rounding. Otherwise every partial sum and silu may be rounded too.
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
    """Return ``x @ weight.T`` in float64, and the maximum error of tensor cores that add in llm_comm's order.

    Args:
        x: FP8 input, [tokens, inputs]. The inputs must be a multiple of a TMA tile's columns.
        weight: FP8 weight, [outputs, inputs].
        scales: Block scales of x and of the weight, which scale the products; None: the products are not scaled.
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
    """Return the scaled result in float64, and its maximum error.

    Args:
        total, allowed: Result of ``sums_and_errors``.
        scale: Product of the scales of x and of the weight, float64, broadcastable to ``total``.
        dtype: Dtype of results. They are rounded to it once, after two fp32 products with scales.
    """
    info = torch.finfo(dtype)
    exact = total * scale
    return exact, allowed * scale + exact.abs() * (info.eps / 2 + 2.0**-22) + info.tiny * info.eps


class Fp8Judge:
    """Check of results of FP8 layers, by float64 references and the error bound of tensor cores."""

    def __init__(self, operands: Operands) -> None:
        assert operands.scales is not None
        x_scale, weight_scale = operands.scales
        scale = x_scale.double().view(-1, 1) * weight_scale.double().view(1, -1)
        self._bounds = [
            bound_of(*sums_and_errors(operands.x, weight), scale, operands.out.dtype) for weight in operands.weights
        ]

    def layer(self, out: Tensor, index: int, rounds_once: bool) -> float:
        """Return the error of one layer's result, as a fraction of the allowed error; above 1 it is wrong.

        Args:
            out: Result of the layer.
            index: Index of the weight.
            rounds_once: Whether the kernel adds in llm_comm's order. Otherwise any order is allowed.
        """
        exact, allowed = self._bounds[index]
        return worst(out.double() - exact, allowed * (1.0 if rounds_once else _ANY_ORDER))
