"""SGLang's linear layers of FP8 by llm_comm, where ``linear.py`` puts it in the place of others.

All of SGLang's methods for FP8 with a scale for each output of the weight (its default on Hopper) quantize x and call
``fp8_scaled_mm`` of ``fp8_utils``: that function is hooked. It is not told which layer it computes, and need not be: no
other rank takes part in a layer. So replicated layers go by llm_comm too, where their shape is preferred. Scales of
blocks, and one scale for the whole weight, go other ways in SGLang, and stay there.

As of ``linear.py``, weights that are no parameters may have been written just before, and are left alone. So are graphs
of torch.compile, which keep SGLang's operator.
"""

from __future__ import annotations

from typing import Any

import torch

from llm_comm.integrations.sglang.fused_norm import State


def around_fp8_scaled_mm(
    theirs: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> Any:
    """``x @ weight``, scaled: weight is [inputs, outputs], the transpose of a contiguous tensor."""
    if (
        bias is None
        and State.is_active
        and State.computes_linears
        and not torch.compiler.is_compiling()
        # Not a tensor in its place: someone may have just made that.
        and type(weight) is torch.nn.Parameter
        and type(weight_scale) is torch.nn.Parameter
    ):
        linear = getattr(getattr(State.group, "ca_comm", None), "linear", None)
        result = None if linear is None else linear(x, weight.t(), (x_scale, weight_scale), out_dtype)
        if result is not None:
            return result
    return theirs(x, weight, x_scale, weight_scale, out_dtype, bias)
