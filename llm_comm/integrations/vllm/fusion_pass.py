"""Compiler pass for vLLM that fuses all-reduce, residual add and RMSNorm, and the pass manager that runs it.

The pass replaces the three nodes by one operator (``operators.py``). It matches any epsilon, but only the
tensor-parallel group. Graphs of Gemma's norms have ``weight.float() + 1``; the operator gets the parameter itself. The
pass leaves norms alone that llm_comm cannot compute: with weights of another dtype than the activations, without
weights, or over a part of the row.

vLLM's ``AllReduceFusionPass`` fuses all-reduces with norms by FlashInfer. It bypasses the communicator and is off while
llm_comm's passes are active. llm_comm's passes run at its position: after the passes that simplify the graph, and
before the passes that fuse norms with quantization, which then work on the remaining norms. The platform names the
class of the pass manager, so llm_comm replaces that class. Passes that users add (``inductor_passes``) would run too
late, after the fusions with quantization.
"""

from __future__ import annotations

from collections.abc import Callable
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
from llm_comm.integrations.vllm.fusion_patterns import Pattern, patterns
from llm_comm.integrations.vllm.graph_layers import DTYPES
from llm_comm.operations.fp8 import BLOCKS, GROUP_SIZE

# Placeholder for epsilon: numbers of this value become wildcards in a pattern. No pattern may contain it otherwise.
_ANY_EPSILON = 1.0e-5 / 3.0
try:
    from vllm.compilation.passes.fusion.add_rms_fusion import AddRMSNormFusionPass as _AddNormPass
except ImportError:  # vLLM 0.26 does not have this pass
    _AddNormPass = None

#: Passes of vLLM that must run before llm_comm's: they remove nodes that would hide a pattern, or replace all-reduces.
BEFORE_OURS = ("NoOpEliminationPass", "SequenceParallelismPass", "AsyncTPPass", "AddRMSNormFusionPass")


class AllReduceNormPass(VllmPatternMatcherPass):  # type: ignore[misc]
    """Pass that replaces all-reduce + RMSNorm, with or without residual add, by llm_comm's fused operator.

    Quantization after the norm is fused too: FP8 if it is static per tensor or by groups of 128, and NVFP4.
    """

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        communicator = get_tp_group().device_communicator
        self._fused_tokens = compiled_graphs.fused_tokens(config, communicator.fused_sizes)
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
                extra_check=_check_of(pattern),
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
        """Return whether all batches of a graph are fused. Others keep inductor's kernels."""
        return compiled_graphs.are_fused(self._fused_tokens, compile_range.start, compile_range.end)

    def uuid(self) -> str:
        return compiled_graphs.digest_of_sources()


def _check_of(pattern: Pattern) -> Callable[[pm.Match], bool]:
    """Return the check of matches of a pattern, whose kernels the operator must replace."""
    if pattern.has_groups:
        return _computes_the_same_of_groups
    return _computes_the_same_of_nvfp4 if pattern.is_nvfp4 else _computes_the_same


def _computes_the_same_of_groups(match: pm.Match) -> bool:
    """Return whether the operator with quantization by groups computes a match: checks of shapes and dtypes."""
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


def _computes_the_same_of_nvfp4(match: pm.Match) -> bool:
    """Return whether the operator with NVFP4 computes a match: checks of shapes and dtypes. Layers whose weights are
    padded give larger buffers than the operator returns."""
    values = _operands(match)
    if values is None:
        return False
    scale, output, output_scale = (values.pop(name) for name in ("scale", "output", "output_scale"))
    hidden = values["x"].shape[-1]
    return (
        _norms_the_same(values)
        and values["x"].dim() == 2
        and (scale.dtype, scale.numel()) == (torch.float32, 1)
        and hidden % BLOCKS["nvfp4"] == 0
        and output.shape[-1] * 2 == hidden
        and (output_scale.dtype, output_scale.shape[-1]) == (torch.int32, (hidden // BLOCKS["nvfp4"] + 3) // 4)
    )


def _computes_the_same(match: pm.Match) -> bool:
    """Return whether the operator without quantization by groups computes a match: checks of shapes and dtypes."""
    values = _operands(match)
    if values is None:
        return False
    scale = values.pop("scale", None)
    is_static = scale is None or (scale.dtype is torch.float32 and scale.numel() == 1 and values["x"].dim() == 2)
    return _norms_the_same(values) and is_static


def _operands(match: pm.Match) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a match by name; None if one is no tensor, as the weight of a norm without weights."""
    names = ("x", "residual", "weight", "scale", "output", "output_scale")
    given = {name: match.kwargs[name] for name in names if name in match.kwargs}
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
    """vLLM's pass manager with the passes of llm_comm. Its ``uuid`` is made of those of all passes, so that of
    llm_comm's passes is part of vLLM's cache key."""

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
    """Return the passes of linear layers, in the order in which they must run.

    The import cannot fail on one rank alone: ``fusion.why_not_linear`` has tried it before the ranks voted.
    """
    from llm_comm.integrations.vllm.linear_passes import ColumnLinearPass, LinearNormPass

    passes = [LinearNormPass(config), ColumnLinearPass(config)]
    if get_tp_group().device_communicator.max_rope_tokens > 0:
        from llm_comm.integrations.vllm.rope_pass import RopePass

        passes.insert(1, RopePass(config))  # ahead of the pass that would take the qkv layers alone
    return passes


def _makes_norms(config: VllmConfig, there: list[str]) -> list[Any]:
    """Return vLLM's pass that turns norms of transformers into vLLM's norms, if it must be added.

    Models on the transformers backend contain norms of transformers, which llm_comm's patterns do not match. vLLM 0.33
    adds this pass if another pass needs it, but the fusion pass that would need it is off.
    """
    if _AddNormPass is None or _AddNormPass.__name__ in there or config.model_config is None:
        return []
    if not config.model_config.using_transformers_backend():
        return []
    with set_current_vllm_config(config, check_compile=False):
        return [_AddNormPass(config)]
