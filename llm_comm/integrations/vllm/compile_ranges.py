"""Which batches vLLM compiles a graph with the fused operator for."""

from __future__ import annotations

from typing import Any


def new_endpoint(vllm_config: Any, max_fused_bytes: int) -> int | None:
    """Batches up to this size need a graph of their own; None if one serves all."""
    endpoints = vllm_config.compilation_config.compile_ranges_endpoints
    tokens = max_fused_tokens(vllm_config, max_fused_bytes)
    # The last one is vLLM's bound of a batch. A graph for one token alone would not be worth its compilation.
    return tokens if endpoints and tokens is not None and 1 < tokens < endpoints[-1] else None


def max_fused_tokens(vllm_config: Any, max_fused_bytes: int) -> int | None:
    """The largest batch, in tokens, that is fused; None if the configuration has no model."""
    model = vllm_config.model_config
    return None if model is None else max_fused_bytes // (model.get_hidden_size() * model.dtype.itemsize)
