"""SGLang's experts by llm_comm: run by ``test_sglang_experts.py``, as ``scenarios.py`` is by its test.

The methods of experts without quantization and of FP8 ones, and what they take, are excerpts, as the norms of
``fusion_scenarios.py`` are.
The runner of SGLang's Triton kernels is a stand-in.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import linear_scenarios
import torch
from expert_layers import (
    EXPERTS,
    FP8,
    HIDDEN,
    INNER,
    TOP_K,
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
from fusion_scenarios import Norm, empty_package, excerpt, names_in, no, server, source_of
from linear_scenarios import meet_elsewhere
from lost_seams import OTHER_BODY, lose
from rank_processes import Log, dist_rank, scenario, serve
from scenarios import ours, server_options, sglang_groups

from llm_comm.integrations.sglang import seams

_MOE, _UNQUANTIZED = "sglang.srt.layers.moe", "sglang.srt.layers.quantization.unquant"
_METHOD = f"{_UNQUANTIZED}:UnquantizedFusedMoEMethod.apply"
_FP8 = "sglang.srt.layers.quantization.fp8"

# ---- Excerpts -------------------------------------------------------------------------------------------------------

for package in ("", ".token_dispatcher", ".moe_runner"):
    empty_package(_MOE + package)
# Since 0.5.23 the questions that a backend answers are apart.
_PREDICATES = {"_MoeRunnerBackendPredicates"} & names_in(source_of(f"{_MOE}.utils")[1].body)
backends = excerpt(f"{_MOE}.utils", "MoeRunnerBackend", *_PREDICATES, Enum=enum.Enum)
dispatcher = excerpt(
    f"{_MOE}.token_dispatcher.standard", "StandardDispatchOutput", "StandardCombineInput", NamedTuple=NamedTuple
)


def topk_softmax(factors: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, renormalize: bool) -> None:
    """SGLang's kernel."""
    CHOSEN_BY_SGLANG.append(len(logits))
    values, chosen = logits.float().softmax(1).topk(ids.shape[1])
    factors.copy_(values / values.sum(1, keepdim=True) if renormalize else values)
    ids.copy_(chosen)


#: Tokens of each call of it.
CHOSEN_BY_SGLANG: list[int] = []

names = ("StandardTopKOutput", "fused_topk")
topk = excerpt(
    f"{_MOE}.topk",
    *names,
    NamedTuple=NamedTuple,
    topk_softmax=topk_softmax,
    _is_cuda=False,
    _use_rocm_triton_softmax_topk=no,
)
runners = excerpt(f"{_MOE}.moe_runner.base", "MoeRunnerConfig", dataclass=dataclasses.dataclass)


class Method(Norm):
    """The bases of the method, which choose by platform."""

    def forward(self, **operands: Any) -> Any:
        return self.forward_cuda(**operands)  # type: ignore[operator]


unquantized = excerpt(
    _UNQUANTIZED,
    "UnquantizedFusedMoEMethod",
    FusedMoEMethodBase=type("FusedMoEMethodBase", (), {}),
    **dict.fromkeys(("MultiPlatformOp", "BaseFusedOp"), Method),  # the latter since 0.5.18
    TritonMoeQuantInfo=SimpleNamespace,
    get_moe_runner_backend=lambda: SimpleNamespace(is_flashinfer_cutlass=no),
    UnquantizedLinearMethod=linear_scenarios.unquantized.UnquantizedLinearMethod,
)


sys.modules[f"{_MOE}.token_dispatcher"].StandardCombineInput = dispatcher.StandardCombineInput  # type: ignore[attr-defined]
_PLATFORMS = ("hip", "npu", "cpu", "xpu", "gfx95_supported", "fp8_fnuz")
fp8 = excerpt(
    _FP8,
    "Fp8MoEMethod",
    FusedMoEMethodBase=type("FusedMoEMethodBase", (), {"runner": None}),
    TritonMoeQuantInfo=SimpleNamespace,
    get_moe_runner_backend=lambda: backends.MoeRunnerBackend.TRITON,
    **{f"_is_{name}": False for name in _PLATFORMS},
    _use_hip_int4=False,
    **dict.fromkeys(("use_intel_amx_backend", "use_intel_xpu_backend", "is_xpu"), no),
    per_tensor_dequantize=lambda weight, scale: weight.float() * scale,
    scaled_fp8_quant=requantized,
)


class Runner:
    """SGLang's kernels: computes the same in fp64, and notes the tokens."""

    def __init__(self, backend: Any) -> None:
        self.runner_backend = backend
        self.tokens: list[int] = []

    def run(self, given: Any, info: Any) -> Any:
        self.tokens.append(len(given.hidden_states))
        scales = getattr(info, "w13_scale", None), getattr(info, "w2_scale", None)
        weights = map(dequantized, (info.w13_weight, info.w2_weight), scales)
        y = expected(*batch_in(given), *weights).to(given.hidden_states.dtype)
        return dispatcher.StandardCombineInput(hidden_states=y)


# ---- Scenarios ------------------------------------------------------------------------------------------------------


@scenario(smoke=True, LLM_COMM_FUSE_EXPERTS="1")
def experts_of_few_tokens_are_computed_by_llm_comm() -> None:
    with served() as log:
        assert len(log.having("; experts of up to 64 tokens by llm_comm (fuse_experts)")) == (dist_rank() == 0)
        for dtype in (torch.bfloat16, torch.float16):
            method, layer = experts(dtype)
            for tokens in (1, 17, 64):
                check(method, layer, given_of(tokens, dtype))
            assert method.runner.tokens == []
            check(method, layer, given_of(65, dtype))
            check(method, layer, given_of(0, dtype))
            assert method.runner.tokens == [65, 0]
        said = f"llm_comm: first experts computed by llm_comm (2 ranks, shape (1, {HIDDEN}), weight (6, 128, {HIDDEN}))"
        assert len(log.having(said)) == (dist_rank() == 0)
        assert len(log.having("first experts")) == (dist_rank() == 0)


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def tokens_without_an_expert_of_this_rank_get_zeros() -> None:
    with served():
        method, layer = experts()
        given = given_of(5)
        given.topk_output.topk_ids[0] = -1
        given.topk_output.topk_ids[3, 1] = -1
        check(method, layer, given)
        once = method.apply(layer, given).hidden_states
        for factor, expected in ((2, 2 * once), (None, once)):
            with mock.patch.object(method.moe_runner_config, "routed_scaling_factor", factor):
                assert torch.equal(method.apply(layer, given).hidden_states, expected)
        assert not method.apply(layer, given).hidden_states[0].any()
        assert method.runner.tokens == []


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def what_llm_comm_does_not_compute_is_left_to_sglang() -> None:
    with served():
        method, layer = experts()
        given, runner = given_of(4), method.runner
        settings = {
            "activation": "gelu",
            "is_gated": False,
            "apply_router_weight_on_input": True,
            "no_combine": True,
            "gemm1_alpha": 1.7,
            "gemm1_clamp_limit": 7.0,
            "swiglu_limit": 7.0,
            "gate_up_interleaved": False,
        }
        for name, value in settings.items():
            with mock.patch.object(method, "moe_runner_config", runners.MoeRunnerConfig(**{name: value})):
                check(method, layer, given)
            assert runner.tokens.pop() == 4, name
        assert not runner.tokens
        for name in ("w13_weight_bias", "w2_weight_bias"):
            with mock.patch.object(layer, name, torch.zeros(1), create=True):
                check(method, layer, given)
            assert runner.tokens.pop() == 4, name
        with mock.patch.object(method, "w13_swiglu_interleaved", True, create=True):
            check(method, layer, given)
        assert runner.tokens.pop() == 4
        with mock.patch.object(runner, "runner_backend", backends.MoeRunnerBackend.DEEP_GEMM):
            deep_gemm = {f"{_MOE}.moe_runner.deep_gemm": SimpleNamespace(DeepGemmMoeQuantInfo=SimpleNamespace)}
            environment = SimpleNamespace(SGLANG_DEEPEP_BF16_DISPATCH=SimpleNamespace(get=no))
            with (
                mock.patch.dict(sys.modules, deep_gemm),
                mock.patch.object(unquantized, "envs", environment, create=True),
            ):
                check(method, layer, given)
        assert runner.tokens.pop() == 4
        packed = SimpleNamespace(**given.topk_output._asdict())
        check(method, layer, given._replace(topk_output=packed))
        assert runner.tokens.pop() == 4
        of_int64 = given.topk_output._replace(topk_ids=given.topk_output.topk_ids.long())
        check(method, layer, given._replace(topk_output=of_int64))
        assert runner.tokens.pop() == 4
        kept = layer.w13_weight.data
        layer.w13_weight.data = torch.cat([kept.new_empty(4), kept.reshape(-1)])[4:].view(kept.shape)
        check(method, layer, given)  # not aligned
        layer.w13_weight.data = kept
        assert runner.tokens.pop() == 4
        check(method, layer, given)
        assert not runner.tokens
        ours("tp").leave()
        check(method, layer, given)
        assert runner.tokens == [4]


@scenario(LLM_COMM_FUSE_EXPERTS="auto", LLM_COMM_TUNE_AT_START="1")
def with_auto_batches_that_are_faster_are_computed_by_llm_comm() -> None:
    with served() as log:
        assert len(log.having("; experts of up to 64 tokens by llm_comm, where it is faster")) == (dist_rank() == 0)
        method, layer = experts()
        tokens = method.runner.tokens
        with timed() as measured:
            for _ in range(2):
                check(method, layer, given_of(4))
            assert measured == [(4, 8)] * 2
            assert tokens == [4] * 8  # of the measurement
            del tokens[:]
            check(method, layer, given_of(3))  # by the measurement of 4
            assert not tokens
            for count in (15, 9, 16, 65, 0):
                check(method, layer, given_of(count))
            assert measured[2:] == [(15, 8)] * 2
            assert tokens == [15] * 8 + [15, 9, 16, 65, 0]
            for _ in range(2):
                check(method, layer, given_of(2))
            assert tokens[-2:] == [2, 2]
            assert measured[4:] == [(2, 8)]
            del tokens[:]
            check(method, layer, given_of(17))
            check(method, layer, given_of(22))  # more than a quarter larger
            assert measured[5:] == [(17, 8)] * 2 + [(22, 8)] * 2
            given = given_of(33)
            of_int64 = given.topk_output._replace(topk_ids=given.topk_output.topk_ids.long())
            check(method, layer, given._replace(topk_output=of_int64))  # which llm_comm declines
            assert tokens[-1] == 33
            assert len(measured) == 9
        assert len(log.having("llm_comm: experts of 4 tokens: 0.5 us, SGLang's 1.0")) == (dist_rank() == 0)
        assert len(log.having("experts of 2 tokens were not measured and are SGLang's: no memory")) == 1


@scenario(LLM_COMM_FUSE_EXPERTS="auto", LLM_COMM_TUNE_AT_START="1")
def experts_of_other_ranks_are_drawn_too() -> None:
    """With expert parallelism SGLang gives them the number -1; a rank may have fewer than a token chooses."""
    with served(), timed() as measured:
        method, layer = experts()
        method.moe_runner_config = runners.MoeRunnerConfig(EXPERTS, 1, HIDDEN, INNER, layer_id=3, top_k=TOP_K)
        layer.w13_weight.data, layer.w2_weight.data = layer.w13_weight.data[:1], layer.w2_weight.data[:1]
        given = given_of(4)
        given.topk_output.topk_ids[given.topk_output.topk_ids > 0] = -1
        check(method, layer, given)
        assert measured == [(4, 8)] * 2


@scenario(LLM_COMM_FUSE_EXPERTS="auto", LLM_COMM_TUNE_AT_START="0")
def with_auto_and_nothing_measured_experts_are_sglangs() -> None:
    with served() as log:
        check_untouched(log, "")


@scenario()
def without_the_option_experts_are_sglangs() -> None:
    before = unquantized.UnquantizedFusedMoEMethod.apply
    with served() as log:
        assert unquantized.UnquantizedFusedMoEMethod.apply is before
        check_untouched(log, "")
    os.environ["LLM_COMM_FUSE_EXPERTS"] = "1"
    meet_elsewhere("second")
    with served() as log:
        method, layer = experts()
        check(method, layer, given_of(4))
        assert not method.runner.tokens
    os.environ["LLM_COMM_FUSE_EXPERTS"] = "0"
    meet_elsewhere("third")
    with served() as log:  # the hook is there by now
        check_untouched(log, "")


@scenario(LLM_COMM_FUSE_EXPERTS="1", LLM_COMM_DETERMINISTIC="1", SGLANG_ENABLE_DETERMINISTIC_INFERENCE="1")
def in_deterministic_mode_experts_are_sglangs() -> None:
    """Larger batches would have other bits."""
    with served() as log:
        check_untouched(log, "; experts are SGLang's: deterministic inference is on")


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def one_rank_that_cannot_be_hooked_takes_the_others_along() -> None:
    if dist_rank() == 1:
        lose(seams.TABLE, _METHOD)
    with served() as log:
        check_untouched(log, "; experts are SGLang's: rank 1 (global rank 1): ")


# ---- FP8 ------------------------------------------------------------------------------------------------------------


@scenario(smoke=True, LLM_COMM_FUSE_EXPERTS="1")
def fp8_experts_are_computed_by_llm_comm() -> None:
    with served() as log:
        for block in (True, False):
            method, layer = fp8_experts(block)
            for tokens in (1, 17, 64):
                for dtype in (torch.bfloat16, torch.float16):
                    check(method, layer, given_of(tokens, dtype))
            assert method.runner.tokens == []
            check(method, layer, given_of(65))
            assert method.runner.tokens == [65]
        assert len(log.having("first experts")) == (dist_rank() == 0)


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def fp8_experts_that_llm_comm_does_not_compute_are_left_to_sglang() -> None:
    with served():
        method, layer = fp8_experts(block=True)
        changes: list[tuple[Any, str, Any]] = [
            (method.runner, "runner_backend", backends.MoeRunnerBackend.DEEP_GEMM),
            (method, "runner", None),  # of CUTLASS
            (method, "moe_runner_config", runners.MoeRunnerConfig(activation="gelu")),
            (method, "weight_block_size", [1, 32]),
            (method, "weight_block_size", [64, 128]),
            (method, "weight_block_size", None),
            (method, "block_quant", False),
            (layer, "w13_weight_bias", torch.zeros(1)),
            (layer, "_mega_moe_weights_built", True),
            *((layer, name, value) for name, value in wrong_scales(layer)),
        ]
        for place, name, value in changes:
            with mock.patch.object(place, name, value, create=not hasattr(place, name)):
                check_declined(method, layer, name)
        check(method, layer, given_of(4))
        method, layer = fp8_experts(block=False)
        with mock.patch.object(
            layer, "w13_weight_scale", parameter(torch.ones(EXPERTS, 2))
        ):  # gate and up have their own
            check_declined(method, layer, "w13_weight_scale")
        check(method, layer, given_of(4))
        assert not method.runner.tokens
        ours("tp").leave()
        check(method, layer, given_of(4))
        assert method.runner.tokens == [4]


@scenario(LLM_COMM_FUSE_EXPERTS="auto", LLM_COMM_TUNE_AT_START="1")
def with_auto_each_form_of_scales_is_measured() -> None:
    with served(), timed() as measured:
        for block in (True, False, True):
            method, layer = fp8_experts(block)
            check(method, layer, given_of(4))
        check(*experts(), given_of(4))
        assert measured == [(4, 8)] * 6


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def fp8_experts_of_an_untested_release_are_sglangs() -> None:
    lose(seams.TABLE, f"{_FP8}:Fp8MoEMethod.get_triton_quant_info", how=OTHER_BODY)
    with served() as log:
        assert len(log.having("; experts of up to 64 tokens by llm_comm (fuse_experts)")) == (dist_rank() == 0)
        assert len(log.having(f"; experts of FP8 are SGLang's: {_FP8}:Fp8MoEMethod.get_")) == (dist_rank() == 0)
        method, layer = fp8_experts(block=True)
        check(method, layer, given_of(4))
        assert method.runner.tokens == [4]
        method, layer = experts()
        check(method, layer, given_of(4))
        assert not method.runner.tokens


# ---- The router ------------------------------------------------------------------------------------------------------


@scenario(smoke=True, LLM_COMM_FUSE_EXPERTS="1")
def the_router_is_computed_by_llm_comm_once_it_is_known() -> None:
    with served() as log:
        assert len(log.having("(fuse_experts); their router by llm_comm")) == (dist_rank() == 0)
        for renormalize in (True, False):
            for bias in (False, True):
                gate = router(bias)
                for tokens, is_ours in ((4, False), (4, True), (64, True), (65, False), (1, True)):
                    check_router(gate, tokens, is_ours, renormalize=renormalize)
        said = f"llm_comm: first router computed by llm_comm (2 ranks, shape (4, {HIDDEN}), weight (6, {HIDDEN}))"
        assert len(log.having(said)) == (dist_rank() == 0)
        ours("tp").leave()
        check_router(gate, 4, False)


@scenario(LLM_COMM_FUSE_EXPERTS="auto", LLM_COMM_TUNE_AT_START="1")
def with_auto_routers_of_sizes_that_were_measured_are_computed_by_llm_comm() -> None:
    from llm_comm.integrations.sglang import routers as hooks  # it imports the excerpts

    with served() as log:
        assert len(log.having("; their router by llm_comm, where it is faster")) == (dist_rank() == 0)
        gate = router()
        check_router(gate, 4, False)
        check_router(gate, 4, True)
        with mock.patch.object(hooks, "was_faster", return_value=False) as was_faster:
            check_router(gate, 4, False)
        was_faster.assert_called_once_with(6, 4, HIDDEN)
        check_router(gate, 4, True)


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def a_router_of_another_kind_is_left_to_sglang() -> None:
    with served():
        gate = router()
        check_router(gate, 4, False)
        check_router(gate, 4, True)
        check_router(gate, 4, False, top_k=3)  # settings have changed
        check_router(gate, 4, True, top_k=3)
        others = {"num_fused_shared_experts": 1, "num_token_non_padded": torch.tensor(2), "correction_bias": 1}
        for name, value in others.items():
            check_router(gate, 4, False, top_k=3, **{name: value})
        check_router(gate, 4, True, top_k=3, routed_scaling_factor=2.5)
        # Logits that are not the last layer's, or not of a layer.
        logits, _ = gate(batch_of(4)[0])
        gate(batch_of(5)[0])
        choose(logits, 3)
        choose(logits.clone(), 3)
        assert [CHOSEN_BY_SGLANG.pop(), CHOSEN_BY_SGLANG.pop()] == [4, 4]
        with mock.patch.object(gate, "weight", torch.nn.Parameter(gate.weight.float(), requires_grad=False)):
            check_router(gate, 4, False, dtype=torch.float32)
        logits, _ = gate(batch_of(4)[0])
        choose(logits.mul_(-1), 3)
        assert CHOSEN_BY_SGLANG.pop() == 4
        gate.quant_method = linear_scenarios.QuantizedMethod()
        with mock.patch.object(gate.quant_method, "apply", lambda layer, x, bias: x @ layer.weight.T, create=True):
            check_router(gate, 4, False)


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def compiled_routers_are_sglangs_and_are_compiled_once() -> None:
    """The hooks keep the last logits. Graphs must not depend on them."""
    with served():
        gate, other, x = router(), router(), batch_of(4)[0]
        gate.quant_method = SimpleNamespace(apply=lambda layer, x, _: x @ layer.weight.T)
        compilations: list[int] = []

        def backend(graph: Any, _: Any) -> Any:
            compilations.append(1)
            return graph.forward

        def route(x: torch.Tensor) -> Any:
            logits, _ = gate(x)
            return topk.fused_topk(hidden_states=x, gating_output=logits, topk=TOP_K, renormalize=True)

        compiled = torch.compile(route, backend=backend)
        for is_known in (False, True):
            compiled(x)
            assert CHOSEN_BY_SGLANG.pop() == 4
            check_router(other, 4, is_known)
            other(x)  # nobody takes these logits
        compiled(x)
        assert CHOSEN_BY_SGLANG.pop() == 4
        assert compilations == [1]


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def one_rank_whose_router_cannot_be_hooked_takes_the_others_along() -> None:
    if dist_rank() == 1:
        lose(seams.TABLE, f"{_MOE}.topk:fused_topk")
    with served() as log:
        said = "(fuse_experts); their router is SGLang's: rank 1 (global rank 1): "
        assert len(log.having(said)) == (dist_rank() == 0)
        gate = router()
        for _ in range(2):
            check_router(gate, 4, False)


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def logits_that_sglang_overwrites_are_its_own() -> None:
    options = {"elastic_ep_backend": None, "ep_dispatch_algorithm": "fake"}
    with server_options(moe=options), served() as log:
        said = "; their router is SGLang's: --ep-dispatch-algorithm is fake"
        assert len(log.having(said)) == (dist_rank() == 0)


@scenario(LLM_COMM_FUSE_EXPERTS="1")
def choices_in_sglangs_symmetric_memory_are_its_own() -> None:
    options = {"flashinfer_allreduce_fusion_backend": None, "enable_symm_mem": True}
    with server_options(comm=options), served() as log:
        said = "; their router is SGLang's: --enable-symm-mem is set"
        assert len(log.having(said)) == (dist_rank() == 0)


# ---- What they are made of ------------------------------------------------------------------------------------------


@contextmanager
def served() -> Iterator[Log]:
    """A server with two ranks; its log."""
    with sglang_groups() as log, server(), torch.no_grad():
        yield log


def experts(dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """The method and the layer of experts, with numbers of this rank."""
    method = unquantized.UnquantizedFusedMoEMethod()
    method.runner = Runner(backends.MoeRunnerBackend.TRITON)
    method.moe_runner_config = runners.MoeRunnerConfig(EXPERTS, EXPERTS, HIDDEN, INNER, layer_id=3, top_k=TOP_K)
    method._aiter_runner = None
    return method, layer_of(dtype)


def fp8_experts(block: bool) -> tuple[Any, Any]:
    """The method and the layer of FP8 experts, with numbers of this rank. A scale for each expert's tensor is what
    SGLang makes of a checkpoint."""
    config = SimpleNamespace(
        weight_block_size=[128, 128] if block else None,
        is_checkpoint_fp8_serialized=True,
        activation_scheme="dynamic",
        is_fp4_experts=False,
        dequant_fp4_to_fp8=False,
        convert_mxfp8_to_block_fp8=None,
    )
    method, layer = fp8.Fp8MoEMethod(config), fp8_layer_of(block)
    method.runner = Runner(backends.MoeRunnerBackend.TRITON)
    method.moe_runner_config = layer.moe_runner_config = runners.MoeRunnerConfig(EXPERTS, EXPERTS, HIDDEN, top_k=TOP_K)
    if not block:
        method.process_weights_after_loading(layer)
        assert layer.w13_weight.dtype is FP8
        assert layer.w13_weight_scale.shape == (EXPERTS,)
    return method, layer


def given_of(tokens: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """What the router hands on."""
    x, factors, ids = batch_of(tokens, dtype)
    return dispatcher.StandardDispatchOutput(x, None, topk.StandardTopKOutput(factors, ids, torch.empty(0)))


def router(bias: bool = False) -> Any:
    """A layer that makes the logits of the experts."""
    gate = linear_scenarios.linear.ReplicatedLinear(HIDDEN, EXPERTS, bias=bias, params_dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(1)
    for weight in gate.parameters():
        weight.data = torch.randn(weight.shape, generator=random).to(weight.dtype)
    return gate


def choose(logits: torch.Tensor, top_k: int, renormalize: bool = True, **others: Any) -> Any:
    """Call fused_topk as select_experts does, and check what it returns."""
    x = logits.new_empty(len(logits), HIDDEN)
    chosen = topk.fused_topk(hidden_states=x, gating_output=logits, topk=top_k, renormalize=renormalize, **others)
    factors, ids = chosen
    values = logits.float().softmax(1).gather(1, ids.long())
    torch.testing.assert_close(factors, values / values.sum(1, keepdim=True) if renormalize else values)
    assert torch.equal(logits.gather(1, ids.long()), logits.topk(top_k).values)
    return chosen


def check_router(
    gate: Any, tokens: int, is_ours: bool, top_k: int = TOP_K, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> None:
    """Route a batch, and check by whom its experts are chosen."""
    x = batch_of(tokens, dtype)[0]
    logits, bias = gate(x)
    assert bias is None
    exact = x.double() @ gate.weight.double().T + (0 if gate.bias is None else gate.bias.double())
    torch.testing.assert_close(logits.double(), exact, rtol=0.02, atol=0.05)
    choose(logits, top_k, **options)
    expected_calls = [] if is_ours else [tokens]
    assert expected_calls == CHOSEN_BY_SGLANG
    CHOSEN_BY_SGLANG.clear()


def batch_in(given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return given.hidden_states, given.topk_output.topk_weights, given.topk_output.topk_ids


def check(method: Any, layer: Any, given: Any) -> None:
    before = given.hidden_states.clone()
    got = method.apply(layer, given)
    assert type(got) is dispatcher.StandardCombineInput
    assert torch.equal(given.hidden_states, before)
    want = expected(*batch_in(given), *weights_in(layer))
    torch.testing.assert_close(got.hidden_states.double(), want, rtol=0.02, atol=0.02)


def check_declined(method: Any, layer: Any, why: str) -> None:
    """That the hook does not ask llm_comm."""
    from llm_comm.integrations.sglang import experts as hooks  # it imports the excerpts

    with mock.patch.object(hooks, "computed", never):
        got = hooks.around_fp8_apply(lambda *_: "SGLang's", method, layer, given_of(4))
    assert got == "SGLang's", why


def check_untouched(log: Log, said: str) -> None:
    """That experts are SGLang's, and the line at start says so."""
    check_start(log, said)
    method, layer = experts()
    check(method, layer, given_of(4))
    assert method.runner.tokens == [4]
    assert not log.having("first experts")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # as SGLang does
    serve(globals(), "sglang_scheduler_{}")
