"""Random operands of FP8 linear layers, and what results of them may be.

There is a bound for any operands, far wider than fp32's (``llm_comm/bench/linear_operands.py`` says why). And there are
operands whose sums fit in the bits that tensor cores keep, for which the one right result is known.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from llm_comm.bench.linear_operands import bound_of, sums_and_errors

FP8 = torch.float8_e4m3fn
#: What inputs are a multiple of.
BOX = 128


class Scales(NamedTuple):
    """Of x [tokens, 1] or [1], and of the weight [outputs, 1] or [1]."""

    x: torch.Tensor
    weight: torch.Tensor

    def of(self, sums: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """What an fp32 sum becomes, in the order in which the kernel computes. The last product and the sum with the
        bias are rounded to fp32 together."""
        of_weight, of_x = self.weight.view(1, -1) * sums, self.x.view(-1, 1)
        return of_x * of_weight if bias is None else (of_x.double() * of_weight.double() + bias.double()).float()


def beyond_bound(
    got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scales: Scales, bias: torch.Tensor | None
) -> torch.Tensor:
    """By element: further from float64 than such additions can bring it, and the products with scales and rounding."""
    scale = scales.x.double().view(-1, 1) * scales.weight.double().view(1, -1)
    exact, bound = bound_of(*sums_and_errors(x, weight), scale, got.dtype)
    if bias is not None:
        exact = exact + bias.double()
        bound = bound + bias.double().abs() * (torch.finfo(got.dtype).eps / 2 + 2.0**-23)
    overflows = exact.abs() + bound >= torch.finfo(got.dtype).max
    return ~overflows & ~((got.double() - exact).abs() <= bound)


def beyond_one_rounding(
    got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scales: Scales, bias: torch.Tensor | None
) -> torch.Tensor:
    """By element, whether bits differ from those due, where x and weight are whole numbers up to 2: their sums stay
    below 2^12 (that they do not is 20 standard deviations away), and so exact whatever is cut."""
    sums = x.double() @ weight.double().t()
    due = scales.of(sums.float(), bias).to(got.dtype)
    return got.view(torch.int16) != due.view(torch.int16)
