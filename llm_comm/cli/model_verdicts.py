"""``llm-comm doctor --model``: what of a model llm_comm serves in an engine, and why not the rest, by its config.json
alone. Sizes are of a rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llm_comm import _core
from llm_comm.bench.report import format_bytes
from llm_comm.cli import launch
from llm_comm.config import EngineOptions
from llm_comm.errors import ConfigError
from llm_comm.planning.catalogue import find_table
from llm_comm.planning.layers import (
    LINEAR,
    LINEAR_SILU_AND_MUL,
    inputs_multiple,
    is_preferred,
    of_factors,
    takes_features,
)
from llm_comm.planning.tables import TuningTable

#: As kMaxHidden in csrc/algorithms/all_reduce_add_rms_norm/operation.cuh.
_MOST_HIDDEN = 16384
#: Where no GPU is found: those that shipped tables are of, with multiprocessors and compute capability.
_MEASURED_GPUS = (("NVIDIA H100 80GB HBM3", 132, 90), ("NVIDIA H200", 132, 90))
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Model(NamedTuple):
    """What config.json says of a decoder's layers."""

    name: str
    kind: str
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    #: Of the MLP; 0 where there is none.
    inner: int
    layers: int
    is_gated: bool
    activation: str
    #: Why norms are not fused, or "".
    why_not_norm: str
    #: Why linear layers are not served, or "".
    why_not_layers: str
    is_fp8: bool
    experts: int
    has_latent_attention: bool


class Layer(NamedTuple):
    """A linear layer of a rank."""

    name: str
    operation: str
    outputs: int
    inputs: int
    #: Why it is not served, or "".
    why_not: str = ""


def report(name: str, ranks: int, options: EngineOptions) -> dict[str, str]:
    """A line for each sum, norm and layer.

    Args:
        name: A directory with config.json, that file, or the name of a model in the cache of huggingface_hub.
        ranks: Tensor-parallel ones.

    Raises:
        ConfigError: There is no such file, it is not that of a decoder, or the ranks do not divide the model.
    """
    path = find(name)
    model = read(path)
    if not (ranks in launch.WORLDS and model.heads % ranks == 0 and model.inner % ranks == 0):
        raise ConfigError(
            f"--tp {ranks}: it must be 2 to {launch.WORLDS[-1]} and divide {model.heads} heads and {model.inner} "
            f"columns of the MLP, which {path} has"
        )
    tables = dict(_tables(ranks, options))
    norm = model.why_not_norm
    lines = {
        "model": f"{model.name} ({model.kind}), {model.layers} layers, {ranks} ranks",
        "all-reduce": f"served: {format_bytes(2 * model.hidden)} a token of bf16 or fp16",
        "norms": f"not fused: {norm}; summed by llm_comm" if norm else "fused with the all-reduce before them",
    }
    if model.experts:
        lines["experts"] = f"{model.experts}, the engine's; their sum is served"
    if model.has_latent_attention:
        lines["attention"] = "latent (MLA): its layers are not judged here"
    if options.fuse_linear == "auto":
        lines["linear layers"] = (
            "where they are faster, with dependent launches (pdl). Those are on in SGLang; in vLLM with pdl: 1, or "
            "where the table has a layer with as many outputs as the hidden size"
        )
    for layer in layers_of(model, ranks):
        lines[layer.name] = _verdict(layer, tables, options)
    return lines


def find(name: str) -> Path:
    """The config.json that ``name`` stands for; raises ConfigError."""
    given = Path(name)
    if given.exists():
        return given / "config.json" if given.is_dir() else given
    home = os.environ.get("HF_HUB_CACHE") or Path(
        os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface",
        "hub",
    )
    found = sorted(Path(home).glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json"), key=os.path.getmtime)
    if not found:
        raise ConfigError(f"--model {name}: no such file or directory, and no such model in {home}: give a path")
    return found[-1]


def read(path: Path) -> Model:
    """What a config.json says; raises ConfigError."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model: {path} cannot be read: {error}") from error
    if not isinstance(whole, dict):
        raise ConfigError(f"--model: {path} has no entries")
    text = whole.get("text_config")
    config: dict[str, Any] = {**whole, **text} if isinstance(text, dict) else whole

    def number(name: str, default: int | None = None) -> int:
        value = config.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value <= 0:
            raise ConfigError(f"--model: {name} in {path} is {value!r}: a decoder has a positive number of them")
        return value

    heads, hidden, kind = number("num_attention_heads"), number("hidden_size"), str(config.get("model_type"))
    experts = next((number(name) for name in _EXPERTS if config.get(name)), 0)
    activation = str(config.get("hidden_act") or config.get("hidden_activation") or "silu")
    of_checkpoint = config.get("quantization_config")
    why_quantized, is_fp8 = _quantization(of_checkpoint if isinstance(of_checkpoint, Mapping) else {})
    return Model(
        name=path.resolve().parent.name,
        kind=kind,
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_size=number("head_dim", max(1, hidden // heads)),
        inner=0 if experts else number("intermediate_size"),
        layers=number("num_hidden_layers"),
        is_gated="rms_norm_eps" in config,
        activation=activation,
        why_not_norm=_why_not_norm(kind, hidden, config),
        why_not_layers=why_quantized,
        is_fp8=is_fp8,
        experts=experts,
        has_latent_attention=bool(config.get("kv_lora_rank")),
    )


def _why_not_norm(kind: str, hidden: int, config: Mapping[str, Any]) -> str:
    if kind.startswith("gemma"):
        return "Gemma's norms multiply by 1 + weight"
    if "rms_norm_eps" not in config:
        return "they are no RMSNorm (config.json has no rms_norm_eps)"
    return "" if hidden <= _MOST_HIDDEN else f"rows of {hidden} are longer than {_MOST_HIDDEN}"


def _quantization(config: Mapping[str, Any]) -> tuple[str, bool]:
    """Why layers are not served, or "", and whether operands are FP8."""
    if not config:
        return "", False
    method = str(config.get("quant_method"))
    if config.get("weight_block_size"):
        return "FP8 with scales of blocks", True
    if method == "fp8":
        return "", True
    groups = config.get("config_groups")
    if method == "compressed-tensors" and isinstance(groups, Mapping):
        parts = [
            part
            for group in groups.values()
            if isinstance(group, Mapping)
            for part in (group.get("weights"), group.get("input_activations"))
        ]
        if parts and all(_is_served_fp8(part) for part in parts):
            return "", True
    return f"quantized by {method}", False


def _is_served_fp8(part: Any) -> bool:
    """Whether a part of a compressed-tensors group is FP8 with scales of tensors, tokens or outputs."""
    return (
        isinstance(part, Mapping)
        and (part.get("type"), part.get("num_bits")) == ("float", 8)
        and part.get("strategy") in ("tensor", "channel", "token")
    )


def layers_of(model: Model, ranks: int) -> Iterator[Layer]:
    """The linear layers that a rank computes."""
    heads, kv_heads = model.heads // ranks, max(1, model.kv_heads // ranks)
    behind = "the norm behind its sum is not fused" if model.why_not_norm else ""
    if not model.has_latent_attention:
        outputs = (heads + 2 * kv_heads) * model.head_size
        yield _layer(model, "qkv_proj", LINEAR, outputs, model.hidden)
        yield _layer(model, "o_proj", LINEAR, model.hidden, heads * model.head_size, behind)
    if model.inner:
        inner = model.inner // ranks
        if model.is_gated and model.activation == "silu":
            yield _layer(model, "gate_up_proj", LINEAR_SILU_AND_MUL, inner, model.hidden)
        else:
            outputs = 2 * inner if model.is_gated else inner
            yield _layer(model, "gate_up_proj" if model.is_gated else "up_proj", LINEAR, outputs, model.hidden)
        yield _layer(model, "down_proj", LINEAR, model.hidden, inner, behind)


def _layer(model: Model, name: str, operation: str, outputs: int, inputs: int, why_not: str = "") -> Layer:
    multiple = inputs_multiple(model.is_fp8)
    why_not = why_not or model.why_not_layers
    if not why_not and not takes_features(outputs):
        why_not = f"{outputs} outputs are no multiple of {inputs_multiple(False)}"
    if not why_not and not takes_features(inputs, multiple):
        why_not = f"{inputs} inputs are no multiple of {multiple}"
    return Layer(name, of_factors(operation, model.is_fp8), outputs, inputs, why_not)


def _tables(ranks: int, options: EngineOptions) -> Iterator[tuple[str, tuple[TuningTable, _core.Limits]]]:
    """By GPU: the one that is here, else those that tables come with."""
    gpus: tuple[tuple[str, int, int], ...] = _MEASURED_GPUS
    if launch.usable_gpus()[0]:
        here = torch.cuda.get_device_properties(0)
        gpus = ((here.name, here.multi_processor_count, 10 * here.major + here.minor),)
    for name, sm_count, capability in gpus:
        limits = _core.Limits(slot_bytes=0, sm_count=sm_count, max_cluster=0, compute_capability=capability)
        yield name, (find_table(name, ranks, sm_count, options, capability), limits)


def _verdict(layer: Layer, tables: Mapping[str, tuple[TuningTable, _core.Limits]], options: EngineOptions) -> str:
    shape = f"{layer.outputs} x {layer.inputs}"
    if "silu" in layer.operation:
        shape += ", with silu-and-mul in vLLM"
    if layer.why_not:
        return f"{shape}: the engine's: {layer.why_not}"
    if options.fuse_linear != "auto":
        return f"{shape}: {'served, up to 64 tokens' if options.fuse_linear else 'served, but fuse_linear is off'}"
    found = {name: _most_tokens(layer, table, limits, options) for name, (table, limits) in tables.items()}
    if not any(found.values()):
        return f"{shape}: served with fuse_linear: 1; else the engine's: not known to be faster on {', '.join(found)}"
    by_gpu = [
        f"{f'up to {tokens} tokens' if tokens else 'not known to be faster'} on {name}"
        for name, tokens in found.items()
    ]
    return f"{shape}: served {', '.join(by_gpu)}"


def _most_tokens(layer: Layer, table: TuningTable, limits: _core.Limits, options: EngineOptions) -> int:
    """Up to which an engine would compute the layer by llm_comm, with dependent launches."""
    by = table.layers, options.replace(pdl=True), limits, layer.operation, layer.outputs, layer.inputs
    return max((tokens for tokens in range(1, _core.linear_max_tokens + 1) if is_preferred(*by, tokens)), default=0)
