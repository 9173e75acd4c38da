"""Whether kernels are launched dependently in vLLM (``Config.pdl``) where nobody has said."""

from __future__ import annotations

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config_or_none

from llm_comm.config import EngineOptions
from llm_comm.planning.catalogue import check_table_option
from llm_comm.runtime.devices import find_table


def choose(config: EngineOptions, device: torch.device, world_size: int) -> EngineOptions:
    """``config`` with ``pdl`` off, unless it was set or linear layers are to be computed by llm_comm.

    Behind and before the kernels of a model dependent launches cost 0.7 to 1 % (docs/experiments/engines.md). Linear
    layers of llm_comm gain more by them (docs/experiments/linear.md). The same on all ranks that have the same options
    and device.

    Raises:
        ConfigError: The tuning table cannot be used.
    """
    if "pdl" in config.origins:
        return config
    if envs.VLLM_BATCH_INVARIANT:
        return config.replace(pdl=config.batch_invariant_linear == "llm_comm")
    gains = config.fuse_linear
    if gains == "auto":
        check_table_option(config)
        outputs = _outputs_before_norms()
        layers = find_table(device, world_size, config).layers
        gains = any(row.is_faster and row.pdl and row.outputs == outputs for row in layers)
    return config.replace(pdl=gains)


def _outputs_before_norms() -> int | None:
    """Of the layers in front of all-reduces, by which a model is known before its layers are made; None: no model, or
    none that is known here, whose norms and layers are vLLM's then (``fusion.py``, which also says so)."""
    try:
        model = get_current_vllm_config_or_none().model_config
        return None if model is None else int(model.get_hidden_size())
    except Exception:
        return None
