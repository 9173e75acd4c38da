"""Linear layers in vLLM's batch-invariant mode (VLLM_BATCH_INVARIANT), computed by llm_comm for batches of any size.

In this mode vLLM's ``UnquantizedLinearMethod.apply`` calls ``linear_batch_invariant``, a Triton kernel with tiles of
128 tokens by 128 outputs. A small batch keeps few SMs busy with it. With option ``batch_invariant_linear``, ``apply``
calls an operator of llm_comm instead, if llm_comm serves the layer's weight. The choice must depend on the layer alone
and never on the batch, so that one kernel computes all batches of a layer. Layers of other shapes, quantized layers,
logits and experts stay vLLM's.

``apply`` runs both when a model is traced and in models that are not compiled, so both use the operator.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import linear_batch_invariant

from llm_comm.integrations.linear import is_aligned, takes_all_batches_of
from llm_comm.integrations.vllm import operators

#: Key of additional_config, which is part of vLLM's cache key. It separates compiled graphs with the operator from
#: those without.
MARK = "llm_comm_invariant_linear"
#: Value of ``MARK``. It must change when the operator computes something else.
_VERSION = 1


def mark_configuration() -> None:
    """Change vLLM's cache key, so that graphs with the operator are kept apart from those without."""
    vllm_config = get_current_vllm_config_or_none()
    vllm_config.additional_config = {**vllm_config.additional_config, MARK: _VERSION}


def apply(theirs: Any, method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Replacement of ``UnquantizedLinearMethod.apply``: use llm_comm if it serves the weight, and if
    ``computes_all_batches`` of the tensor-parallel communicator is set."""
    weight = layer.weight
    group = get_tp_group()
    ours = getattr(group.device_communicator, "computes_all_batches", False)
    if not ours or x.dtype != weight.dtype or not takes_all_batches_of(weight):
        return theirs(method, layer, x, bias)
    y = batch_invariant_linear(x, weight, group.unique_name)
    return y if bias is None else y + bias  # y is rounded before the bias is added, as in vLLM's own mode


def _batch_invariant_linear(x: torch.Tensor, weight: torch.Tensor, group_name: str) -> torch.Tensor:
    """Implementation of the operator: ``x @ weight.T`` for any number of rows.

    Args:
        x: Input, [..., inputs].
        weight: Weight, [outputs, inputs]. The kernel reads it while earlier kernels still run, so none of these may
            write it.
        group_name: vLLM's name of the group whose communicator computes the layer.

    Raises:
        ValueError: There is no such group, or it has been destroyed.
        UnsupportedInputError: llm_comm does not serve ``x``. vLLM's kernel may not replace it, as it rounds
            differently.
    """
    ours = getattr(operators.find_group(group_name).device_communicator, "batch_invariant_linear", None)
    # Alignment may decide, like the shape: it is constant for a layer, since its weight is not moved.
    result = None if ours is None or not is_aligned(weight) else ours(x, weight)
    return linear_batch_invariant(x, weight) if result is None else result  # type: ignore[no-any-return]


def _fake(x: torch.Tensor, weight: torch.Tensor, group_name: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


batch_invariant_linear = operators.define(
    "batch_invariant_linear(Tensor x, Tensor weight, str group_name) -> Tensor", _batch_invariant_linear, _fake
)
