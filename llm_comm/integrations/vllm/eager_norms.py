"""Models that vLLM does not compile, and that leave sums to the norms behind them by a function of vLLM's.

``fused_allreduce_rms_norm(hidden_states, residual, norm)`` takes FlashInfer's kernel where there is one, and else sums
and norms one after the other. DeepSeek-V3.2, models that share its layers (GLM, Dots3-Note), and a draft model of
Kimi-K3 call it; ``uncompiled_layers.py`` has others do so. vLLM 0.33 runs them without torch.compile, in CUDA graphs
with breaks (``DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES``): the passes of ``fusion_pass.py`` do not see them. Here the
function asks llm_comm first.

Models import the function by its name, some before a communicator is made, so modules that have it are told too.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed import get_tp_group

from llm_comm.integrations.vllm import uncompiled_layers

FUNCTION = "fused_allreduce_rms_norm"
#: Where it is: vLLM 0.33, 0.26.
_MODULES = ("vllm.models.common.ops.fused_allreduce_rms_norm", "vllm.models.deepseek_v32.nvidia.fused_ops")


def set_up(architectures: Iterable[str]) -> str | None:
    """Has the function ask llm_comm, where the communicator of the group says ``fuses_eagerly``, and layers of
    ``architectures`` that could call it do so (``uncompiled_layers.py``). More than once is no error. Returns why it
    cannot be, if so."""
    try:
        module = _find_module()
        if module is None:
            return f"this version of vLLM has no {FUNCTION}"
        theirs = getattr(module, FUNCTION)
        if not getattr(theirs, "by_llm_comm", False):
            ours = _asking_llm_comm(theirs, importlib.import_module("vllm.model_executor.layers.layernorm").RMSNorm)
            for each in list(sys.modules.values()):
                if getattr(each, "__name__", "").startswith("vllm.") and vars(each).get(FUNCTION) is theirs:
                    setattr(each, FUNCTION, ours)
        uncompiled_layers.set_up(architectures, getattr(module, FUNCTION))
    except Exception as error:
        return f"it does not know this version of vLLM ({type(error).__name__}: {error})"
    return None


def _find_module() -> Any:
    for name in _MODULES:
        try:
            if importlib.util.find_spec(name) is not None:
                return importlib.import_module(name)
        except ModuleNotFoundError:  # a package above it
            continue
    return None


def _asking_llm_comm(theirs: Any, plain: type) -> Any:
    @functools.wraps(theirs)
    def fused_allreduce_rms_norm(
        hidden_states: torch.Tensor, residual: torch.Tensor, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # What is compiled after all keeps what vLLM puts there.
        if not torch.compiler.is_compiling() and _is_plain(norm, plain):
            ours = get_tp_group().device_communicator
            # The same on all ranks: it depends on the shape of the batch.
            if getattr(ours, "fuses_eagerly", False) and hidden_states.nbytes <= ours.max_fused_bytes:
                result = ours.all_reduce_add_rms_norm(
                    hidden_states, residual, norm.weight.data, norm.variance_epsilon, None
                )
                if result is not None:
                    return result  # type: ignore[no-any-return]
        return theirs(hidden_states, residual, norm)  # type: ignore[no-any-return]

    fused_allreduce_rms_norm.by_llm_comm = True  # type: ignore[attr-defined]
    return fused_allreduce_rms_norm


def _is_plain(norm: Any, plain: type) -> bool:
    """Whether ``norm`` computes what the fused kernel does."""
    return type(norm) is plain and _is_of_whole_rows(norm)


def _is_of_whole_rows(norm: Any) -> bool:
    return norm.variance_size_override is None and bool(norm.has_weight)
