"""Linear layers in vLLM's batch-invariant mode (VLLM_BATCH_INVARIANT) by llm_comm, for batches of any size.

There ``UnquantizedLinearMethod.apply`` calls ``linear_batch_invariant``, a Triton kernel with tiles of 128 tokens by
128 outputs: a small batch keeps few multiprocessors busy. With option ``batch_invariant_linear`` it calls an operator
of llm_comm instead, where the layer's weight is one that llm_comm takes. That goes by the layer, never by the batch:
all batches of a layer have the bits of one kernel. Layers of other shapes, of other classes (logits, experts) and with
quantization stay vLLM's.

``apply`` is called while a model is traced, and by models that are not compiled, so both have the operator.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import linear_batch_invariant

from llm_comm.integrations.linear import is_aligned, takes_all_batches_of
from llm_comm.integrations.vllm import operators

#: Key of additional_config that tells compiled graphs with the operator from those without.
MARK = "llm_comm_invariant_linear"
#: What goes under it: another number for an operator that computes something else.
_VERSION = 1


def mark_configuration() -> None:
    """Has vLLM keep compiled graphs with the operator apart from those without, under its current configuration."""
    vllm_config = get_current_vllm_config_or_none()
    vllm_config.additional_config = {**vllm_config.additional_config, MARK: _VERSION}


def apply(theirs: Any, method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """In place of ``UnquantizedLinearMethod.apply``: by llm_comm where the communicator of the tensor-parallel group
    says ``computes_all_batches``."""
    weight = layer.weight
    group = get_tp_group()
    ours = getattr(group.device_communicator, "computes_all_batches", False)
    if not ours or x.dtype != weight.dtype or not takes_all_batches_of(weight):
        return theirs(method, layer, x, bias)
    y = linear_of_any_batch(x, weight, group.unique_name)
    return y if bias is None else y + bias  # rounded before, as vLLM does


def _linear_of_any_batch(x: torch.Tensor, weight: torch.Tensor, group_name: str) -> torch.Tensor:
    """``x @ weight.T``.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs]. It is read before the kernels ahead have ended, so none of them may write it.
        group_name: vLLM's name of the group whose communicator computes it.

    Raises:
        ValueError: There is no such group (any more).
        UnsupportedInputError: llm_comm does not serve ``x``. vLLM's kernel would have other bits.
    """
    ours = getattr(operators.find_group(group_name).device_communicator, "linear_of_any_batch", None)
    # An odd address is the layer's, as its shape is: the weight stays where it is.
    result = None if ours is None or not is_aligned(weight) else ours(x, weight)
    return linear_batch_invariant(x, weight) if result is None else result  # type: ignore[no-any-return]


def _fake(x: torch.Tensor, weight: torch.Tensor, group_name: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


linear_of_any_batch = operators.define(
    "linear_of_any_batch(Tensor x, Tensor weight, str group_name) -> Tensor", _linear_of_any_batch, _fake
)
