"""Which batches vLLM compiles graphs with llm_comm's operators for."""

from __future__ import annotations

from typing import Any


def new_endpoints(vllm_config: Any, max_fused_bytes: int, max_linear_tokens: int) -> list[int]:
    """Batches up to these sizes need graphs of their own; none where one graph serves all.

    Args:
        vllm_config: Of the model.
        max_fused_bytes: Larger messages keep their norms apart.
        max_linear_tokens: The same of linear layers; 0: all of them are vLLM's.
    """
    endpoints = vllm_config.compilation_config.compile_ranges_endpoints
    if not endpoints:
        return []
    fused = max_fused_tokens(vllm_config, max_fused_bytes)
    found = {max_linear_tokens} if max_linear_tokens > 0 else set()
    if fused is not None and fused > 1:  # a graph for one token alone would not be worth its compilation
        found.add(fused)
    return sorted(tokens for tokens in found if tokens < endpoints[-1])  # the last one is vLLM's bound of a batch


def max_fused_tokens(vllm_config: Any, max_fused_bytes: int) -> int | None:
    """The largest batch, in tokens, that is fused; None if the configuration has no model."""
    model = vllm_config.model_config
    return None if model is None else max_fused_bytes // (model.get_hidden_size() * model.dtype.itemsize)


def max_linear_tokens(vllm_config: Any, max_fused_bytes: int, preferred: int) -> int:
    """The largest batch, in tokens, whose linear layers go into operators of llm_comm: its norms must be fused.

    Args:
        vllm_config, max_fused_bytes: As of ``new_endpoints``.
        preferred: The most tokens for which any layer is preferred.
    """
    fused = max_fused_tokens(vllm_config, max_fused_bytes)
    return preferred if fused is None else min(preferred, fused)
