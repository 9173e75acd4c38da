"""Hooks for dense models in older versions of SGLang, whose row-parallel layers all-reduce before the norm.

The hooks move each all-reduce into the norm after it, so that both can be fused. They switch the all-reduce of
row-parallel layers off (SGLang's attribute ``reduce_results``). A decoder layer then returns hidden states that are not
yet reduced, with a mark that the next layer reads. A layer whose output has other readers all-reduces at its end. Such
are the last layer, and all layers of a model whose hidden states are captured for a draft model. Hooks of norm and
linear layer alone would not suffice, since they cannot tell who else reads a tensor.

Versions and models:

* Llama up to 0.5.21 (without ``stage_facts``): SGLang fuses neither all-reduce of a layer. ``around_llama_layer``
  replaces the layer's forward.
* Qwen3 up to 0.5.20 (without ``layer_boundary``): SGLang already leaves the attention's all-reduce to the norm. The
  MLP's all-reduce uses SGLang's own mark, which SGLang itself sets in MoE models only.
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

# Attribute of hidden states between layers of Llama that are not yet all-reduced.
_OWED = "_llm_comm_owed"
# SGLang's own attribute for hidden states that are not yet all-reduced, read by layers with a LayerCommunicator.
_OWED_TO_COMMUNICATOR = "_sglang_needs_allreduce_fusion"


class _LayerPosition:
    """Position of a decoder layer in its model. This is no torch module: otherwise the model would become a submodule
    of its own layer."""

    def __init__(self, model: Any, is_last: bool) -> None:
        self._model = model
        self._is_last = is_last
        # In 0.5.18 to 0.5.21 a norm takes the linear layer after it, to quantize for that layer.
        self._norms_quantize = "quant_linear" in inspect.signature(layernorm.RMSNorm.forward_cuda).parameters

    def options(self, block: Any, linear: str) -> dict[str, Any]:
        """Return the keyword arguments that Llama passes to the norm before layer ``linear`` of ``block``."""
        return {"quant_linear": getattr(block, linear)} if self._norms_quantize else {}

    def carries_on(self) -> bool:
        """Return whether the layer leaves its last all-reduce to the next layer, which then must be the only reader of
        its output."""
        return not (self._is_last or self._model.layers_to_capture)


def _leave_sums(model: Any, layers: list[Any], linears: list[Any], is_possible: bool = True) -> None:
    """Have ``linears`` leave their all-reduces to norms, if each of them all-reduces over the tensor-parallel group.

    Args:
        model: Model, for the log and for the layers' positions.
        layers: Decoder layers of this pipeline stage.
        linears: Row-parallel layers of ``layers``.
        is_possible: False rules the change out.
    """
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
            # The output of the last layer of this pipeline stage has other readers.
            layer.llm_comm_position = _LayerPosition(model, is_last=layer is layers[-1])
    if linears and dist.get_rank() == 0:
        name = type(model).__name__
        if sum_alike:
            logger.info("llm_comm: %d of the linears of %s leave their sums to norms", len(linears), name)
        else:
            logger.info("llm_comm: norms of %s are not fused: its linears sum in another group or not at all", name)


# ---- Llama ----------------------------------------------------------------------------------------------------------


def make_llama(theirs: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Hook of ``LlamaModel.__init__``: have the linear layers of a new model leave their all-reduces to norms."""
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
    """Hook of ``LlamaDecoderLayer.forward``: the same computation, with both all-reduces in the norms after them."""
    position = getattr(layer, "llm_comm_position", None)
    if position is None:
        result: tuple[torch.Tensor, torch.Tensor] = theirs(layer, positions, hidden_states, forward_batch, residual)
        return result
    norm, options = layer.input_layernorm, position.options(layer.self_attn, "qkv_proj")
    if residual is None:
        residual = hidden_states
        hidden_states = norm(hidden_states, **options)
    elif getattr(hidden_states, _OWED, False):
        hidden_states, residual = sum_and_norm(norm, hidden_states, residual, may_overwrite=True, **options)
    else:
        hidden_states, residual = norm(hidden_states, residual, **options)
    hidden_states = layer.self_attn(positions=positions, hidden_states=hidden_states, forward_batch=forward_batch)
    norm, options = layer.post_attention_layernorm, position.options(layer.mlp, "gate_up_proj")
    hidden_states, residual = sum_and_norm(norm, hidden_states, residual, may_overwrite=True, **options)
    hidden_states = layer.mlp(hidden_states)
    if position.carries_on():
        setattr(hidden_states, _OWED, True)
    else:
        hidden_states = State.group.all_reduce(hidden_states)
    return hidden_states, residual


# ---- Qwen3 ----------------------------------------------------------------------------------------------------------


def make_qwen3(theirs: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Hook of ``Qwen3Model.__init__``: have the MLPs of a new model leave their all-reduces to the next layer."""
    theirs(model, *args, **kwargs)
    from sglang.srt.layers.communicator import CommunicateSummableTensorPairFn
    from sglang.srt.models.qwen3 import Qwen3DecoderLayer, Qwen3Model

    # at_every_size: SGLang's LayerCommunicator decides for each batch, so batches would differ in their norms.
    # Subclasses are left alone: the language model of Qwen3-VL adds image features between layers.
    if not State.is_active or State.at_every_size or type(model) is not Qwen3Model:
        return
    layers = [layer for layer in model.layers if type(layer) is Qwen3DecoderLayer]

    def hands_over_all_rows(boundary: Any) -> bool:
        """Return whether a layer neither scatters nor gathers rows, as with ``--enable-layernorm-sp`` (0.5.20)."""
        trivial = CommunicateSummableTensorPairFn._trivial
        return boundary._communicate_summable_tensor_pair_fn is trivial and not getattr(boundary, "_sp_variant", None)

    # With ``all_sums_are_of_the_group`` llm_comm's gate says yes, so the next layer's norm does the all-reduce.
    is_possible = all_sums_are_of_the_group() and all(hands_over_all_rows(layer.layer_communicator) for layer in layers)
    _leave_sums(model, layers, [layer.mlp.down_proj for layer in layers], is_possible)


def around_qwen3_layer(theirs: Any, layer: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Hook of ``Qwen3DecoderLayer.forward``: mark hidden states that lack the MLP's all-reduce, or all-reduce them."""
    result: tuple[torch.Tensor, torch.Tensor] = theirs(layer, *args, **kwargs)
    position = getattr(layer, "llm_comm_position", None)
    if position is None:
        return result
    hidden_states, residual = result
    if position.carries_on():
        setattr(hidden_states, _OWED_TO_COMMUNICATOR, True)
    else:
        hidden_states = State.group.all_reduce(hidden_states)
    return hidden_states, residual
