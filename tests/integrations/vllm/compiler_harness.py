"""vLLM's compiler with the passes of llm_comm, for scenarios: small models go through vLLM's ``VllmBackend`` and
inductor, with the compiler's passes as they are in the published wheel. Inductor generates code for CPU tensors; vLLM's
compiled operators are those of ``stand_in_operators.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from rank_processes import data, dist_rank, shared_directory
from scenarios import Log, current_platform, parallel_state, plugin, tensor_model_parallel_all_reduce, vllm_groups
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import remove_noop_ops, view_to_reshape
from vllm.compilation.backends import VllmBackend
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.compilation.passes.vllm_inductor_pass import get_match_table
from vllm.config import CompilationConfig, CompilationMode, PassConfig, VllmConfig
from vllm.config.kernel import IrOpPriorityConfig, KernelConfig
from vllm.config.utils import Range
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

HIDDEN = 64
FP8_SCALE = 0.25
OUR_PASS = "AllReduceNormPass"
Model = Callable[[torch.Tensor], Any]


class Compiler(NamedTuple):
    """vLLM with its groups, ready to compile."""

    config: VllmConfig
    log: Log
    #: Shapes that went through the fused kernel, and how it quantized them.
    fused_calls: list[tuple[tuple[int, ...], str | None]]
    #: The same of those with a linear layer: of x, and of the weight.
    linear_calls: list[tuple[tuple[int, ...], tuple[int, ...], str | None]]
    #: Layers that are computed alone: the communicator's method, and the same shapes.
    column_calls: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    backends: list[VllmBackend]

    def backend(self) -> VllmBackend:
        self.backends.append(VllmBackend(self.config))
        return self.backends[-1]

    def compile(self, model: Model) -> Model:
        """Through vLLM's backend as it is: inductor and the C++ compiler."""
        return self._compile(model, self.backend())

    def trace(self, model: Model, up_to: int = 1024) -> Model:
        """Through vLLM's passes only, as for batches of ``up_to`` tokens; torch runs the graph that they leave."""
        return self._compile(model, partial(self._run_passes, up_to))

    def _compile(self, model: Model, backend: Any) -> Model:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)

        def run(x: torch.Tensor) -> Any:
            torch._dynamo.mark_dynamic(x, 0)
            return compiled(x)

        return run

    def _run_passes(self, up_to: int, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        backend = self.backend()
        backend.configure_post_pass()

        def after_autograd(graph: torch.fx.GraphModule, _: Any) -> Any:
            remove_noop_ops(graph.graph)  # as inductor does ahead of it
            view_to_reshape(graph)
            backend.inductor_config[backend.pass_key](graph.graph)
            graph.recompile()
            return make_boxed_func(graph)

        v1 = {"enable_auto_functionalized_v2": backend.inductor_config["enable_auto_functionalized_v2"]}
        with pass_context(Range(1, up_to)), torch._inductor.config.patch(v1):
            backend.inductor_config["pre_grad_custom_pass"](graph.graph)
            return aot_module_simplified(
                graph, inputs, fw_compiler=after_autograd, decompositions=select_decomp_table()
            )

    def check(self, compiled: Model, model: Model, rows: int = 4, hidden: int = HIDDEN) -> list[torch.Tensor]:
        """Runs both; returns the results of ``compiled``, which must be those of ``model`` but for rounding."""
        want, got = as_list(model(data((rows, hidden)))), as_list(compiled(data((rows, hidden))))
        for one, other in zip(want, got, strict=True):
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())
            tolerance = 0.13 if one.dtype.itemsize == 1 else 0.02
            torch.testing.assert_close(other.float(), one.float(), rtol=tolerance, atol=tolerance)
        return got

    def expect(
        self, model: Model, fused: int, quantized: int = 0, compile: Callable[[Model], Model] | None = None
    ) -> None:
        """Compiles and runs ``model``, of whose all-reduces ``fused`` are to go, ``quantized`` of them to FP8."""
        self.fused_calls.clear()
        before = matches(OUR_PASS)
        self.check((compile or self.trace)(model), model)
        assert matches(OUR_PASS) - before == fused, f"{matches(OUR_PASS) - before} instead of {fused}"
        ways = [quantize for _, quantize in self.fused_calls]
        assert (len(ways), ways.count("static")) == (fused, quantized), ways


def compiler_config(
    norms_by: str = "vllm_c",
    fuse_norm_quant: bool = False,
    splitting_ops: list[str] | None = None,
    custom_ops: list[str] | None = None,
    additional_config: dict[str, Any] | None = None,
) -> VllmConfig:
    """vLLM's defaults, but norms by ``norms_by`` and no CUDA graphs."""
    priority = IrOpPriorityConfig(rms_norm=[norms_by, "native"], fused_add_rms_norm=[norms_by, "native"])
    return VllmConfig(
        compilation_config=CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE,
            cudagraph_mode="NONE",
            splitting_ops=splitting_ops,
            custom_ops=custom_ops or [],
            pass_config=PassConfig(fuse_norm_quant=fuse_norm_quant, fuse_act_quant=False),
        ),
        kernel_config=KernelConfig(ir_op_priority=priority),
        additional_config=additional_config or {},
    )


def with_model(config: VllmConfig, transformers: bool = False) -> VllmConfig:
    """As where vLLM has a model to serve, of this hidden size."""
    model = mock.Mock(dtype=torch.bfloat16, is_encoder_decoder=False)
    model.get_hidden_size.return_value = HIDDEN
    model.using_transformers_backend.return_value = transformers
    model.compute_hash.return_value = "a model"
    config.model_config = model
    return config


@contextmanager
def compiler(
    config: VllmConfig | None = None,
    norms_by: str = "vllm_c",
    tensor_parallel: int = 2,
    pipeline_parallel: int = 1,
) -> Iterator[Compiler]:
    # What another run has left there would be taken instead of compiling.
    mine = shared_directory() / f"cache{dist_rank()}"
    os.environ.update(VLLM_CACHE_ROOT=str(mine), TORCHINDUCTOR_CACHE_DIR=str(mine / "inductor"))
    config = config or compiler_config(norms_by)
    with vllm_groups(tensor_parallel, pipeline_parallel, config) as log, torch.no_grad():
        config.kernel_config.ir_op_priority.set_default()  # as vLLM's worker does
        yield Compiler(config, log, calls_of_the_fused_kernel(), calls_of_linear_layers(), calls_of_columns(), [])


def calls_of_the_fused_kernel() -> list[tuple[tuple[int, ...], str | None]]:
    calls: list[tuple[tuple[int, ...], str | None]] = []
    communicator = getattr(parallel_state.get_tp_group().device_communicator, "_llm_comm", None)
    if communicator is not None:
        original = communicator.all_reduce_add_rms_norm

        def all_reduce_add_rms_norm(x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            results = original(x, *arguments, **options)
            calls.append((tuple(x.shape), options.get("quantize")))
            return results

        communicator.all_reduce_add_rms_norm = all_reduce_add_rms_norm
    return calls


def calls_of_linear_layers() -> list[tuple[tuple[int, ...], tuple[int, ...], str | None]]:
    calls: list[tuple[tuple[int, ...], tuple[int, ...], str | None]] = []
    communicator = getattr(parallel_state.get_tp_group().device_communicator, "_llm_comm", None)
    if communicator is not None:
        original = communicator.linear_all_reduce_add_rms_norm

        def linear_all_reduce_add_rms_norm(x: torch.Tensor, weight: torch.Tensor, *others: Any, **options: Any) -> Any:
            results = original(x, weight, *others, **options)
            calls.append((tuple(x.shape), tuple(weight.shape), options.get("quantize")))
            return results

        communicator.linear_all_reduce_add_rms_norm = linear_all_reduce_add_rms_norm
    return calls


def calls_of_columns() -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    calls: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    communicator = getattr(parallel_state.get_tp_group().device_communicator, "_llm_comm", None)

    def recording(name: str, original: Any) -> Any:
        def call(x: torch.Tensor, weight: torch.Tensor, **scales: Any) -> torch.Tensor:
            result: torch.Tensor = original(x, weight, **scales)
            calls.append((name, tuple(x.shape), tuple(weight.shape)))
            return result

        return call

    if communicator is not None:
        for name in ("linear", "linear_silu_and_mul", "linear_gelu_tanh_and_mul"):
            setattr(communicator, name, recording(name, getattr(communicator, name)))
    return calls


def expect_no_fusion(config: VllmConfig, reason: str) -> None:
    before = config.compute_hash()
    with compiler(config) as vllm:
        assert config.compute_hash() == before
        (norm,) = norms(1e-5)

        def model(x: torch.Tensor) -> Any:
            return norm(tensor_model_parallel_all_reduce(x), x)

        assert current_platform.get_pass_manager_cls() == plugin.THEIR_PASS_MANAGER
        assert len(vllm.log.having(f"not fused with RMSNorm: {reason}")) == (dist_rank() == 0)
        if config.compilation_config.mode == CompilationMode.VLLM_COMPILE:
            vllm.check(vllm.trace(model), model)
        assert not vllm.fused_calls
        assert matches(OUR_PASS) == 0


def norms(*epsilons: float, hidden: int = HIDDEN) -> list[RMSNorm]:
    """Norms with weights that are not one, the same on all ranks."""
    torch.manual_seed(0)
    made = [RMSNorm(hidden, eps=epsilon, dtype=torch.bfloat16) for epsilon in epsilons]
    for norm in made:
        norm.weight.data.uniform_(0.5, 1.5)
    return made


def gemma_norms(*epsilons: float, hidden: int = HIDDEN) -> list[GemmaRMSNorm]:
    """Norms that add 1 to their weights, the same on all ranks."""
    torch.manual_seed(0)
    made = [GemmaRMSNorm(hidden, eps=epsilon) for epsilon in epsilons]
    for norm in made:
        norm.weight.data = torch.empty(hidden).uniform_(-0.5, 0.5).bfloat16()
    return made


def quantization() -> QuantFP8:
    return QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR, compile_native=False)


def matches(its_pass: str) -> int:
    """How often a pass has replaced something in this process."""
    return get_match_table().get(its_pass, 0)


def as_list(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)
