"""Random operands of FP8 linear layers, and what results of them may be.

There is a bound for any operands, far wider than fp32's (``llm_comm/bench/linear_operands.py`` says why). And there are
operands whose sums fit in the bits that tensor cores keep, for which the one right result is known.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from llm_comm.bench.linear_operands import bound_of, scale_of_block, sums_and_errors
from llm_comm.operations.fp8 import Scaling

FP8 = torch.float8_e4m3fn
#: What inputs are a multiple of.
BOX = 128


class Scales(NamedTuple):
    """Of x [tokens, 1] or [1], and of the weight [outputs, 1] or [1]; or of blocks of both."""

    x: torch.Tensor
    weight: torch.Tensor

    def of(self, sums: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """What an fp32 sum becomes, in the order in which the kernel computes. The last product and the sum with the
        bias are rounded to fp32 together."""
        of_weight, of_x = self.weight.view(1, -1) * sums, self.x.view(-1, 1)
        return of_x * of_weight if bias is None else (of_x.double() * of_weight.double() + bias.double()).float()

    def are_of_blocks(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether the scales are those of blocks."""
        return Scaling(self.x, self.weight, None).of_blocks(x, len(weight))

    def of_blocks(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The layer in the order in which the kernel computes, where no sum of a block is rounded."""
        sums = torch.zeros(2, len(x), len(weight), device=x.device)
        for block in range(x.shape[1] // BOX):
            columns = slice(block * BOX, (block + 1) * BOX)
            products = x[:, columns].double() @ weight[:, columns].double().t()
            scale = scale_of_block(self.x, self.weight, block, len(weight)).float()
            sums[block % 2] = multiply_add(scale, products.float(), sums[block % 2])
        total = sums[0] + sums[1]
        return total if bias is None else total + bias.float()


def multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of fp32, rounded once: by way of float64, rounded to odd."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    of_addend = total - product
    error = (product - (total - of_addend)) + (addend - of_addend)
    is_even = total.view(torch.int64) % 2 == 0
    neighbor = torch.nextafter(total, torch.full_like(total, torch.inf).copysign(error))
    return torch.where((error != 0) & is_even, neighbor, total).float()


def beyond_bound(
    got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scales: Scales, bias: torch.Tensor | None
) -> torch.Tensor:
    """By element: further from float64 than such additions can bring it, and the products with scales and rounding."""
    if scales.are_of_blocks(x, weight):
        one = torch.ones((), dtype=torch.float64, device=x.device)
        exact, bound = bound_of(*sums_and_errors(x, weight, scales), one, got.dtype)
    else:
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
    if scales.are_of_blocks(x, weight):
        due = scales.of_blocks(x, weight, bias).to(got.dtype)
    else:
        due = scales.of((x.double() @ weight.double().t()).float(), bias).to(got.dtype)
    return got.view(torch.int16) != due.view(torch.int16)
