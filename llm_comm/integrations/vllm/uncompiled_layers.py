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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.layernorm import RMSNorm

from llm_comm.integrations.seams import load
from llm_comm.integrations.vllm import seams


class Kind(NamedTuple):
    """A kind of layer.

    Attributes:
        feature: The rows of ``seams.py`` about the layer.
        symbol: The class, ``module:name``.
        adds_a_residual: Whether the whole residual is added behind the attention of a layer, and nothing else, on a
            rank that has all tokens.
    """

    feature: str
    symbol: str
    adds_a_residual: Callable[[Any], bool]


_KIMI = Kind(
    seams.KIMI,
    seams.KIMI_LAYER,
    lambda layer: not (layer.use_attn_res or layer.use_sequence_parallel),  # the former: a mix of earlier residuals
)
_GLM = Kind(
    seams.GLM,
    seams.GLM_LAYER,
    # Layers that draft tokens do without hyper-connections.
    lambda layer: (not layer.mhc or layer.is_mtp_layer) and not layer.is_sequence_parallel,
)
#: Kinds by architecture.
LAYERS = {
    "KimiLinearForCausalLM": _KIMI,
    "Glm5NextForCausalLM": _GLM,
    "Glm5NextForConditionalGeneration": _GLM,
}


def set_up(architectures: Iterable[str]) -> str | None:
    """Have layers of ``architectures`` that are built from now on leave the sum of their attention to the norm behind
    it, where the communicator of the group says ``fuses_eagerly``. Return why they cannot, if so."""
    features = {LAYERS[architecture].feature for architecture in architectures if architecture in LAYERS}
    return next(filter(None, map(seams.TABLE.attempt, sorted(features))), None)


def make_kimi_layer(theirs: Any, layer: Any, *arguments: Any, **options: Any) -> None:
    theirs(layer, *arguments, **options)
    _leave_a_sum(layer, _KIMI)


def make_glm_layer(theirs: Any, layer: Any, *arguments: Any, **options: Any) -> None:
    theirs(layer, *arguments, **options)
    _leave_a_sum(layer, _GLM)


def _leave_a_sum(layer: Any, kind: Kind) -> None:
    """Have ``layer`` leave the sum of its attention to the norm behind it, where the group ``fuses_eagerly``."""
    group = get_tp_group()
    # The same on all ranks: voted on, and the rest follows from vLLM's version and the model.
    if not getattr(group.device_communicator, "fuses_eagerly", False) or type(layer) is not load(kind.symbol):
        return
    if kind.adds_a_residual(layer) and _sums_for_a_norm(layer, group.world_size):
        layer.self_attn.o_proj.reduce_results = False
        _have_it_sum(layer.post_attention_layernorm)


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


def _have_it_sum(norm: Any) -> None:
    # The copy shares the parameters, those that are loaded later too. In a tuple: a module as an attribute would be a
    # module of the model, with parameters of its own.
    norm.llm_comm_sum = (load(str(seams.TABLE.first_of(seams.SUMMING_NORM))), copy.copy(norm))
    norm.__class__ = _SummingNorm
