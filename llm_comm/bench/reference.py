"""Inputs of benchmarks, and what judges the results of collectives: float64 sums, and bits where nothing is rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Of norms.
EPS = 1e-5

#: Normed rows and new residual.
Outputs = tuple[Tensor, Tensor]


def worst(difference: Tensor, allowed: Tensor) -> float:
    """The largest difference as a fraction of what is allowed; infinite for a NaN."""
    # Where all addends are 0 nothing is allowed, and 0 / 0 would not say that the result is right.
    ratio = torch.where(difference == 0, 0.0, difference.abs() / allowed)
    return float(ratio.nan_to_num(nan=torch.inf).max())


class Reference:
    """Inputs that depend on rank and position, and their sums in float64, which judge a result.

    Args:
        count: elements.
        world: number of ranks.
        dtype, device: of the inputs; the sums are formed on the device as well.
    """

    def __init__(self, count: int, world: int, dtype: torch.dtype, device: torch.device) -> None:
        self._count, self._world, self._dtype, self._device = count, world, dtype, device
        self._expected: dict[int, tuple[Tensor, Tensor]] = {}

    def addend(self, rank: int, salt: int) -> Tensor:
        """The input of one rank; another ``salt`` gives other data. Values lie within +-2."""
        # The period is a prime, so no shard, chunk or line of one size starts at the same values again.
        index = torch.arange(1, self._count + 1, device=self._device)
        steps = (index * (7919 + 104729 * rank) + 1009 * salt) % 4001 - 2000
        return (steps / 1024).to(self._dtype)

    def error(self, actual: Tensor, salt: int, rounds_once: bool, first: int = 0) -> float:
        """Largest difference from the float64 sum, as a fraction of what rounding explains; huge for a NaN.

        Args:
            actual: (count,) the result to judge, or a part of it.
            salt: as of the inputs.
            rounds_once: allow a float32 accumulation and one rounding to the dtype; otherwise a rounding to
                the dtype for every addend.
            first: element of the sum with which ``actual`` begins.
        """
        total, magnitude = (sums[first : first + actual.numel()] for sums in self.sums(salt))
        epsilon = torch.finfo(self._dtype).eps
        if rounds_once:
            allowed = total.abs() * (epsilon / 2) + magnitude * (self._world * torch.finfo(torch.float32).eps)
        else:
            allowed = magnitude * (self._world * epsilon)
        return worst(actual.double() - total, allowed)

    def sums(self, salt: int) -> tuple[Tensor, Tensor]:
        """Sum of the addends and of their absolute values, float64."""
        if salt not in self._expected:
            addends = [self.addend(rank, salt).double() for rank in range(self._world)]
            total = torch.stack(addends).sum(dim=0)
            self._expected[salt] = total, torch.stack(addends).abs().sum(dim=0)
        return self._expected[salt]


class Parts:
    """Judge of an all-gather: the parts of all ranks in their order, bit for bit."""

    def __init__(self, count: int, world: int, dtype: torch.dtype, device: torch.device) -> None:
        self._world, self._inputs = world, Reference(count, world, dtype, device)

    def addend(self, rank: int, salt: int) -> Tensor:
        """The part of one rank."""
        return self._inputs.addend(rank, salt)

    def error(self, actual: Tensor, salt: int, rounds_once: bool) -> float:
        """0, or infinite where the result has other bits anywhere."""
        del rounds_once
        expected = torch.cat([self.addend(rank, salt) for rank in range(self._world)])
        return 0.0 if torch.equal(actual, expected) else float("inf")


class PartOfSums:
    """Judge of a reduce-scatter: a rank's part of the sums."""

    def __init__(self, count: int, rank: int, world: int, dtype: torch.dtype, device: torch.device) -> None:
        self._sums, self._first = Reference(count * world, world, dtype, device), rank * count

    def addend(self, rank: int, salt: int) -> Tensor:
        """The whole input of one rank."""
        return self._sums.addend(rank, salt)

    def error(self, actual: Tensor, salt: int, rounds_once: bool) -> float:
        """As of ``Reference``."""
        return self._sums.error(actual, salt, rounds_once, self._first)


@dataclass(frozen=True)
class Operands:
    """What a call works on: [rows, hidden], the same residual and weight on all ranks."""

    x: Tensor
    residual: Tensor
    weight: Tensor


class FusedReference:
    """Operands that depend on rank and position, and float64 results, which judge a library."""

    def __init__(self, rows: int, hidden: int, world: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._world = (rows, hidden), world
        self._sums = Reference(rows * hidden, world, dtype, device)

    def addend(self, rank: int, salt: int) -> Tensor:
        """The rows of one rank that are summed; another ``salt`` gives other data."""
        return self._sums.addend(rank, salt).view(self._shape)

    def operands(self, rank: int, salt: int) -> Operands:
        """Of one rank; another ``salt`` gives another ``x``. The residual is that of a rank that does not exist."""
        x = self.addend(rank, salt)
        residual = self._sums.addend(self._world, 0).view(self._shape)
        weight = self._sums.addend(self._world + 1, 0).view(self._shape)[0].clone()
        return Operands(x, residual, weight)

    def error(self, outputs: Outputs, salt: int, rounds_once: bool) -> float:
        """Largest difference from the float64 results, as a fraction of what rounding explains; huge for a NaN.

        The norm is judged by the library's own new residual: what that is off by is counted once.
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
    """Largest difference of normed rows from the float64 norm of a residual, as a fraction of what rounding explains;
    infinite for a NaN."""
    x = new_residual.double()
    norm = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    # One ulp more than half of one; and a rounding before the weight, as some kernels do.
    return worst(normed.double() - norm, norm.abs() * torch.finfo(normed.dtype).eps * 1.5 + 1e-30)
