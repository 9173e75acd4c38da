"""The plugins of the harness: found by the engines, not by anybody else; and the weights they make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from bench_serving import engine_logs, processes

sys.path.append(str(processes.PLUGINS))

import llm_comm_bench
from llm_comm_bench import free_norms, weights


def entry_points(environment: dict[str, str]) -> dict[str, str]:
    """{group: value} of the entry points named llm_comm_bench that a process finds."""
    program = (
        "import json; from importlib.metadata import entry_points; "
        "print(json.dumps({e.group: e.value for e in entry_points(name='llm_comm_bench')}))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_engines_of_the_harness_find_the_plugins() -> None:
    assert entry_points(processes.environment({}, os.environ)) == {
        "vllm.general_plugins": "llm_comm_bench.vllm_plugin:register",
        "sglang.srt.plugins": "llm_comm_bench.sglang_plugin:register",
    }


def test_nobody_else_finds_them() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert entry_points(environment) == {}


def test_the_harness_looks_for_what_the_plugins_log() -> None:
    assert llm_comm_bench.FREE_MARK == engine_logs.FREE_MARK
    assert llm_comm_bench.FREE_NORMS_MARK == engine_logs.FREE_NORMS_MARK
    assert llm_comm_bench.WEIGHTS_MARK == engine_logs.WEIGHTS_MARK
    assert llm_comm_bench.DETERMINISTIC_MARK == engine_logs.DETERMINISTIC_MARK
    assert llm_comm_bench.BACKEND_MARK == engine_logs.BACKEND_MARK


def test_norms_that_have_a_residual_to_add_do_nothing() -> None:
    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            return x * 2 if residual is None else (x * 2, residual + x)

    free_norms.install(Norm)
    x, residual = torch.ones(2), torch.zeros(2)
    assert Norm()(x, residual) == (x, residual)
    assert torch.equal(Norm()(x), x * 2)


class Block(torch.nn.Module):
    """The parameters of a layer, in the shapes of one shard of ``world`` ranks."""

    def __init__(self, hidden: int, world: int) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(64 // world, hidden)
        self.qkv_proj = torch.nn.Linear(hidden, hidden // world)
        self.o_proj = torch.nn.Linear(hidden // world, hidden, bias=False)
        self.norm = torch.nn.LayerNorm(hidden)


def filled(rank: int, world: int = 4) -> Block:
    block = Block(256, world).to(torch.bfloat16)
    weights.fill(block, rank, world)
    return block


def test_weights_are_the_same_at_every_start() -> None:
    for first, second in zip(filled(1).parameters(), filled(1).parameters(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["embed_tokens", "qkv_proj", "o_proj"])
def test_matrices_differ_from_rank_to_rank(name: str) -> None:
    assert not torch.equal(getattr(filled(0), name).weight, getattr(filled(1), name).weight)


def test_replicated_vectors_are_equal_on_all_ranks() -> None:
    one, other = filled(0), filled(3)
    assert torch.equal(one.norm.weight, other.norm.weight)
    assert one.norm.weight.float().mean().item() == pytest.approx(1, abs=0.05)
    assert not one.qkv_proj.bias.any()


def test_activations_stay_of_order_1() -> None:
    world = 4
    blocks = [filled(rank, world) for rank in range(world)]
    hidden = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    inner = [block.qkv_proj(hidden) for block in blocks]
    assert torch.cat(inner, dim=1).float().std().item() == pytest.approx(1, rel=0.1)
    total = sum(block.o_proj(part).float() for block, part in zip(blocks, inner, strict=True))
    assert isinstance(total, torch.Tensor)
    assert total.std().item() == pytest.approx(0.5, rel=0.1)


class Quantized(torch.nn.Module):
    """Parameters of layers in fp8: one weight as checkpoints have it, one as vLLM leaves it for its kernel; experts."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"down_proj": (64, 256), "gate_up_proj": (64, 128)}.items():
            layer = torch.nn.Module()
            weight = torch.zeros(shape).to(torch.float8_e4m3fn)
            layer.weight = parameter(weight if name == "down_proj" else weight.t())
            layer.weight_scale, layer.input_scale = parameter(torch.zeros(3)), parameter(torch.tensor(0.0))
            self.add_module(name, layer)
        self.experts = torch.nn.Module()
        self.experts.w2_weight = parameter(torch.zeros(3, 128, 256).to(torch.float8_e4m3fn))
        self.experts.w2_weight_scale_inv = parameter(torch.zeros(3, 1, 2))
        self.attn = torch.nn.Module()
        self.attn.k_scale = parameter(torch.tensor(-1.0))


def parameter(data: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=False)


def test_weights_of_fp8_are_quantized_ones_of_the_same_distribution() -> None:
    model: Any = Quantized()
    weights.fill(model, 1, 2)
    for layer in (model.down_proj, model.gate_up_proj):
        assert torch.equal(layer.weight_scale, layer.weight_scale[:1].expand(3))
        assert layer.input_scale.item() == pytest.approx(16 / 448)
    # Of 2 x 256 inputs, and of 128: variances 0.25 / 512 and 1 / 128.
    for layer, variance in ((model.down_proj, 0.25 / 512), (model.gate_up_proj, 1 / 128)):
        values = layer.weight.float() * layer.weight_scale[0]
        assert values.var().item() == pytest.approx(variance, rel=0.05)
    experts = model.experts.w2_weight.float() * model.experts.w2_weight_scale_inv[0, 0, 0]
    assert experts.var().item() == pytest.approx((0.5 * 1.5) ** 2 / 512, rel=0.05)
    assert model.attn.k_scale.item() == 1


def test_scales_are_the_same_on_all_ranks_and_weights_of_fp8_are_not() -> None:
    one, other = Quantized(), Quantized()
    weights.fill(one, 0, 2)
    weights.fill(other, 1, 2)
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.float(), theirs.float()) == ("scale" in name), name


def test_another_quantization_is_an_error() -> None:
    model = torch.nn.Module()
    model.weight, model.weight_scale = parameter(torch.zeros(4, 4, dtype=torch.bfloat16)), parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"weight_scale belongs to a weight of torch.bfloat16; .* use --weights dummy"):
        weights.fill(model, 0, 2)


def test_what_ranks_hold_whole_is_the_same_on_all() -> None:
    class ReplicatedLinear(torch.nn.Linear):
        """Engines call it so."""

    def routed(rank: int) -> torch.Tensor:
        model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"gate": ReplicatedLinear(256, 16, bias=False)})})
        weights.fill(model, rank, 2)
        return next(model.parameters()).data

    assert torch.equal(routed(0), routed(1))
    # Logits of a router have a standard deviation of 4.
    assert routed(0).var().item() == pytest.approx(16 / 256, rel=0.05)


def test_embeddings_that_are_those_of_the_logits_too_are_filled_as_embeddings() -> None:
    model: Any = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(64, 32), "lm_head": torch.nn.Linear(32, 64)})
    model.lm_head.weight = model.embed_tokens.weight
    weights.fill(model, 0, 2)
    assert model.lm_head.weight.var().item() == pytest.approx(1, rel=0.1)
