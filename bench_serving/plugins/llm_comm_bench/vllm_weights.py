"""Scaled weights as vLLM's load format ``dummy``."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from llm_comm_bench import WEIGHTS_MARK, weights

logger = logging.getLogger("vllm.llm_comm_bench")


class ScaledWeightsLoader(DummyModelLoader):  # type: ignore[misc]
    """Takes the place of vLLM's loader of dummy weights."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        rank = get_tensor_model_parallel_rank()
        weights.fill(model, rank, get_tensor_model_parallel_world_size())
        if rank == 0:
            logger.info("%s", WEIGHTS_MARK)
