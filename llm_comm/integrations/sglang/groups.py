"""Which groups of ranks SGLang is about to make, so that those that llm_comm serves share the memory it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.runtime_context import get_parallel

#: Those of this process, set when SGLang begins to make them. Empty: not known.
served: tuple[str, ...] = ()

# What ``initialize_model_parallel`` calls the widths up to 0.5.20, and the context that it reads them from since.
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
    """What llm_comm serves of the groups that ``initialize``, SGLang's ``initialize_model_parallel``, makes when it is
    called so."""
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
    width = {name: value or 1 for name, value in widths.items()}
    tp, cp, ep, moe_dp = (width[name] for name in ("tp", "attn_cp", "moe_ep", "moe_dp"))
    attention_tp = tp // cp // width["attn_dp"]
    # SGLang takes "tp" where one of these would have the same ranks.
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
