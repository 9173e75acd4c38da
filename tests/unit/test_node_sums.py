"""The sum between nodes: fp32 in node order, rounded once, whatever the type and the number of nodes."""

from __future__ import annotations

import pytest
import torch

from llm_comm.nodes.exchange import sum_in_order

BITS = {2: torch.int16, 4: torch.int32}


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_nodes_are_added_in_order_and_stay_as_they_are(dtype: torch.dtype, nodes: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    scale = torch.randint(-6, 7, (nodes, 4001), generator=generator)
    parts = torch.ldexp(torch.randn(nodes, 4001, generator=generator), scale).to(dtype)
    parts[0, ::97], parts[-1, 5::101] = float("nan"), float("inf")
    parts[0, 5::202] = float("-inf")
    before, out = parts.clone(), torch.empty(4001, dtype=dtype)
    sum_in_order(parts, out)

    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    expected, bits = total.to(dtype), BITS[dtype.itemsize]
    expected.view(bits)[expected.isnan()] = torch.iinfo(bits).max
    assert torch.equal(out.view(bits), expected.view(bits))
    assert out.isnan().any()
    assert out.isinf().any()
    assert torch.equal(parts.view(bits), before.view(bits))
