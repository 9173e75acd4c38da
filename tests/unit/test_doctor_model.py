"""``llm-comm doctor --model``: what of a model is served, by config.json alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from llm_comm.cli import commands, launch, model_verdicts
from llm_comm.config import EngineOptions
from llm_comm.errors import ConfigError
from llm_comm.planning import models

SHAPES = Path(__file__).parents[2] / "bench_serving" / "model_shapes"
LLAMA = json.loads((SHAPES / "llama-3-8b" / "config.json").read_text())
LAYERS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


@pytest.fixture(autouse=True)
def _no_gpu_and_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("LLM_COMM_", "HF_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(launch, "usable_gpus", lambda: (0, "none"))


def verdicts(directory: Path, ranks: int = 2, /, **entries: Any) -> dict[str, str]:
    config = {name: value for name, value in {**LLAMA, **entries}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return model_verdicts.report(str(directory), ranks, EngineOptions.load({}))


def refusal(directory: Path, ranks: int = 2, /, **entries: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        verdicts(directory, ranks, **entries)
    return str(caught.value)


def test_a_model_of_which_a_table_has_layers() -> None:
    found = model_verdicts.report(str(SHAPES / "llama-2-70b-quarter"), 2, EngineOptions.load({}))
    assert found["all-reduce"] == "served: 16K a token of bf16 or fp16"
    assert found["norms"] == "fused with the all-reduce before them"
    assert found["o_proj"] == f"8192 x 1024: served up to 64 tokens on {H100}, served up to 16 tokens on {H200}"
    assert found["qkv_proj"] == f"1280 x 8192: served up to 32 tokens on {H100}, measured at start on {H200}"
    assert found["gate_up_proj"].startswith("3584 x 8192, with its activation: served up to 64 tokens")
    assert list(found) == ["model", "all-reduce", "norms", "linear layers", *LAYERS]


def test_an_engine_measures_gate_and_up_both_ways() -> None:
    """Where the kernel with the activation is not faster, the engine computes the layer alone."""
    model = models.read(SHAPES / "gemma-2-9b" / "config.json")
    gate_up = [layer for layer in models.layers_to_measure(model, 2) if layer.name == "gate_up_proj"]
    assert [(layer.operation, layer.outputs) for layer in gate_up] == [
        ("linear_silu_and_mul", 7168),
        ("linear", 14336),
    ]
    alone = list(models.layers_to_measure(model, 2, with_activation=False))
    assert alone == list(models.layers_of(model, 2, with_activation=False))
    assert list(models.layers_to_measure(model, 2))[:-1] == list(models.layers_of(model, 2))


def test_a_model_that_no_table_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(tmp_path)["down_proj"] == f"4096 x 7168: measured at start on {H100}, measured at start on {H200}"
    monkeypatch.setenv("LLM_COMM_TUNE_AT_START", "0")
    found = model_verdicts.report(str(tmp_path), 2, EngineOptions.load())
    assert found["down_proj"] == f"4096 x 7168: served up to 32 tokens on {H100}, served up to 32 tokens on {H200}"
    found = model_verdicts.report(str(SHAPES / "llama-2-70b-quarter"), 2, EngineOptions.load())
    assert found["qkv_proj"] == f"1280 x 8192: served up to 32 tokens on {H100}, served up to 32 tokens on {H200}"
    verdicts(tmp_path, intermediate_size=65536)
    found = model_verdicts.report(str(tmp_path), 2, EngineOptions.load())
    assert found["down_proj"] == f"4096 x 32768: not known to be faster on {H100}, not known to be faster on {H200}"
    monkeypatch.setenv("LLM_COMM_FUSE_LINEAR", "1")
    options = EngineOptions.load()
    found = model_verdicts.report(str(tmp_path), 4, options)
    assert found["qkv_proj"] == "1536 x 4096: served, up to 64 tokens"
    monkeypatch.setenv("LLM_COMM_FUSE_LINEAR", "0")
    found = model_verdicts.report(str(tmp_path), 4, EngineOptions.load())
    assert found["qkv_proj"] == "1536 x 4096: served, but fuse_linear is off"


@pytest.mark.parametrize(
    ("entries", "layer", "why"),
    [
        ({"model_type": "qwen2"}, "qkv_proj", "3072 x 4096: measured"),  # with a bias
        ({"attention_bias": True}, "o_proj", "measured"),
        ({"mlp_bias": True}, "gate_up_proj", "measured"),
        ({"model_type": "gemma2"}, "norms", "before them in vLLM; in SGLang summed by llm_comm, normed by SGLang"),
        ({"model_type": "gemma2"}, "down_proj", "4096 x 7168: measured"),
        ({"model_type": "gemma2", "hidden_act": "gelu"}, "gate_up_proj", "14336 x 4096: measured"),
        ({"rms_norm_eps": None}, "down_proj", "the engine's: the norm behind its sum is not fused"),
        ({"model_type": "glm4"}, "gate_up_proj", "7168 x 4096, with its activation in vLLM: measured"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "gate_up_proj",
            "7168 x 4096, with its activation in vLLM: measured",
        ),
        ({"rms_norm_eps": None}, "norms", "not fused: they are no RMSNorm"),
        ({"rms_norm_eps": None}, "up_proj", "7168 x 4096: measured"),
        ({"hidden_size": 32768}, "norms", "not fused: rows of 32768 are longer than 16384"),
        ({"intermediate_size": 14400}, "gate_up_proj", "the engine's: 7200 outputs are no multiple of 64"),
        ({"intermediate_size": 14400}, "down_proj", "the engine's: 7200 inputs are no multiple of 64"),
        (
            {"num_experts": 128},
            "experts",
            "128, llm_comm's for up to 64 tokens, where the engine uses Triton and they measure to be faster",
        ),
        ({"num_experts": 128, "hidden_act": "gelu"}, "experts", "128, the engine's; their sum is served"),
        (
            {"num_experts": 128, "quantization_config": {"quant_method": "awq"}},
            "experts",
            "128, the engine's; their sum is served",
        ),
        (
            {"num_experts": 128, "quantization_config": {"quant_method": "awq"}},
            "router",
            f"128 x 4096, in SGLang: measured at start on {H100}, measured at start on {H200}",
        ),
        ({"num_experts": 8}, "router", "8 x 4096, in SGLang: the engine's: 8 outputs are no multiple of 64"),
        ({"kv_lora_rank": 512}, "attention", "latent (MLA): its layers are not judged here"),
        ({"quantization_config": {"quant_method": "awq"}}, "o_proj", "the engine's: quantized by awq"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "o_proj",
            "4096 x 2048, FP8 with scales of blocks (in vLLM, with fuse_linear on): not known",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "gate_up_proj",
            "7168 x 4096, with its activation in vLLM, FP8 with scales of blocks (in vLLM, with fuse_linear on)",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}},
            "o_proj",
            "the engine's: quantized by fp8 with scales of blocks of [64, 128]",
        ),
        (
            {"quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]}},
            "o_proj",
            "the engine's: quantized by mxfp8 with scales of blocks of [1, 32]",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}, "intermediate_size": 14464},
            "down_proj",
            "7232 inputs are no",
        ),
        ({"text_config": {"hidden_size": 2048}}, "all-reduce", "served: 4K a token"),
    ],
)
def test_what_is_not_served(tmp_path: Path, entries: dict[str, Any], layer: str, why: str) -> None:
    assert why in verdicts(tmp_path, **entries)[layer]


def test_layers_with_scales_of_blocks_are_served_in_vllm_alone(tmp_path: Path) -> None:
    verdicts(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    model = models.read(tmp_path / "config.json")
    layers = list(models.layers_of(model, 2))
    kinds = {"linear_fp8_blocks", "linear_silu_and_mul_fp8_blocks"}
    assert {layer.operation for layer in layers} == kinds
    assert not any(layer.why_not for layer in layers)
    of_sglang = models.layers_of(model, 2, with_block_scales=False)
    assert {layer.why_not for layer in of_sglang} == {"FP8 with scales of blocks"}
    options = EngineOptions.load({}, tune_at_start=0)
    found = model_verdicts.report(str(tmp_path), 2, options)["down_proj"]
    assert found.endswith(
        f"(in vLLM, with fuse_linear on): not known to be faster on {H100}, not known to be faster on {H200}"
    )


def test_gemma_3_leaves_out_what_is_usual(tmp_path: Path) -> None:
    """As google/gemma-3-4b-it: entries of the language model that are those of transformers are not in the file."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert models.read(tmp_path / "config.json").activation == "gelu_pytorch_tanh"
    found = model_verdicts.report(str(tmp_path), 2, EngineOptions.load({}))
    assert found["model"].endswith("(gemma3_text), 34 layers, 2 ranks")
    assert found["norms"].startswith("fused with the all-reduce before them in vLLM; ")
    gate_up = "5120 x 2560, with its activation in vLLM"
    shapes = {"qkv_proj": "2048 x 2560", "o_proj": "2560 x 1024", "gate_up_proj": gate_up}
    assert {name: found[name].partition(":")[0] for name in shapes} == shapes
    found = model_verdicts.report(str(tmp_path), 4, EngineOptions.load({}))
    assert found["down_proj"].startswith("2560 x 2560: measured")


@pytest.mark.parametrize(
    ("weights", "x", "is_served"),
    [
        (
            {"type": "float", "num_bits": 8, "strategy": "channel"},
            {"type": "float", "num_bits": 8, "strategy": "token"},
            True,
        ),
        (
            {"type": "float", "num_bits": 8, "strategy": "block"},
            {"type": "float", "num_bits": 8, "strategy": "token"},
            False,
        ),
        ({"type": "int", "num_bits": 4, "strategy": "group"}, None, False),
    ],
)
def test_compressed_tensors(tmp_path: Path, weights: dict[str, Any], x: dict[str, Any] | None, is_served: bool) -> None:
    groups = {"group_0": {"weights": weights, "input_activations": x}}
    found = verdicts(tmp_path, quantization_config={"quant_method": "compressed-tensors", "config_groups": groups})
    assert ("the engine's: quantized by compressed-tensors" in found["qkv_proj"]) == (not is_served)


def test_ranks_that_share_heads(tmp_path: Path) -> None:
    found = verdicts(tmp_path, 8, num_key_value_heads=2)
    assert found["qkv_proj"].startswith(f"{(4 + 2) * 128} x 4096")


@pytest.mark.parametrize(
    ("entries", "experts", "mentions"),
    [
        ({}, 0, False),
        ({"num_experts": 0}, 0, False),
        ({"num_experts": 128}, 128, True),
        ({"moe_num_experts": 64}, 64, True),  # ERNIE
        ({"moe_num_experts": [64, 32]}, 0, True),
        ({"expert_count": 64}, 0, True),
        ({"text_config": {"num_experts": 8}}, 8, True),
    ],
)
def test_experts_of_a_model(entries: dict[str, Any], experts: int, mentions: bool) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 64, "num_hidden_layers": 1}
    found = models.of_config({**sizes, **entries})
    assert (found.experts, found.mentions_experts) == (experts, mentions)


def test_what_is_no_model(tmp_path: Path) -> None:
    assert "--tp 3: it must be 2 to 16 and divide 32 heads" in refusal(tmp_path, 3)
    assert "--tp 32" in refusal(tmp_path, 32)
    assert "hidden_size is 'large'" in refusal(tmp_path, hidden_size="large")
    assert "num_hidden_layers" in refusal(tmp_path, num_hidden_layers=None)
    assert "num_attention_heads" in refusal(tmp_path, num_attention_heads=True)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="has no entries"):
        model_verdicts.read(tmp_path / "list.json")
    (tmp_path / "list.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read"):
        model_verdicts.read(tmp_path / "list.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        model_verdicts.read(tmp_path / "no.json")


def test_names_are_those_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="--model org/name: no such file or directory, and no such model in"):
        model_verdicts.find("org/name")
    file = tmp_path / "hub" / "models--org--name" / "snapshots" / "1234" / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(LLAMA))
    assert model_verdicts.find("org/name") == file
    assert model_verdicts.find(str(file.parent)) == model_verdicts.find(str(file)) == file


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert commands.main(["doctor", "--model", str(tmp_path), "--tp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "norms: fused with the all-reduce before them" in lines
    assert commands.main(["doctor", "--model", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["down_proj"].startswith("4096 x 1792")
    assert commands.main(["doctor", "--model", str(tmp_path / "none")]) == 2
