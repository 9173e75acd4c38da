"""What is made of the times and the logs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench_serving import checks, engine_logs, metrics, report, schedule, summary
from bench_serving.arms import ARMS
from bench_serving.metrics import Request
from bench_serving.settings import Settings
from bench_serving.summary import Run

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def request(*times: float) -> Request:
    return Request(list(times), [1] * len(times))


def test_latencies_of_known_times() -> None:
    figures = metrics.latencies([request(0.1, 0.2, 0.4), request(0.3, 0.4, 0.5)])
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["median_ttft_ms"] == pytest.approx(200)
    assert figures["p99_ttft_ms"] == pytest.approx(298)
    assert figures["mean_tpot_ms"] == pytest.approx(125)
    assert figures["mean_itl_ms"] == pytest.approx(125)
    assert figures["median_itl_ms"] == pytest.approx(100)
    assert figures["p99_itl_ms"] == pytest.approx(197)
    assert figures["p99.9_itl_ms"] == pytest.approx(199.7)


def test_tokens_that_arrive_together_count_each() -> None:
    several = Request()
    several.arrived(1.0, [5])
    several.arrived(1.6, [6, 7, 8])
    assert several.tpot == pytest.approx(0.2)
    assert several.itl == pytest.approx([0.6])
    assert several.tokens == [5, 6, 7, 8]


def test_one_token_has_no_tpot() -> None:
    assert request(0.5).tpot is None
    assert "mean_tpot_ms" not in metrics.latencies([request(0.5)])


def test_decode_counts_only_steps_of_the_whole_batch() -> None:
    early = request(0.0, 0.9, 1.0, 1.01, 1.02)  # waits 0.9 s while the other is prefilled
    late = request(1.0, 1.01, 1.02, 1.03, 1.04)
    assert metrics.decode_ms([early, late]) == pytest.approx(10)
    frayed = request(1.0, 1.01, 1.02, 1.5, 2.0)  # goes on alone
    assert metrics.decode_ms([early, frayed]) == pytest.approx(10)
    assert metrics.decode_ms([request(0.1, 0.2, 0.3)]) == pytest.approx(100)


def test_decode_without_common_steps_is_an_error() -> None:
    with pytest.raises(ValueError, match="output-tokens"):
        metrics.decode_ms([request(0.0, 0.1), request(0.1, 0.2)])


def test_a_batch_survives_json() -> None:
    batch = [request(0.25, 0.5), request(0.25, 0.75)]
    assert [r.times for r in metrics.from_json(metrics.to_json(batch))] == [[0.25, 0.5], [0.25, 0.75]]


def test_repeats_alternate_in_direction() -> None:
    assert schedule.interleaved(["a", "b"], 3) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_speedups_are_taken_repeat_by_repeat() -> None:
    times = {
        "nccl": {0: 12.0, 1: 15.0},
        "default": {0: 10.0, 1: 12.0},
        "llm_comm": {0: 8.0, 1: 10.0},
        "free": {0: 7.0, 1: 7.0},
    }
    compared = summary.compare(times, "decode_ms")
    over = compared["llm_comm"]["speedup_over"]
    assert over["default"]["values"] == pytest.approx([1.25, 1.2])
    assert (over["nccl"]["min"], over["nccl"]["max"]) == pytest.approx((1.5, 1.5))
    assert compared["llm_comm"]["recovered_share"] == pytest.approx((11 - 9) / (11 - 7))
    assert set(compared["default"]["speedup_over"]) == {"nccl"}
    assert "recovered_share" not in compared["free"]


def test_a_repeat_without_baseline_is_left_out() -> None:
    compared = summary.compare({"default": {1: 12.0}, "llm_comm": {0: 8.0, 1: 10.0}}, "decode_ms")
    assert compared["llm_comm"]["speedup_over"]["default"]["values"] == pytest.approx([1.2])
    assert "recovered_share" not in compared["llm_comm"]


@pytest.mark.parametrize("free", [11.0, 12.0])
def test_where_free_all_reduces_are_not_faster_there_is_nothing_to_recover(free: float) -> None:
    compared = summary.compare({"default": {0: 11.0}, "free": {0: free}, "llm_comm": {0: 9.0}}, "decode_ms")
    assert "recovered_share" not in compared["llm_comm"]


ACTIVE = "(Worker_TP0 pid=7) INFO llm_comm 0.1.0 is active for group tp:0 (4 ranks, VMM): all-reduce one_shot to 48 KiB"
BY_PROGRAM = ACTIVE.replace("all-reduce", "all-reduce dsl:one_shot_ll to 8 MiB, else")
VLLM = (
    "INFO 11-21 [cuda_communicator.py:264] Using [{}] all-reduce backends (in dispatch order) for group 'tp:0' out of"
)
CUSTOM, NCCL_ONLY = VLLM.format("'CUSTOM', 'PYNCCL'"), VLLM.format("'PYNCCL'")
FUSED = "INFO llm_comm: first all-reduce fused with its RMSNorm (4 ranks, shape (1, 8192))"
FUSED_LINEAR = (
    "INFO llm_comm: first linear layer fused with its all-reduce and RMSNorm "
    "(4 ranks, shape (1, 2048), weight (8192, 2048))"
)
NO_LINEAR = (
    f"{ACTIVE}; fused with RMSNorm in compiled graphs; linear layers are vLLM's: fuse_linear is false (environment)"
)
FREE = f"INFO {engine_logs.FREE_MARK} (tp:0)"
SERVED = "(Worker pid=8) llm_comm-nccl [8] INFO communicator of 4 ranks, rank 0 on device 0: served by the table of 4 X"
FREE_NORM = f"{FREE}\nINFO {engine_logs.FREE_NORMS_MARK}"


def ran(engine: str = "vllm", **others: Any) -> Settings:
    return Settings(engine, "", tensor_parallel_size=4, **others)


@pytest.mark.parametrize(
    ("arm", "log"),
    [
        ("nccl", NCCL_ONLY),
        ("nccl_library", f"{NCCL_ONLY}\n{SERVED}"),
        ("default", CUSTOM),
        ("llm_comm", f"{CUSTOM}\n{ACTIVE}; fused with RMSNorm in compiled graphs\n{FUSED}"),
        ("llm_comm_unfused", f"{CUSTOM}\n{ACTIVE}; not fused with RMSNorm: fuse is false (environment)"),
        ("llm_comm_dsl", f"{CUSTOM}\n{BY_PROGRAM}; not fused with RMSNorm: fuse is false (environment)"),
        ("llm_comm", f"{CUSTOM}\n{ACTIVE}; fused with RMSNorm in compiled graphs\n{FUSED_LINEAR}"),
        ("llm_comm_no_linear", f"{CUSTOM}\n{NO_LINEAR}\n{FUSED}"),
        (
            "llm_comm_wire",
            f"{CUSTOM}\n{ACTIVE}; all-reduces and reduce-scatters from 8 MiB are quantized (fp8): lossy\n{FUSED}",
        ),
        ("free", f"{FREE}\n{CUSTOM}"),
        ("free_norm", f"{FREE_NORM}\n{CUSTOM}"),
    ],
)
def test_logs_confirm_their_arm_and_no_other(arm: str, log: str) -> None:
    assert engine_logs.evidence(ran(), ARMS[arm], f"first line\n{log}\nlast line")
    # the environment may have switched quantized sums on for all arms with llm_comm
    accepting = {arm, "llm_comm"} if ARMS[arm].lossy else {arm}
    for other in ARMS.values():
        if other.name not in accepting:
            with pytest.raises(ValueError, match=r"log|custom all-reduce"):
                engine_logs.evidence(ran(), other, log)


def test_gathers_and_scatters_of_llm_comm_are_recorded() -> None:
    lines = [
        "llm_comm: first all_gather of group tp:0 (4 ranks, shape (1, 32000))",
        "llm_comm: first all_gatherv of group dp:0 (4 ranks, shape (1, 64), sizes [1, 2, 1, 1])",
        "llm_comm: first custom_reduce_scatter of group tp:0 (4 ranks, shape (4, 64))",
    ]
    log = "\n".join([CUSTOM, ACTIVE, FUSED, *(f"INFO {line}" for line in lines)])
    assert [line for line in engine_logs.evidence(ran(), ARMS["llm_comm"], log) if line in lines] == lines
    with pytest.raises(ValueError, match="llm_comm has gathered or scattered"):
        engine_logs.evidence(ran(), ARMS["default"], f"{CUSTOM}\n{lines[0]}")


def test_data_parallel_attention_gathers_and_fuses_nothing() -> None:
    settings = ran("sglang", engine_options={"dp_size": 4, "enable_dp_attention": True})
    backend = f"[TP0] {engine_logs.BACKEND_MARK} of group tp:0: CustomAllReduceV2, disabled=False"
    gathered = "[TP0] llm_comm: first all_gather_into_tensor of group tp:0 (4 ranks, shape (8, 2048))"
    assert engine_logs.evidence(settings, ARMS["llm_comm"], f"{backend}\n{ACTIVE}\n{gathered}")
    assert engine_logs.evidence(settings, ARMS["default"], backend)
    for arm, log in (("llm_comm", ACTIVE), ("default", gathered)):
        with pytest.raises(ValueError, match="llm_comm has gathered or scattered"):
            engine_logs.evidence(settings, ARMS[arm], f"{backend}\n{log}")


def test_linear_layers_of_llm_comm_are_recorded_where_they_may_be() -> None:
    lines = [
        f"llm_comm: first {kind} (4 ranks, shape (1, 2048), weight (8192, 2048))"
        for kind in (
            "linear layer computed by llm_comm",
            "column-parallel linear layer computed by llm_comm",
            "column-parallel linear layer computed with silu-and-mul",
        )
    ]
    log = "\n".join([CUSTOM, ACTIVE, FUSED, *(f"INFO {line}" for line in lines)])
    assert [line for line in engine_logs.evidence(ran(), ARMS["llm_comm"], log) if line in lines] == lines
    for arm, log in (("llm_comm_no_linear", f"{NO_LINEAR}\n{FUSED}"), ("default", "")):
        for line in lines:
            with pytest.raises(ValueError, match="llm_comm has computed a linear layer"):
                engine_logs.evidence(ran(), ARMS[arm], f"{CUSTOM}\n{log}\nINFO {line}")


def test_the_mode_must_be_the_one_asked_for() -> None:
    mark = f"INFO {engine_logs.DETERMINISTIC_MARK}"
    # It may turn the engine's custom all-reduce off.
    assert engine_logs.evidence(ran(deterministic=True), ARMS["default"], f"{NCCL_ONLY}\n{mark}")
    for given, log in ((ran(deterministic=True), CUSTOM), (ran(), f"{CUSTOM}\n{mark}")):
        with pytest.raises(ValueError, match="the engine is in its deterministic mode"):
            engine_logs.evidence(given, ARMS["default"], log)
    # SGLang's norms are fused in some of its versions and models, vLLM's always.
    backend = f"[TP0] {engine_logs.BACKEND_MARK} of group tp:0: LlmCommAllReduce, disabled=False"
    layers = "linear layers by llm_comm at every size (batch_invariant_linear)"
    for fused in ("", FUSED):
        log = f"{backend}\n{ACTIVE}; {layers}\n{mark}\n{fused}"
        found = engine_logs.evidence(ran("sglang", deterministic=True), ARMS["llm_comm"], log)
        assert any("fused with its" in line for line in found) == bool(fused)
    with pytest.raises(ValueError, match="llm_comm has fused an all-reduce"):
        engine_logs.evidence(ran(deterministic=True), ARMS["llm_comm"], f"{NCCL_ONLY}\n{ACTIVE}; {layers}\n{mark}")
    for arm, log in (("llm_comm", ACTIVE), ("llm_comm_no_linear", f"{ACTIVE}; {layers}")):
        with pytest.raises(ValueError, match="linear layers are llm_comm's at every size"):
            engine_logs.evidence(ran(deterministic=True), ARMS[arm], f"{NCCL_ONLY}\n{log}\n{mark}\n{FUSED}")
    apart = f"{NCCL_ONLY}\n{ACTIVE}; linear layers are vLLM's: batches of more than 64 tokens\n{mark}\n{FUSED}"
    assert engine_logs.evidence(ran(deterministic=True), ARMS["llm_comm_no_linear"], apart)


def test_eager_vllm_has_no_graphs_to_fuse_in() -> None:
    log = f"{CUSTOM}\n{ACTIVE}; not fused with RMSNorm: vLLM does not compile the model"
    for arm in ("llm_comm", "llm_comm_no_linear"):
        assert engine_logs.evidence(ran(enforce_eager=True), ARMS[arm], log)
    with pytest.raises(ValueError, match="llm_comm has fused an all-reduce"):
        engine_logs.evidence(ran(), ARMS["llm_comm"], log)


@pytest.mark.parametrize(
    "log",
    [
        VLLM.format("'FLASHINFER', 'PYNCCL'"),
        VLLM.format("'NCCL_SYMM_MEM', 'PYNCCL'"),
        VLLM.format("'SYMM_MEM', 'PYNCCL'"),
        f"{NCCL_ONLY}\nINFO Initialized FlashInfer Allreduce norm fusion workspace with backend=trtllm",
    ],
)
def test_nccl_means_nccl_alone(log: str) -> None:
    with pytest.raises(ValueError, match=r"not NCCL alone|by FlashInfer"):
        engine_logs.evidence(ran(), ARMS["nccl"], log)


def test_no_arm_may_use_multicast() -> None:
    log = f"{CUSTOM}\nINFO Initialized FlashInfer Allreduce norm fusion workspace with backend="
    assert engine_logs.evidence(ran(), ARMS["default"], f"{log}trtllm")
    with pytest.raises(ValueError, match="FlashInfer uses multicast"):
        engine_logs.evidence(ran(), ARMS["default"], f"{log}mnnvl")
    found = engine_logs.evidence(ran(as_deployed=True), ARMS["default"], f"{log}mnnvl")
    assert found == [CUSTOM, log.splitlines()[1] + "mnnvl"]


def test_a_silent_log_confirms_nothing() -> None:
    for engine in ("vllm", "sglang"):
        for arm in ARMS.values():
            with pytest.raises(ValueError, match="the log"):
                engine_logs.evidence(ran(engine), arm, "")


def test_the_reason_why_llm_comm_is_not_active_is_told() -> None:
    log = f"{CUSTOM}\nWARNING llm_comm is not active for group tp:0: no nvcc"
    with pytest.raises(ValueError, match="no nvcc"):
        engine_logs.evidence(ran(), ARMS["llm_comm"], log)


def test_weights_must_be_the_ones_asked_for() -> None:
    with pytest.raises(ValueError, match="weights are scaled"):
        engine_logs.evidence(ran(weights="scaled"), ARMS["default"], CUSTOM)
    with pytest.raises(ValueError, match="weights are scaled"):
        engine_logs.evidence(ran(), ARMS["default"], f"{CUSTOM}\nINFO {engine_logs.WEIGHTS_MARK}")


@pytest.mark.parametrize(
    ("arm", "state", "right"),
    [
        ("default", "CustomAllReduceV2, disabled=False", True),
        ("default", "CustomAllReduceV2, disabled=True", False),
        ("default", "none", False),
        ("nccl", "none", True),
        ("nccl", "CustomAllReduceV2, disabled=False", False),
    ],
)
def test_sglang_tells_its_custom_all_reduce(arm: str, state: str, right: bool) -> None:
    log = f"[TP0] {engine_logs.BACKEND_MARK} of group tp:0: {state}"
    if right:
        assert engine_logs.evidence(ran("sglang"), ARMS[arm], log)
    else:
        with pytest.raises(ValueError, match="SGLang's custom all-reduce"):
            engine_logs.evidence(ran("sglang"), ARMS[arm], log)


def test_sglang_with_flashinfer_must_have_its_workspace() -> None:
    asked = ran("sglang", engine_options={"flashinfer_allreduce_fusion_backend": "trtllm"})
    backend = f"[TP0] {engine_logs.BACKEND_MARK} of group tp:0: CustomAllReduceV2, disabled=False"
    has = "[TP0] FlashInfer AllReduce Fusion enabled and workspace initialized: backend={}, rank=0, world_size=4"
    assert engine_logs.evidence(asked, ARMS["default"], f"{backend}\n{has.format('trtllm')}")
    # After a failed set-up SGLang goes on without.
    with pytest.raises(ValueError, match="does not say that SGLang fuses all-reduces by FlashInfer"):
        engine_logs.evidence(asked, ARMS["default"], backend)
    with pytest.raises(ValueError, match="FlashInfer uses multicast"):
        engine_logs.evidence(asked, ARMS["default"], f"{backend}\n{has.format('mnnvl')}")
    for settings, arm, custom in (
        (asked, "nccl", "none"),
        (ran("sglang"), "default", "CustomAllReduceV2, disabled=False"),
    ):
        log = f"[TP0] {engine_logs.BACKEND_MARK} of group tp:0: {custom}"
        assert engine_logs.evidence(settings, ARMS[arm], log)
        with pytest.raises(ValueError, match="says that SGLang fuses all-reduces by FlashInfer"):
            engine_logs.evidence(settings, ARMS[arm], f"{log}\n{has.format('trtllm')}")


def test_the_kernel_of_fp8_layers_is_recorded() -> None:
    line = "INFO 11-26 Selected CutlassFP8ScaledMMLinearKernel for Fp8LinearMethod"
    assert line in engine_logs.evidence(ran(), ARMS["default"], f"{line}\n{CUSTOM}")


def of_logits(arm: str, by_length: dict[str, list[list[float]]], repeat: int = 0, tokens: Sequence[int] = (1,)) -> Run:
    """A run whose check had prompts of these lengths."""
    return Run(repeat, arm, 1.0, result={"check": {"tokens": {"1": [list(tokens)]}, "logits": by_length}})


def checked(arm: str, repeat: int, tokens: list[int], logits: list[float]) -> Run:
    return of_logits(arm, {"8": [logits]}, repeat, tokens)


def test_log_probabilities_are_compared_like_logits() -> None:
    assert checks.distance([1.0, 2.0, 4.0], [-9.0, -8.0, -6.0]) == pytest.approx(0)
    assert checks.distance([0.0, 0.0, 3.0], [0.0, 0.0, 1.0]) == pytest.approx(2)


@pytest.mark.parametrize("logits", [[math.nan, 1.0, 2.0], [math.inf, 1.0, 2.0], [1.0, -math.inf, 2.0], [1.0, 1.0, 1.0]])
def test_logits_without_information_fail_the_check(logits: list[float]) -> None:
    result = checks.summarize([checked("llm_comm", 0, [1], logits)])
    assert result["failures"] == ["llm_comm, prompts of 8 tokens: logits are not finite, or all equal"]


@pytest.mark.parametrize(("theirs", "passed"), [(0.0, False), (0.03, True)])
def test_the_engines_own_rounding_is_the_measure(theirs: float, passed: bool) -> None:
    reference = [1.0, -1.0, 1.0, -1.0]
    runs = [
        checked("nccl", 0, [1], reference),
        checked("default", 0, [1], [x + y * theirs for x, y in zip(reference, [1, 1, -1, -1], strict=True)]),
        checked("llm_comm", 0, [1], [x + y * 0.05 for x, y in zip(reference, [1, 1, -1, -1], strict=True)]),
    ]
    result = checks.summarize(runs)
    assert result["logits"]["llm_comm"]["8"]["distance_to_nccl"] == pytest.approx(0.05)
    assert result["passed"] == passed


def test_it_is_told_how_many_requests_went_as_with_nccl() -> None:
    logits = [1.0, -1.0, 1.0, -1.0]
    runs = [checked("nccl", 0, [1, 2], logits), checked("nccl_library", 0, [1, 2], logits)]
    runs += [checked("default", 0, [1, 3], logits)]
    result = checks.summarize(runs)
    same = {arm: entry["same_as_nccl"] for arm, entry in result["tokens"].items()}
    assert same == {"nccl": 1, "nccl_library": 1, "default": 0}
    assert result["passed"]


@pytest.mark.parametrize("arm", ["llm_comm", "nccl_library"])
def test_logits_far_from_those_of_nccl_fail_the_check(arm: str) -> None:
    runs = [checked("nccl", 0, [1], [1.0, -1.0, 1.0, -1.0]), checked(arm, 0, [1], [1.1, -1.0, 1.0, -1.0])]
    assert not checks.summarize(runs)["passed"]


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_a_distance_that_is_no_number_is_too_large() -> None:
    """Of logits that are finite, but whose squares are not."""
    runs = [checked(arm, 0, [1], [sign, -sign]) for arm, sign in (("nccl", 1e200), ("llm_comm", -1e200))]
    result = checks.summarize(runs)
    assert math.isnan(result["logits"]["llm_comm"]["8"]["distance_to_nccl"])
    assert result["failures"] == ["llm_comm, prompts of 8 tokens: logits differ from nccl's by nan, more than 0.04"]


def test_the_limit_is_the_tolerance_or_twice_the_distance_of_default() -> None:
    runs = [checked("nccl", 0, [1], [1.0, 2.0, 3.0]), checked("llm_comm", 0, [1], [1.0, 2.1, 3.0])]
    assert checks.distance([1.0, 2.1, 3.0], [1.0, 2.0, 3.0]) == pytest.approx(0.058, abs=0.001)
    assert not checks.summarize(runs)["passed"]
    lenient = checks.summarize(runs, checks.QUANTIZED)
    assert (lenient["passed"], lenient["limit"]) == (True, {"8": checks.QUANTIZED.distance})
    far = checks.summarize([*runs, checked("default", 0, [1], [1.0, 2.2, 3.0])])
    assert far["limit"] == {"8": 2 * far["logits"]["default"]["8"]["distance_to_nccl"]}
    assert "limit" not in checks.summarize(runs[1:])


def test_quantized_sums_have_a_tolerance_of_their_own() -> None:
    logits = {"nccl": 0.0, "llm_comm": 0.03, "llm_comm_wire": 0.1}
    assert checks.summarize([checked_prompts(arm, [x]) for arm, x in logits.items()])["passed"]
    for arm, too_far, limit in (("llm_comm", 0.1, "0.04"), ("llm_comm_wire", 0.2, "0.15")):
        result = checks.summarize([checked_prompts(a, [x]) for a, x in {**logits, arm: too_far}.items()])
        assert result["failures"] == [
            f"{arm}, prompts of 8 tokens: logits differ from nccl's by {too_far}, more than {limit}"
        ]


def checked_prompts(arm: str, distances: list[float]) -> Run:
    """A run whose logits are so far from those of ``[1, 1, -1, -1]``."""
    return of_logits(arm, {"8": [[1 + x, 1 - x, -1 + x, -1 - x] for x in distances]})


@pytest.mark.parametrize(
    ("distances", "failure"),
    [
        ([0.1, 0.15, 0.6], None),
        ([0.1, 0.25, 0.25], "llm_comm, prompts of 8 tokens: logits differ from nccl's by 0.25, more than 0.2"),
        ([0.1, 0.1, 0.9], "llm_comm, prompts of 8 tokens: logits of one differ from nccl's by 0.9, more than 0.7"),
        ([0.1, 0.1, math.nan], "llm_comm, prompts of 8 tokens: logits differ from nccl's by nan, more than 0.2"),
    ],
)
def test_with_experts_the_median_prompt_is_judged_and_no_prompt_may_be_wrong(
    distances: list[float], failure: str | None
) -> None:
    runs = [checked_prompts("nccl", [0.0, 0.0, 0.0]), checked_prompts("llm_comm", distances)]
    result = checks.summarize(runs, checks.EXPERTS)
    assert [each for each in result["failures"] if "finite" not in each] == ([failure] if failure else [])
    entry = result["logits"]["llm_comm"]["8"]
    assert entry["distances"] == pytest.approx(distances, nan_ok=True)
    assert entry["judged"] == "median"


def test_elsewhere_the_worst_prompt_is_judged() -> None:
    runs = [checked_prompts("nccl", [0.0] * 3), checked_prompts("llm_comm", [0.01, 0.05, 0.01])]
    result = checks.summarize(runs)
    assert result["failures"] == ["llm_comm, prompts of 8 tokens: logits differ from nccl's by 0.05, more than 0.04"]
    assert result["logits"]["llm_comm"]["8"]["judged"] == "worst"
    runs[1] = checked_prompts("llm_comm", [0.01, math.nan, 0.01])
    assert not checks.summarize(runs)["passed"]


def test_prompts_of_each_length_are_judged_by_themselves() -> None:
    right, wrong, noisy = [1.0, -1.0, 1.0], [1.0, -1.0, 0.8], [1.0, -1.0, 0.5]
    made = {"nccl": (right, right), "default": (right, noisy), "llm_comm": (wrong, wrong)}
    runs = [of_logits(arm, {"8": [short], "99": [long]}) for arm, (short, long) in made.items()]
    result = checks.summarize(runs)
    (failure,) = result["failures"]
    assert failure.startswith("llm_comm, prompts of 8 tokens: logits differ from nccl's by ")
    assert result["limit"]["8"] == checks.PLAIN.distance
    assert result["limit"]["99"] > result["logits"]["llm_comm"]["99"]["distance_to_nccl"] > checks.PLAIN.distance


def test_another_token_in_one_repeat_fails_the_check() -> None:
    runs = [checked("llm_comm", repeat, [1, 2 + (repeat == 2)], [1.0, 2.0, 3.0]) for repeat in range(3)]
    result = checks.summarize(runs)
    assert not result["passed"]
    assert result["failures"] == ["llm_comm: tokens differ from those of repeat 0 at repeat 2, batch 1, request 0"]


def test_what_failed_or_computes_nonsense_is_not_checked() -> None:
    runs = [checked("free", 0, [1], [1.0, 2.0]), Run(0, "llm_comm", 1.0, failure="crashed")]
    assert checks.summarize(runs) == {}


def test_the_table_shows_ratios_with_their_spread() -> None:
    times = {"nccl": {0: 12.0, 1: 12.0}, "default": {0: 10.0, 1: 10.0}, "llm_comm": {0: 8.0, 1: 10.0}, "free": {0: 7.0}}
    content: dict[str, Any] = {
        "decode": {"4": summary.compare(times, "decode_ms")},
        "prefill": {},
        "check": {},
        "arms": {name: ARMS[name].label for name in times},
        "runs": [],
        "engine": "vllm",
        "device": "4x H200",
        "commit": None,
        "date": "today",
        "repeats": 2,
        "versions": {"vllm": "0.26.0", "torch": "2.11.0", "llm_comm": "0.1.0"},
        "settings": {
            "layers": 4,
            "model": "/x/llama-2-70b",
            "weights": "dummy",
            "tensor_parallel_size": 4,
            "prompt_tokens": 128,
            "output_tokens": 136,
            "prefill_tokens": [],
            "enforce_eager": False,
        },
    }
    shown = report.text(content)
    row = next(line for line in shown.splitlines() if line.startswith("llm_comm"))
    assert row.split()[:8] == [
        "llm_comm",
        "9.000",
        "8.000-10.000",
        "1.350x",
        "1.200-1.500",
        "1.125x",
        "1.000-1.250",
        "33%",
    ]
    assert "llama-2-70b cut to 4 layers" in shown


#: Those of bench_serving; single steps (``_steps``) have a form of their own.
REPORTS = sorted(
    path
    for path in (*RESULTS.glob("*_vllm*.json"), *RESULTS.glob("*_sglang*.json"))
    if not path.stem.endswith("_steps")
)


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_committed_reports_can_be_shown(path: Path, tmp_path: Path) -> None:
    content = json.loads(path.read_text())
    text = report.text(content)
    assert ("vs default" in text) == bool(content["decode"])
    assert ("check passed" in text) == bool(content["check"] and content["check"]["passed"])
    pytest.importorskip("matplotlib")
    if content["decode"]:
        report.plot(tmp_path / "report.png", content)


def test_a_run_that_does_not_count_is_in_no_figure() -> None:
    """It has a result, of an arm that was not what it says."""
    figures = {"batches": {"1": {"decode_ms": [10.0]}}, "prefill_s": {"4096": [0.1]}}
    runs = [Run(0, "nccl", 1.0, result=figures), Run(0, "llm_comm", 1.0, failure="not active", result=figures)]
    found = summary.summarize(runs)
    assert set(found["decode"]["1"]) == set(found["prefill"]["4096"]) == {"nccl"}
