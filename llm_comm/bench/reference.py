"""Inputs of benchmarks, and judges of results: float64 sums, or bitwise comparison where nothing is rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm_comm.bench.wire_reference import FORMAT_OF_WIRE, quantized_all_reduce

#: Epsilon of norms.
EPS = 1e-5

#: Normed rows and new residual.
Outputs = tuple[Tensor, Tensor]


def worst(difference: Tensor, allowed: Tensor) -> float:
    """Return the largest difference as a fraction of the allowed one; infinite for NaN."""
    # If all addends are 0 the allowed difference is 0. The quotient 0 / 0 of a correct result must count as 0.
    ratio = torch.where(difference == 0, 0.0, difference.abs() / allowed)
    return float(ratio.nan_to_num(nan=torch.inf).max())


class Reference:
    """Inputs that depend on rank and position, and their sums in float64 to judge results.

    Args:
        count: Number of elements.
        world: Number of ranks.
        dtype, device: Dtype and device of the inputs. Sums are computed on the device as well.
        wire: Value of option ``wire`` that quantizes llm_comm's all-reduce, which is then compared bitwise; "": none.
    """

    def __init__(self, count: int, world: int, dtype: torch.dtype, device: torch.device, wire: str = "") -> None:
        self._count, self._world, self._dtype, self._device = count, world, dtype, device
        self._wire = wire
        self._expected: dict[int, tuple[Tensor, Tensor]] = {}

    def addend(self, rank: int, salt: int) -> Tensor:
        """Return the input of one rank, within +-2. Another ``salt`` gives other data."""
        # The period is a prime, so shards, chunks and lines of one size start with different values.
        index = torch.arange(1, self._count + 1, device=self._device)
        steps = (index * (7919 + 104729 * rank) + 1009 * salt) % 4001 - 2000
        return (steps / 1024).to(self._dtype)

    def error(self, actual: Tensor, salt: int, rounds_once: bool, first: int = 0) -> float:
        """Return the largest difference from the float64 sum as a fraction of what rounding explains; huge for NaN.

        Args:
            actual: Result to judge, or a part of it: [count].
            salt: Salt of the inputs.
            rounds_once: Allow float32 accumulation and one rounding. Otherwise allow a rounding for every addend.
            first: Index of the sum's element with which ``actual`` begins.
        """
        if rounds_once and self._wire:
            addends = [self.addend(rank, salt) for rank in range(self._world)]
            expected = quantized_all_reduce(addends, FORMAT_OF_WIRE[self._wire])[first : first + actual.numel()]
            return worst(actual.double() - expected.double(), torch.zeros_like(expected))
        total, magnitude = (sums[first : first + actual.numel()] for sums in self.sums(salt))
        epsilon = torch.finfo(self._dtype).eps
        if rounds_once:
            allowed = total.abs() * (epsilon / 2) + magnitude * (self._world * torch.finfo(torch.float32).eps)
        else:
            allowed = magnitude * (self._world * epsilon)
        return worst(actual.double() - total, allowed)

    def sums(self, salt: int) -> tuple[Tensor, Tensor]:
        """Return the sum of the addends and the sum of their absolute values, in float64."""
        if salt not in self._expected:
            addends = [self.addend(rank, salt).double() for rank in range(self._world)]
            total = torch.stack(addends).sum(dim=0)
            self._expected[salt] = total, torch.stack(addends).abs().sum(dim=0)
        return self._expected[salt]


class AllGatherReference:
    """Judge of an all-gather: the shards of all ranks in order, compared bitwise."""

    def __init__(self, count: int, world: int, dtype: torch.dtype, device: torch.device) -> None:
        self._world, self._inputs = world, Reference(count, world, dtype, device)

    def addend(self, rank: int, salt: int) -> Tensor:
        """Return the shard of one rank."""
        return self._inputs.addend(rank, salt)

    def part(self, rank: int, salt: int) -> Tensor:
        """Return what one rank contributes to the result."""
        return self.addend(rank, salt)

    def error(self, actual: Tensor, salt: int, rounds_once: bool) -> float:
        """Return 0, or infinity if the result differs anywhere."""
        del rounds_once
        expected = torch.cat([self.part(rank, salt) for rank in range(self._world)])
        return 0.0 if torch.equal(actual, expected) else float("inf")


class AllToAllReference(AllGatherReference):
    """Judge of an all-to-all: the parts of all ranks for one rank, compared bitwise."""

    def __init__(self, count: int, rank: int, world: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(count * world, world, dtype, device)
        self._part = slice(rank * count, (rank + 1) * count)

    def part(self, rank: int, salt: int) -> Tensor:
        """Return what one rank contributes to the result."""
        return self.addend(rank, salt)[self._part]


class ReduceScatterReference:
    """Judge of a reduce-scatter: one rank's shard of the sums."""

    def __init__(self, count: int, rank: int, world: int, dtype: torch.dtype, device: torch.device) -> None:
        self._sums, self._first = Reference(count * world, world, dtype, device), rank * count

    def addend(self, rank: int, salt: int) -> Tensor:
        """Return the whole input of one rank."""
        return self._sums.addend(rank, salt)

    def error(self, actual: Tensor, salt: int, rounds_once: bool) -> float:
        """See ``Reference.error``."""
        return self._sums.error(actual, salt, rounds_once, self._first)


@dataclass(frozen=True)
class Operands:
    """Operands of a fused call: [rows, hidden]. Residual and weight are equal on all ranks."""

    x: Tensor
    residual: Tensor
    weight: Tensor


class FusedReference:
    """Operands that depend on rank and position, and float64 results to judge a library."""

    def __init__(self, rows: int, hidden: int, world: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._world = (rows, hidden), world
        self._sums = Reference(rows * hidden, world, dtype, device)

    def addend(self, rank: int, salt: int) -> Tensor:
        """Return the summand of one rank. Another ``salt`` gives other data."""
        return self._sums.addend(rank, salt).view(self._shape)

    def operands(self, rank: int, salt: int) -> Operands:
        """Return the operands of one rank. Another ``salt`` gives another ``x``. The residual uses the data of a rank
        that does not exist."""
        x = self.addend(rank, salt)
        residual = self._sums.addend(self._world, 0).view(self._shape)
        weight = self._sums.addend(self._world + 1, 0).view(self._shape)[0].clone()
        return Operands(x, residual, weight)

    def error(self, outputs: Outputs, salt: int, rounds_once: bool) -> float:
        """Return the largest difference from the float64 results as a fraction of what rounding explains; huge for NaN.

        The norm is judged against the library's own new residual, so that an error of the residual counts once.
        """
        normed, new_residual = outputs
        total, magnitude = (sums.view(self._shape) for sums in self._sums.sums(salt))
        operands = self.operands(0, salt)
        epsilon = torch.finfo(normed.dtype).eps
        exact = total + operands.residual.double()
        summing = magnitude * self._world * (torch.finfo(torch.float32).eps if rounds_once else epsilon)
        allowed = summing + (total.abs() + exact.abs() + epsilon) * (epsilon / 2) * 1.01
        return max(worst(new_residual.double() - exact, allowed), norm_error(normed, new_residual, operands.weight))


def norm_error(normed: Tensor, new_residual: Tensor, weight: Tensor) -> float:
    """Return the largest difference of normed rows from the float64 norm as a fraction of what rounding explains;
    infinite for NaN."""
    x = new_residual.double()
    norm = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    # Allowed: half an ulp, one ulp more, and a rounding before the weight, as in some kernels.
    return worst(normed.double() - norm, norm.abs() * torch.finfo(normed.dtype).eps * 1.5 + 1e-30)
