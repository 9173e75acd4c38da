"""Plugin for SGLang: entry point of the group ``sglang.srt.plugins``, loaded in each of its processes."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from llm_comm_bench import (
    BACKEND_MARK,
    DETERMINISTIC_MARK,
    FREE,
    FREE_MARK,
    FREE_NORMS,
    FREE_NORMS_MARK,
    PROCESS_MARK,
    PROFILE,
    SCALED_WEIGHTS,
    WEIGHTS_MARK,
    free_norms,
    kernel_profile,
    weights,
)

logger = logging.getLogger("sglang.llm_comm_bench")

_GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator"
#: Groups that do not all-reduce activations.
_OTHERS = ("world", "pp")


def register() -> None:
    """Install the hooks that the environment asks for."""
    HookRegistry.register(f"{_GROUP}.__init__", _tell, HookType.AFTER)
    if FREE:
        HookRegistry.register(f"{_GROUP}.all_reduce", _free, HookType.AROUND)


def _tell(result: None, group: Any, /, *args: Any, **kwargs: Any) -> None:
    """Log the members of a group and its custom all-reduce, which SGLang itself logs at debug level only."""
    if group.unique_name.split(":")[0] == "tp":
        logger.info(PROCESS_MARK, group.rank_in_group, os.getpid())
        if PROFILE:
            _add_profile_methods(group.rank_in_group)
        if FREE_NORMS:
            from sglang.srt.layers.layernorm import RMSNorm

            free_norms.install(RMSNorm)
            logger.info("%s", FREE_NORMS_MARK)
        if group.rank_in_group == 0 and envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.get():
            logger.info("%s", DETERMINISTIC_MARK)
    if SCALED_WEIGHTS:
        # Done here because plugins are loaded before the loader can be imported, and groups are created before the
        # model.
        from sglang.srt.model_loader import loader

        loader.initialize_dummy_weights = _fill
    if group.world_size > 1 and group.rank_in_group == 0:
        custom = group.ca_comm
        state = "none" if custom is None else f"{type(custom).__name__}, disabled={getattr(custom, 'disabled', None)}"
        logger.info("%s of group %s: %s", BACKEND_MARK, group.unique_name, state)
        if FREE and group.unique_name.split(":")[0] not in _OTHERS:
            logger.info("%s (%s)", FREE_MARK, group.unique_name)


def _add_profile_methods(rank: int) -> None:
    """Add the methods to the scheduler class that ``sglang.Engine.collective_rpc`` calls by name in each scheduler."""
    from sglang.srt.managers.scheduler import Scheduler

    recorder = kernel_profile.recorder
    Scheduler.start_kernel_profile = lambda scheduler: recorder.start(rank)
    Scheduler.begin_kernel_section = lambda scheduler: recorder.begin_section()
    Scheduler.stop_kernel_profile = lambda scheduler, directory, names: recorder.stop(rank, directory, names)


def _free(original: Any, group: Any, input_: torch.Tensor, /) -> Any:
    if group.world_size > 1 and group.unique_name.split(":")[0] not in _OTHERS:
        return torch.empty_like(input_)
    return original(group, input_)


def _fill(model: torch.nn.Module) -> None:
    from sglang.srt.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    rank = get_tensor_model_parallel_rank()
    weights.fill(model, rank, get_tensor_model_parallel_world_size())
    if rank == 0:
        logger.info("%s", WEIGHTS_MARK)
