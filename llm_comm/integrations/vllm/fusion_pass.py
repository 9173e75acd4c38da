"""A pass of vLLM's compiler: all-reduce, residual add and RMSNorm become one operator (``fused_op.py``).

It matches any epsilon, and one group, that of tensor parallelism. It does not match what llm_comm does not compute:
weights of another dtype than the activations (Gemma's ``weight.float() + 1``), norms without weights or over a part of
the row.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch._inductor.pattern_matcher as pm
import torch.distributed as dist
from vllm.compilation.passes.inductor_pass import enable_fake_mode, get_pass_context
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass, VllmPatternMatcherPass
from vllm.config import VllmConfig
from vllm.config.utils import Range
from vllm.distributed import get_tp_group

from llm_comm.integrations.vllm import cache_key, compile_ranges
from llm_comm.integrations.vllm.fusion_patterns import patterns
from llm_comm.operations.fp8 import GROUP_SIZE

logger = logging.getLogger("vllm.llm_comm")

DTYPES = (torch.bfloat16, torch.float16)

# Stands for any epsilon: numbers of this value become wildcards in a pattern. No pattern holds it for another reason.
_ANY_EPSILON = 1.0e-5 / 3.0


class AllReduceNormPass(VllmPatternMatcherPass):  # type: ignore[misc]
    """Replaces all-reduce + RMSNorm, with or without residual, with or without FP8 quantization: static, or by groups
    of 128."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        communicator = get_tp_group().device_communicator
        self._max_tokens = compile_ranges.max_fused_tokens(config, communicator.max_fused_bytes)
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
        return cache_key.digest_of_sources()


@functools.cache
def log_once(text: str) -> None:
    """Logs what was done to a graph. The layers of a model are graphs of their own, most of them alike."""
    if dist.get_rank() == 0:
        logger.info(text)


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
