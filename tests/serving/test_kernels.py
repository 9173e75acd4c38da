"""Analysis of recorded kernels: steps, layers, gaps, names and categories, on kernels made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bench_serving import kernels
from bench_serving.kernels import Kernel

#: (name, microseconds, gap before the kernel, stream).
Planned = tuple[str, float, float, int]

QKV, ATTENTION, OUTPUT, SUM, UP, DOWN = "nvjet_qkv", "flash_fwd", "nvjet_o", "llm_comm::fused", "nvjet_up", "nvjet_down"
LAYER: list[Planned] = [
    (QKV, 10, 1, 7),
    (ATTENTION, 20, 1, 7),
    (OUTPUT, 5, 1, 7),
    (SUM, 8, 2, 7),
    (UP, 15, 1, 7),
    (DOWN, 12, 1, 7),
    (SUM, 8, 2, 7),
]
LAYER_US = 78 + 9
HEAD: list[Planned] = [("Memcpy HtoD (Pinned -> Device)", 2, 50, 7), ("embedding", 4, 3, 7), ("first_norm", 3, 1, 7)]
TAIL: list[Planned] = [("nvjet_logits", 30, 4, 7), ("ArgMaxOps", 6, 5, 7)]


def recorded(planned: Sequence[Planned], begin: float = 100.0) -> list[Kernel]:
    """Lay the kernels out in time. A gap counts from the end of the kernel before, in the plan."""
    result, now = [], begin
    for name, us, gap, stream in planned:
        result.append(Kernel(now + gap, us, name, stream))
        now += gap + us
    return result


def step(layers: int = 4, layer: Sequence[Planned] = LAYER) -> list[Planned]:
    return [*HEAD, *(list(layer) * layers), *TAIL]


def summary(planned: Sequence[Planned], layers: int = 4, expected: int = 5) -> dict[str, Any]:
    return kernels.summarize(recorded(planned), layers, expected)


def test_a_step_is_split_into_head_layers_and_tail() -> None:
    found = summary(step() * 5)
    assert found["steps"] == 3  # the first and the last have no neighbour
    assert [row["name"] for row in found["head"]] == ["Memcpy HtoD", "embedding", "first_norm"]
    assert [row["name"] for row in found["layer"]] == [QKV, ATTENTION, OUTPUT, SUM, UP, DOWN, SUM]
    assert [row["name"] for row in found["tail"]] == ["nvjet_logits", "ArgMaxOps"]
    assert (found["layers"], found["layers_alike"], found["kernels"]) == (4, 4, 3 + 4 * 7 + 2)
    # From the start of the first kernel: without the 50 us before it, which are between steps.
    head, tail = 2 + 3 + 4 + 1 + 3, 4 + 30 + 5 + 6
    assert found["span_us"] == pytest.approx(head + 4 * LAYER_US + tail)
    assert found["period_us"] == pytest.approx(found["span_us"] + 50)
    assert found["head_us"] == pytest.approx(head + 1)
    assert found["layers_us"] == pytest.approx(4 * LAYER_US - 1)
    assert found["tail_us"] == pytest.approx(tail)
    assert found["layer_us"] == pytest.approx(LAYER_US)
    assert found["kernel_us"] == pytest.approx(9 + 4 * 78 + 36)
    assert found["gap_us"] == pytest.approx(4 + 4 * 9 + 9)
    assert found["overlap_us"] == pytest.approx(0)


def test_a_row_of_the_layer_has_medians_over_layers() -> None:
    planned = step() * 5
    slow = [index for index, kernel in enumerate(planned) if kernel[0] == ATTENTION][1::4]
    for index in slow:  # one of 4 layers of each step
        planned[index] = (ATTENTION, 95, 9, 7)
    row = summary(planned)["layer"][1]
    assert (row["us"], row["gap_us"], row["adds_us"], row["start_us"]) == pytest.approx((20, 1, 21, 11))


def test_categories_share_the_time_of_all_kernels() -> None:
    found = summary(step() * 5)
    times = {name: entry["us"] for name, entry in found["categories"].items()}
    assert times == pytest.approx(
        {
            "linear/GEMM": 4 * (10 + 5 + 15 + 12) + 30,
            "attention": 80,
            "all-reduce/llm_comm": 64,
            "sampling": 6,
            "other": 6,
            "norm/elementwise": 3,
        }
    )
    assert sum(entry["share"] for entry in found["categories"].values()) == pytest.approx(1)


def test_the_median_step_by_duration_is_taken() -> None:
    slow, fast = step(layer=[(name, us * 3, gap, stream) for name, us, gap, stream in LAYER]), step()
    found = summary([*fast, *slow, *fast, *fast, *fast])
    assert (found["steps"], found["layer_us"]) == (3, pytest.approx(LAYER_US))


def test_a_layer_that_differs_in_one_kernel_is_not_in_the_medians() -> None:
    odd = [*LAYER]
    odd[4] = ("other_gemm", 100, 1, 7)
    planned = [*HEAD, *LAYER, *odd, *LAYER, *LAYER, *TAIL] * 5
    found = summary(planned)
    assert (found["layers"], found["layers_alike"]) == (4, 3)
    assert found["layer"][4]["name"] == UP
    assert found["layer_us"] == pytest.approx(LAYER_US)


def test_a_layer_with_a_kernel_more_moves_no_other_layer() -> None:
    planned = [*HEAD, *LAYER, *LAYER, ("extra", 3, 1, 7), *LAYER, *LAYER, *TAIL] * 5
    found = summary(planned)
    assert (found["layers_alike"], len(found["layer"])) == (3, 7)
    assert [row["name"] for row in found["tail"]] == ["nvjet_logits", "ArgMaxOps"]


def test_the_kernels_before_the_first_that_all_layers_share_are_the_head() -> None:
    """An unfused layer begins with a norm, and the first layer with another one."""
    layer: list[Planned] = [("add_norm", 3, 1, 7), *LAYER]
    found = summary([*HEAD, *LAYER, *(layer * 3), ("add_norm", 3, 1, 7), *TAIL] * 5)
    assert [row["name"] for row in found["layer"]] == [QKV, ATTENTION, OUTPUT, SUM, UP, DOWN, SUM, "add_norm"]
    assert found["layers_alike"] == 4
    assert found["head"][-1]["name"] == "first_norm"


def test_a_prefill_before_decode_steps_is_not_one_of_them() -> None:
    prefill = [(f"prefill_{name}" if name in (ATTENTION, QKV) else name, us * 40, gap, 7) for name, us, gap, _ in LAYER]
    planned = [*step(layer=prefill), *(step() * 5)]
    found = summary(planned)
    # The first decode step has the prefill before it.
    assert (found["steps"], found["layer_us"]) == (4, pytest.approx(LAYER_US))
    shared = [*step(layer=[(name, us * 40, gap, 7) for name, us, gap, _ in LAYER]), *(step() * 5)]
    assert summary(shared)["layer_us"] == pytest.approx(LAYER_US)


@pytest.mark.parametrize("begins_with_decode", [False, True])
def test_an_unwanted_decode_step_after_a_prefill_is_not_its_tail(begins_with_decode: bool) -> None:
    """SGLang may begin a decode step before it knows that a request of one token is finished."""
    long = [(f"long_{name}", us * 40, gap, 7) for name, us, gap, _ in LAYER]
    pair = [step(layer=long), step()]
    first, second = pair[::-1] if begins_with_decode else pair
    found = summary([*first, *second] * 5)
    assert found["layer"][0]["name"] == f"long_{QKV}"
    assert [row["name"] for row in found["tail"]] == ["nvjet_logits", "ArgMaxOps"]
    assert [row["name"] for row in found["head"]] == ["Memcpy HtoD", "embedding", "first_norm"]


@pytest.mark.parametrize("beside", [1, 4])
def test_kernels_of_a_second_stream_belong_to_the_layer_in_which_they_start(beside: int) -> None:
    """The order of starts differs from layer to layer; the layers are alike."""

    def with_expert(layer: int, at: float) -> list[Kernel]:
        own = recorded([("nvjet" if name.startswith("nvjet") else name, *rest) for name, *rest in LAYER], at)
        return [*own, Kernel(own[beside].start + (0.5 if layer % 2 else -0.5), 9, "shared_expert_gemm", 20)]

    made, now = [], 0.0
    for _ in range(5):
        made += recorded(HEAD, now)
        for layer in range(4):
            made += with_expert(layer, now + 63 + layer * LAYER_US)
        made += recorded(TAIL, now + 63 + 4 * LAYER_US)
        now += 63 + 4 * LAYER_US + 45
    found = kernels.summarize(made, 4, 5)
    assert found["layers_alike"] == 4
    (expert,) = (row for row in found["layer"] if row["stream"] == 20)
    assert expert["us"] == 9
    assert found["layer_us"] == pytest.approx(LAYER_US)
    assert found["overlap_us"] == pytest.approx(4 * 8.5, abs=4)
    assert len(found["head"]) == len(HEAD)


def test_layers_may_begin_with_kernels_that_occur_several_times_in_them() -> None:
    layer: list[Planned] = [("gemm", 9, 1, 7), (SUM, 4, 1, 7), ("gemm", 9, 1, 7), (SUM, 4, 1, 7), (ATTENTION, 9, 1, 7)]
    found = summary(step(layer=layer) * 5)
    assert [row["name"] for row in found["layer"]] == ["gemm", SUM, "gemm", SUM, ATTENTION]
    assert (len(found["head"]), len(found["tail"])) == (len(HEAD), len(TAIL))


def test_overlap_by_pdl_is_a_negative_gap_and_times_still_add_up() -> None:
    layer = [*LAYER]
    layer[4] = (UP, 15, -5, 7)  # begins before the all-reduce has ended
    found = summary(step(layer=layer) * 5)
    row = found["layer"][4]
    assert (row["gap_us"], row["adds_us"]) == pytest.approx((-5, 10))
    assert found["overlap_us"] == pytest.approx(4 * 5)
    assert found["layer_us"] == pytest.approx(LAYER_US - 6)
    assert found["span_us"] == pytest.approx(found["head_us"] + found["layers_us"] + found["tail_us"])
    assert found["span_us"] == pytest.approx(found["kernel_us"] + found["gap_us"] - found["overlap_us"])


def test_a_kernel_hidden_behind_another_adds_nothing() -> None:
    layer = [*LAYER, ("side", 2, -6, 7)]
    row = summary(step(layer=layer) * 5)["layer"][7]
    assert (row["gap_us"], row["adds_us"]) == pytest.approx((-6, 0))


def test_the_order_of_the_events_does_not_matter() -> None:
    made = recorded(step() * 5)
    assert kernels.summarize(made[::-1], 4, 5) == kernels.summarize(made, 4, 5)


@pytest.mark.parametrize(("in_head", "in_tail"), [(2, 2), (0, 4)])
def test_copies_that_are_as_many_as_layers_do_not_mark_layers(in_head: int, in_tail: int) -> None:
    copy: Planned = ("Memcpy DtoD", 1, 0, 7)
    found = summary([*HEAD, *([copy] * in_head), *(LAYER * 4), *([copy] * in_tail), *TAIL] * 5)
    assert [row["name"] for row in found["layer"]] == [QKV, ATTENTION, OUTPUT, SUM, UP, DOWN, SUM]
    assert (len(found["head"]), len(found["tail"])) == (len(HEAD) + in_head, len(TAIL) + in_tail)


@pytest.mark.parametrize(
    ("planned", "layers", "said"),
    [
        (step() * 5, 1, "a profile needs a model of 2 layers or more"),
        (step() * 5, 80, "no kernel occurs once in each of 80 layers of 5 passes; most often: 40 llm_comm::fused"),
        (step() * 10, 4, "no kernel occurs once in each of 4 layers of 5 passes"),
        (HEAD * 5, 4, "no kernel occurs once"),
    ],
)
def test_kernels_that_are_not_those_of_the_model_are_an_error(planned: list[Planned], layers: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        summary(planned, layers)


def test_a_recording_may_begin_within_a_pass() -> None:
    whole = step()
    found = summary([*whole[len(HEAD) + len(LAYER) :], *(whole * 5)])
    assert (found["steps"], found["layer_us"]) == (4, pytest.approx(LAYER_US))


def test_too_few_passes_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 forward passes are recorded, too few"):
        summary(step() * 2, expected=2)


TORCH = "void at::native::"
LAMBDA = "{lambda()#3}::operator()() const::{lambda(float)#1}"


@pytest.mark.parametrize(
    ("name", "short", "category"),
    [
        (
            f"{TORCH}vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, "
            "3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)",
            "at::vectorized_elementwise_kernel<CUDAFunctor_add>",
            "norm/elementwise",
        ),
        (
            f"{TORCH}elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda("
            f"at::TensorIteratorBase&)::{LAMBDA}>(at::TensorIteratorBase&)::{LAMBDA}>(int, int)",
            "at::elementwise_kernel<direct_copy_kernel_cuda>",
            "norm/elementwise",
        ),
        (
            f"{TORCH}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned int, "
            "long, 4, 4> >(at::native::ReduceOp<float>)",
            "at::reduce_kernel<ArgMaxOps>",
            "sampling",
        ),
        (
            f"{TORCH}(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16, long, unsigned int, 2, 2, -2>(...)",
            "at::indexSelectSmallIndex",
            "other",
        ),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", None, "norm/elementwise"),
        ("triton_poi_fused_cat_moe_forward_1", None, "norm/elementwise"),
        ("_fwd_grouped_kernel_stage1", None, "attention"),
        ("kernel_unified_attention", None, "attention"),
        ("fused_moe_kernel", None, "MoE"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", None, "linear/GEMM"),
        (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)",
            "cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>",
            "linear/GEMM",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Collective<2, "
            "cute::tuple<cute::C<1> > > > > >(flash::Params)",
            "cutlass::device_kernel<FlashAttnFwdSm90>",
            "attention",
        ),
        (
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int> > >(Params)",
            "cutlass::device_kernel<GemmUniversal>",
            "linear/GEMM",
        ),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, 7, false>(Params)",
            "gemvx::kernel",
            "linear/GEMM",
        ),
        (
            "void llm_comm::cuda::all_reduce_add_rms_norm_one_shot<__nv_bfloat16, 2, true>(AddRmsNormArgs)",
            "llm_comm::all_reduce_add_rms_norm_one_shot",
            "all-reduce/llm_comm",
        ),
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
            "all-reduce/llm_comm",
        ),
        (
            "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*, int)",
            "vllm::cross_device_reduce_1stage",
            "all-reduce/llm_comm",
        ),
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<2, 3, true>(Params)",
            "flashinfer::allreduce_fusion_kernel_oneshot_lamport",
            "all-reduce/llm_comm",
        ),
        (
            "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)",
            "flashinfer::FusedAddRMSNormKernel",
            "norm/elementwise",
        ),
        (
            "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u>(Params)",
            "flashinfer::BatchDecodeWithPagedKVCacheKernel",
            "attention",
        ),
        (
            "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(long)",
            "vllm::reshape_and_cache_flash_kernel",
            "rope/KV write",
        ),
        (
            "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)",
            "vllm::rotary_embedding_kernel",
            "rope/KV write",
        ),
        (
            "void vllm::moe::topkGating<16, 128, 4, 16, 32, int>(float const*)",
            "vllm::topkGating",
            "MoE",
        ),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD", "other"),
        ("Memset (Device)", "Memset", "other"),
    ],
)
def test_names_are_short_and_have_a_category(name: str, short: str | None, category: str) -> None:
    assert kernels.short_name(name) == (short or name)
    assert kernels.category(name) == category
