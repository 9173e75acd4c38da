"""A pass of vLLM's compiler: all-reduce, residual add and RMSNorm become one operator (``fused_op.py``).

vLLM has such a pass for FlashInfer (``AllReduceFusionPass``), which goes past the communicator and is off while
llm_comm is active. This one stands in its place: after the passes that tidy the graph, before those that fuse norms
with quantization, which go on to work on what it leaves. It comes in through the platform, which names the class of the
pass manager: passes that an operator adds (``inductor_passes``) run too late, behind the fusions with quantization.

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
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass, VllmPatternMatcherPass
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.utils import Range
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

from llm_comm.integrations.vllm import compile_ranges, fused_op
from llm_comm.integrations.vllm.fused_op import all_reduce_add_rms_norm

try:
    from vllm.compilation.passes.fusion.add_rms_fusion import AddRMSNormFusionPass as _AddNormPass
except ImportError:  # before 0.33
    _AddNormPass = None

logger = logging.getLogger("vllm.llm_comm")

#: Passes of vLLM that go first: they remove what would hide a pattern, or replace all-reduces altogether.
BEFORE_OURS = ("NoOpEliminationPass", "SequenceParallelismPass", "AsyncTPPass", "AddRMSNormFusionPass")
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
            _log_once(
                f"llm_comm fused {self.matched_count} of {sums} all-reduces of a graph for batches of {batches.start} "
                f"to {batches.end} tokens with the RMSNorms after them"
            )

    def is_applicable_for_range(self, compile_range: Range) -> bool:
        """Larger batches keep their all-reduces, and the kernels that inductor generates for their norms."""
        return self._max_tokens is None or compile_range.end <= self._max_tokens

    def uuid(self) -> str:
        return fused_op.digest_of_sources()


class LlmCommPassManager(PostGradPassManager):  # type: ignore[misc]
    """vLLM's passes and ours among them. Its ``uuid`` is made of theirs, so it covers ours."""

    def configure(self, config: VllmConfig) -> None:
        super().configure(config)
        with set_current_vllm_config(config, check_compile=False):
            ours = AllReduceNormPass(config)
        names = [type(theirs).__name__ for theirs in self.passes]
        place = max((names.index(name) + 1 for name in BEFORE_OURS if name in names), default=0)
        self.passes[place:place] = [*_makes_norms(config, names), ours]


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


@functools.cache
def _log_once(text: str) -> None:
    # The layers of a model are graphs of their own, most of them alike.
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
