"""Table of the seams to vLLM (``llm_comm/integrations/seams.py``). This module imports nothing of vLLM."""

from __future__ import annotations

from pathlib import Path

from llm_comm.integrations.seams import Row, Table, digest_rows, flashinfer_rows, named_rows, replace

ALL_REDUCE = "all-reduce"
GATHERING = "all-gather and reduce-scatter"
SLEEP = "sleep mode"
THEIR_FUSION = "vLLM's own fused norms"
NORMS = "fused norms in compiled graphs"
LINEAR = "fused linear layers"
ROPE = "qkv layers with rotary embedding"
CACHE_WRITES = "cache writes of qkv layers"
INVARIANT_LINEAR = "batch-invariant linear layers"
EAGER_NORMS = "fused norms outside compiled graphs"
EXPERTS = "experts"
FP8_EXPERTS = "experts of FP8"

#: Consequence of each feature being off, for messages.
LOST = {
    ALL_REDUCE: "All collectives are vLLM's",
    GATHERING: "All-gathers and reduce-scatters are vLLM's",
    SLEEP: "Workspaces of llm_comm stay while vLLM sleeps",
    THEIR_FUSION: "vLLM's fusion of all-reduces with norms stays as it is",
    NORMS: "All-reduces are fused with norms only where vLLM's own passes do so",
    LINEAR: "Linear layers are vLLM's",
    ROPE: "Rotary embeddings are vLLM's",
    CACHE_WRITES: "Keys and values are written by vLLM",
    INVARIANT_LINEAR: "Linear layers are vLLM's",
    EAGER_NORMS: "Norms of models that vLLM does not compile are vLLM's",
    EXPERTS: "Experts are vLLM's",
    FP8_EXPERTS: "Experts of FP8 are vLLM's",
}

_OURS = "llm_comm.integrations.vllm"
_COMMUNICATOR = "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator"
_PLATFORM = "vllm.platforms.cuda:CudaPlatformBase"
_GROUP = "vllm.distributed.parallel_state:GroupCoordinator"
_PASSES = "vllm.compilation.passes"
_LINEAR = "vllm.model_executor.layers.linear"
_ATTENTION = "vllm.model_executor.layers.attention.attention"
_FLASH_ATTENTION = "vllm.v1.attention.backends.flash_attn"
_MOE = "vllm.model_executor.layers.fused_moe"
_FP8_METHOD = "vllm.model_executor.layers.quantization.fp8:Fp8MoEMethod"

TIMEOUT = "vllm.config:ParallelConfig.distributed_timeout_seconds"
#: vLLM's function for an all-reduce and an RMSNorm in models that are not compiled.
FUNCTION = "fused_allreduce_rms_norm"
#: Symbol of ``FUNCTION`` in vLLM 0.33, and in 0.26.
SUMMING_NORM = (
    f"vllm.models.common.ops.fused_allreduce_rms_norm:{FUNCTION} vllm.models.deepseek_v32.nvidia.fused_ops:{FUNCTION}"
)
#: vLLM's function for an all-reduce and a norm of Gemma in models that are not compiled.
GEMMA_FUNCTION = "fused_allreduce_gemma_rms_norm"
SUMMING_GEMMA_NORM = f"vllm.model_executor.layers.{GEMMA_FUNCTION}:{GEMMA_FUNCTION}"


ROWS = (
    Row(
        ALL_REDUCE,
        f"{_PLATFORM}.get_device_communicator_cls",
        patch=f"{_OURS}.plugin:choose_communicator",
        takes=(),
        by_digest=False,
    ),
    Row(ALL_REDUCE, f"{_PLATFORM}.is_cuda", takes=(), by_digest=False),
    Row(ALL_REDUCE, f"{_COMMUNICATOR}.all_reduce", takes=("input_",), by_digest=False),
    Row(ALL_REDUCE, f"{_COMMUNICATOR}.destroy", takes=(), by_digest=False),
    Row(ALL_REDUCE, "vllm.config:get_current_vllm_config_or_none", takes=(), by_digest=False),
    *named_rows(
        ALL_REDUCE,
        *(f"{_COMMUNICATOR}.{name}" for name in ("unique_name", "cpu_group", "device", "world_size", "global_rank")),
        "vllm.platforms:current_platform",
        "vllm.envs:VLLM_BATCH_INVARIANT",
        *(f"vllm.config:VllmConfig.{name}" for name in ("additional_config", "parallel_config", "model_config")),
        *(
            f"vllm.config:ParallelConfig.{name}"
            for name in (
                "enable_elastic_ep",
                "tensor_parallel_size",
                "decode_context_parallel_size",
                "prefill_context_parallel_size",
                "data_parallel_size",
            )
        ),
    ),
    Row(
        ALL_REDUCE,
        TIMEOUT,
        by_digest=False,
        is_required=False,
        lost="Waits are bounded by llm_comm's own limit",
    ),
    *named_rows(
        THEIR_FUSION,
        "vllm.config:VllmConfig.compilation_config",
        "vllm.config:CompilationConfig.pass_config",
        "vllm.config.compilation:PassConfig.fuse_allreduce_rms",
    ),
    *flashinfer_rows(),
    # All-gathers and reduce-scatters: methods that ``gathering.py`` overrides.
    *digest_rows(
        GATHERING,
        *(f"{_COMMUNICATOR}.{name}" for name in ("all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv")),
        "vllm.config:ParallelConfig.use_sequence_parallel_moe",
    ),
    *(
        Row(GATHERING, f"{_COMMUNICATOR}.{name}", is_required=False)
        for name in ("reduce_scatterv_into_output", "custom_all_gather", "custom_reduce_scatter")
    ),
    *named_rows(
        GATHERING,
        "vllm.config:ParallelConfig.all2all_backend",
        "vllm.config:ParallelConfig.enable_expert_parallel",
        "vllm.config:ModelConfig.is_moe",
    ),
    Row(SLEEP, "vllm.v1.worker.gpu_worker:Worker.sleep", patch="llm_comm.integrations.sleeping:release_first"),
    Row(SLEEP, "vllm.v1.worker.gpu_worker:Worker.wake_up", patch="llm_comm.integrations.sleeping:restore_first"),
    *(
        Row(SLEEP, f"{_COMMUNICATOR}.{name}", is_required=False)
        for name in ("suspend", "resume", "checkpoint_prepare", "checkpoint_restore")
    ),
    # Norms in compiled graphs: symbols of the pass manager, the patterns and the operators.
    Row(NORMS, f"{_PLATFORM}.get_pass_manager_cls", patch=f"{_OURS}.plugin:choose_pass_manager", takes=()),
    *digest_rows(
        NORMS,
        f"{_PASSES}.pass_manager:PostGradPassManager",
        f"{_PASSES}.inductor_pass:get_pass_context",
        f"{_PASSES}.inductor_pass:enable_fake_mode",
        f"{_PASSES}.vllm_inductor_pass:VllmInductorPass",
        f"{_PASSES}.vllm_inductor_pass:VllmPatternMatcherPass",
        f"{_PASSES}.fusion.matcher_utils:MatcherQuantFP8",
        "vllm.model_executor.layers.quantization.utils.quant_utils:kFp8StaticTensorSym",
        "vllm.ir.ops:rms_norm",
        "vllm.ir.ops:fused_add_rms_norm",
        "vllm.ir.op:IrOp",
        "vllm._custom_ops:scaled_fp8_quant",
        "vllm.distributed:tensor_model_parallel_all_reduce",
        "vllm.distributed:get_tp_group",
        f"{_GROUP}.all_reduce",
        f"{_GROUP}._all_reduce_out_place",
        "vllm.distributed.parallel_state:_groups",
        "vllm.config:set_current_vllm_config",
        "vllm.config.utils:Range",
        "vllm.config:CompilationMode",
        "vllm.config:VllmConfig.compute_hash",
        "vllm.config:CompilationConfig.compile_ranges_endpoints",
        "vllm.config:ModelConfig.get_hidden_size",
        "vllm.config:ModelConfig.using_transformers_backend",
    ),
    Row(NORMS, f"{_PASSES}.fusion.add_rms_fusion:AddRMSNormFusionPass", is_required=False),
    *named_rows(
        NORMS,
        f"{_GROUP}.unique_name",
        f"{_GROUP}.device_communicator",
        "vllm.config:VllmConfig.compilation_config",
        "vllm.config:CompilationConfig.pass_config",
        *(f"vllm.config:CompilationConfig.{name}" for name in ("mode", "backend", "cache_dir", "compile_sizes")),
        "vllm.config:ModelConfig.is_encoder_decoder",
        "vllm.config:ModelConfig.dtype",
    ),
    # Linear layers in compiled graphs. They also need all rows of NORMS (``NEEDS``).
    *digest_rows(LINEAR, f"{_PASSES}.fusion.matcher_utils:MatcherSiluAndMul", "vllm._custom_ops:cutlass_scaled_mm"),
    *named_rows(LINEAR, "vllm.config:VllmConfig.offload_config", "vllm.utils.deep_gemm:is_deep_gemm_e8m0_used"),
    # Qkv layers with their rotary embedding. They also need all rows of LINEAR.
    *digest_rows(
        ROPE,
        "vllm._custom_ops:rotary_embedding",
        # Takes q and k with any strides, and makes heads of them before its operators.
        f"{_ATTENTION}:Attention.forward",
    ),
    *named_rows(
        ROPE,
        "vllm.config:CUDAGraphMode",
        "vllm.forward_context:get_forward_context",
        "vllm.forward_context:is_forward_context_available",
        "vllm.v1.attention.backend:AttentionType.DECODER",
    ),
    Row(
        CACHE_WRITES,
        f"{_FLASH_ATTENTION}:FlashAttentionImpl.do_kv_cache_update",
        patch=f"{_OURS}.rope:do_kv_cache_update",
    ),
    *digest_rows(
        CACHE_WRITES,
        f"{_ATTENTION}:get_attention_context",
        f"{_ATTENTION}:unified_kv_cache_update",
    ),
    *named_rows(
        CACHE_WRITES,
        *(
            f"vllm.forward_context:ForwardContext.{name}"
            for name in ("slot_mapping", "no_compile_layers", "cudagraph_runtime_mode")
        ),
        *(
            f"{_ATTENTION}:Attention.{name}"
            for name in (
                "layer_name",
                "kv_cache",
                "kv_cache_dtype",
                "head_size",
                "impl",
                "kv_sharing_target_layer_name",
            )
        ),
    ),
    Row(
        INVARIANT_LINEAR,
        f"{_LINEAR}:UnquantizedLinearMethod.apply",
        patch=f"{_OURS}.invariant_linear:apply",
    ),
    *digest_rows(
        INVARIANT_LINEAR,
        f"{_LINEAR}:linear_batch_invariant",
        "vllm.distributed:get_tp_group",
        "vllm.distributed.parallel_state:_groups",
        "vllm.config:VllmConfig.compute_hash",
    ),
    *named_rows(INVARIANT_LINEAR, "vllm.config:VllmConfig.offload_config"),
    # Norms of models that are not compiled.
    Row(EAGER_NORMS, SUMMING_NORM, patch=f"{_OURS}.eager_norms:fused_allreduce_rms_norm"),
    Row(
        EAGER_NORMS,
        SUMMING_GEMMA_NORM,
        patch=f"{_OURS}.eager_norms:fused_allreduce_rms_norm",
        is_required=False,
    ),
    *digest_rows(
        EAGER_NORMS,
        "vllm.model_executor.layers.layernorm:RMSNorm",
        "vllm.model_executor.layers.layernorm:GemmaRMSNorm",
        "vllm.distributed:get_tp_group",
    ),
    *named_rows(EAGER_NORMS, "vllm.config:ModelConfig.architectures"),
    Row(
        EXPERTS,
        f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.apply",
        patch=f"{_OURS}.experts:apply",
    ),
    *digest_rows(
        EXPERTS,
        f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.forward_native",
        f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.get_fused_moe_quant_config",
        f"{_MOE}.oracle.unquantized:convert_to_unquantized_kernel_format",
        f"{_MOE}.experts.triton_moe:TritonExperts.apply",
        f"{_MOE}.config:FusedMoEConfig",
        f"{_MOE}.config:FusedMoEParallelConfig",
        # Numbers of a rank's experts.
        f"{_MOE}.expert_map_manager:determine_expert_map",
        f"{_MOE}.routed_experts:RoutedExperts.expert_map",
        f"{_MOE}.routed_experts:RoutedExperts.update_expert_map_info",
        # Who computes shared experts.
        f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase.mk_can_overlap_shared_experts",
        f"{_MOE}.modular_kernel:FusedMoEKernel.can_overlap_shared_experts",
        f"{_MOE}.modular_kernel:FusedMoEKernelModularImpl._maybe_apply_shared_experts",
    ),
    *named_rows(
        EXPERTS,
        f"{_MOE}.oracle.unquantized:UnquantizedMoeBackend.TRITON",
        f"{_MOE}.activation:MoEActivation.SILU",
        "vllm.config:VllmConfig.offload_config",
    ),
    Row(FP8_EXPERTS, f"{_FP8_METHOD}.apply", patch=f"{_OURS}.experts:fp8_apply"),
    *digest_rows(
        FP8_EXPERTS,
        f"{_FP8_METHOD}.process_weights_after_loading",
        f"{_FP8_METHOD}._setup_kernel",
        f"{_FP8_METHOD}.get_fused_moe_quant_config",
        f"{_MOE}.oracle.fp8:convert_to_fp8_moe_kernel_format",
    ),
    *named_rows(FP8_EXPERTS, f"{_MOE}.oracle.fp8:Fp8MoeBackend.TRITON"),
)

#: Linear layers need the norms' feature: the pass manager that it replaces also runs the passes of linear layers.
NEEDS = {LINEAR: NORMS, ROPE: LINEAR, CACHE_WRITES: ROPE, FP8_EXPERTS: EXPERTS}
TABLE = Table("vLLM", "vllm", ROWS, LOST, Path(__file__).with_name("digests.json"), replace, NEEDS)
