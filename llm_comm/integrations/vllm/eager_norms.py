"""Fused norms of models that vLLM does not compile: replacement of vLLM's ``fused_allreduce_rms_norm``.

vLLM's function runs FlashInfer's fused kernel if it is installed, otherwise the all-reduce and the norm one after the
other. DeepSeek-V3.2, models that share its layers (GLM, Dots3-Note), and a draft model of Kimi-K3 call it. MiniMax-M3
calls ``fused_allreduce_gemma_rms_norm``, which takes a GemmaRMSNorm. vLLM 0.33 runs these models without torch.compile
(``DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES``), so the passes of ``fusion_pass.py`` cannot fuse them. The replacement
of both functions tries llm_comm first.

Models import the functions by name, some before a communicator exists. ``seams.replace`` replaces those names too.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from llm_comm.planning.selection import is_within


def fused_allreduce_rms_norm(
    theirs: Any, hidden_states: torch.Tensor, residual: torch.Tensor, norm: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replacement of both functions: use llm_comm if it serves the norm and the batch, else vLLM's function."""
    # A graph that is compiled keeps vLLM's function.
    weight_bias = None if torch.compiler.is_compiling() else _weight_bias_of(norm)
    if weight_bias is not None:
        ours = get_tp_group().device_communicator
        # All ranks decide alike, since the decision depends on the shape of the batch alone.
        if getattr(ours, "fuses_eagerly", False) and is_within(ours.fused_sizes, hidden_states.nbytes):
            result = ours.all_reduce_add_rms_norm(
                hidden_states, residual, norm.weight.data, norm.variance_epsilon, weight_bias
            )
            if result is not None:
                return result  # type: ignore[no-any-return]
    return theirs(hidden_states, residual, norm)  # type: ignore[no-any-return]


def _weight_bias_of(norm: Any) -> float | None:
    """Return the constant that ``norm`` adds to its weights; None if the fused kernel cannot compute ``norm``."""
    if type(norm) is GemmaRMSNorm:
        return 1.0
    is_plain = type(norm) is RMSNorm and norm.variance_size_override is None and bool(norm.has_weight)
    return 0.0 if is_plain else None
