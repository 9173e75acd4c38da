"""Linear layers and norms of a model, from its config.json: shapes on one rank, and reasons why llm_comm does not serve
them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llm_comm.errors import ConfigError
from llm_comm.planning.layers import LINEAR, LINEAR_SILU_AND_MUL, inputs_multiple, of_factors, takes_features

#: Longest row of a fused norm: kMaxHidden in csrc/algorithms/all_reduce_add_rms_norm/operation.cuh.
_MOST_HIDDEN = 16384
#: Supported ``weight_block_size`` of FP8 with block scales: kScaleBlock in csrc/algorithms/linear/problem.h.
_SERVED_BLOCKS = [128, 128]
#: Entries that hold the number of experts; models without experts have none of them.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_GEMMA_3 = ("gemma3", "gemma3_text")
#: Defaults of transformers' Gemma3TextConfig. A config.json may omit entries that equal them, as google/gemma-3-4b-it
#: does.
_OF_GEMMA_3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}
#: Values of ``hidden_act`` for which one kernel computes gate, up and the activation.
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
#: Values of ``model_type`` whose MLP in SGLang is ``LlamaMLP`` or ``Qwen2MLP``, the classes that llm_comm hooks
#: (``integrations/sglang/gated_mlps.py``).
_ACTIVATED_IN_SGLANG = ("llama", "mistral", "phi3", "qwen2", "qwen3")


class Model(NamedTuple):
    """Decoder of a model, as its config.json describes it. Sizes are of the whole model, not of a rank."""

    name: str
    kind: str
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    #: Inner size of the MLP. 0 for models with experts: their layers are not described here.
    inner: int
    layers: int
    #: The MLP has gate and up. Assumed of models with RMSNorm; config.json does not tell.
    is_gated: bool
    activation: str
    #: Why norms are not fused, or "".
    why_not_norm: str
    #: Why linear layers are not served, or "".
    why_not_layers: str
    is_fp8: bool
    #: FP8 weights have block scales of 128 x 128.
    has_block_scales: bool
    experts: int
    #: config.json has an entry about experts, maybe one of which their number is not read.
    mentions_experts: bool
    has_latent_attention: bool

    @property
    def is_activated_in_sglang(self) -> bool:
        """True if llm_comm may compute gate, up and activation in one kernel in SGLang. vLLM has no such limit."""
        return self.kind in _ACTIVATED_IN_SGLANG and not self.is_fp8


class Layer(NamedTuple):
    """Linear layer of one rank. ``outputs`` are those of gate alone if the operation includes the activation."""

    name: str
    operation: str
    outputs: int
    inputs: int
    #: Why it is not served, or "".
    why_not: str = ""


def find(name: str) -> Path:
    """Return the path of a model's config.json.

    Args:
        name: Path of the file or its directory, or a name in the local cache of ``huggingface_hub``. Nothing is
            downloaded.

    Raises:
        ConfigError: There is no such file, and the cache has no such model.
    """
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
    """Read a config.json.

    Raises:
        ConfigError: The file cannot be read, or does not describe a decoder.
    """
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model: {path} cannot be read: {error}") from error
    if not isinstance(whole, dict):
        raise ConfigError(f"--model: {path} has no entries")
    try:
        return of_config(whole, path.resolve().parent.name)
    except ConfigError as error:
        raise ConfigError(f"--model: {path}: {error}") from error


def of_config(whole: Mapping[str, Any], name: str = "", quantization: str | None = None) -> Model:
    """Build a ``Model`` from the entries of a config.json. ``text_config`` of multimodal models overrides the others.

    Args:
        whole: All entries.
        name: Name of the model, for output.
        quantization: Quantization method from the engine's options. Used if the checkpoint has no
            ``quantization_config``.

    Raises:
        ConfigError: An entry is missing or is not a positive integer.
    """
    text = whole.get("text_config")
    config = {**whole, **text} if isinstance(text, Mapping) else whole
    kind = str(config.get("model_type"))
    if kind in _GEMMA_3:
        config = {**_OF_GEMMA_3, **config}

    def number(entry: str, default: int | None = None) -> int:
        value = config.get(entry)
        if value is None and default is not None:
            return default
        if type(value) is not int or value <= 0:
            raise ConfigError(f"{entry} is {value!r}: a decoder has a positive number of them")
        return value

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    experts = next((number(entry) for entry in _EXPERTS if type(config.get(entry)) is int and config[entry]), 0)
    activation = str(config.get("hidden_act") or config.get("hidden_activation") or "silu")
    of_checkpoint = config.get("quantization_config")
    of_engine = {} if quantization is None else {"quant_method": quantization}
    why_quantized, is_fp8, has_block_scales = _quantization(
        of_checkpoint if isinstance(of_checkpoint, Mapping) else of_engine
    )
    return Model(
        name=name,
        kind=kind,
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_size=number("head_dim", max(1, hidden // heads)),
        inner=0 if experts else number("intermediate_size"),
        layers=number("num_hidden_layers"),
        is_gated="rms_norm_eps" in config,
        activation=activation,
        why_not_norm=_why_not_norm(hidden, config),
        why_not_layers=why_quantized,
        is_fp8=is_fp8,
        has_block_scales=has_block_scales,
        experts=experts,
        mentions_experts=any("expert" in entry and bool(value) for entry, value in config.items()),
        has_latent_attention=bool(config.get("kv_lora_rank")),
    )


def _why_not_norm(hidden: int, config: Mapping[str, Any]) -> str:
    if "rms_norm_eps" not in config:
        return "they are no RMSNorm (config.json has no rms_norm_eps)"
    return "" if hidden <= _MOST_HIDDEN else f"rows of {hidden} are longer than {_MOST_HIDDEN}"


def _quantization(config: Mapping[str, Any]) -> tuple[str, bool, bool]:
    """Return why layers are not served or "", whether operands are FP8, and whether scales are block scales."""
    if not config:
        return "", False, False
    method = str(config.get("quant_method"))
    blocks = config.get("weight_block_size")
    if blocks and (method != "fp8" or blocks != _SERVED_BLOCKS):
        return f"quantized by {method} with scales of blocks of {blocks}", True, False
    if method == "fp8":
        return "", True, bool(blocks)
    groups = config.get("config_groups")
    if method == "compressed-tensors" and isinstance(groups, Mapping):
        parts = [
            part
            for group in groups.values()
            if isinstance(group, Mapping)
            for part in (group.get("weights"), group.get("input_activations"))
        ]
        if parts and all(_is_served_fp8(part) for part in parts):
            return "", True, False
    return f"quantized by {method}", False, False


def _is_served_fp8(part: Any) -> bool:
    """Return whether weights or activations of a compressed-tensors group are FP8 with scales of tensors or rows."""
    return (
        isinstance(part, Mapping)
        and (part.get("type"), part.get("num_bits")) == ("float", 8)
        and part.get("strategy") in ("tensor", "channel", "token")
    )


def layers_of(
    model: Model, ranks: int, with_activation: bool = True, with_block_scales: bool = True
) -> Iterator[Layer]:
    """Yield the linear layers of one rank, with ``why_not`` set for those that llm_comm does not serve.

    Yields nothing unless ``ranks`` divides both the heads and the inner size. Layers of experts and of latent attention
    are left out.

    Args:
        model: The model.
        ranks: Size of the tensor-parallel group.
        with_activation: Gate, up and activation are one layer if there is a kernel for it.
        with_block_scales: llm_comm hooks the engine's FP8 layers with block scales.
    """
    if model.heads % ranks or model.inner % ranks:
        return
    heads, kv_heads = model.heads // ranks, max(1, model.kv_heads // ranks)
    behind = "the norm behind its sum is not fused" if model.why_not_norm else ""
    if model.has_block_scales and not with_block_scales:
        model = model._replace(why_not_layers="FP8 with scales of blocks")
    if not model.has_latent_attention:
        outputs = (heads + 2 * kv_heads) * model.head_size
        yield _layer(model, "qkv_proj", LINEAR, outputs, model.hidden)
        yield _layer(model, "o_proj", LINEAR, model.hidden, heads * model.head_size, behind)
    if model.inner:
        inner = model.inner // ranks
        if model.is_gated and model.activation in _ACTIVATIONS and with_activation:
            yield _layer(model, "gate_up_proj", LINEAR_SILU_AND_MUL, inner, model.hidden)
        else:
            outputs = 2 * inner if model.is_gated else inner
            yield _layer(model, "gate_up_proj" if model.is_gated else "up_proj", LINEAR, outputs, model.hidden)
        yield _layer(model, "down_proj", LINEAR, model.hidden, inner, behind)


def router_of(model: Model) -> Layer | None:
    """Return the layer that scores experts, which each rank has as a whole and engines do not quantize. None if the
    model has no experts."""
    if not model.experts:
        return None
    return _layer(model._replace(is_fp8=False, why_not_layers=""), "router", LINEAR, model.experts, model.hidden)


def layers_to_measure(
    model: Model,
    ranks: int,
    with_activation: bool = True,
    with_block_scales: bool = True,
    with_router: bool = False,
) -> Iterator[Layer]:
    """Yield the layers that an engine measures when it starts.

    These are the layers of ``layers_of``, the router if llm_comm hooks it, and gate and up without their activation. An
    engine uses the latter if one kernel for both is not faster.
    """
    yield from layers_of(model, ranks, with_activation, with_block_scales)
    router = router_of(model) if with_router else None
    if router is not None:
        yield router
    if with_activation:
        alone = layers_of(model, ranks, False, with_block_scales)
        yield from (layer for layer in alone if layer.name == "gate_up_proj")


def _layer(model: Model, name: str, operation: str, outputs: int, inputs: int, why_not: str = "") -> Layer:
    multiple = inputs_multiple(model.is_fp8)
    why_not = why_not or model.why_not_layers
    if not why_not and not takes_features(outputs):
        why_not = f"{outputs} outputs are no multiple of {inputs_multiple(False)}"
    if not why_not and not takes_features(inputs, multiple):
        why_not = f"{inputs} inputs are no multiple of {multiple}"
    return Layer(name, of_factors(operation, model.is_fp8, model.has_block_scales), outputs, inputs, why_not)
