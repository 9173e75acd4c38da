"""Table of the seams to SGLang (``llm_comm/integrations/seams.py``). This module imports nothing of SGLang when it is
loaded."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm_comm.integrations.seams import Row, Table, digest_rows, flashinfer_rows, named_rows, replace

ALL_REDUCE = "all-reduce"
GATHERING = "all-gather and reduce-scatter"
MEMORY = "release of memory"
THEIR_FUSION = "notice of FlashInfer's fused norms"
NORMS = "fused norms"
LINEAR = "linear layers"
FP8 = "linear layers of FP8"
SILU_AND_MUL = "gate and up with silu-and-mul"
ROPE = "q, k and v with RoPE and KV cache"
INVARIANT_LINEAR = "batch-invariant linear layers"
EXPERTS = "experts"
FP8_EXPERTS = "experts of FP8"
ROUTER = "router of experts"

#: Consequence of each feature being off, for messages.
LOST = {
    ALL_REDUCE: "All collectives are SGLang's",
    GATHERING: "All-gathers and reduce-scatters are SGLang's",
    MEMORY: "Workspaces of llm_comm stay while SGLang releases memory",
    THEIR_FUSION: "Whether SGLang sums by FlashInfer is not told",
    NORMS: "All-reduces are fused with norms only where SGLang does so by itself",
    LINEAR: "Linear layers are SGLang's",
    FP8: "Linear layers of FP8 are SGLang's",
    SILU_AND_MUL: "Silu-and-mul of MLPs is SGLang's",
    ROPE: "Norms of heads, RoPE and writes to the KV cache are SGLang's",
    INVARIANT_LINEAR: "Linear layers are SGLang's",
    EXPERTS: "Experts are SGLang's",
    FP8_EXPERTS: "Experts of FP8 are SGLang's",
    ROUTER: "The router of experts is SGLang's",
}

_OURS = "llm_comm.integrations.sglang"
_STATE = "sglang.srt.distributed.parallel_state"
_GROUP = f"{_STATE}:GroupCoordinator"
_THEIRS = "sglang.srt.distributed.device_communicators.custom_all_reduce:CustomAllreduce"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_BOUNDARY = "sglang.srt.layers.communicator:LayerCommunicator"
_UNQUANTIZED = "sglang.srt.layers.quantization.unquant"
_FP8_METHOD = "sglang.srt.layers.quantization.fp8:Fp8MoEMethod"
_LINEAR = "sglang.srt.layers.linear"
_RUNNER = "sglang.srt.layers.moe.moe_runner"
_SINCE_0_5_23 = "sglang.srt.layers.moe.utils:_MoeRunnerBackendPredicates"
_FUSED_MOE = f"{_RUNNER}.triton_utils.fused_moe"
_DISPATCHER = "sglang.srt.layers.moe.token_dispatcher.standard"
_LLAMA = "sglang.srt.models.llama"
_QWEN2 = "sglang.srt.models.qwen2"
_QWEN3 = "sglang.srt.models.qwen3"
_QWEN3_MOE = "sglang.srt.models.qwen3_moe"
_CONTEXT = "sglang.srt.runtime_context"

TIMEOUT = f"{_STATE}:_MODEL_PARALLEL_GROUP_TIMEOUT"
#: Module that exists from 0.5.21 on. It has SGLang's own rules for leaving the all-reduce of an MLP to the next layer.
NEW_BOUNDARIES = "sglang.srt.layers.layer_boundary"
#: Attribute that exists from 0.5.22 on. Llama's linear layers then leave their all-reduces to norms.
NEW_LLAMA = f"{_LLAMA}:LlamaDecoderLayer.stage_facts"
_OLD_BOUNDARIES, _OLD_LLAMA = f"!{NEW_BOUNDARIES}", f"!{NEW_LLAMA}"
#: SGLang's function that decides whether a norm includes the all-reduce: in 0.5.22 and later, in 0.5.21, and in older
#: releases.
GATE = (
    f"{NEW_BOUNDARIES}.residual.add_norm:flashinfer_ar_fusion_applies "
    f"{NEW_BOUNDARIES}.residual.add_norm:apply_flashinfer_allreduce_fusion "
    "sglang.srt.layers.communicator:apply_flashinfer_allreduce_fusion"
)
FP8_KERNEL = "sglang.srt.layers.quantization.fp8_utils:fp8_scaled_mm"
_NEW_FUSIONS = f"{NEW_BOUNDARIES}.fusions.allreduce"
UNQUANTIZED_LINEAR = f"{_UNQUANTIZED}:UnquantizedLinearMethod"
#: Attention layers whose ``forward`` is the layer of q, k and v, then norms of heads or none, RoPE, attention and the
#: output projection.
ATTENTIONS = (
    f"{_LLAMA}:LlamaAttention",
    "sglang.srt.models.mixtral:MixtralAttention",
    f"{_QWEN2}:Qwen2Attention",
    "sglang.srt.models.qwen2_moe:Qwen2MoeAttention",
    f"{_QWEN3}:Qwen3Attention",
    f"{_QWEN3_MOE}:Qwen3MoeAttention",
)
QKV = f"{_LINEAR}:QKVParallelLinear"
RADIX_ATTENTION = "sglang.srt.layers.radix_attention:RadixAttention"
KV_POOL = "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool"
_BACKENDS = "sglang.srt.layers.attention"
#: Attention backends that read k and v of a decode step from the KV cache alone.
BACKENDS = (
    f"{_BACKENDS}.flashattention_backend:FlashAttentionBackend",
    f"{_BACKENDS}.flashinfer_backend:FlashInferAttnBackend",
    f"{_BACKENDS}.triton_backend:TritonAttnBackend",
)
_ROTARY = "sglang.srt.layers.rotary_embedding.base:RotaryEmbedding"


def _option(name: str, group: str) -> str:
    """Return the symbols of a server option: of older releases, and of 0.5.23, with a class for each group of
    options."""
    return f"sglang.srt.server_args:ServerArgs.{name} sglang.srt.arg_groups.fields.{group}.{name}"


ROWS = (
    Row(ALL_REDUCE, f"{_GROUP}.__init__", patch=f"{_OURS}.plugin:make_group", by_digest=False),
    Row(ALL_REDUCE, f"{_GROUP}.destroy", patch=f"{_OURS}.plugin:destroy_group", takes=(), by_digest=False),
    Row(
        ALL_REDUCE,
        f"{_STATE}:initialize_model_parallel",
        patch=f"{_OURS}.plugin:make_all_groups",
        by_digest=False,
        is_required=False,
        lost="Each group takes as much memory as if there were no other",
    ),
    Row(ALL_REDUCE, f"{_GROUP}.all_reduce", takes=("input_",), by_digest=False),
    Row(ALL_REDUCE, f"{_THEIRS}.should_custom_ar", takes=("inp",), by_digest=False),
    Row(ALL_REDUCE, f"{_THEIRS}.custom_all_reduce", takes=("input",), by_digest=False),
    *named_rows(
        ALL_REDUCE,
        *(f"{_GROUP}.{name}" for name in ("ca_comm", "unique_name", "cpu_group", "device", "world_size")),
        f"{_STATE}:_ENABLE_CUSTOM_ALL_REDUCE",
        f"{_THEIRS}.disabled",
        "sglang.srt.environ:envs",
        "sglang.srt.environ:Envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE",
        "sglang.srt.utils:is_cuda",
        "sglang.srt.plugins.hook_registry:HookRegistry.register",
        "sglang.srt.plugins.hook_registry:HookType",
        f"{_CONTEXT}:get_disagg",
        f"{_CONTEXT}:get_exec",
        _option("encoder_only", "disagg:Disagg"),
        _option("elastic_ep_backend", "exec_:ExecMoe"),
    ),
    Row(ALL_REDUCE, TIMEOUT, by_digest=False, is_required=False, lost="Waits are bounded by llm_comm's own limit"),
    *named_rows(THEIR_FUSION, _option("flashinfer_allreduce_fusion_backend", "exec_:ExecComm")),
    *flashinfer_rows(),
    # All-gathers and reduce-scatters: methods that end in NCCL.
    *(
        Row(GATHERING, f"{_GROUP}.{name}", patch=f"{_OURS}.gathering:{name.lstrip('_')}")
        for name in (
            "_all_gather_into_tensor",
            "all_gatherv",
            "all_gather",
            "_reduce_scatter_tensor",
            "reduce_scatterv",
        )
    ),
    *digest_rows(GATHERING, f"{_STATE}:_groups"),
    Row(MEMORY, f"{_UPDATER}.release_memory_occupation", patch="llm_comm.integrations.sleeping:release_last"),
    Row(MEMORY, f"{_UPDATER}.resume_memory_occupation", patch="llm_comm.integrations.sleeping:restore_first"),
    # Norms that include the all-reduce before them.
    Row(NORMS, "sglang.srt.layers.layernorm:_forward_with_allreduce_fusion", patch=f"{_OURS}.fused_norm:around_norm"),
    Row(NORMS, GATE, patch=f"{_OURS}.fusion:around_gate"),
    *digest_rows(
        NORMS,
        "sglang.srt.layers.layernorm:RMSNorm",
        "sglang.srt.layers.layernorm:GemmaRMSNorm",
        "sglang.srt.layers.dp_attention:is_dp_attention_enabled",
        f"{_STATE}:_groups",
        f"{_CONTEXT}:get_parallel",
        f"{_CONTEXT}:get_spec",
        f"{_CONTEXT}:get_server_args",
    ),
    # Callers of the norm and of the gate.
    *digest_rows(
        NORMS,
        # Names from 0.5.22 on, and in 0.5.21.
        f"{_NEW_FUSIONS}:fused_attn_input {_NEW_FUSIONS}:complete_attention_input",
        f"{_NEW_FUSIONS}:fused_ffn_input {_NEW_FUSIONS}:complete_ffn_input",
        f"{NEW_BOUNDARIES}.exit:_batch_allows_deferred_sum {NEW_BOUNDARIES}.exit:_can_defer_ffn_reduction",
        where=NEW_BOUNDARIES,
    ),
    Row(NORMS, f"{_BOUNDARY}.__init__", patch=f"{_OURS}.fusion:make_boundary", where=_OLD_BOUNDARIES),
    Row(
        NORMS,
        f"{_BOUNDARY}.should_fuse_mlp_allreduce_with_next_layer",
        patch=f"{_OURS}.fusion:around_deferral",
        where=_OLD_BOUNDARIES,
    ),
    *digest_rows(
        NORMS,
        f"{_BOUNDARY}.prepare_attn",
        f"{_BOUNDARY}.prepare_mlp",
        "sglang.srt.layers.communicator:CommunicateSummableTensorPairFn._trivial",
        "sglang.srt.arg_groups.overrides:_FLASHINFER_ALLREDUCE_FUSION_ARCHS",
        where=_OLD_BOUNDARIES,
    ),
    # Dense models whose linear layers all-reduce.
    Row(
        NORMS,
        f"{_QWEN3}:Qwen3DecoderLayer.forward",
        patch=f"{_OURS}.dense_models:around_qwen3_layer",
        where=_OLD_BOUNDARIES,
    ),
    Row(NORMS, f"{_QWEN3}:Qwen3Model.__init__", patch=f"{_OURS}.dense_models:make_qwen3", where=_OLD_BOUNDARIES),
    Row(
        NORMS,
        f"{_LLAMA}:LlamaDecoderLayer.forward",
        patch=f"{_OURS}.dense_models:around_llama_layer",
        where=_OLD_LLAMA,
    ),
    Row(NORMS, f"{_LLAMA}:LlamaModel.__init__", patch=f"{_OURS}.dense_models:make_llama", where=_OLD_LLAMA),
    *digest_rows(
        NORMS,
        f"{_LLAMA}:LlamaModel.forward",
        f"{_LLAMA}:LlamaMLP.forward",
        f"{_LLAMA}:LlamaAttention.forward",
        f"{_LINEAR}:RowParallelLinear.forward",
        where=_OLD_LLAMA,
    ),
    # Linear layers before and after norms that include the all-reduce.
    Row(LINEAR, f"{UNQUANTIZED_LINEAR}.apply", patch=f"{_OURS}.linear:apply"),
    Row(LINEAR, f"{UNQUANTIZED_LINEAR}.create_weights", patch=f"{_OURS}.linear:create_weights"),
    *digest_rows(
        LINEAR,
        f"{_UNQUANTIZED}:get_bf16_gemm_backend",
        f"{_LINEAR}:RowParallelLinear.__init__",
        f"{_LINEAR}:ColumnParallelLinear.__init__",
    ),
    Row(
        FP8,
        FP8_KERNEL,
        patch=f"{_OURS}.linear:around_fp8_scaled_mm",
    ),
    # MLPs whose gate and up are one layer. The hooks bypass the forward of that layer and of the activation, so both
    # must be those of a tested release.
    Row(SILU_AND_MUL, f"{_LLAMA}:LlamaMLP.forward", patch=f"{_OURS}.gated_mlps:around_llama_mlp"),
    Row(SILU_AND_MUL, f"{_QWEN2}:Qwen2MLP.forward", patch=f"{_OURS}.gated_mlps:around_qwen2_mlp"),
    *digest_rows(
        SILU_AND_MUL,
        f"{_LINEAR}:ColumnParallelLinear.forward",
        "sglang.srt.layers.activation:SiluAndMul.forward_cuda",
    ),
    *named_rows(SILU_AND_MUL, f"{_CONTEXT}:get_forward"),
    # Attention layers. The hook bypasses what is between the input and the attention backend.
    *(Row(ROPE, f"{attention}.forward", patch=f"{_OURS}.attention:around_forward") for attention in ATTENTIONS),
    *digest_rows(
        ROPE,
        f"{_LLAMA}:LlamaAttention.forward_prepare_native",
        f"{_QWEN3}:Qwen3Attention.forward_prepare_native",
        *(
            f"{_QWEN3_MOE}:Qwen3MoeAttention.{name}"
            for name in ("forward_prepare", "forward_prepare_native", "apply_qk_norm_rope", "forward_core")
        ),
        "sglang.srt.models.utils:apply_qk_norm",
        "sglang.srt.layers.layernorm:RMSNorm",
        f"{QKV}.__init__",
        f"{_LINEAR}:ColumnParallelLinear.forward",
        f"{_ROTARY}.forward_cuda",
        f"{_ROTARY}._compute_cos_sin_cache",
        f"{RADIX_ATTENTION}.forward",
        f"{KV_POOL}.set_kv_buffer",
        f"{KV_POOL}._store_kv_layer",
        f"{KV_POOL}.get_kv_buffer",
        *(f"{backend}.forward_decode" for backend in BACKENDS),
    ),
    *named_rows(ROPE, f"{_CONTEXT}:get_exec", "sglang.srt.model_executor.forward_context:get_attn_backend"),
    Row(INVARIANT_LINEAR, f"{UNQUANTIZED_LINEAR}.apply", patch=f"{_OURS}.invariant_linear:around_apply"),
    Row(EXPERTS, f"{_UNQUANTIZED}:UnquantizedFusedMoEMethod.apply", patch=f"{_OURS}.experts:around_apply"),
    *digest_rows(
        EXPERTS,
        f"{_UNQUANTIZED}:UnquantizedFusedMoEMethod.forward_cuda",
        f"{_UNQUANTIZED}:UnquantizedFusedMoEMethod.process_weights_after_loading",
        f"{_DISPATCHER}:StandardDispatchOutput",
        f"{_DISPATCHER}:StandardCombineInput",
        "sglang.srt.layers.moe.topk:StandardTopKOutput",
        f"{_RUNNER}.base:MoeRunnerConfig",
    ),
    # The functions that multiply the sum by the factor of the configuration.
    *digest_rows(EXPERTS, f"{_FUSED_MOE}:_fused_moe_kernel_sequence", where=f"!{_SINCE_0_5_23}"),
    *digest_rows(EXPERTS, f"{_FUSED_MOE}:moe_combine_topk", where=_SINCE_0_5_23),
    Row(FP8_EXPERTS, f"{_FP8_METHOD}.apply", patch=f"{_OURS}.experts:around_fp8_apply"),
    *digest_rows(
        FP8_EXPERTS,
        f"{_FP8_METHOD}.get_triton_quant_info",
        f"{_FP8_METHOD}.process_weights_after_loading",
        f"{_FP8_METHOD}.process_weights_after_loading_block_quant",
    ),
    Row(ROUTER, f"{_LINEAR}:ReplicatedLinear.forward", patch=f"{_OURS}.routers:around_forward"),
    Row(ROUTER, "sglang.srt.layers.moe.topk:fused_topk", patch=f"{_OURS}.routers:around_fused_topk"),
    *digest_rows(ROUTER, "sglang.srt.layers.moe.topk:select_experts"),
    *named_rows(
        ROUTER, _option("ep_dispatch_algorithm", "exec_:ExecMoe"), _option("enable_symm_mem", "exec_:ExecComm")
    ),
)


def _install(symbol: str, patch: Callable[..., Any]) -> None:
    """Replace a symbol: SGLang's own by SGLang's hook registry, others by ``replace``.

    Raises:
        RuntimeError: SGLang's registry could not hook the symbol.
    """
    if not symbol.startswith("sglang."):
        replace(symbol, patch)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Hooks are applied right away: SGLang's own call of ``apply_hooks`` was before groups are made.
    target = symbol.replace(":", ".")
    before = pkgutil.resolve_name(target)
    HookRegistry.register(target, patch, HookType.AROUND)
    HookRegistry.apply_hooks()  # logs failures instead of raising, so the check below is needed
    if pkgutil.resolve_name(target) is before:
        raise RuntimeError(f"{target} cannot be hooked")


NEEDS = {FP8: LINEAR, SILU_AND_MUL: LINEAR, ROPE: LINEAR, FP8_EXPERTS: EXPERTS}
TABLE = Table("SGLang", "sglang", ROWS, LOST, Path(__file__).with_name("digests.json"), _install, NEEDS)
