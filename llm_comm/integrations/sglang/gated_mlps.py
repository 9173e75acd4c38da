"""Gate and up of SGLang's MLPs with silu-and-mul, computed by one kernel of llm_comm.

``forward`` of ``LlamaMLP`` and of ``Qwen2MLP`` is hooked. Mistral, Phi-3 and Qwen3 use these classes too. Both compute
gate and up in one layer, then silu-and-mul, then the down-projection. No other code reads the tensors in between. If
llm_comm computes the first two steps, the hook calls the down-projection as SGLang does. If llm_comm declines, SGLang's
whole forward runs, in which llm_comm may still compute the layer of gate and up (``linear.py``).

``linear.py`` marks the layers that are served (``llm_comm_activates``). Layers with LoRA are other modules, without
marks. FP8 layers have no mark, since SGLang quantizes x inside the layer. Graphs of torch.compile keep two kernels.
Weights that SGLang fetches from the host for each pass are no parameters, and are not served.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.runtime_context import get_forward

from llm_comm.integrations.sglang.linear import by_llm_comm


def around_llama_mlp(theirs: Any, mlp: Any, x: torch.Tensor, forward_batch: Any = None) -> Any:
    """Hook of ``LlamaMLP.forward``."""
    activated = _activated(mlp, x)
    return theirs(mlp, x, forward_batch) if activated is None else mlp.down_proj(activated)[0]


def around_qwen2_mlp(theirs: Any, mlp: Any, x: torch.Tensor, forward_batch: Any = None) -> Any:
    """Hook of ``Qwen2MLP.forward``."""
    activated = _activated(mlp, x)
    if activated is None:
        return theirs(mlp, x, forward_batch)
    return mlp.down_proj(activated, forward_batch=forward_batch)[0]


def _activated(mlp: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Return the input of the down-projection, computed by llm_comm; None if llm_comm declines."""
    layer = mlp.gate_up_proj
    if (
        torch.compiler.is_compiling()
        or not getattr(layer, "llm_comm_activates", False)
        or type(layer.weight) is not torch.nn.Parameter
        or layer.bias is not None
        or type(mlp.act_fn) is not SiluAndMul
        # SGLang has its own kernel for gate and up with silu-and-mul: in 0.5.22 and later, on Blackwell.
        or getattr(getattr(mlp, "dual_gemm", None), "mode", None) is not None
        # With --enable-layernorm-sp (0.5.20 and later) x is split over ranks in prefills, and the layer gathers it.
        or getattr(get_forward(), "sp_active", False)
    ):
        return None
    return by_llm_comm("linear_silu_and_mul", x, layer.weight)
