"""Dense models of SGLang whose linears reduce, in versions before theirs left it to norms: what has them do so.

The linears are told not to reduce (``reduce_results``, an option of theirs), and each layer hands over what lacks its
sum, with a mark that the next one reads. A layer whose output someone but the next layer reads sums at its end: the
last one, those of a model whose hidden states are captured for a draft model. Hooks of the norm and of the linear would
do without hooks of the layer, but could not know who reads a tensor that lacks its sum.

Llama before ``stage_facts``, in 0.5.22: neither of a layer's sums is left to a norm, and its forward is replaced by one
that sums in its norms. Qwen3 before ``layer_boundary``, in 0.5.21: the sum of the attention is, and the layers'
communicator knows a mark of its own for that of the MLP, which only models of experts make.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.layers import layernorm

from llm_comm.integrations.sglang.fused_norm import State, all_sums_are_of_the_group, sum_and_norm

logger = logging.getLogger("sglang.llm_comm")

# Set on a tensor that still lacks its sum, between layers of Llama.
_OWED = "_llm_comm_owed"
# The same by SGLang's name, between layers that have a communicator.
_OWED_TO_COMMUNICATOR = "_sglang_needs_allreduce_fusion"


class _Place:
    """Where a layer stands in its model. Not a module, so that the model is not a child of its layer."""

    def __init__(self, model: Any, is_last: bool) -> None:
        self._model = model
        self._is_last = is_last
        # 0.5.18 to 0.5.21: a norm quantizes for the linear that it is given.
        self._norms_quantize = "quant_linear" in inspect.signature(layernorm.RMSNorm.forward_cuda).parameters

    def options(self, block: Any, linear: str) -> dict[str, Any]:
        """What Llama gives a norm, besides tensors, whose output the linear of ``block`` reads."""
        return {"quant_linear": getattr(block, linear)} if self._norms_quantize else {}

    def carries_on(self) -> bool:
        """Whether the sum of the layer's output is left to the next layer, which alone reads it."""
        return not (self._is_last or self._model.layers_to_capture)


def _leave_sums(model: Any, layers: list[Any], linears: list[Any], is_possible: bool = True) -> None:
    """Has ``linears`` leave their sums to norms, if all of them sum over the group."""
    sum_alike = is_possible and all(
        linear.reduce_results
        and linear.tp_size == State.group.world_size
        and not linear.use_dp_attention_reduce
        and not linear.use_decode_attn_tp
        for linear in linears
    )
    if sum_alike:
        for linear in linears:
            linear.reduce_results = False
        for layer in layers:
            # The last layer of this pipeline stage.
            layer.llm_comm_place = _Place(model, is_last=layer is layers[-1])
    if linears and dist.get_rank() == 0:
        name = type(model).__name__
        if sum_alike:
            logger.info("llm_comm: %d of the linears of %s leave their sums to norms", len(linears), name)
        else:
            logger.info("llm_comm: norms of %s are not fused: its linears sum in another group or not at all", name)


# ---- Llama ----------------------------------------------------------------------------------------------------------


def make_llama(theirs: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    theirs(model, *args, **kwargs)
    from sglang.srt.models.llama import LlamaDecoderLayer

    if State.is_active:
        layers = [layer for layer in model.layers if type(layer) is LlamaDecoderLayer]
        _leave_sums(model, layers, [x for layer in layers for x in (layer.self_attn.o_proj, layer.mlp.down_proj)])


def around_llama_layer(
    theirs: Any,
    layer: Any,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    forward_batch: Any,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    place = getattr(layer, "llm_comm_place", None)
    if place is None:
        result: tuple[torch.Tensor, torch.Tensor] = theirs(layer, positions, hidden_states, forward_batch, residual)
        return result
    norm, options = layer.input_layernorm, place.options(layer.self_attn, "qkv_proj")
    if residual is None:
        residual = hidden_states
        hidden_states = norm(hidden_states, **options)
    elif getattr(hidden_states, _OWED, False):
        hidden_states, residual = sum_and_norm(norm, hidden_states, residual, may_overwrite=True, **options)
    else:
        hidden_states, residual = norm(hidden_states, residual, **options)
    hidden_states = layer.self_attn(positions=positions, hidden_states=hidden_states, forward_batch=forward_batch)
    norm, options = layer.post_attention_layernorm, place.options(layer.mlp, "gate_up_proj")
    hidden_states, residual = sum_and_norm(norm, hidden_states, residual, may_overwrite=True, **options)
    hidden_states = layer.mlp(hidden_states)
    if place.carries_on():
        setattr(hidden_states, _OWED, True)
    else:
        hidden_states = State.group.all_reduce(hidden_states)
    return hidden_states, residual


# ---- Qwen3 ----------------------------------------------------------------------------------------------------------


def make_qwen3(theirs: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    theirs(model, *args, **kwargs)
    from sglang.srt.layers.communicator import CommunicateSummableTensorPairFn
    from sglang.srt.models.qwen3 import Qwen3DecoderLayer, Qwen3Model

    # The language model of Qwen3-VL, which is derived from it, adds features of images between layers.
    # Its layers have a communicator, which decides for each batch.
    if not State.is_active or State.at_every_size or type(model) is not Qwen3Model:
        return
    layers = [layer for layer in model.layers if type(layer) is Qwen3DecoderLayer]

    def hands_over_all_rows(boundary: Any) -> bool:
        """Whether a layer neither scatters nor gathers: not with ``--enable-layernorm-sp`` (0.5.20), for one."""
        trivial = CommunicateSummableTensorPairFn._trivial
        return boundary._communicate_summable_tensor_pair_fn is trivial and not getattr(boundary, "_sp_variant", None)

    # The gate lets norms sum.
    is_possible = all_sums_are_of_the_group() and all(hands_over_all_rows(layer.layer_communicator) for layer in layers)
    _leave_sums(model, layers, [layer.mlp.down_proj for layer in layers], is_possible)


def around_qwen3_layer(theirs: Any, layer: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor] = theirs(layer, *args, **kwargs)
    place = getattr(layer, "llm_comm_place", None)
    if place is None:
        return result
    hidden_states, residual = result
    if place.carries_on():
        setattr(hidden_states, _OWED_TO_COMMUNICATOR, True)
    else:
        hidden_states = State.group.all_reduce(hidden_states)
    return hidden_states, residual
