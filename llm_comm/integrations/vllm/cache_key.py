"""What vLLM and inductor have to tell compiled graphs with llm_comm's operators apart by.

Graphs are kept on disk. A process must not be given one that was compiled by other passes, for other operators, or
under another choice of what they replace.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from llm_comm.communicator import Communicator
from llm_comm.planning import layers

#: Key of additional_config that tells compiled graphs with the operators from those without.
MARK = "llm_comm_fusion"

_SOURCES = (
    "column_pass.py",
    "fused_op.py",
    "fusion_pass.py",
    "fusion_patterns.py",
    "graph_layers.py",
    "group_fp8_op.py",
    "layer_ops.py",
    "layer_pass.py",
    "linear_pass.py",
    "pass_manager.py",
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
    return hashlib.sha256(repr((config.fuse_linear, config.pdl, rows)).encode()).hexdigest()


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
