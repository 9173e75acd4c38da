"""A pass of vLLM's compiler: all-reduce, residual add and RMSNorm become one operator (``operators.py``); and the pass
manager that runs it among vLLM's own.

The pass matches any epsilon, and one group, that of tensor parallelism. Norms of Gemma, whose graphs hold
``weight.float() + 1``, are matched with the parameter itself. The pass does not match what llm_comm does not compute:
weights of another dtype than the activations, norms without weights or over a part of the row.

vLLM has a pass that fuses all-reduces with norms by FlashInfer (``AllReduceFusionPass``), which goes past the
communicator and is off while llm_comm is active. Ours stand in its place: after the passes that tidy the graph, before
those that fuse norms with quantization, which go on to work on what they leave. They come in through the platform,
which names the class of the pass manager: passes that an operator adds (``inductor_passes``) run too late, behind the
fusions with quantization.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.pattern_matcher as pm
from vllm.compilation.passes.inductor_pass import enable_fake_mode, get_pass_context
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass, VllmPatternMatcherPass
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.utils import Range
from vllm.distributed import get_tp_group

from llm_comm.integrations.vllm import compiled_graphs
from llm_comm.integrations.vllm.compiled_graphs import log_once
from llm_comm.integrations.vllm.fusion_patterns import patterns
from llm_comm.integrations.vllm.graph_layers import DTYPES
from llm_comm.operations.fp8 import GROUP_SIZE

# Stands for any epsilon: numbers of this value become wildcards in a pattern. No pattern holds it for another reason.
_ANY_EPSILON = 1.0e-5 / 3.0
try:
    from vllm.compilation.passes.fusion.add_rms_fusion import AddRMSNormFusionPass as _AddNormPass
except ImportError:  # before 0.33
    _AddNormPass = None

#: Passes of vLLM that go first: they remove what would hide a pattern, or replace all-reduces altogether.
BEFORE_OURS = ("NoOpEliminationPass", "SequenceParallelismPass", "AsyncTPPass", "AddRMSNormFusionPass")


class AllReduceNormPass(VllmPatternMatcherPass):  # type: ignore[misc]
    """Replaces all-reduce + RMSNorm, with or without residual, with or without FP8 quantization: static, or by groups
    of 128."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        communicator = get_tp_group().device_communicator
        self._max_tokens = compiled_graphs.max_fused_tokens(config, communicator.max_fused_bytes)
        self.pm_pass = pm.PatternMatcherPass(pass_name=self.pass_name)
        self._register()
        self.dump_patterns(config, self.pm_pass)

    @enable_fake_mode  # type: ignore[untyped-decorator]
    def _register(self) -> None:
        for pattern in patterns(get_tp_group().unique_name, self.device):
            pm.register_replacement(
                pattern.search,
                pattern.replacement,
                pattern.examples,
                pm.fwd_only,
                self.pm_pass,
                extra_check=_computes_the_same_of_groups if pattern.has_groups else _computes_the_same,
                scalar_workaround={"epsilon": _ANY_EPSILON},
            )

    @VllmInductorPass.time_and_log  # type: ignore[untyped-decorator]
    def __call__(self, graph: torch.fx.Graph) -> None:
        sums = sum(node.target is torch.ops.vllm.all_reduce.default for node in graph.nodes)
        self.matched_count = self.pm_pass.apply(graph)
        VllmPatternMatcherPass.match_table[self.pass_name] += self.matched_count
        batches = get_pass_context().compile_range
        if sums > 0:
            log_once(
                f"llm_comm fused {self.matched_count} of {sums} all-reduces of a graph for batches of {batches.start} "
                f"to {batches.end} tokens with the RMSNorms after them"
            )

    def is_applicable_for_range(self, compile_range: Range) -> bool:
        """Larger batches keep their all-reduces, and the kernels that inductor generates for their norms."""
        return self._max_tokens is None or compile_range.end <= self._max_tokens

    def uuid(self) -> str:
        return compiled_graphs.digest_of_sources()


def _computes_the_same_of_groups(match: pm.Match) -> bool:
    """The same where the norm is quantized by groups."""
    values = _operands(match)
    if values is None:
        return False
    scale = values.pop("scale")
    return (
        _norms_the_same(values)
        and values["x"].dim() == 2
        and scale.dtype is torch.float32
        and scale.shape[-1] * GROUP_SIZE == values["x"].shape[-1]
    )


def _computes_the_same(match: pm.Match) -> bool:
    """Whether llm_comm's operator stands for the nodes of this match, which fit but for shapes and dtypes."""
    values = _operands(match)
    if values is None:
        return False
    scale = values.pop("scale", None)
    is_static = scale is None or (scale.dtype is torch.float32 and scale.numel() == 1 and values["x"].dim() == 2)
    return _norms_the_same(values) and is_static


def _operands(match: pm.Match) -> dict[str, torch.Tensor] | None:
    """Those of a match, by name; None where one is no tensor: a norm without weights."""
    given = {name: match.kwargs[name] for name in ("x", "residual", "weight", "scale") if name in match.kwargs}
    if not all(isinstance(node, torch.fx.Node) for node in given.values()):
        return None
    return {name: node.meta["val"] for name, node in given.items()}


def _norms_the_same(values: dict[str, torch.Tensor]) -> bool:
    x, weight = values["x"], values["weight"]
    residual = values.get("residual", x)
    return (
        x.dtype in DTYPES
        and (weight.dtype, weight.shape) == (x.dtype, x.shape[-1:])
        and (residual.dtype, residual.shape) == (x.dtype, x.shape)
    )


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
    from llm_comm.integrations.vllm.linear_passes import ColumnLinearPass, LinearNormPass

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
