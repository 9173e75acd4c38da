"""Inputs of benchmarks, and the float64 sums that judge results."""

from __future__ import annotations

import torch
from torch import Tensor


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
        total, magnitude = (sums[first : first + actual.numel()] for sums in self._sums(salt))
        epsilon = torch.finfo(self._dtype).eps
        if rounds_once:
            allowed = total.abs() * (epsilon / 2) + magnitude * (self._world * torch.finfo(torch.float32).eps)
        else:
            allowed = magnitude * (self._world * epsilon)
        return worst(actual.double() - total, allowed)

    def _sums(self, salt: int) -> tuple[Tensor, Tensor]:
        """Sum of the addends and of their absolute values, float64."""
        if salt not in self._expected:
            addends = [self.addend(rank, salt).double() for rank in range(self._world)]
            total = torch.stack(addends).sum(dim=0)
            self._expected[salt] = total, torch.stack(addends).abs().sum(dim=0)
        return self._expected[salt]
