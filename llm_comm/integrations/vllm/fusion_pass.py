"""A pass of vLLM's compiler: all-reduce, residual add and RMSNorm become one operator (``fused_op.py``).

It matches any epsilon, and one group, that of tensor parallelism. It does not match what llm_comm does not compute:
weights of another dtype than the activations (Gemma's ``weight.float() + 1``), norms without weights or over a part of
the row.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch._inductor.pattern_matcher as pm
import torch.distributed as dist
import vllm.ir.ops
from vllm.compilation.passes.fusion.matcher_utils import MatcherQuantFP8
from vllm.compilation.passes.inductor_pass import enable_fake_mode, get_pass_context
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass, VllmPatternMatcherPass
from vllm.config import VllmConfig
from vllm.config.utils import Range
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

from llm_comm.integrations.vllm import cache_key, compile_ranges
from llm_comm.integrations.vllm.fused_op import all_reduce_add_rms_norm

logger = logging.getLogger("vllm.llm_comm")

DTYPES = (torch.bfloat16, torch.float16)

# Stands for any epsilon: numbers of this value become wildcards in a pattern. No pattern holds it for another reason.
_ANY_EPSILON = 1.0e-5 / 3.0


class _Pattern(NamedTuple):
    """What is searched for, what takes its place, and example arguments but for epsilon, the last one of both."""

    search: Callable[..., Any]
    replacement: Callable[..., Any]
    examples: list[torch.Tensor]


class AllReduceNormPass(VllmPatternMatcherPass):  # type: ignore[misc]
    """Replaces all-reduce + RMSNorm, with or without residual, with or without static FP8 quantization."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        communicator = get_tp_group().device_communicator
        self._max_tokens = compile_ranges.max_fused_tokens(config, communicator.max_fused_bytes)
        self.pm_pass = pm.PatternMatcherPass(pass_name=self.pass_name)
        self._register()
        self.dump_patterns(config, self.pm_pass)

    @enable_fake_mode  # type: ignore[untyped-decorator]
    def _register(self) -> None:
        for pattern in _patterns(get_tp_group().unique_name, self.device):
            pm.register_replacement(
                pattern.search,
                pattern.replacement,
                pattern.examples,
                pm.fwd_only,
                self.pm_pass,
                extra_check=_computes_the_same,
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


def _patterns(group: str, device: str | None) -> Iterator[_Pattern]:
    """All of them, the larger ones first: the matcher takes the first that fits."""
    x, residual = (torch.empty(5, 16, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight = torch.empty(16, dtype=torch.bfloat16, device=device)
    quantize = MatcherQuantFP8(kFp8StaticTensorSym)
    scale = torch.empty(1, 1, device=device)

    def add_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        return vllm.ir.ops.fused_add_rms_norm(tensor_model_parallel_all_reduce(x), residual, weight, epsilon)

    def fused_add_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        return all_reduce_add_rms_norm(x, residual, weight, epsilon, None, group)

    def norm(x: Any, weight: Any, epsilon: float) -> Any:
        total = tensor_model_parallel_all_reduce(x)
        return vllm.ir.ops.rms_norm(total, weight, epsilon), total

    def fused_norm(x: Any, weight: Any, epsilon: float) -> Any:
        return all_reduce_add_rms_norm(x, None, weight, epsilon, None, group)

    def add_norm_quant(x: Any, residual: Any, weight: Any, scale: Any, epsilon: float) -> Any:
        normed, new_residual = add_norm(x, residual, weight, epsilon)
        return quantize(normed, scale)[0], new_residual

    def fused_add_norm_quant(x: Any, residual: Any, weight: Any, scale: Any, epsilon: float) -> Any:
        return all_reduce_add_rms_norm(x, residual, weight, epsilon, scale, group)

    def norm_quant(x: Any, weight: Any, scale: Any, epsilon: float) -> Any:
        normed, total = norm(x, weight, epsilon)
        return quantize(normed, scale)[0], total

    def fused_norm_quant(x: Any, weight: Any, scale: Any, epsilon: float) -> Any:
        return all_reduce_add_rms_norm(x, None, weight, epsilon, scale, group)

    # Where nobody needs the residual, as at the end of a model, it is not among the outputs of the norm.
    yield _Pattern(add_norm_quant, fused_add_norm_quant, [x, residual, weight, scale])
    yield _Pattern(_first_of(add_norm_quant), _first_of(fused_add_norm_quant), [x, residual, weight, scale])
    yield _Pattern(norm_quant, fused_norm_quant, [x, weight, scale])
    yield _Pattern(add_norm, fused_add_norm, [x, residual, weight])
    yield _Pattern(_first_of(add_norm), _first_of(fused_add_norm), [x, residual, weight])
    yield _Pattern(norm, fused_norm, [x, weight])


def _first_of(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # the matcher reads the names of the arguments
    def first(*arguments: Any) -> Any:
        return function(*arguments)[0]

    return first


def _computes_the_same(match: pm.Match) -> bool:
    """Whether llm_comm's operator stands for the nodes of this match, which fit but for shapes and dtypes."""
    given = {name: match.kwargs[name] for name in ("x", "residual", "weight", "scale") if name in match.kwargs}
    if not all(isinstance(node, torch.fx.Node) for node in given.values()):
        return False  # a norm without weights
    values: dict[str, torch.Tensor] = {name: node.meta["val"] for name, node in given.items()}
    x, weight = values["x"], values["weight"]
    residual, scale = values.get("residual", x), values.get("scale")
    return (
        x.dtype in DTYPES
        and (weight.dtype, weight.shape) == (x.dtype, x.shape[-1:])
        and (residual.dtype, residual.shape) == (x.dtype, x.shape)
        and (scale is None or (scale.dtype is torch.float32 and scale.numel() == 1 and x.dim() == 2))
    )
