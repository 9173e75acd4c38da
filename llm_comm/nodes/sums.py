"""The sum between nodes: fp32 in node order, rounded once."""

from __future__ import annotations

import torch

_PATTERNS = {2: torch.int16, 4: torch.int32}


def sum_in_order(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Puts the sum of the node sums into ``out``: added in fp32 from the first node to the last, rounded once.

    NaN becomes 0x7FFF (fp32: 0x7FFFFFFF), as in the kernels. GPUs make no other NaN in an addition or a conversion.

    Args:
        parts: [nodes, elements], at least two nodes, bfloat16, float16 or float32.
        out: [elements], of the same dtype.
    """
    first, *rest, last = parts.unbind()
    # Two tensors of one type: torch adds in fp32 and rounds once, in one kernel.
    total = first.to(torch.float32, copy=True) if rest else first
    for part in rest:
        total.add_(part)
    torch.add(total, last, out=out)
    if out.device.type == "cpu":
        patterns = out.view(_PATTERNS[out.element_size()])
        patterns.masked_fill_(out.isnan(), torch.iinfo(patterns.dtype).max)
