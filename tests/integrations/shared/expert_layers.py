"""Experts of few tokens for the scenarios of both engines: layers, batches, results, and what timing is replaced by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rank_processes import Log, dist_rank
from torch import nn

EXPERTS, TOP_K, HIDDEN, INNER = 6, 2, 128, 64
#: Intermediate size of FP8 experts: two blocks with scales.
FP8_INNER = 256
FP8 = torch.float8_e4m3fn


def layer_of(dtype: torch.dtype = torch.bfloat16) -> Any:
    """A layer with weights of this rank."""
    random, layer = torch.Generator().manual_seed(dist_rank()), nn.Module()
    for name, shape in (("w13_weight", (EXPERTS, 2 * INNER, HIDDEN)), ("w2_weight", (EXPERTS, HIDDEN, INNER))):
        weight = torch.randn(shape, generator=random) / shape[-1] ** 0.5
        setattr(layer, name, parameter(weight.to(dtype)))
    return layer


def fp8_layer_of(block: bool) -> Any:
    """Return a layer with FP8 weights of this rank, as a checkpoint has them: a scale for each block, or for each of an
    expert's three weights."""
    random, layer = torch.Generator().manual_seed(dist_rank()), nn.Module()
    layer.intermediate_size_per_partition, layer.num_local_experts, layer.local_num_experts = (
        FP8_INNER,
        EXPERTS,
        EXPERTS,
    )
    layer.w13_input_scale = layer.w2_input_scale = None
    for name, shape in (("w13_weight", (2 * FP8_INNER, HIDDEN)), ("w2_weight", (HIDDEN, FP8_INNER))):
        weight = torch.randn(EXPERTS, *shape, generator=random).to(FP8)
        of_tensors = (2,) if name == "w13_weight" else ()
        scale = torch.rand(EXPERTS, *([size // 128 for size in shape] if block else of_tensors), generator=random)
        setattr(layer, name, parameter(weight))
        scale_name = f"{name}_scale_inv" if block else f"{name}_scale"
        setattr(layer, scale_name, parameter((scale + 0.5) / shape[-1] ** 0.5))
    return layer


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def wrong_scales(layer: Any) -> list[tuple[str, nn.Parameter | None]]:
    """Return scales of blocks that llm_comm cannot compute with, by the name of those that ``layer`` has."""
    w13_scale, w2_scale = layer.w13_weight_scale_inv, layer.w2_weight_scale_inv
    return [
        ("w13_weight_scale_inv", None),
        ("w13_weight_scale_inv", parameter(w13_scale.to(torch.int32))),
        ("w13_weight_scale_inv", parameter(w13_scale.transpose(1, 2))),
        ("w2_weight_scale_inv", parameter(w2_scale.bfloat16())),
        ("w2_weight_scale_inv", parameter(w2_scale.repeat(1, 2, 2))),
    ]


def never(*_: Any) -> None:
    """Take the place of a call to llm_comm that must not be made."""
    raise AssertionError("llm_comm is asked")


def dequantized(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return weights times their scales: None, one for each expert, or one for each block."""
    if scale is None:
        return weight
    scale = scale.double().view(len(weight), *(scale.shape[1:] or (1, 1)))
    for dimension in (1, 2):
        scale = scale.repeat_interleave(weight.shape[dimension] // scale.shape[dimension], dimension)
    return weight.double() * scale


def weights_in(layer: Any) -> list[torch.Tensor]:
    """Return the weights of a layer, dequantized."""
    names = ("w13_weight", "w2_weight")
    scales = [getattr(layer, f"{name}_scale", getattr(layer, f"{name}_scale_inv", None)) for name in names]
    return [dequantized(getattr(layer, name), scale) for name, scale in zip(names, scales, strict=True)]


def requantized(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize by a given scale, as the engines' kernel for it does."""
    return (weight.float() / scale).to(FP8), scale


def batch_of(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of tokens, factors of their experts, and numbers of these."""
    random = torch.Generator().manual_seed(tokens)
    chosen = [torch.randperm(EXPERTS, generator=random)[:TOP_K] for _ in range(tokens)]
    ids = torch.stack(chosen).int() if chosen else torch.empty(0, TOP_K, dtype=torch.int32)
    factors = torch.rand(tokens, TOP_K, generator=random)
    return torch.randn(tokens, HIDDEN, generator=random).to(dtype), factors, ids


def expected(
    x: torch.Tensor, factors: torch.Tensor, ids: torch.Tensor, gate_up_weight: torch.Tensor, down_weight: torch.Tensor
) -> torch.Tensor:
    """Return the sum of the experts of each token, in fp64."""
    x, y = x.double(), torch.zeros(x.shape, dtype=torch.float64)
    for expert, (gate_up, down) in enumerate(zip(gate_up_weight.double(), down_weight.double(), strict=True)):
        gate, up = (x @ gate_up.T).chunk(2, -1)
        factor = torch.where(ids == expert, factors.double(), 0).sum(-1, keepdim=True)
        y += F.silu(gate) * up * factor @ down.T
    return y


@contextmanager
def timed() -> Iterator[list[tuple[int, int]]]:
    """Has batches of at most 8 tokens be faster by llm_comm, and batches of 2 fail. Yields the numbers of tokens and
    calls of each chain that is timed; the engine's comes first."""
    found: list[tuple[int, int]] = []

    def time_chain(call: Any, links: Any, *_: Any) -> float:
        for link in links:
            call(link)
        tokens = len(links[0].x)
        found.append((tokens, len(links)))
        if tokens == 2:
            raise RuntimeError("no memory")
        return 1.0 if tokens > 8 or len(found) % 2 == 1 else 0.5

    with mock.patch("llm_comm.integrations.experts.time_chain", time_chain):
        yield found


def check_start(log: Log, said: str) -> None:
    """That the line at start of rank 0 says ``said`` about experts, or nothing with ""."""
    lines = log.having("is active for group")
    assert len([line for line in lines if "experts" in line]) == (bool(said) and dist_rank() == 0), lines
    assert not said or len(log.having(said)) == (dist_rank() == 0), lines
