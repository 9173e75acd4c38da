"""vLLM's experts by llm_comm: run by ``test_vllm_experts.py``, as ``scenarios.py`` is by its test.

The methods of experts without quantization and of FP8 ones are vLLM's. A stand-in takes the place of its Triton
kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from expert_layers import (
    EXPERTS,
    HIDDEN,
    batch_of,
    check_start,
    dequantized,
    expected,
    fp8_layer_of,
    layer_of,
    never,
    parameter,
    requantized,
    timed,
    weights_in,
    wrong_scales,
)
from lost_seams import OTHER_BODY, lose
from rank_processes import Log, dist_rank, scenario
from scenarios import parallel_state, vllm_groups
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.utils import fp8_utils

from llm_comm.integrations.vllm import configuration, seams
from llm_comm.integrations.vllm import experts as hooks
from llm_comm.planning.models import of_config

_METHOD = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.apply"
_SIZES = {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 64, "num_hidden_layers": 1}
DENSE = of_config({"model_type": "llama", "rms_norm_eps": 1e-5, **_SIZES})


class Kernel:
    """vLLM's kernels: computes the same in fp64, and notes the tokens."""

    is_monolithic = can_overlap_shared_experts = False

    def __init__(self, scales: Any = (None, None)) -> None:
        self.tokens: list[int] = []
        self.scales = scales

    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        self.tokens.append(len(hidden_states))
        self.shared = shared_experts
        weights = map(dequantized, (w1, w2), self.scales)
        return expected(hidden_states, topk_weights, topk_ids, *weights).to(hidden_states.dtype)


# ---- Scenarios ------------------------------------------------------------------------------------------------------


@scenario(smoke=True, LLM_COMM_FUSE_EXPERTS="1")
def experts_of_few_tokens_are_computed_by_llm_comm() -> None:
    with served() as log:
        assert len(log.having("; experts of up to 64 tokens by llm_comm (fuse_experts)")) == (dist_rank() == 0)
        for dtype in (torch.bfloat16, torch.float16):
            method, layer = experts(dtype)
            for tokens in (1, 17, 64):
                check(method, layer, tokens, dtype)
            assert method.moe_kernel.tokens == []
            check(method, layer, 65, dtype)
            assert method.moe_kernel.tokens == [65]
        said = f"llm_comm: first experts computed by llm_comm (2 ranks, shape (1, {HIDDEN}), weight (6, 128, {HIDDEN}))"
        assert len(log.having(said)) == (dist_rank() == 0)


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def what_llm_comm_does_not_compute_is_left_to_vllm() -> None:
    with served():
        method, layer = experts()
        tokens = method.moe_kernel.tokens
        changes: list[tuple[Any, str, Any]] = [
            (method, "unquantized_backend", UnquantizedMoeBackend.FLASHINFER_CUTLASS),
            (method, "experts_cls", object),
            (layer, "activation", MoEActivation.GELU),
            (layer, "expert_map", torch.zeros(EXPERTS, dtype=torch.int32)),
            (layer, "apply_router_weight_on_input", True),
            *((layer, name, 7.0) for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit")),
            *((method.moe, name, True) for name in ("has_bias", "is_lora_enabled", "_defer_moe_finalize")),
            (method.moe, "swiglu_limit", 7.0),
            *((method.moe.moe_parallel_config, name, 2) for name in ("dp_size", "pcp_size", "sp_size")),
        ]
        for place, name, value in changes:
            with mock.patch.object(place, name, value, create=True):
                check(method, layer, 4)
            assert tokens.pop() == 4, name
        assert not tokens
        x, factors, ids = batch_of(4)
        shared = SimpleNamespace()
        method.apply(layer, x, factors, ids, shared, x)  # vLLM computes the shared ones elsewhere
        assert not tokens
        with mock.patch.object(method.moe_kernel, "can_overlap_shared_experts", True):
            method.apply(layer, x, factors, ids, shared, x)
        assert (tokens.pop(), method.moe_kernel.shared) == (4, shared)
        method.apply(layer, x, factors, ids.long(), shared, x)
        assert (tokens.pop(), method.moe_kernel.shared) == (4, shared)
        method.__class__ = type("Other", (UnquantizedFusedMoEMethod,), {})
        check(method, layer, 4)
        assert tokens.pop() == 4
        method.__class__ = UnquantizedFusedMoEMethod
        with mock.patch.object(method.moe_kernel, "fused_experts", SimpleNamespace(post_gemm2_hook=print), create=True):
            check(method, layer, 4)
        assert tokens.pop() == 4
        check(method, layer, 4)
        assert not tokens


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def with_expert_parallelism_a_rank_computes_its_own_experts() -> None:
    """vLLM's numbers are those of all experts, with a map to those of the rank."""
    with served():
        method, layer = experts()
        method.moe.moe_parallel_config.ep_size = 2
        first = EXPERTS * dist_rank()
        layer.expert_map = torch.full((2 * EXPERTS,), -1, dtype=torch.int32)
        layer.expert_map[first : first + EXPERTS] = torch.arange(EXPERTS, dtype=torch.int32)
        x, factors, ids = batch_of(9)
        ids[::2] += EXPERTS
        want = expected(x, factors, ids - first, *weights_in(layer))
        for _ in range(2):
            got = method.apply(layer, x, factors, ids, None, None)
            torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02)
        assert not method.moe_kernel.tokens
        by_turns = torch.full((2 * EXPERTS,), -1, dtype=torch.int32)
        by_turns[::2] = torch.arange(EXPERTS, dtype=torch.int32)
        no_shared_one = layer.expert_map.where(layer.expert_map < EXPERTS - 1, -1)  # fewer than the weights have
        for other in (layer.expert_map.flip(0), by_turns, no_shared_one, torch.full_like(by_turns, -1)):
            layer.expert_map = other
            method.apply(layer, x, factors, ids, None, None)
            assert method.moe_kernel.tokens.pop() == 9


@scenario(LLM_COMM_FUSE_EXPERTS="auto", LLM_COMM_TUNE_AT_START="1")
def with_auto_experts_of_all_ranks_are_drawn() -> None:
    with served(), timed() as measured:
        method, layer = experts()
        layer.expert_map = torch.full((2 * EXPERTS,), -1, dtype=torch.int32)
        layer.expert_map[:EXPERTS] = torch.arange(EXPERTS, dtype=torch.int32)
        with mock.patch.object(method.moe_kernel, "apply", wraps=method.moe_kernel.apply) as theirs:
            check(method, layer, 4)
        drawn = torch.cat([call.kwargs["topk_ids"] for call in theirs.call_args_list])
        assert measured == [(4, 8)] * 2
        assert 0 <= drawn.min() < EXPERTS <= drawn.max() < 2 * EXPERTS


@scenario(LLM_COMM_FUSE_EXPERTS="auto", LLM_COMM_TUNE_AT_START="1")
def with_auto_batches_that_are_faster_are_computed_by_llm_comm() -> None:
    with served() as log, timed() as measured:
        assert len(log.having("; experts of up to 64 tokens by llm_comm, where it is faster")) == (dist_rank() == 0)
        method, layer = experts()
        tokens = method.moe_kernel.tokens
        for _ in range(2):
            check(method, layer, 4)
        assert measured == [(4, 8)] * 2
        assert tokens == [4] * 8  # of the measurement
        check(method, layer, 9)
        assert tokens[8:] == [9] * 9
        assert len(log.having("llm_comm: experts of 4 tokens: 0.5 us, vLLM's 1.0")) == (dist_rank() == 0)


@scenario(smoke=True, LLM_COMM_FUSE_EXPERTS="1")
def fp8_experts_are_computed_by_llm_comm() -> None:
    with served() as log:
        for block in (True, False):
            method, layer = fp8_experts(block)
            for tokens in (1, 17, 64):
                for dtype in (torch.bfloat16, torch.float16):
                    check(method, layer, tokens, dtype)
            assert method.moe_kernel.tokens == []
            check(method, layer, 65)
            assert method.moe_kernel.tokens == [65]
        assert len(log.having("first experts")) == (dist_rank() == 0)


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def fp8_experts_that_llm_comm_does_not_compute_are_left_to_vllm() -> None:
    with served():
        method, layer = fp8_experts(block=True)
        block_shape = "moe_block_shape" if hasattr(method, "moe_block_shape") else "weight_block_size"
        backends = [backend for backend in Fp8MoeBackend if backend is not Fp8MoeBackend.TRITON]
        changes: list[tuple[Any, str, Any]] = [
            *((method, "fp8_backend", backend) for backend in backends),
            (method, "experts_cls", object),
            (method, block_shape, [64, 64]),
            (method, block_shape, None),
            (method, "block_quant", False),
            (method.moe, "has_bias", True),
            (layer, "expert_map", torch.zeros(EXPERTS, dtype=torch.int32)),
            *((layer, name, value) for name, value in wrong_scales(layer)),
        ]
        for place, name, value in changes:
            with mock.patch.object(place, name, value, create=not hasattr(place, name)):
                check_declined(method, layer, f"{name} {value}")
        method.__class__ = type("Other", (fp8.Fp8MoEMethod,), {})
        check_declined(method, layer, "its class")
        method.__class__ = fp8.Fp8MoEMethod
        check(method, layer, 4)
        method, layer = fp8_experts(block=False)
        with mock.patch.object(
            layer, "w13_weight_scale", parameter(torch.ones(EXPERTS, 2))
        ):  # gate and up have their own
            check_declined(method, layer, "w13_weight_scale")
        check(method, layer, 4)
        assert not method.moe_kernel.tokens


@scenario(LLM_COMM_FUSE_EXPERTS="auto", LLM_COMM_TUNE_AT_START="1")
def with_auto_each_form_of_scales_is_measured() -> None:
    with served(), timed() as measured:
        for block in (True, False, True):
            check(*fp8_experts(block), 4)
        check(*experts(), 4)
        assert measured == [(4, 8)] * 6


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def fp8_experts_of_an_untested_release_are_vllms() -> None:
    lose(seams.TABLE, "vllm.model_executor.layers.quantization.fp8:Fp8MoEMethod._setup_kernel", how=OTHER_BODY)
    with served() as log:
        assert len(log.having("; experts of up to 64 tokens by llm_comm (fuse_experts)")) == (dist_rank() == 0)
        assert len(log.having("; experts of FP8 are vLLM's: vllm.model_executor")) == (dist_rank() == 0)
        method, layer = fp8_experts(block=True)
        check(method, layer, 4)
        assert method.moe_kernel.tokens == [4]
        method, layer = experts()
        check(method, layer, 4)
        assert not method.moe_kernel.tokens


@scenario()
def without_the_option_experts_are_vllms() -> None:
    before = UnquantizedFusedMoEMethod.apply
    with served() as log:
        assert UnquantizedFusedMoEMethod.apply is before
        check_untouched(log, "")


@scenario(LLM_COMM_FUSE_EXPERTS="1", VLLM_BATCH_INVARIANT="1")
def in_batch_invariant_mode_experts_are_vllms() -> None:
    """Larger batches would have other bits."""
    with served() as log:
        check_untouched(log, "; experts are vLLM's: VLLM_BATCH_INVARIANT is on")


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def experts_whose_weights_lie_in_the_hosts_memory_are_vllms() -> None:
    config = VllmConfig()
    config.offload_config.uva.cpu_offload_gb = 1
    with served(config) as log:
        check_untouched(log, "; experts are vLLM's: weights lie in the host's memory")


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def nothing_is_hooked_for_a_model_without_experts() -> None:
    with mock.patch.object(configuration, "model", return_value=DENSE), served() as log:
        check_untouched(log, "; experts are vLLM's: the model has none")


@scenario(LLM_COMM_TUNE_AT_START="1", LLM_COMM_FUSE_EXPERTS="auto")
def with_auto_nothing_is_said_of_a_model_without_experts() -> None:
    with mock.patch.object(configuration, "model", return_value=DENSE), served() as log:
        check_untouched(log, "")


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def one_rank_without_the_method_takes_the_others_along() -> None:
    if dist_rank() == 1:
        lose(seams.TABLE, _METHOD)
    with served() as log:
        check_untouched(log, "; experts are vLLM's: rank 1 (global rank 1): ")


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def after_the_group_has_been_destroyed_experts_are_vllms() -> None:
    with served():
        method, layer = experts()
        check(method, layer, 4)
        assert not method.moe_kernel.tokens
    check(method, layer, 4)
    assert method.moe_kernel.tokens == [4]


# ---- What they are made of ------------------------------------------------------------------------------------------


@contextmanager
def served(config: VllmConfig | None = None) -> Iterator[Log]:
    """Groups of two ranks; their log."""
    with vllm_groups(config=config) as log, torch.no_grad():
        assert parallel_state.get_tp_group().world_size == 2
        yield log


def experts(dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """The method and the layer of experts, with numbers of this rank."""
    method = object.__new__(UnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(method)
    method.unquantized_backend = UnquantizedMoeBackend.TRITON
    method._forward_method = method.forward_native
    layer = layer_of(dtype)
    set_up(method, layer, Kernel())
    return method, layer


def fp8_experts(block: bool) -> tuple[Any, Any]:
    """The method and the layer of FP8 experts, with numbers of this rank. vLLM makes weights and scales of a
    checkpoint."""
    method, layer = object.__new__(fp8.Fp8MoEMethod), fp8_layer_of(block)
    method.fp8_backend, method.block_quant = Fp8MoeBackend.TRITON, block
    method.weight_block_size = layer.weight_block_size = [128, 128] if block else None
    if seams.TABLE.has("vllm.model_executor.layers.quantization.fp8:Fp8MoEMethod._init_moe_kernel"):  # 0.32
        method.moe_block_shape, method.per_act_token_quant = method.weight_block_size, False
    method.weight_scale_name = "weight_scale_inv" if block else "weight_scale"
    method.quant_config = SimpleNamespace(activation_scheme="dynamic")
    layer._expert_routing_tables = lambda: None
    set_up(method, layer, None)
    made: list[Any] = []
    kernels = SimpleNamespace(scaled_fp8_quant=requantized)
    with (
        mock.patch.object(fp8_utils, "ops", kernels),
        mock.patch.object(fp8, "make_fp8_moe_kernel", lambda **given: made.append(given["moe_quant_config"])),
    ):
        method.process_weights_after_loading(layer)
    (config,) = made
    method.moe_kernel = Kernel((config.w1_scale, config.w2_scale))
    return method, layer


def set_up(method: Any, layer: Any, kernel: Any) -> None:
    """Set what all methods and layers have in common."""
    method.experts_cls, method.moe_kernel = TritonExperts, kernel
    method.moe = SimpleNamespace(
        moe_parallel_config=SimpleNamespace(dp_size=1, ep_size=1, pcp_size=1, sp_size=1),
        has_bias=False,
        is_act_and_mul=True,
    )
    layer.activation, layer.apply_router_weight_on_input = MoEActivation.SILU, False
    layer.global_num_experts, layer.expert_map = EXPERTS, None


def check(method: Any, layer: Any, tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
    batch = batch_of(tokens, dtype)
    got = method.apply(layer, *batch, None, None)
    want = expected(*batch, *weights_in(layer))
    torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02)


def check_declined(method: Any, layer: Any, why: str) -> None:
    """That the replacement does not ask llm_comm."""
    with mock.patch.object(hooks, "computed", never):
        got = hooks.fp8_apply(lambda *_: "vLLM's", method, layer, *batch_of(4), None, None)
    assert got == "vLLM's", why


def check_untouched(log: Log, said: str) -> None:
    """That experts are vLLM's, and the line at start says so."""
    check_start(log, said)
    method, layer = experts()
    check(method, layer, 4)
    assert method.moe_kernel.tokens == [4]
    assert not log.having("first experts")
