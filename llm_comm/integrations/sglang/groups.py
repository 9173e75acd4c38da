"""Prediction of the groups of ranks that SGLang will make, so that the served groups can share the workspace memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.runtime_context import get_parallel

#: Kinds of this process's groups that llm_comm may serve, "tp" first. Set before SGLang makes the groups; empty if
#: unknown.
served: tuple[str, ...] = ()

# Sizes of parallelism, by kind: the parameter of ``initialize_model_parallel`` (up to 0.5.20), and the attribute of
# SGLang's parallel context (from 0.5.21).
_WIDTHS = {
    "tp": ("tensor_model_parallel_size", "tp_size"),
    "attn_dp": ("attention_data_parallel_size", "attn_dp_size"),
    "attn_cp": ("attention_context_model_parallel_size", "attn_cp_size"),
    "moe_ep": ("expert_model_parallel_size", "moe_ep_size"),
    "moe_dp": ("moe_data_model_parallel_size", "moe_dp_size"),
    "dcp": ("decode_context_parallel_size", "attn_dcp_size"),
    "shared_experts_tp": ("", "shared_experts_tp_size"),
}


def of_call(initialize: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of groups that llm_comm may serve, of those that a call of ``initialize_model_parallel`` makes.

    Args:
        initialize: SGLang's ``initialize_model_parallel``.
        args, kwargs: Arguments of the call.
    """
    given = inspect.signature(initialize).bind(*args, **kwargs)
    given.apply_defaults()
    arguments = given.arguments
    if _WIDTHS["tp"][0] in arguments:
        widths = {name: arguments.get(argument) for name, (argument, _) in _WIDTHS.items()}
    else:
        context = get_parallel()
        widths = {name: getattr(context, leaf) for name, (_, leaf) in _WIDTHS.items()}
    return tuple(_served(widths, bool(arguments.get("duplicate_tp_group"))))


def _served(widths: Mapping[str, int | None], pdmux: bool) -> list[str]:
    """Return the kinds of groups that will have several ranks, "tp" first."""
    width = {name: value or 1 for name, value in widths.items()}
    tp, cp, ep, moe_dp = (width[name] for name in ("tp", "attn_cp", "moe_ep", "moe_dp"))
    attention_tp = tp // cp // width["attn_dp"]
    # SGLang uses "tp" instead of a group that would have the same ranks, so only smaller groups count below.
    parts = {
        "attn_cp": cp,
        "attention_tp": attention_tp,
        "moe_dp": 1 if cp > moe_dp else moe_dp,
        "moe_ep": ep,
        "moe_tp": tp // ep // moe_dp,
    }
    shared_experts = width["shared_experts_tp"]
    return [
        *(["tp"] if tp > 1 else []),
        *(["pdmux_prefill_tp"] if pdmux and tp > 1 else []),
        *(["dcp"] if width["dcp"] > 1 else []),
        *(name for name, size in parts.items() if 1 < size < tp),
        *(["shared_experts_tp"] if shared_experts > 1 and shared_experts != attention_tp else []),
    ]
