"""Small Llama with random weights, sharded over tensor-parallel ranks as in Megatron and vLLM.

Query, key, value, gate and up projections are split by output features (column parallel), the attention output and down
projections by input features (row parallel). Each row-parallel product is a partial sum, so a layer has two
all-reduces. Embedding and output head are replicated: every rank computes all logits from the same hidden state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from llm_comm.errors import ConfigError

AllReduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of the model; sizes in elements.

    Raises:
        ConfigError: A size is below 1, ``hidden`` is not a multiple of ``heads`` with an even head size, or ``heads``
            is not a multiple of ``kv_heads``.
    """

    hidden: int = 1024
    layers: int = 4
    heads: int = 16
    kv_heads: int = 8
    intermediate: int = 2816
    vocab: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocab"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.hidden % self.heads or self.head_dim % 2:
            raise ConfigError(
                f"hidden {self.hidden} over {self.heads} heads: hidden must be a multiple of twice the heads"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly")

    @property
    def head_dim(self) -> int:
        """Number of elements of one attention head."""
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Number of weights of the whole, unsharded model."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + 2 * self.vocab * self.hidden + self.hidden

    def divides(self, world: int) -> bool:
        """Return whether the model splits evenly over ``world`` ranks."""
        return not (self.kv_heads % world or self.intermediate % world)

    def require_divides(self, world: int) -> None:
        """Raise ConfigError with the sizes that do not divide, unless :meth:`divides`."""
        if not self.divides(world):
            raise ConfigError(
                f"a model with {self.kv_heads} KV heads and intermediate size {self.intermediate} does not "
                f"split over {world} ranks: both must be multiples of the number of ranks"
            )


class KVCache:
    """Keys and values of all positions. The buffers never move or change shape, since CUDA graphs hold pointers to
    them.

    ``keys`` and ``values``: [layers, batch, KV heads of this rank, max_length, head_dim].
    """

    def __init__(self, model: Llama, batch: int, max_length: int) -> None:
        config = model.config
        shape = (config.layers, batch, config.kv_heads // model.world, max_length, config.head_dim)
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.values = torch.zeros_like(self.keys)
        self.slots = torch.arange(max_length, device=model.device)


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer, shard of this rank. Matrices are [output features, input features]."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class _ShardedWeights:
    """Source of weights: draws the full matrices one at a time and keeps the shard of this rank.

    Every rank draws the same sequence on the CPU in float32, so shards for any number of ranks belong to one model.
    """

    def __init__(self, model: Llama, seed: int) -> None:
        self._rank, self._world = model.rank, model.world
        self._device, self._dtype = model.device, model.dtype
        self._generator = torch.Generator().manual_seed(seed)

    def norm(self, features: int) -> Tensor:
        return self._place(1.0 + 0.1 * torch.randn(features, generator=self._generator))

    def replicated(self, rows: int, columns: int, scale: float) -> Tensor:
        return self._place(self._draw(rows, columns) * scale)

    def column_parallel(self, *output_features: int, inputs: int) -> Tensor:
        """Return the matrices of a fused projection, each split by output features, stacked."""
        parts = [self._draw(outputs, inputs).chunk(self._world, dim=0)[self._rank] for outputs in output_features]
        return self._place(torch.cat(parts) * inputs**-0.5)

    def row_parallel(self, outputs: int, inputs: int, scale: float) -> Tensor:
        part = self._draw(outputs, inputs).chunk(self._world, dim=1)[self._rank]
        return self._place(part * (scale * inputs**-0.5))

    def _draw(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._generator)

    def _place(self, weight: Tensor) -> Tensor:
        return weight.to(device=self._device, dtype=self._dtype).contiguous()


class Llama:
    """Shard of the model on one rank.

    Args:
        config: Shape of the whole model.
        seed: Seed of the weights, equal on all ranks.
        max_length: Longest sequence in tokens, prompt included.
        dtype, device: Dtype and device of weights, activations and KV cache.
        rank, world: Index of the shard and number of shards. ``world`` 1 is the reference model.
        all_reduce: Sums a partial result over the ranks; called twice in each layer.

    Raises:
        ConfigError: The model does not split evenly over ``world`` ranks.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        seed: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
        all_reduce: AllReduce = lambda partial: partial,
    ) -> None:
        config.require_divides(world)
        self.config = config
        self.rank, self.world = rank, world
        self.dtype, self.device = dtype, device
        self._all_reduce = all_reduce
        self._cos, self._sin = _rope_tables(config, max_length, device)
        weights = _ShardedWeights(self, seed)
        self._embedding = weights.replicated(config.vocab, config.hidden, scale=1.0)
        self._layers = [self._draw_layer(weights) for _ in range(config.layers)]
        self._norm = weights.norm(config.hidden)
        self._head = weights.replicated(config.vocab, config.hidden, scale=config.hidden**-0.5)

    def _draw_layer(self, weights: _ShardedWeights) -> _Layer:
        config = self.config
        kv_features = config.kv_heads * config.head_dim
        # Keeps the magnitude of the residual stream independent of depth, so that rounding errors are comparable.
        residual_scale = (2 * config.layers) ** -0.5
        return _Layer(
            attention_norm=weights.norm(config.hidden),
            qkv=weights.column_parallel(config.hidden, kv_features, kv_features, inputs=config.hidden),
            output=weights.row_parallel(config.hidden, config.hidden, residual_scale),
            mlp_norm=weights.norm(config.hidden),
            gate_up=weights.column_parallel(config.intermediate, config.intermediate, inputs=config.hidden),
            down=weights.row_parallel(config.hidden, config.intermediate, residual_scale),
        )

    def forward(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Compute the logits of every token, and append the tokens to the cache.

        No shape depends on a value, so one captured graph serves every step of a decode.

        Args:
            tokens: [batch, length] int64.
            positions: [length] int64, consecutive, equal for all sequences of the batch.
            cache: Cache with all earlier positions.

        Returns:
            [batch, length, vocab] float32.
        """
        x = self._embedding[tokens]
        visible = cache.slots <= positions[:, None]
        for index, layer in enumerate(self._layers):
            normed = self._rms_norm(x, layer.attention_norm)
            heads = self._attention(normed, layer, positions, visible, cache.keys[index], cache.values[index])
            x = x + self._all_reduce(F.linear(heads, layer.output))
            gate, up = F.linear(self._rms_norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + self._all_reduce(F.linear(F.silu(gate) * up, layer.down))
        return F.linear(self._rms_norm(x, self._norm), self._head).float()

    def _attention(
        self, x: Tensor, layer: _Layer, positions: Tensor, visible: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Causal grouped-query attention: [batch, length, hidden] -> [batch, length, hidden / world]."""
        batch, length, _ = x.shape
        head_dim = self.config.head_dim
        kv_heads = self.config.kv_heads // self.world
        queries_per_kv = self.config.heads // self.config.kv_heads
        projected = F.linear(x, layer.qkv).view(batch, length, -1, head_dim)
        query, key, value = projected.split([kv_heads * queries_per_kv, kv_heads, kv_heads], dim=2)
        keys.index_copy_(2, positions, self._rotate(key, positions).transpose(1, 2))
        values.index_copy_(2, positions, value.transpose(1, 2))
        query = self._rotate(query, positions).view(batch, length, kv_heads, queries_per_kv, head_dim)
        scores = torch.einsum("blkqd,bksd->bkqls", query, keys).float() * head_dim**-0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1).to(self.dtype)
        return torch.einsum("bkqls,bksd->blkqd", weights, values).reshape(batch, length, -1)

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotary position embedding of [batch, length, heads, head_dim]."""
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        first, second = heads.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(self.dtype)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.config.norm_eps)
        return (wide * scale).to(self.dtype) * weight


def _rope_tables(config: LlamaConfig, max_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(max_length, dtype=torch.float32), config.rope_theta**-exponents)
    return angles.cos().to(device), angles.sin().to(device)
