"""Models that vLLM does not compile, and that leave sums to the norms behind them by a function of vLLM's.

``fused_allreduce_rms_norm(hidden_states, residual, norm)`` takes FlashInfer's kernel where there is one, and else sums
and norms one after the other. DeepSeek-V3.2, models that share its layers (GLM, Dots3-Note), and a draft model of
Kimi-K3 call it; MiniMax-M3 calls ``fused_allreduce_gemma_rms_norm``, which takes a GemmaRMSNorm. vLLM 0.33 runs them
without torch.compile, in CUDA graphs with breaks (``DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES``): the passes of
``fusion_pass.py`` do not see them. Here both functions ask llm_comm first.

Models import the function by its name, some before a communicator is made: ``seams.replace`` tells them too.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm


def fused_allreduce_rms_norm(
    theirs: Any, hidden_states: torch.Tensor, residual: torch.Tensor, norm: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    # What is compiled after all keeps what vLLM puts there.
    weight_bias = None if torch.compiler.is_compiling() else _weight_bias_of(norm)
    if weight_bias is not None:
        ours = get_tp_group().device_communicator
        # The same on all ranks: it depends on the shape of the batch.
        if getattr(ours, "fuses_eagerly", False) and hidden_states.nbytes <= ours.max_fused_bytes:
            result = ours.all_reduce_add_rms_norm(
                hidden_states, residual, norm.weight.data, norm.variance_epsilon, weight_bias, None
            )
            if result is not None:
                return result  # type: ignore[no-any-return]
    return theirs(hidden_states, residual, norm)  # type: ignore[no-any-return]


def _weight_bias_of(norm: Any) -> float | None:
    """Return what ``norm`` adds to its weights; None where it computes what the fused kernel does not."""
    if type(norm) is GemmaRMSNorm:
        return 1.0
    is_plain = type(norm) is RMSNorm and norm.variance_size_override is None and bool(norm.has_weight)
    return 0.0 if is_plain else None
