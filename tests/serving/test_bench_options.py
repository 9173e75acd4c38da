"""The command line, the model shapes and what the engines are given."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from bench_serving import cli
from bench_serving.arms import ARMS
from bench_serving.engines import bench_latency, command_line, serve, sglang, vllm
from bench_serving.settings import SHAPES, Job, Settings


def settings(*options: str) -> Settings:
    return cli.settings_of(cli.parser().parse_args(list(options)))


def test_defaults_are_those_of_the_comparison() -> None:
    default = settings()
    assert (default.engine, Path(default.model).name, default.tensor_parallel_size) == ("vllm", "llama-2-70b", 8)
    assert default.batch_sizes == (1, 4, 16, 64)
    assert (default.weights, default.check, default.mode) == ("dummy", False, "latency")

    def arms(*options: str) -> list[str]:
        return cli.arms_of(cli.parser().parse_args(options))

    assert arms() == ["nccl", "default", "llm_comm", "llm_comm_unfused", "free"]
    assert arms("--arms", ",".join(ARMS)) == list(ARMS)
    assert arms("--as-deployed") == ["default", "llm_comm"]
    assert arms("--as-deployed", "--arms", "llm_comm") == ["llm_comm"]
    with pytest.raises(SystemExit, match="--as-deployed takes the arms default and llm_comm: nccl changes switches"):
        arms("--as-deployed", "--arms", "llm_comm,nccl")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--arms", "nccl,mine"],
            "unknown arm 'mine'; valid: nccl, nccl_library, default, llm_comm, llm_comm_unfused, llm_comm_dsl, "
            "llm_comm_no_linear",
        ),
        (["--batch-sizes", "0"], "'0': must be a whole number of at least 1"),
        (["--layers", "abc"], "'abc': must be a whole number of at least 1"),
        (["--prefill-tokens", "-5"], "'-5': must be a whole number of at least 0"),
        (["--engine-option", "attention_backend"], "expected NAME=VALUE"),
        (["--engine", "other"], "invalid choice"),
    ],
)
def test_wrong_options_are_named(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parser().parse_args(options)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "none"], "neither a known shape nor a directory"),
        (["--check", "--weights", "dummy"], "needs --weights scaled"),
        (["--deterministic", "--weights", "dummy"], "--deterministic needs --weights scaled"),
        (["--mode", "serve", "--check"], "--mode serve takes neither"),
        (["--mode", "serve", "--deterministic"], "nor --deterministic"),
        (["--mode", "bench-latency", "--engine", "sglang"], "is vLLM's"),
        (["--mode", "bench-latency", "--model", "llama-2-70b-quarter"], "ids below 10000, and .* has 8000"),
        (["--output-tokens", "1"], "at least 2"),
        (["--profile", "--mode", "serve"], "--profile needs --mode latency and --output-tokens 8 or more"),
        (["--profile", "--output-tokens", "7"], "--profile needs --mode latency and --output-tokens 8 or more"),
        (["--check", "--model", "qwen3-30b-a3b"], "over 48 layers .*--layers 24"),
        (["--check", "--model", "qwen3-30b-a3b", "--layers", "25"], "over 25 layers"),
        (["--mode", "check", "--model", "llama-2-70b-quarter-fp8"], "over 80 layers"),
        (
            ["--engine", "sglang", "--engine-option", "flashinfer_allreduce_fusion_backend=auto"],
            "flashinfer_allreduce_fusion_backend=auto: must be trtllm",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        settings(*options)


@pytest.mark.parametrize(
    "options",
    [
        ["--check", "--model", "llama-2-70b"],
        ["--check", "--model", "qwen3-30b-a3b", "--layers", "24"],
        ["--weights", "scaled", "--model", "qwen3-30b-a3b"],
    ],
)
def test_models_of_many_layers_that_are_taken(options: list[str]) -> None:
    """Those in bf16, those that are cut, those that are not checked."""
    assert settings(*options).weights == "scaled"


def test_a_model_with_a_configuration_inside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 50}}))
    with pytest.raises(SystemExit, match=r"config\.json has no vocab_size"):
        settings("--model", str(tmp_path))


def test_engines_own_benchmarks_have_no_prefill_of_ours() -> None:
    assert settings("--mode", "serve").prefill_tokens == ()
    assert settings("--mode", "serve").max_model_len < settings().max_model_len


def test_a_check_takes_weights_that_show_something() -> None:
    assert settings("--check").weights == "scaled"
    checked = settings("--mode", "check")
    assert (checked.weights, checked.check, checked.program) == ("scaled", True, "vllm")


def test_deterministic_mode_decodes_the_same_prompts_in_every_batch() -> None:
    given = settings("--deterministic", "--batch-sizes", "4,1")
    assert (given.weights, given.check, given.deterministic) == ("scaled", False, True)
    assert given.decode_prompts(1) == given.decode_prompts(4)[:1]
    usual = settings("--batch-sizes", "4,1")
    assert usual.decode_prompts(1) != usual.decode_prompts(4)[:1]
    only = settings("--mode", "check", "--deterministic")
    assert (only.check, only.deterministic) == (False, True)
    assert settings("--mode", "check", "--check", "--deterministic").check


def test_deterministic_mode_is_that_of_the_engine() -> None:
    given, usual = settings("--deterministic"), settings("--weights", "scaled")
    compilation = vllm.options(given, False)["compilation_config"]
    assert compilation["inductor_compile_config"]["deterministic"]
    assert compilation["pass_config"] == {"fuse_allreduce_rms": False}
    assert sglang.options(given, False)["enable_deterministic_inference"]
    assert "enable_deterministic_inference" not in sglang.options(usual, False)
    assert "pass_config" not in vllm.options(usual, False)["compilation_config"]


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = Job(settings("--layers", "4", "--engine-option", "seed=3"), "nccl", True, "/x/result.json")
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job


@pytest.mark.parametrize("shape", ["llama-2-70b", "llama-3-8b", "qwen3-32b"])
def test_shapes_can_be_split_over_8_ranks(shape: str) -> None:
    config = json.loads((SHAPES / shape / "config.json").read_text())
    assert config["num_attention_heads"] % 8 == config["num_key_value_heads"] % 8 == 0
    assert config["intermediate_size"] % 8 == config["vocab_size"] % 8 == 0
    assert config["architectures"][0].lower().startswith(config["model_type"])


@pytest.mark.parametrize(
    ("shape", "quantized"),
    [
        ("llama-2-70b-quarter", "llama-2-70b-quarter-fp8"),
        ("llama-2-70b-quarter", "llama-2-70b-quarter-fp8-dynamic"),
        ("qwen3-32b-quarter", "qwen3-32b-quarter-fp8"),
        ("qwen3-30b-a3b", "qwen3-30b-a3b-fp8"),
    ],
)
def test_a_shape_in_fp8_differs_by_its_quantization_alone(shape: str, quantized: str) -> None:
    whole, other = (json.loads((SHAPES / name / "config.json").read_text()) for name in (shape, quantized))
    how = other.pop("quantization_config")
    assert other == whole
    assert how["quant_method"] == "fp8"
    heads = whole["num_attention_heads"] + 2 * whole["num_key_value_heads"]
    for block in how.get("weight_block_size", []):
        # Of a rank of 2: outputs of qkv_proj and of gate and up, inputs of o_proj and of down_proj.
        sizes = (heads * whole["head_dim"], whole["intermediate_size"], whole["num_attention_heads"] * 128)
        assert all(size % (2 * block) == 0 for size in sizes)


@pytest.mark.parametrize(("part", "ranks"), [("half", 4), ("quarter", 2)])
@pytest.mark.parametrize("shape", ["llama-2-70b", "qwen3-32b"])
def test_a_rank_of_a_part_is_one_of_8(shape: str, part: str, ranks: int) -> None:
    whole, less = (json.loads((SHAPES / name / "config.json").read_text()) for name in (shape, f"{shape}-{part}"))
    heads = whole["num_attention_heads"]
    assert less.pop("head_dim") == whole.pop("head_dim", whole["hidden_size"] // heads)
    for split in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        assert less.pop(split) / ranks == whole.pop(split) / 8
    assert less == whole


def test_a_check_compiles_the_same_at_each_start() -> None:
    assert vllm.options(settings("--check"), False)["compilation_config"]["inductor_compile_config"]["deterministic"]
    assert "inductor_compile_config" not in vllm.options(settings(), False)["compilation_config"]
    assert "compilation_config" not in vllm.options(settings("--check", "--enforce-eager"), False)


def test_prompts_are_the_same_in_every_process() -> None:
    one, other = settings(), settings("--arms", "free")
    assert one.prompts(2, 5, "decode") == other.prompts(2, 5, "decode")
    assert one.prompts(2, 5, "decode") != one.prompts(2, 5, "check")
    assert one.prompts(2, 5, "decode") != settings("--seed", "1").prompts(2, 5, "decode")
    assert all(10 <= token < 32000 for prompt in one.prompts(8, 100, "decode") for token in prompt)


def test_a_model_that_is_too_short_is_stretched() -> None:
    # 4096 tokens of prompt and one more do not fit into the 4096 positions of Llama-2.
    assert settings().config_overrides() == {"max_position_embeddings": settings().max_model_len}
    assert settings().max_model_len > 4096
    assert settings("--prefill-tokens", "4096,8192").max_model_len > 8192
    assert settings("--prefill-tokens", "0", "--layers", "2").config_overrides() == {"num_hidden_layers": 2}


@pytest.mark.parametrize("disable", [True, False])
def test_the_arm_is_all_that_differs_in_the_options(disable: bool) -> None:
    for engine in (vllm, sglang):
        given = engine.options(settings("--check"), disable)
        assert given == engine.options(settings("--check"), not disable) | {"disable_custom_all_reduce": disable}


def test_nccl_sums_without_the_fusion_of_vllm() -> None:
    given = settings(
        "--batch-sizes", "8,2", "--engine-option", 'compilation_config={"pass_config": {"enable_sp": true}}'
    )
    passes = {"enable_sp": True, "fuse_allreduce_rms": False}
    wanted = {"cudagraph_capture_sizes": [2, 8], "pass_config": passes}
    assert vllm.options(given, True, own_fusion=False)["compilation_config"] == wanted
    by_arm = {name: Job(settings(), name, arm.disable_custom_all_reduce, "").own_fusion for name, arm in ARMS.items()}
    # Nor may FlashInfer sum where nothing is to sum.
    assert [name for name, own_fusion in by_arm.items() if not own_fusion] == [
        "nccl",
        "nccl_library",
        "free",
        "free_norm",
    ]
    assert ARMS["nccl"].environment["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"
    command = bench_latency.command(Job(settings(), "nccl", True, ""), 16, 136, Path("latency.json"))
    assert "fuse_allreduce_rms" in command[command.index("--compilation-config") + 1]


def test_sglang_fuses_by_flashinfer_where_it_is_asked_to_and_the_arm_may() -> None:
    option, forced = "flashinfer_allreduce_fusion_backend", "enforce_disable_flashinfer_allreduce_fusion"
    asked = settings("--engine", "sglang", "--engine-option", f"{option}=trtllm")
    by_arm = {}
    for name, arm in ARMS.items():
        job = Job(asked, name, arm.disable_custom_all_reduce, "")
        by_arm[name] = not sglang.options(asked, job.disable_custom_all_reduce, job.own_fusion)[forced]
    assert [name for name, fuses in by_arm.items() if not fuses] == ["nccl", "nccl_library", "free", "free_norm"]
    assert sglang.options(asked, False)[option] == "trtllm"
    assert sglang.options(settings("--engine", "sglang"), False)[forced]
    nccl = serve.server_command(Job(asked, "nccl", True, ""), Path("model"), 1)
    assert "--enforce-disable-flashinfer-allreduce-fusion" in nccl
    default = serve.server_command(Job(asked, "default", False, ""), Path("model"), 1)
    assert "--enforce-disable-flashinfer-allreduce-fusion" not in default


def test_graphs_are_captured_for_the_batch_sizes_that_occur() -> None:
    assert vllm.options(settings("--batch-sizes", "8,2"), False)["compilation_config"] == {
        "cudagraph_capture_sizes": [2, 8]
    }
    assert sglang.options(settings("--batch-sizes", "8,2", "--check"), False)["cuda_graph_bs_decode"] == [
        1,
        2,
        4,
        8,
        16,
    ]
    assert "compilation_config" not in vllm.options(settings("--enforce-eager"), False)
    assert sglang.options(settings("--enforce-eager"), False)["disable_decode_cuda_graph"]


def test_further_engine_options_win() -> None:
    given = settings("--engine-option", "gpu_memory_utilization=0.5", "--engine-option", "kv_cache_dtype=fp8")
    options = vllm.options(given, False)
    assert (options["gpu_memory_utilization"], options["kv_cache_dtype"]) == (0.5, "fp8")


def test_python_arguments_become_those_of_the_command_line() -> None:
    options: dict[str, Any] = {
        "load_format": "dummy",
        "enforce_eager": False,
        "disable_custom_all_reduce": True,
        "enable_prefix_caching": False,
        "hf_overrides": {"num_hidden_layers": 4},
        "cuda_graph_bs_decode": [1, 4],
    }
    assert command_line.arguments(options) == [
        *("--load-format", "dummy", "--disable-custom-all-reduce", "--no-enable-prefix-caching"),
        *("--hf-overrides", '{"num_hidden_layers": 4}', "--cuda-graph-bs-decode", "1", "4"),
    ]


@pytest.mark.parametrize("engine", cli.ENGINES)
def test_server_and_client_fit_together(engine: str, tmp_path: Path) -> None:
    job = Job(dataclasses.replace(settings("--mode", "serve"), engine=engine), "nccl", True, "")
    server = serve.server_command(job, tmp_path, 4711)
    client = serve.client_command(job.settings, tmp_path, 4711, 16, tmp_path / "result.json")
    for command in (server, client):
        assert command[command.index("--port") + 1] == "4711"
        assert str(tmp_path) in command
    assert "--disable-custom-all-reduce" in server
    assert "--skip-tokenizer-init" not in server
    assert client[client.index("--max-concurrency") + 1] == "16"


def test_bench_latency_gets_the_options_of_the_engine(tmp_path: Path) -> None:
    job = Job(settings("--mode", "bench-latency"), "nccl", True, "")
    assert job.settings.program == "bench_latency"
    command = bench_latency.command(job, 16, 136, tmp_path / "latency.json")
    assert command[command.index("--batch-size") + 1] == "16"
    assert command[command.index("--output-len") + 1] == "136"
    assert "--disable-custom-all-reduce" in command


def test_the_tokenizer_keeps_the_number_of_tokens(tmp_path: Path) -> None:
    directory = serve.model_directory(settings(), tmp_path)
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(32000))
    # The end-of-sequence token is looked for inside of words.
    assert not any("</s>" in word for word in vocabulary if word != "</s>")


@pytest.mark.parametrize("lines", [1, 2])
def test_results_of_serving_benchmarks_are_read(lines: int, tmp_path: Path) -> None:
    names = [f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl") for kind in ("mean", "median", "p99")]
    content = {"completed": 12, **{name: float(index) for index, name in enumerate(names)}}
    file = tmp_path / "result.json"
    file.write_text("\n".join([json.dumps({"completed": 0}), json.dumps(content)][-lines:]) + "\n")
    result = serve.read_result(file, 12)
    assert result["decode_ms"] == [content["median_tpot_ms"]]
    assert result["latencies"] == {name: content[name] for name in names}


def test_requests_that_failed_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"completed": 3}))
    with pytest.raises(RuntimeError, match="3 of 4 requests were completed"):
        serve.read_result(tmp_path / "result.json", 4)


def test_a_missing_engine_is_told_before_any_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match=r"--engine sglang: .* has no package sglang: install it there, or run"):
        cli.main(["--engine", "sglang", "--model", "llama-2-70b-quarter", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("place", "why"), [("file", "File exists"), ("file/below", "Not a directory")])
def test_a_place_that_cannot_be_written_is_told_before_any_run(tmp_path: Path, place: str, why: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=rf"--out .*/{place}: nothing can be written there \({why}\): name another"):
        cli.check_place("json", tmp_path / place)
