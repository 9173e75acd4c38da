"""Compiled graphs with llm_comm's operators: the batch ranges that vLLM compiles, and the keys of its compile cache.

vLLM and inductor keep compiled graphs on disk. A process must not load a graph that was compiled with other passes,
with other operators, or with another choice of replaced layers.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from llm_comm.communicator import Communicator
from llm_comm.planning import layers
from llm_comm.planning.selection import Sizes

logger = logging.getLogger("vllm.llm_comm")

#: Key in vLLM's additional_config, which is part of the compile cache key.
MARK = "llm_comm_fusion"

#: Modules in this package whose text is part of the cache key: a change may change the graphs.
_SOURCES = (
    "fusion_pass.py",
    "fusion_patterns.py",
    "graph_layers.py",
    "linear_passes.py",
    "operators.py",
    "rope.py",
    "rope_pass.py",
)


def digest_of_sources() -> str:
    """Return a hash of the sources of the operators and passes, as part of cache keys."""
    here = Path(__file__)
    # planning/layers.py decides which layers are preferred, and the passes replace those.
    sources = (*map(here.with_name, _SOURCES), Path(layers.__file__))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def preferred_layers(communicator: Communicator) -> str:
    """Return a hash of everything that ``Communicator.prefers_linear`` and ``prefers_linear_silu_and_mul`` depend on.

    Communicators with equal hashes prefer the same layers.
    """
    config = communicator.config
    rows = [tuple(row.without_figures()) for row in communicator.table.layers]
    by_size = layers.is_measured(communicator.limits)
    return hashlib.sha256(repr((config.fuse_linear, config.pdl, by_size, rows)).encode()).hexdigest()


def value(fused_sizes: Sequence[Sizes], max_linear_tokens: int, linear_key: str) -> str:
    """Return the value for the key ``MARK``.

    Args:
        fused_sizes: Sizes of messages, in bytes, whose all-reduces are fused with norms.
        max_linear_tokens: Largest batch, in tokens, whose linear layers llm_comm may compute; 0: vLLM computes all.
        linear_key: ``preferred_layers`` of the group whose all-reduces are fused, and its ``max_rope_tokens``.
    """
    key = f"{digest_of_sources()} {[tuple(sizes) for sizes in fused_sizes]}"
    # With 0 no linear layer is replaced, so the tables and options of linear layers change no graph.
    return key if max_linear_tokens == 0 else f"{key} {max_linear_tokens} {linear_key}"


def new_endpoints(
    vllm_config: Any, fused_sizes: Sequence[Sizes], max_linear_tokens: int, max_rope_tokens: int = 0
) -> list[int]:
    """Return endpoints, in tokens, that llm_comm adds to vLLM's compile ranges; [] if one graph serves all batches.

    Args:
        vllm_config: vLLM's configuration.
        fused_sizes: Sizes of messages, in bytes, whose all-reduces are fused with norms.
        max_linear_tokens: Largest batch, in tokens, whose linear layers llm_comm may compute; 0: vLLM computes all.
        max_rope_tokens: Largest batch, in tokens, whose qkv layers it may compute with their rotary embedding; 0: none.
    """
    endpoints = vllm_config.compilation_config.compile_ranges_endpoints
    if not endpoints:
        return []
    found = {max_linear_tokens, max_rope_tokens} - {0}
    for tokens in fused_tokens(vllm_config, fused_sizes) or ():
        found |= {tokens.first - 1, tokens.last} - {0, 1}  # a graph for one token only is not worth its compilation
    return sorted(tokens for tokens in found if 0 < tokens < endpoints[-1])  # the last is vLLM's largest batch


def fused_tokens(vllm_config: Any, fused_sizes: Sequence[Sizes]) -> list[Sizes] | None:
    """Return the batches, in tokens, whose all-reduces are fused with norms; None without a model."""
    model = vllm_config.model_config
    if model is None:
        return None
    token_bytes = model.get_hidden_size() * model.dtype.itemsize
    return [Sizes(-(-sizes.first // token_bytes), sizes.last // token_bytes) for sizes in fused_sizes]


def are_fused(tokens: Sequence[Sizes] | None, first: int, last: int) -> bool:
    """Return whether all batches of ``first`` to ``last`` tokens are fused. ``tokens``: result of ``fused_tokens``."""
    return tokens is None or any(one.first <= first and last <= one.last for one in tokens)


@functools.cache
def log_once(text: str) -> None:
    """Log once, on rank 0, what was done to a graph. vLLM splits a model into graphs, most of them alike."""
    if dist.get_rank() == 0:
        logger.info(text)
