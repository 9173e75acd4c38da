"""vLLM's compiler passes and those of llm_comm among them.

vLLM has a pass that fuses all-reduces with norms by FlashInfer (``AllReduceFusionPass``), which goes past the
communicator and is off while llm_comm is active. Ours stand in its place: after the passes that tidy the graph, before
those that fuse norms with quantization, which go on to work on what they leave. They come in through the platform,
which names the class of the pass manager: passes that an operator adds (``inductor_passes``) run too late, behind the
fusions with quantization.
"""

from __future__ import annotations

from typing import Any

from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tp_group

from llm_comm.integrations.vllm.fusion_pass import AllReduceNormPass

try:
    from vllm.compilation.passes.fusion.add_rms_fusion import AddRMSNormFusionPass as _AddNormPass
except ImportError:  # before 0.33
    _AddNormPass = None

#: Passes of vLLM that go first: they remove what would hide a pattern, or replace all-reduces altogether.
BEFORE_OURS = ("NoOpEliminationPass", "SequenceParallelismPass", "AsyncTPPass", "AddRMSNormFusionPass")


class LlmCommPassManager(PostGradPassManager):  # type: ignore[misc]
    """Its ``uuid`` is made of those of the passes, so it covers ours."""

    def configure(self, config: VllmConfig) -> None:
        super().configure(config)
        with set_current_vllm_config(config, check_compile=False):
            ours: list[Any] = [AllReduceNormPass(config)]
            if get_tp_group().device_communicator.max_linear_tokens > 0:
                ours += _linear_passes(config)
        names = [type(theirs).__name__ for theirs in self.passes]
        place = max((names.index(name) + 1 for name in BEFORE_OURS if name in names), default=0)
        self.passes[place:place] = [*_makes_norms(config, names), *ours]


def _linear_passes(config: VllmConfig) -> list[Any]:
    """Each works on what the passes before it leave. All ranks have them: ``fusion.why_not_linear`` has looked."""
    from llm_comm.integrations.vllm.column_pass import ColumnLinearPass
    from llm_comm.integrations.vllm.linear_pass import LinearNormPass

    return [LinearNormPass(config), ColumnLinearPass(config)]


def _makes_norms(config: VllmConfig, there: list[str]) -> list[Any]:
    """The pass that makes vLLM's norms of those of transformers, which has a backend for models that vLLM lacks.

    vLLM 0.33 has it, where another pass needs it; the one that llm_comm stands in for is off.
    """
    if _AddNormPass is None or _AddNormPass.__name__ in there or config.model_config is None:
        return []
    if not config.model_config.using_transformers_backend():
        return []
    with set_current_vllm_config(config, check_compile=False):
        return [_AddNormPass(config)]
