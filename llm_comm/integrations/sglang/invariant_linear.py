"""Linear layers in SGLang's deterministic mode, computed by llm_comm for batches of any size.

In this mode SGLang replaces ``aten::mm`` and related operators by a kernel with large tiles. With option
``batch_invariant_linear``, llm_comm computes unquantized layers instead, if it serves the layer's weight. The choice
must depend on the layer alone and never on the batch, so that one kernel computes all batches of a layer. Layers of
other shapes, quantized layers, experts and logits stay SGLang's.

``UnquantizedLinearMethod.apply`` is hooked. Weights that are no parameters are left alone: an earlier kernel may still
be writing them when llm_comm's kernel reads.
"""

from __future__ import annotations

from typing import Any

import torch

from llm_comm.integrations.linear import is_aligned, takes_all_batches_of

# The operator is opaque to torch.compile: graphs are traced with one number of tokens and run with others.
_library = torch.library.Library("llm_comm_sglang", "FRAGMENT")
_library.define("batch_invariant_linear(Tensor x, Tensor weight) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,))


class _State:
    """State of the process.

    Attributes:
        group: SGLang's tensor-parallel group, whose communicator computes the layers. SGLang computes them if this is
            None, or if the group has no communicator left.
    """

    group: Any = None


def activate(group: Any) -> None:
    """Have the communicator of SGLang's ``group`` compute linear layers."""
    _State.group = group


def around_apply(theirs: Any, method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Hook of ``UnquantizedLinearMethod.apply``: use llm_comm if it serves the layer's weight."""
    weight = layer.weight
    if (
        _State.group is None
        or _State.group.ca_comm is None  # the group was destroyed, and this layer belongs to another engine
        or type(weight) is not torch.nn.Parameter
        or x.dtype != weight.dtype
        or not takes_all_batches_of(weight)
    ):
        return theirs(method, layer, x, bias)
    run = torch.ops.llm_comm_sglang.batch_invariant_linear if torch.compiler.is_compiling() else _batch_invariant_linear
    y = run(x, weight)
    return y if bias is None else y + bias


def _batch_invariant_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute ``x @ weight.T`` for any number of rows: x [..., inputs], weight [outputs, inputs].

    Raises:
        UnsupportedInputError: llm_comm does not serve ``x``. SGLang's kernel may not replace it, as it rounds
            differently.
    """
    ours = getattr(_State.group.ca_comm, "batch_invariant_linear", None)
    # Alignment may decide, like the shape: it is constant for a layer, since its weight is not moved.
    result: torch.Tensor | None = None if ours is None or not is_aligned(weight) else ours(x, weight.detach())
    return torch.nn.functional.linear(x, weight) if result is None else result


def _fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library.impl("batch_invariant_linear", _batch_invariant_linear, "CompositeExplicitAutograd")
torch.library.register_fake("llm_comm_sglang::batch_invariant_linear", _fake, lib=_library)
