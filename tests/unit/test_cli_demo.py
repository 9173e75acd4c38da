"""The demo's model and checks: sharding changes nothing, and whatever goes wrong is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from llm_comm.demo import run as demo
from llm_comm.demo.model import KVCache, Llama, LlamaConfig
from llm_comm.errors import ConfigError

CONFIG = LlamaConfig(hidden=64, layers=2, heads=16, kv_heads=8, intermediate=160, vocab=50)
PROMPTS = torch.tensor([[3, 14, 15, 9, 2, 6], [5, 35, 8, 9, 7, 9]])
MAX_LENGTH = 16


def build(**sharding: Any) -> Llama:
    return Llama(CONFIG, seed=7, max_length=MAX_LENGTH, dtype=torch.float32, device=torch.device("cpu"), **sharding)


def logits_of(model: Llama) -> Tensor:
    cache = KVCache(model, batch=2, max_length=MAX_LENGTH)
    return model.forward(PROMPTS, torch.arange(PROMPTS.shape[1]), cache)


class ThreadSum:
    """All-reduce between threads, one a rank."""

    def __init__(self, world: int) -> None:
        self._slots: list[Tensor] = [torch.empty(0)] * world
        self._barrier = threading.Barrier(world)

    def of_rank(self, rank: int) -> Callable[[Tensor], Tensor]:
        def all_reduce(partial: Tensor) -> Tensor:
            self._slots[rank] = partial
            self._barrier.wait(60)
            total = torch.stack(self._slots).sum(dim=0)
            self._barrier.wait(60)
            return total

        return all_reduce


def sharded_logits(world: int) -> list[Tensor]:
    sums = ThreadSum(world)

    def run_rank(rank: int) -> Tensor:
        return logits_of(build(rank=rank, world=world, all_reduce=sums.of_rank(rank)))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run_rank, range(world)))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_shards_compute_what_the_whole_model_computes(world: int) -> None:
    expected = logits_of(build())
    for actual in sharded_logits(world):
        assert demo.relative_error(actual, expected).max() < 1e-5


def test_a_shard_without_its_all_reduce_is_far_off() -> None:
    error = demo.relative_error(logits_of(build(rank=0, world=2)), logits_of(build()))
    assert error.min() > 10 * max(demo.LOGIT_TOLERANCE.values())


def test_model_refuses_a_world_that_does_not_divide_it() -> None:
    with pytest.raises(ConfigError, match="8 KV heads"):
        build(rank=0, world=3)


@pytest.mark.parametrize("wrong", [{"hidden": 60}, {"heads": 3}, {"kv_heads": 5}, {"layers": 0}])
def test_config_refuses_shapes_that_do_not_fit(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        LlamaConfig(**{"hidden": 64, "heads": 16, "kv_heads": 8, "intermediate": 160, **wrong})


def test_parameters_counts_every_weight() -> None:
    model = build()
    layers = [weight for layer in model._layers for weight in vars(layer).values()]
    held = sum(weight.numel() for weight in [*layers, model._embedding, model._norm, model._head])
    assert held == CONFIG.parameters


def test_a_token_sees_no_later_token() -> None:
    changed = PROMPTS.clone()
    changed[:, -1] = 0
    model = build()
    cache = KVCache(model, batch=2, max_length=MAX_LENGTH)
    altered = model.forward(changed, torch.arange(PROMPTS.shape[1]), cache)
    original = logits_of(model)
    assert torch.equal(altered[:, :-1], original[:, :-1])
    assert not torch.equal(altered[:, -1], original[:, -1])


class CountingComm:
    """Stands for a communicator of one rank that takes messages up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def accepts(self, x: Tensor) -> bool:
        return x.numel() * x.element_size() <= self._limit

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


def decode(group: dist.ProcessGroup, tokens: int, limit: int = 1 << 20) -> tuple[demo.Decoder, demo.CountedAllReduce]:
    counted = demo.CountedAllReduce(CountingComm(limit), group)  # type: ignore[arg-type]
    decoder = demo.Decoder(build(all_reduce=counted), counted, PROMPTS, tokens)
    demo.timed_decode(decoder, tokens - 1, torch.device("cpu"), group)
    return decoder, counted


def test_decode_agrees_with_teacher_forcing(group: dist.ProcessGroup) -> None:
    decoder, _ = decode(group, tokens=10)
    reference = demo.reference_logits(build(), PROMPTS, decoder.generated)
    assert demo.relative_error(decoder.logits, reference).max() < 1e-5
    assert torch.equal(reference.argmax(dim=-1), decoder.generated)


def test_every_all_reduce_is_counted_by_size(group: dist.ProcessGroup) -> None:
    step_bytes, prefill_bytes = PROMPTS.shape[0] * CONFIG.hidden * 4, PROMPTS.numel() * CONFIG.hidden * 4
    _, counted = decode(group, tokens=5, limit=step_bytes)
    assert counted.calls(accepted=True) == {step_bytes: 4 * 2 * CONFIG.layers}
    assert counted.calls(accepted=False) == {prefill_bytes: 2 * CONFIG.layers}


def check(group: dist.ProcessGroup, spoil: Callable[[Tensor], None]) -> demo.Check:
    decoder, _ = decode(group, tokens=4)
    reference = demo.reference_logits(build(), PROMPTS, decoder.generated)
    spoil(decoder.logits)
    return demo.check_agreement(decoder.logits, decoder.generated, reference, 1e-4, group)


def test_check_passes_a_right_run(group: dist.ProcessGroup) -> None:
    outcome = check(group, lambda logits: None)
    assert outcome.passed
    assert outcome.rank_spread == 0


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_check_finds_one_wrong_sequence_in_one_step(factor: float, group: dist.ProcessGroup) -> None:
    outcome = check(group, lambda logits: logits[2, 1].mul_(factor))
    assert not outcome.passed
    assert outcome.worst_step == 2


@pytest.mark.parametrize(
    "wrong",
    [{"rank_spread": 1.0}, {"rank_spread": float("nan")}, {"tokens_identical": False}, {"logits_error": 1.0}],
)
def test_check_fails_for_each_reason_alone(wrong: dict[str, Any]) -> None:
    right = {
        "logits_error": 0.0,
        "worst_step": 0,
        "tolerance": 1e-4,
        "rank_spread": 0.0,
        "tokens_identical": True,
    }
    assert demo.Check(**right).passed
    assert not demo.Check(**{**right, **wrong}).passed


def test_report_says_how_it_ended_and_on_what() -> None:
    report = {
        "ranks": {"description": "2 emulated GPUs"},
        "model": {"layers": 2},
        "decode": {"batch": 1, "prompt_len": 4, "tokens": 8, "tokens_per_s": 12.5, "cuda_graph": False},
        "all_reduce": {
            "served": {4096: 10},
            "declined": {},
            "workspace_bytes": 1 << 20,
            "plans": [
                {
                    "algorithm": "one_shot",
                    "protocol": "LL",
                    "blocks": 2,
                    "threads": 64,
                    "message_bytes": size,
                    "reason": "r",
                }
                for size in (2048, 4096)
            ],
        },
        "check": {
            "logits_error": 0.5,
            "worst_step": 3,
            "tolerance": 1e-4,
            "rank_spread": 0.0,
            "tokens_identical": True,
            "passed": False,
        },
    }
    lines = demo.render(report).splitlines()
    assert lines[-1] == "demo FAILED on 2 emulated GPUs"
    assert "10 through llm_comm" in lines[1]
    assert [("*" in line) for line in lines if "one_shot" in line] == [False, True]


def rotate_naively(head: Tensor, position: int) -> Tensor:
    """Rotary embedding of one head as a product of complex numbers."""
    half = head.numel() // 2
    speeds = CONFIG.rope_theta ** -(torch.arange(half) / half)
    turned = torch.complex(head[:half], head[half:]) * torch.polar(torch.ones(half), position * speeds)
    return torch.cat((turned.real, turned.imag))


def naive_logits(model: Llama, tokens: list[int]) -> Tensor:
    """The model by the book, one token and one head at a time: (tokens, vocab)."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape, weight, CONFIG.norm_eps)

    size, group = CONFIG.head_dim, CONFIG.heads // CONFIG.kv_heads
    stream = [model._embedding[token] for token in tokens]
    for layer in model._layers:
        projections = [layer.qkv @ norm(x, layer.attention_norm) for x in stream]
        heads = [projected.split(size) for projected in projections]
        for position in range(len(stream)):
            outputs = []
            for head in range(CONFIG.heads):
                query = rotate_naively(heads[position][head], position)
                shared = CONFIG.heads + head // group
                seen = range(position + 1)
                scores = torch.stack([query @ rotate_naively(heads[p][shared], p) for p in seen]) / size**0.5
                values = torch.stack([heads[p][shared + CONFIG.kv_heads] for p in seen])
                outputs.append(scores.softmax(dim=0) @ values)
            x = stream[position] + layer.output @ torch.cat(outputs)
            gate, up = (layer.gate_up @ norm(x, layer.mlp_norm)).chunk(2)
            stream[position] = x + layer.down @ (torch.nn.functional.silu(gate) * up)
    return torch.stack([model._head @ norm(x, model._norm) for x in stream])


def test_model_is_a_llama() -> None:
    model = build()
    expected = torch.stack([naive_logits(model, tokens) for tokens in PROMPTS.tolist()])
    assert demo.relative_error(logits_of(model), expected).max() < 1e-5
