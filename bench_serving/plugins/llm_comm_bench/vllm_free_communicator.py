"""Device communicator of vLLM without communication in all-reduces."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from llm_comm_bench import FREE_MARK, FREE_NORMS, FREE_NORMS_MARK, free_norms

logger = logging.getLogger("vllm.llm_comm_bench")


class FreeCommunicator(CudaCommunicator):  # type: ignore[misc]
    """Lower bound of an engine's time if only all-reduces change. Its results are meaningless."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._free = self.unique_name.split(":")[0] == "tp" and self.world_size > 1
        if not self._free:
            return
        logger.info("%s (%s)", FREE_MARK, self.unique_name)
        if FREE_NORMS:
            # Done here because plugins are loaded before the layers can be imported, and groups are created before the
            # layers.
            from vllm.model_executor.layers.layernorm import RMSNorm

            free_norms.install(RMSNorm)
            logger.info("%s", FREE_NORMS_MARK)
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is not None:
            # Otherwise vLLM would fuse all-reduces with their norms, and all_reduce would not be called.
            vllm_config.compilation_config.pass_config.fuse_allreduce_rms = False

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(input_) if self._free else super().all_reduce(input_)
