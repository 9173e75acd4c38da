"""A small transformer over two ranks, with the modules that engines have, in the scaled weights of the harness.

It is computed in fp32 with the roundings of an engine in bf16 or fp8, so that two ways to round can be compared. No
engine and no GPU is needed.
"""

from __future__ import annotations

import functools
import math
import sys

import torch

from bench_serving import processes

sys.path.append(str(processes.PLUGINS))

from llm_comm_bench import weights

WORLD = 2
HIDDEN, INNER, HEADS, HEAD, VOCABULARY = 256, 512, 4, 64, 512
EXPERTS, CHOSEN, EXPERT_INNER = 128, 8, 64
BLOCK = 128
#: How activations of a layer of fp8 are quantized.
STATIC, TOKEN, BLOCKS = "static", "token", "blocks"


class Linear(torch.nn.Module):
    """One rank's part of a linear layer: bf16, or fp8 with the parameters that checkpoints have."""

    def __init__(self, outputs: int, inputs: int, quantized: str) -> None:
        super().__init__()
        self.quantized = quantized
        dtype = torch.float8_e4m3fn if quantized else torch.bfloat16
        self.weight = torch.nn.Parameter(torch.zeros(outputs, inputs).to(dtype), requires_grad=False)
        if quantized == BLOCKS:
            self.weight_scale_inv = _empty(outputs // BLOCK, inputs // BLOCK)
        elif quantized:
            self.weight_scale = _empty(1)
        if quantized == STATIC:
            self.input_scale = _empty(1)

    @functools.cached_property
    def columns(self) -> torch.Tensor:
        """What the weight stands for, transposed."""
        weight = self.weight.float()
        if self.quantized == BLOCKS:
            weight *= self.weight_scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        elif self.quantized:
            weight *= self.weight_scale
        return weight.T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.quantized == BLOCKS:
            parts = x.unflatten(-1, (-1, BLOCK))
            x = _quantized(parts, parts.abs().amax(-1, keepdim=True) / 448).flatten(-2)
        elif self.quantized:
            x = _quantized(x, self.input_scale if self.quantized == STATIC else x.abs().amax(-1, keepdim=True) / 448)
        return rounded(x @ self.columns)


class ReplicatedLinear(Linear):
    """The same, of which each rank has the whole; engines call it so."""


class Experts(torch.nn.Module):
    """One rank's part of all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = _empty(EXPERTS, 2 * EXPERT_INNER // WORLD, HIDDEN, dtype=torch.bfloat16)
        self.w2_weight = _empty(EXPERTS, HIDDEN, EXPERT_INNER // WORLD, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            inner = activated(rounded(x[tokens] @ self.w13_weight[expert].float().T))
            outer = inner @ self.w2_weight[expert].float().T
            total.index_add_(0, tokens, rounded(outer * shares[tokens, places, None]))
        return rounded(total)


class Layer(torch.nn.Module):
    """One rank's part of a layer."""

    def __init__(self, quantized: str, has_experts: bool) -> None:
        super().__init__()
        self.input_layernorm = torch.nn.RMSNorm(HIDDEN)
        self.post_attention_layernorm = torch.nn.RMSNorm(HIDDEN)
        self.qkv_proj = Linear(3 * HEADS * HEAD // WORLD, HIDDEN, quantized)
        self.o_proj = Linear(HIDDEN, HEADS * HEAD // WORLD, quantized)
        if has_experts:
            self.gate = ReplicatedLinear(EXPERTS, HIDDEN, "")
            self.experts = Experts()
        else:
            self.gate_up_proj = Linear(2 * INNER // WORLD, HIDDEN, quantized)
            self.down_proj = Linear(HIDDEN, INNER // WORLD, quantized)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (-1, HEAD)).transpose(0, 1) for part in self.qkv_proj(x).chunk(3, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(rounded(mixed.transpose(0, 1).flatten(1)))  # type: ignore[no-any-return]

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "experts"):
            return self.down_proj(activated(self.gate_up_proj(x)))  # type: ignore[no-any-return]
        shares, chosen = torch.softmax(self.gate(x), -1).topk(CHOSEN, -1)
        return self.experts(x, shares / shares.sum(-1, keepdim=True), chosen)  # type: ignore[no-any-return]


class Shard(torch.nn.Module):
    """What one rank holds of a model."""

    def __init__(self, rank: int, layers: int, quantized: str, has_experts: bool) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(VOCABULARY // WORLD, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer(quantized, has_experts) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(HIDDEN)
        self.lm_head = Linear(VOCABULARY // WORLD, HIDDEN, "")
        weights.fill(self, rank, WORLD)


class Model:
    """A model over two ranks.

    Args:
        layers: Their number.
        quantized: How activations are, with weights in fp8; empty for bf16.
        has_experts: Whether MLPs are experts.
    """

    def __init__(self, layers: int, quantized: str = "", has_experts: bool = False) -> None:
        self.shards = [Shard(rank, layers, quantized, has_experts) for rank in range(WORLD)]

    @torch.no_grad()
    def logits(
        self, tokens: torch.Tensor, rounds_residual_first: bool, loses_an_addend: bool = False
    ) -> tuple[list[float], float]:
        """Logits after the last of ``tokens``, and the root mean square of what the layers have made of the residual.

        Args:
            tokens: [n], below ``VOCABULARY``.
            rounds_residual_first: Whether a norm takes the residual as it is kept, in bf16, as llm_comm does, rather
                than the sum before it is rounded.
            loses_an_addend: All-reduces in the layers leave the last rank out.
        """

        def reduced(parts: list[torch.Tensor]) -> torch.Tensor:
            return parts[0] if loses_an_addend else rounded(parts[0] + parts[1])

        def normed(x: torch.Tensor, residual: torch.Tensor, norm: torch.nn.RMSNorm) -> tuple[torch.Tensor, ...]:
            total = x + residual
            kept = rounded(total)
            source = kept if rounds_residual_first else total
            scale = torch.rsqrt(source.pow(2).mean(-1, keepdim=True) + 1e-5)
            return rounded(source * scale * norm.weight.float()), kept

        embeddings = torch.cat([shard.embed_tokens.weight for shard in self.shards])
        x, residual = rounded(embeddings[tokens]), torch.zeros(len(tokens), HIDDEN)
        for of_ranks in zip(*(shard.layers for shard in self.shards), strict=True):
            normed_x, residual = normed(x, residual, of_ranks[0].input_layernorm)
            x = reduced([layer.attention(normed_x) for layer in of_ranks])
            normed_x, residual = normed(x, residual, of_ranks[0].post_attention_layernorm)
            x = reduced([layer.mlp(normed_x) for layer in of_ranks])
        last, residual = normed(x, residual, self.shards[0].norm)
        logits = torch.cat([shard.lm_head(last[-1:]) for shard in self.shards], -1)
        return logits[0].tolist(), math.sqrt(residual.pow(2).mean().item())


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To bf16."""
    return x.to(torch.bfloat16).float()


def activated(x: torch.Tensor) -> torch.Tensor:
    """Silu of the first half times the second."""
    gate, up = x.chunk(2, -1)
    return rounded(torch.nn.functional.silu(gate) * up)


def _quantized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Through fp8 and back; what is beyond its range saturates."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
