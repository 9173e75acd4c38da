"""Hooks in SGLang that compute the router of experts by one kernel of llm_comm, with option ``fuse_experts``.

SGLang computes a router by two functions that the code of a model connects: a ``ReplicatedLinear`` makes logits, and
``fused_topk`` chooses experts from them. Both are hooked. The first call of ``fused_topk`` shows which layer made its
logits, how many experts are chosen, and how factors are made. From then on llm_comm computes the layer and the choice
together, and ``fused_topk`` takes the choice that belongs to its logits. What SGLang does after ``fused_topk`` stays.

All ranks must choose the same experts. So the decision depends on what is the same on all ranks: the program, shapes,
dtypes and settings. What may differ, such as a weight that is not aligned, is an error. Batches that llm_comm declines
are SGLang's.

With ``fuse_experts="auto"`` llm_comm computes routers of sizes that it is known to compute faster. Nothing is measured:
a measurement could differ between ranks.

Routers with scores by sigmoid, a correction of scores, groups of experts or fused shared experts are SGLang's. So is a
choice whose logits were changed before it.
"""

from __future__ import annotations

import importlib
import weakref
from typing import Any, NamedTuple

import torch

from llm_comm import _core

#: Values of arguments of ``fused_topk`` that do not change what llm_comm computes. Any other argument must have its
#: default, one of a later release too.
_PLAIN = {
    "scoring_func": "softmax",
    "correction_bias": None,
    "apply_routed_scaling_factor_on_output": False,  # without it the factor is not used
    "num_fused_shared_experts": 0,
    "packed_out": None,
    "num_token_non_padded": None,
}
_IGNORED = ("routed_scaling_factor",)
#: Sizes that were faster than SGLang's linear layer and ``fused_topk`` on one H200: most experts, and by most columns
#: of x its most elements (docs/results/2026-11-30_h200_experts_layers_2.json).
_MEASURED_EXPERTS = 128
_MEASURED_ELEMENTS = {2048: 2**17, 4096: 2**16}
_DTYPES = (torch.bfloat16, torch.float16)


class _Made(NamedTuple):
    """Logits of a replicated layer.

    Attributes:
        logits: The tensor.
        version: Its version; None if torch counts none.
        layer: Layer that made them.
        choice: Factors and experts that were computed with them, for ``settings``; None if SGLang made the logits.
    """

    logits: weakref.ref[torch.Tensor]
    version: int | None
    layer: weakref.ref[Any]
    settings: tuple[int, bool] | None
    choice: tuple[torch.Tensor, torch.Tensor] | None


class _State:
    """State of the process.

    Attributes:
        group: SGLang's tensor-parallel group, whose communicator computes routers; None: SGLang does.
        only_measured: Routers of other sizes are SGLang's.
        made: The last logits.
        method: SGLang's class of layers without quantization.
    """

    group: Any = None
    only_measured = False
    made: _Made | None = None
    method: Any = None


def set_up() -> None:
    """Look up the objects of SGLang that the hooks use.

    Raises:
        Exception: SGLang lacks a name.
    """
    _State.method = importlib.import_module("sglang.srt.layers.quantization.unquant").UnquantizedLinearMethod


def activate(group: Any, only_measured: bool) -> None:
    """Have the communicator of SGLang's ``group`` compute routers. Call it on all ranks.

    Args:
        group: SGLang's tensor-parallel group.
        only_measured: Only those of sizes that were measured to be faster.
    """
    _State.group, _State.only_measured = group, only_measured


def around_forward(theirs: Any, layer: Any, x: torch.Tensor) -> Any:
    """Hook of ``ReplicatedLinear.forward``: use llm_comm for layers that are known to be routers."""
    if torch.compiler.is_compiling() or _communicator() is None:
        return theirs(layer, x)
    settings = getattr(layer, "llm_comm_routes", None)
    routed = None if settings is None or not _is_served(layer, x) else _route(x, layer, *settings)
    if routed is None:
        result, choice = theirs(layer, x), None
    else:
        factors, ids, logits = routed
        result, choice = (logits, None), (factors, ids)
    _State.made = _Made(weakref.ref(result[0]), _version(result[0]), weakref.ref(layer), settings, choice)
    return result


def around_fused_topk(
    theirs: Any, hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool, **others: Any
) -> Any:
    """Hook of ``fused_topk``: use the choice that llm_comm made with these logits, or remember who made them."""
    if torch.compiler.is_compiling() or _State.made is None:
        return theirs(hidden_states, gating_output, topk, renormalize, **others)
    made, _State.made = _State.made, None
    is_whole = made.logits() is gating_output and made.version == _version(gating_output)
    if is_whole and gating_output.dtype in _DTYPES and _are_plain(others):
        settings, layer = (topk, bool(renormalize)), made.layer()
        if made.choice is not None and made.settings == settings:
            return made.choice
        if layer is not None:
            layer.llm_comm_routes = settings
    return theirs(hidden_states, gating_output, topk, renormalize, **others)


def _communicator() -> Any:
    """Return llm_comm's object in the group; None if it computes no routers, or has left the group."""
    ours = getattr(_State.group, "ca_comm", None)
    return ours if getattr(ours, "communicator", None) is not None else None


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _are_plain(others: dict[str, Any]) -> bool:
    return all(name in _IGNORED or (name in _PLAIN and value == _PLAIN[name]) for name, value in others.items())


def _is_served(layer: Any, x: torch.Tensor) -> bool:
    """Return whether llm_comm computes what the layer does. It reads parameters only: the stream may still be writing a
    plain tensor."""
    return (
        x.dim() == 2
        and 1 <= len(x) <= _core.linear_max_tokens
        and type(layer.quant_method) is _State.method
        and type(layer.weight) is torch.nn.Parameter
        and (layer.bias is None or (type(layer.bias) is torch.nn.Parameter and not layer.skip_bias_add))
        and (not _State.only_measured or was_faster(len(layer.weight), *x.shape))
    )


def was_faster(experts: int, tokens: int, columns: int) -> bool:
    """Return whether a router is of a size that was measured to be faster."""
    elements = next((most for most_columns, most in _MEASURED_ELEMENTS.items() if columns <= most_columns), 0)
    return experts <= _MEASURED_EXPERTS and tokens * columns <= elements


def _route(x: torch.Tensor, layer: Any, top_k: int, renormalize: bool) -> Any:
    """Return factors, experts and logits; None if llm_comm declines."""
    bias = None if layer.bias is None else layer.bias.detach()
    return _communicator().moe_route(x, layer.weight.detach(), top_k, bias=bias, renormalize=renormalize)
