"""Linear layers in SGLang's deterministic mode by llm_comm, for batches of any size.

There SGLang puts a kernel with large tiles in place of ``aten::mm`` and its kin. With option ``batch_invariant_linear``
layers without quantization go by llm_comm instead, where their weight is one that it takes. That goes by the layer,
never by the batch: all batches of a layer have the bits of one kernel. Layers of other shapes, with quantization, of
experts, and logits stay SGLang's.

``UnquantizedLinearMethod.apply`` is hooked. As of ``linear.py``, weights that are no parameters may have been written
just before, and are left alone.
"""

from __future__ import annotations

from typing import Any

import torch

from llm_comm.integrations.linear import is_aligned, takes_all_batches_of

# Opaque to torch.compile: graphs are traced with one number of tokens and run with others.
_library = torch.library.Library("llm_comm_sglang", "FRAGMENT")
_library.define("linear_of_any_batch(Tensor x, Tensor weight) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,))


class _State:
    """
    Attributes:
        group: Whose communicator computes the layers; None, or without one any more: SGLang does.
    """

    group: Any = None


def activate(group: Any) -> None:
    """The communicator of SGLang's ``group`` computes layers from now on."""
    _State.group = group


def around_apply(theirs: Any, method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    weight = layer.weight
    if (
        _State.group is None
        or _State.group.ca_comm is None  # it has ended, and this is a layer of another engine in this process
        or type(weight) is not torch.nn.Parameter
        or x.dtype != weight.dtype
        or not takes_all_batches_of(weight)
    ):
        return theirs(method, layer, x, bias)
    run = torch.ops.llm_comm_sglang.linear_of_any_batch if torch.compiler.is_compiling() else _linear_of_any_batch
    y = run(x, weight)
    return y if bias is None else y + bias


def _linear_of_any_batch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T``, x [..., inputs], weight [outputs, inputs].

    Raises:
        UnsupportedInputError: llm_comm does not serve ``x``. SGLang's kernel would have other bits.
    """
    ours = getattr(_State.group.ca_comm, "linear_of_any_batch", None)
    # An odd address is the layer's, as its shape is: the weight stays where it is.
    result: torch.Tensor | None = None if ours is None or not is_aligned(weight) else ours(x, weight.detach())
    return torch.nn.functional.linear(x, weight) if result is None else result


def _fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library.impl("linear_of_any_batch", _linear_of_any_batch, "CompositeExplicitAutograd")
torch.library.register_fake("llm_comm_sglang::linear_of_any_batch", _fake, lib=_library)
