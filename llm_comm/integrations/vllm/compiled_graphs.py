"""Compiled graphs with llm_comm's operators: which batches vLLM compiles them for, and what vLLM and inductor have to
tell them apart by.

Graphs are kept on disk. A process must not be given one that was compiled by other passes, for other operators, or
under another choice of what they replace.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from llm_comm.communicator import Communicator
from llm_comm.planning import layers

logger = logging.getLogger("vllm.llm_comm")

#: Key of additional_config that tells compiled graphs with the operators from those without.
MARK = "llm_comm_fusion"

_SOURCES = (
    "fusion_pass.py",
    "fusion_patterns.py",
    "graph_layers.py",
    "linear_passes.py",
    "operators.py",
)


def digest_of_sources() -> str:
    """Differs between versions of the operators and of the passes."""
    here = Path(__file__)
    # The last of them says which layers are preferred, by which the passes go.
    sources = (*map(here.with_name, _SOURCES), Path(layers.__file__))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def preferred_layers(communicator: Communicator) -> str:
    """Differs where ``Communicator.prefers_linear`` or ``prefers_linear_silu_and_mul`` could: made of all that they
    depend on."""
    config = communicator.config
    rows = [tuple(row.without_figures()) for row in communicator.table.layers]
    by_size = layers.is_measured(communicator.limits)
    return hashlib.sha256(repr((config.fuse_linear, config.pdl, by_size, rows)).encode()).hexdigest()


def value(max_fused_bytes: int, max_linear_tokens: int, linear_key: str) -> str:
    """What goes under ``MARK``.

    Args:
        max_fused_bytes: Larger messages keep their norms apart.
        max_linear_tokens: The same of linear layers; 0: all of them are vLLM's.
        linear_key: ``preferred_layers`` of the group whose all-reduces are fused.
    """
    key = f"{digest_of_sources()} {max_fused_bytes}"
    # Without linear layers, tables and options that are about them change no graph.
    return key if max_linear_tokens == 0 else f"{key} {max_linear_tokens} {linear_key}"


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


@functools.cache
def log_once(text: str) -> None:
    """Logs what was done to a graph. The layers of a model are graphs of their own, most of them alike."""
    if dist.get_rank() == 0:
        logger.info(text)
