"""What the passes of vLLM's compiler that replace linear layers have in common: for which batches they run, and what
tells their graphs apart in vLLM's cache."""

from __future__ import annotations

from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass
from vllm.config import VllmConfig
from vllm.config.utils import Range
from vllm.distributed import get_tp_group

from llm_comm.integrations.vllm import cache_key


class LayerPass(VllmInductorPass):  # type: ignore[misc]
    """A pass for batches whose linear layers llm_comm may compute."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        communicator = get_tp_group().device_communicator
        self._max_tokens = communicator.max_linear_tokens
        self._uuid = f"{cache_key.digest_of_sources()} {self._max_tokens} {communicator.linear_key}"

    def is_applicable_for_range(self, compile_range: Range) -> bool:
        """Larger batches keep their linear layers as they are."""
        return compile_range.end <= self._max_tokens  # type: ignore[no-any-return]

    def uuid(self) -> str:
        return self._uuid
