"""Command ``llm-comm doctor --model``: which parts of a model llm_comm serves in an engine, by its config.json only.

Sizes are those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from llm_comm import _core
from llm_comm.bench.report import format_bytes
from llm_comm.cli import launch
from llm_comm.config import EngineOptions
from llm_comm.errors import ConfigError
from llm_comm.planning.catalogue import find_table
from llm_comm.planning.layers import has_block_scales, is_preferred
from llm_comm.planning.models import Layer, find, layers_of, read, router_of
from llm_comm.planning.tables import TuningTable

#: GPUs with shipped tables, used if this machine has none: name, number of SMs, compute capability.
_MEASURED_GPUS = (("NVIDIA H100 80GB HBM3", 132, 90), ("NVIDIA H200", 132, 90))


def report(name: str, ranks: int, options: EngineOptions) -> dict[str, str]:
    """Return a line for each all-reduce, norm and linear layer.

    Args:
        name: A directory with config.json, the file itself, or the name of a model in the cache of huggingface_hub.
        ranks: Number of tensor-parallel ranks.
        options: Options of the engine integration.

    Raises:
        ConfigError: The file does not exist or is not of a decoder, or ``ranks`` does not divide the model.
    """
    path = find(name)
    model = read(path)
    if not (ranks in launch.WORLDS and model.heads % ranks == 0 and model.inner % ranks == 0):
        raise ConfigError(
            f"--tp {ranks}: it must be 2 to {launch.WORLDS[-1]} and divide {model.heads} heads and {model.inner} "
            f"columns of the MLP, which {path} has"
        )
    tables = dict(_tables(ranks, options))
    norm, fused = model.why_not_norm, "fused with the all-reduce before them"
    if model.kind.startswith("gemma"):  # in SGLang, Gemma's linear layers perform the all-reduce
        fused += " in vLLM; in SGLang summed by llm_comm, normed by SGLang"
    lines = {
        "model": f"{model.name} ({model.kind}), {model.layers} layers, {ranks} ranks",
        "all-reduce": f"served: {format_bytes(2 * model.hidden)} a token of bf16 or fp16",
        "norms": f"not fused: {norm}; summed by llm_comm" if norm else fused,
    }
    if model.experts:
        whose = "llm_comm's for up to 64 tokens, where the engine uses Triton"
        if options.fuse_experts == "auto":
            whose += " and they measure to be faster"
        if not options.fuse_experts or model.why_not_layers or model.activation != "silu":
            whose = "the engine's"
        lines["experts"] = f"{model.experts}, {whose}; their sum is served"
    if model.has_latent_attention:
        lines["attention"] = "latent (MLA): its layers are not judged here"
    if options.fuse_linear == "auto":
        lines["linear layers"] = "those that are faster than the engine's: by the tuning table, or as measured at start"
    router = router_of(model)
    for layer in (*layers_of(model, ranks), *([router] if router else [])):
        lines[layer.name] = _verdict(layer, model.is_activated_in_sglang, tables, options)
    return lines


def _tables(ranks: int, options: EngineOptions) -> Iterator[tuple[str, tuple[TuningTable, _core.Limits]]]:
    """Yield tables by GPU: the GPU of this machine, or else those with shipped tables."""
    gpus: tuple[tuple[str, int, int], ...] = _MEASURED_GPUS
    if launch.usable_gpus()[0]:
        here = torch.cuda.get_device_properties(0)
        gpus = ((here.name, here.multi_processor_count, 10 * here.major + here.minor),)
    for name, sm_count, capability in gpus:
        limits = _core.Limits(slot_bytes=0, sm_count=sm_count, max_cluster=0, compute_capability=capability)
        yield name, (find_table(name, ranks, sm_count, options, capability), limits)


def _verdict(
    layer: Layer,
    is_activated_in_sglang: bool,
    tables: Mapping[str, tuple[TuningTable, _core.Limits]],
    options: EngineOptions,
) -> str:
    shape = f"{layer.outputs} x {layer.inputs}"
    if "silu" in layer.operation:
        shape += ", with its activation" + " in vLLM" * (not is_activated_in_sglang)
    if layer.name == "router":
        shape += ", in SGLang"
    if has_block_scales(layer.operation):
        shape += ", FP8 with scales of blocks (in vLLM, with fuse_linear on)"
    if layer.why_not:
        return f"{shape}: the engine's: {layer.why_not}"
    if options.fuse_linear != "auto":
        served = f"served, up to {_core.linear_max_tokens} tokens"
        return f"{shape}: {served if options.fuse_linear else 'served, but fuse_linear is off'}"
    found = ", ".join(f"{_auto_verdict(layer, *known, options)} on {name}" for name, known in tables.items())
    return f"{shape}: {found}"


def _auto_verdict(layer: Layer, table: TuningTable, limits: _core.Limits, options: EngineOptions) -> str:
    """Return what an engine would do with the layer, with pdl on."""
    key = layer.operation, layer.outputs, layer.inputs, True
    # Engines measure layers with block scales only with fuse_linear on.
    is_measured = options.tune_at_start != 0 and not has_block_scales(layer.operation)
    if is_measured and all(row.layer() != key for row in table.layers):
        return "measured at start"
    by = table.layers, options.replace(pdl=True), limits, layer.operation, layer.outputs, layer.inputs
    preferred = [tokens for tokens in range(1, _core.linear_max_tokens + 1) if is_preferred(*by, tokens)]
    return f"served up to {preferred[-1]} tokens" if preferred else "not known to be faster"
