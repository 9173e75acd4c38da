"""Methods that the harness calls in vLLM's workers. The harness passes the class as ``worker_extension_cls``."""

from __future__ import annotations

import logging
import os
from typing import Any

import vllm.envs as envs
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from llm_comm_bench import DETERMINISTIC_MARK, PROCESS_MARK, WEIGHTS_MARK, kernel_profile, weights

logger = logging.getLogger("vllm.llm_comm_bench")


class Extension:
    """Extension of vLLM's worker, which inherits from it."""

    def fill_with_scaled_weights(self: Any) -> None:
        """Overwrite the dummy weights in place. CUDA graphs and compiled code stay valid."""
        rank = get_tensor_model_parallel_rank()
        weights.fill(self.get_model(), rank, get_tensor_model_parallel_world_size())
        if rank == 0:
            logger.info("%s", WEIGHTS_MARK)

    def tell_mode(self) -> None:
        """Log if vLLM is in batch-invariant mode, which vLLM itself does not log."""
        if envs.VLLM_BATCH_INVARIANT and get_tensor_model_parallel_rank() == 0:
            logger.info("%s", DETERMINISTIC_MARK)

    def tell_process(self) -> None:
        """Log the process id of this rank."""
        logger.info(PROCESS_MARK, get_tensor_model_parallel_rank(), os.getpid())

    def start_kernel_profile(self) -> None:
        """Begin to record kernels."""
        kernel_profile.recorder.start(get_tensor_model_parallel_rank())

    def begin_kernel_section(self) -> None:
        """Begin a section of the recording."""
        kernel_profile.recorder.begin_section()

    def stop_kernel_profile(self, directory: str, names: str) -> None:
        """Write the sections to files in ``directory``; their names are separated by commas."""
        kernel_profile.recorder.stop(get_tensor_model_parallel_rank(), directory, names)
