"""Layers of models that vLLM does not compile, which sum although only a norm reads the sum.

Behind their attention come the add of the residual and a plain norm, and nothing in between. But ``o_proj`` sums by
itself, where DeepSeek-V3.2 leaves that to ``fused_allreduce_rms_norm``. Here they are made to do the same: as a layer
is built, its ``o_proj`` is told not to sum (an option of vLLM's, ``reduce_results``), and its norm to call that
function, which asks llm_comm (``eager_norms.py``). The sum behind the experts stays where it is: the model reads it
between layers.

Kimi-Linear, and GLM-5-Next without hyper-connections. The other architectures that vLLM 0.33 does not compile have
something between a sum and a norm, or kernels of their own: docs/vllm.md.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.layernorm import RMSNorm

_KIMI = ("vllm.models.kimi_k3.nvidia.model", "KimiDecoderLayer")
_GLM = ("vllm.models.glm5next.common.model", "Glm5NextDecoderLayer")
#: Where the layers of an architecture are.
LAYERS = {
    "KimiLinearForCausalLM": _KIMI,
    "Glm5NextForCausalLM": _GLM,
    "Glm5NextForConditionalGeneration": _GLM,
}


def set_up(architectures: Iterable[str], function: Callable[..., Any]) -> None:
    """Has layers of ``architectures`` that are built from now on leave the sum of their attention to the norm behind
    it, where the communicator of the group says ``fuses_eagerly``. More than once is no error.

    Args:
        architectures: Of the model.
        function: ``fused_allreduce_rms_norm``, which asks llm_comm.

    Raises:
        ImportError, AttributeError: This version of vLLM has the architecture, but not these layers.
    """
    for module, name in {LAYERS[architecture] for architecture in architectures if architecture in LAYERS}:
        layer = getattr(importlib.import_module(module), name)
        if not getattr(layer.__init__, "by_llm_comm", False):
            layer.__init__ = _leaving_a_sum(layer, function)


def _leaving_a_sum(kind: Any, function: Callable[..., Any]) -> Any:
    theirs = kind.__init__

    @functools.wraps(theirs)
    def __init__(layer: Any, *arguments: Any, **options: Any) -> None:
        theirs(layer, *arguments, **options)
        group = get_tp_group()
        # The same on all ranks: it has been voted on, and the rest follows from vLLM's version and the model.
        if getattr(group.device_communicator, "fuses_eagerly", False) and _may_leave_it(layer, kind, group.world_size):
            layer.self_attn.o_proj.reduce_results = False
            _have_it_sum(layer.post_attention_layernorm, function)

    __init__.by_llm_comm = True  # type: ignore[attr-defined]
    return __init__


def _may_leave_it(layer: Any, kind: Any, world_size: int) -> bool:
    """Whether the norm behind the attention of ``layer`` reads the sum over the group, and nothing else does."""
    try:
        attention = layer.self_attn
        projection = attention.o_proj
        return (
            type(layer) is kind
            and _adds_a_residual(layer)
            and type(layer.post_attention_layernorm) is RMSNorm
            and projection.reduce_results
            and projection.tp_size == world_size
            # A kernel that multiplies and sums.
            and getattr(attention, "gemm_rs_ar", None) is None
        )
    except AttributeError:  # a release of vLLM whose layers are others
        return False


def _adds_a_residual(layer: Any) -> bool:
    """Whether the whole residual is added, and nothing else, on a rank that has all tokens."""
    if hasattr(layer, "use_attn_res"):  # Kimi: a mix of earlier residuals
        return not (layer.use_attn_res or layer.use_sequence_parallel)
    # GLM: hyper-connections, which the layers that draft tokens do without
    return (not layer.mhc or layer.is_mtp_layer) and not layer.is_sequence_parallel


class _SummingNorm(RMSNorm):  # type: ignore[misc]
    """A norm whose input lacks its sum over the group."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
        function, plain = self.__dict__["_llm_comm_sum"]
        return function(x, residual, plain)


def _have_it_sum(norm: Any, function: Callable[..., Any]) -> None:
    # The copy shares the parameters, those that are loaded later too. Not in an attribute that would make it a module
    # of the model with parameters of its own.
    norm.__dict__["_llm_comm_sum"] = (function, copy.copy(norm))
    norm.__class__ = _SummingNorm
