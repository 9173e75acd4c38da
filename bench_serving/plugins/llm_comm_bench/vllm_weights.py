"""Scaled weights in vLLM: the harness names the class as ``worker_extension_cls`` and calls its method."""

from __future__ import annotations

import logging
from typing import Any

from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from llm_comm_bench import WEIGHTS_MARK, weights

logger = logging.getLogger("vllm.llm_comm_bench")


class ScaledWeights:
    """Becomes a base class of vLLM's worker."""

    def fill_with_scaled_weights(self: Any) -> None:
        """Overwrites the dummy weights in place: CUDA graphs and compiled code stay valid."""
        rank = get_tensor_model_parallel_rank()
        weights.fill(self.get_model(), rank, get_tensor_model_parallel_world_size())
        if rank == 0:
            logger.info("%s", WEIGHTS_MARK)
