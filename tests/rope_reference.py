"""What follows a plain layer of q, k and v: norms of heads and rotary position embedding, by torch in fp32."""

from __future__ import annotations

import torch


def normed_and_rotated(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    head_size: int,
    kv_heads: int,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    interleaved: bool,
) -> torch.Tensor:
    """Return q, k and v after norms and rotation, each rounded to the dtype of ``qkv``.

    Args:
        qkv: [tokens, outputs], the result of the layer.
        positions, cos_sin, head_size, kv_heads, norm_weights, eps, interleaved: As in ``Communicator.linear_rope``.
    """
    heads = qkv.float().unflatten(1, (-1, head_size))
    rotated_heads = heads.shape[1] - kv_heads
    if norm_weights is not None:
        of_q, of_k = (weight.float() for weight in norm_weights)
        weights = torch.stack([*[of_q] * (rotated_heads - kv_heads), *[of_k] * kv_heads])
        factor = torch.rsqrt((heads[:, :rotated_heads] ** 2).mean(-1, keepdim=True) + eps)
        heads[:, :rotated_heads] = (heads[:, :rotated_heads] * factor * weights).to(qkv.dtype).float()
    cos, sin = cos_sin.float()[positions.long()][:, None].chunk(2, -1)
    part = heads[:, :rotated_heads, : cos_sin.shape[1]]
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    x, y = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack([x, y], -1).flatten(-2) if interleaved else torch.cat([x, y], -1)
    heads[:, :rotated_heads, : cos_sin.shape[1]] = turned
    return heads.flatten(1).to(qkv.dtype)
