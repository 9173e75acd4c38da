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
from typing import Any, NamedTuple

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.layernorm import RMSNorm


class Kind(NamedTuple):
    """A kind of layer.

    Attributes:
        module: Where its class is.
        name: Of the class.
        adds_a_residual: Whether the whole residual is added behind the attention of a layer, and nothing else, on a
            rank that has all tokens.
    """

    module: str
    name: str
    adds_a_residual: Callable[[Any], bool]


_KIMI = Kind(
    "vllm.models.kimi_k3.nvidia.model",
    "KimiDecoderLayer",
    lambda layer: not (layer.use_attn_res or layer.use_sequence_parallel),  # the former: a mix of earlier residuals
)
_GLM = Kind(
    "vllm.models.glm5next.common.model",
    "Glm5NextDecoderLayer",
    # Layers that draft tokens do without hyper-connections.
    lambda layer: (not layer.mhc or layer.is_mtp_layer) and not layer.is_sequence_parallel,
)
#: Of an architecture.
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
    for kind in {LAYERS[architecture] for architecture in architectures if architecture in LAYERS}:
        theirs = getattr(importlib.import_module(kind.module), kind.name)
        if not getattr(theirs.__init__, "by_llm_comm", False):
            theirs.__init__ = _leaving_a_sum(theirs, kind.adds_a_residual, function)


def _leaving_a_sum(kind: Any, adds_a_residual: Callable[[Any], bool], function: Callable[..., Any]) -> Any:
    theirs = kind.__init__

    @functools.wraps(theirs)
    def __init__(layer: Any, *arguments: Any, **options: Any) -> None:
        theirs(layer, *arguments, **options)
        group = get_tp_group()
        # The same on all ranks: it has been voted on, and the rest follows from vLLM's version and the model.
        if not getattr(group.device_communicator, "fuses_eagerly", False):
            return
        try:
            leaves_it = type(layer) is kind and adds_a_residual(layer) and _sums_for_a_norm(layer, group.world_size)
        except AttributeError:  # a release of vLLM whose layers are others
            leaves_it = False
        if leaves_it:
            layer.self_attn.o_proj.reduce_results = False
            _have_it_sum(layer.post_attention_layernorm, function)

    __init__.by_llm_comm = True  # type: ignore[attr-defined]
    return __init__


def _sums_for_a_norm(layer: Any, world_size: int) -> bool:
    """Whether the projection of the attention of ``layer`` sums over the group, and a plain norm comes behind."""
    attention = layer.self_attn
    return (
        type(layer.post_attention_layernorm) is RMSNorm
        and attention.o_proj.reduce_results
        and attention.o_proj.tp_size == world_size
        # A kernel that multiplies and sums.
        and getattr(attention, "gemm_rs_ar", None) is None
    )


class _SummingNorm(RMSNorm):  # type: ignore[misc]
    """A norm whose input lacks its sum over the group."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
        function, plain = self.llm_comm_sum
        return function(x, residual, plain)


def _have_it_sum(norm: Any, function: Callable[..., Any]) -> None:
    # The copy shares the parameters, those that are loaded later too. In a tuple: a module as an attribute would be a
    # module of the model, with parameters of its own.
    norm.llm_comm_sum = (function, copy.copy(norm))
    norm.__class__ = _SummingNorm
