"""Experts of few tokens: gate, up and down-projection of the experts that a router chose, by the emulated kernels."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from cores import connected
from harness import RankPool, make_communicator
from torch._subclasses import FakeTensorMode

from llm_comm import UnsupportedInputError, _core, registry

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
NUMBERS = {BF16: "bf16", FP16: "fp16"}


class Layer(NamedTuple):
    """Weights of one layer, as engines keep them."""

    gate_up: torch.Tensor  # [experts, 2 * intermediate, hidden]: rows of gate, then rows of up
    down: torch.Tensor  # [experts, hidden, intermediate]
    #: Of FP8 weights: for each block of 128 rows and 128 columns of each.
    scales: tuple[torch.Tensor, ...] = ()

    def in_full(self) -> list[torch.Tensor]:
        """Both weights in fp64."""
        weights = [self.gate_up.double(), self.down.double()]
        if not self.scales:
            return weights
        full = [scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2) for scale in self.scales]
        return [weight * scale for weight, scale in zip(weights, full, strict=True)]


def layer_of(experts: int, hidden: int, intermediate: int, dtype: torch.dtype = BF16) -> Layer:
    return Layer(
        (torch.randn(experts, 2 * intermediate, hidden) / hidden**0.5).to(dtype),
        (torch.randn(experts, hidden, intermediate) / intermediate**0.5).to(dtype),
    )


def fp8_layer_of(experts: int, hidden: int, intermediate: int) -> Layer:
    gate_up = torch.randn(experts, 2 * intermediate, hidden).to(FP8)
    down = torch.randn(experts, hidden, intermediate).to(FP8)
    scales = [
        torch.rand(experts, weight.shape[1] // 128, weight.shape[2] // 128) * 2 / weight.shape[2] ** 0.5
        for weight in (gate_up, down)
    ]
    return Layer(gate_up, down, tuple(scales))


def choice_of(tokens: int, top_k: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    return ids.int(), torch.rand(tokens, top_k)


def run(
    x: torch.Tensor,
    layer: Layer,
    ids: torch.Tensor,
    weights: torch.Tensor,
    epilogue: str = "silu_and_mul",
    **others: Any,
) -> torch.Tensor:
    (core,) = connected(1)
    experts, hidden, intermediate = layer.down.shape
    tokens, top_k = ids.shape
    call: Any = core.prepare_experts(
        tokens=tokens,
        top_k=top_k,
        experts=experts,
        hidden=hidden,
        intermediate=intermediate,
        data_type=list(registry.data_types()).index(NUMBERS[x.dtype]),
        epilogue=epilogue,
        scale_strides=[scale.stride() for scale in layer.scales] or None,
        **others,
    )
    state = torch.full((tokens * top_k, intermediate), torch.nan, dtype=x.dtype)
    out = torch.full_like(x, torch.nan)
    operands = (x, layer.gate_up, layer.down, ids, weights, state, out, *(layer.scales or (None, None)))
    assert call(*(0 if operand is None else operand.data_ptr() for operand in operands), 0)
    core.wait_for(0)
    return out


def reference(x: torch.Tensor, layer: Layer, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """In fp64, but for the roundings of gate, up and the state between the layers."""
    dtype = x.dtype
    gate_up_weight, down_weight = layer.in_full()
    y = torch.zeros(*x.shape, dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for place, expert in enumerate(chosen):
            if not 0 <= expert < len(layer.down):
                continue
            gate, up = (gate_up_weight[expert] @ x[token].double()).to(dtype).double().chunk(2)
            state = (torch.nn.functional.silu(gate) * up).to(dtype).double()
            y[token] += weights[token, place].double() * (down_weight[expert] @ state)
    return y


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "hidden", "intermediate"),
    [
        (1, 1, 1, 64, 64),
        (1, 8, 512, 64, 64),
        (3, 2, 8, 256, 128),
        (9, 4, 16, 192, 192),
        (17, 2, 5, 128, 320),
        (40, 3, 9, 640, 64),
        (64, 16, 33, 64, 128),
        (5, 2, 3, 1280, 64),  # warps with two and with three tiles of a unit
        (3, 2, 4, 2624, 64),  # with five and with six
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_experts(tokens: int, top_k: int, experts: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    layer = layer_of(experts, hidden, intermediate, dtype)
    x, (ids, weights) = torch.randn(tokens, hidden).to(dtype), choice_of(tokens, top_k, experts)
    expected = reference(x, layer, ids, weights)
    torch.testing.assert_close(run(x, layer, ids, weights).double(), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "hidden", "intermediate"),
    [(1, 1, 1, 128, 128), (3, 8, 9, 1280, 384), (12, 2, 5, 256, 640), (40, 3, 4, 384, 128), (5, 2, 3, 2304, 128)],
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_fp8_weights(tokens: int, top_k: int, experts: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    layer = fp8_layer_of(experts, hidden, intermediate)
    x, (ids, weights) = torch.randn(tokens, hidden).to(dtype), choice_of(tokens, top_k, experts)
    expected = reference(x, layer, ids, weights)
    out = run(x, layer, ids, weights)
    torch.testing.assert_close(out.double(), expected, rtol=2**-6, atol=2**-6)
    for token in (0, tokens - 1):  # each alone, in groups of another size
        one = slice(token, token + 1)
        assert torch.equal(run(x[one], layer, ids[one], weights[one]), out[one])
    for gate_up, down in (((16, 3, 8), (8, 3, 1)), ((16, 2, 8), (64, 2, 3)), ((16, 2, 8), (24, 2, 2))):
        choices = {
            name: _core.LinearChoice(block_outputs=outputs, stages=stages, stage_boxes=boxes)
            for name, (outputs, stages, boxes) in {"gate_up": gate_up, "down": down}.items()
        }
        assert torch.equal(run(x, layer, ids, weights, **choices), out), (gate_up, down)


def test_scales_of_any_strides() -> None:
    torch.manual_seed(11)
    layer, (ids, weights) = fp8_layer_of(3, 384, 256), choice_of(4, 2, 3)
    x = torch.randn(4, 384).to(BF16)
    turned = layer._replace(scales=tuple(scale.mT.contiguous().mT for scale in layer.scales))
    assert torch.equal(run(x, turned, ids, weights), run(x, layer, ids, weights))
    of_matrices = tuple(scale[:, :1, :1].expand_as(scale) for scale in layer.scales)
    written_out = layer._replace(scales=tuple(scale.contiguous() for scale in of_matrices))
    assert torch.equal(run(x, layer._replace(scales=of_matrices), ids, weights), run(x, written_out, ids, weights))


@pytest.mark.parametrize("value", [448.0, 2**-9, -(2**-9), 0.0, -0.0, torch.nan])
def test_every_fp8_value_is_exact(value: float) -> None:
    """One weight, alone in its column, beside x and scales of powers of two."""
    layer = Layer(
        torch.zeros(1, 256, 128).to(FP8), torch.zeros(1, 128, 128).to(FP8), (torch.ones(1, 2, 1), torch.ones(1, 1, 1))
    )
    layer.gate_up[0, 5, 7], layer.gate_up[0, 128 + 5, 7], layer.down[0, 3, 5] = value, 1.0, 1.0
    layer.scales[0][0, 0, 0] = 2.0
    x = torch.ones(1, 128).to(BF16)
    out = run(x, layer, torch.zeros(1, 1).int(), torch.ones(1, 1))
    expected = torch.nn.functional.silu(torch.tensor(2 * value)).to(BF16)
    assert torch.equal(out[0, 3].nan_to_num(7.0), expected.nan_to_num(7.0))
    others = out[0, torch.arange(128) != 3]
    assert others.isnan().all() if value != value else not others.any()


def test_tokens_without_an_expert_and_numbers_that_are_none() -> None:
    torch.manual_seed(1)
    layer = layer_of(6, 128, 64)
    x, (ids, weights) = torch.randn(5, 128).to(BF16), choice_of(5, 3, 6)
    ids[0] = -1
    ids[1, 0], ids[1, 1], ids[2, 2] = -1, 6, 2**31 - 1
    out = run(x, layer, ids, weights)
    assert not out[0].any()
    torch.testing.assert_close(out.double(), reference(x, layer, ids, weights), rtol=2**-6, atol=2**-6)
    assert not run(x, layer, torch.full_like(ids, -1), weights).any()


@pytest.mark.parametrize("experts", [2, 5, 40])  # groups of up to 32, 16 and 8 tokens
def test_all_tokens_have_one_expert(experts: int) -> None:
    torch.manual_seed(2)
    layer = layer_of(experts, 128, 64)
    x, ids, weights = torch.randn(33, 128).to(BF16), torch.full((33, 1), 1, dtype=torch.int32), torch.rand(33, 1)
    torch.testing.assert_close(
        run(x, layer, ids, weights).double(), reference(x, layer, ids, weights), rtol=2**-6, atol=2**-6
    )


@pytest.mark.parametrize("top_k", [4, 8, 12])  # groups of up to 8, 16 and 32 tokens; alone of up to 8
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
def test_a_token_is_the_same_beside_any_others(value: float, top_k: int) -> None:
    """The bits of a token do not depend on other tokens, whose experts lie before and behind its own."""
    torch.manual_seed(3)
    layer = layer_of(16, 128, 192)
    x, (ids, weights) = torch.randn(20, 128).to(BF16), choice_of(20, top_k, 16)
    together = run(x, layer, ids, weights)
    for token in (0, 7, 19):
        one = slice(token, token + 1)
        assert torch.equal(run(x[one], layer, ids[one], weights[one]), together[one])
    others = x.clone()
    others[1] = value
    among = run(others, layer, ids, weights)
    assert torch.equal(among[0], together[0])
    assert torch.equal(among[2:], together[2:])
    assert among[1].isnan().all() == (not torch.isfinite(torch.tensor(value)))


def test_blocks_of_more_warps_have_the_same_bits() -> None:
    torch.manual_seed(16)
    # 32.5 MB of a down-projection are read by 16 warps of each block, 17 MB by 8. Warps have several of 32 units.
    layer = fp8_layer_of(8, 2048, 2048)
    x, (ids, weights) = torch.randn(5, 2048).to(BF16), choice_of(5, 4, 8)
    out = run(x, layer, ids, weights)
    torch.testing.assert_close(out.double(), reference(x, layer, ids, weights), rtol=2**-6, atol=2**-6)
    one = slice(3, 4)
    assert torch.equal(run(x[one], layer, ids[one], weights[one]), out[one])


@pytest.mark.parametrize("count", [0, 5, 500])
def test_numbers_of_experts_that_other_ranks_have(count: int) -> None:
    torch.manual_seed(7)
    layer = layer_of(5, 128, 128)
    x, (ids, weights) = torch.randn(24, 128).to(BF16), choice_of(24, 3, 5)
    ids[::3, 1], ids[::4, 2] = -4, 5
    out = run(x, layer, ids, weights)
    assert torch.equal(run(x, layer, ids + 100, weights, first_expert=100, all_experts=count), out)


def test_a_factor_of_nan_stays_with_its_token() -> None:
    torch.manual_seed(4)
    layer = layer_of(4, 64, 64)
    x, (ids, weights) = torch.randn(3, 64).to(BF16), choice_of(3, 2, 4)
    weights[1, 0] = torch.nan
    out = run(x, layer, ids, weights)
    assert [bool(row.isnan().any()) for row in out] == [False, True, False]


def test_factors_of_an_expert_that_a_token_has_twice_are_added() -> None:
    torch.manual_seed(8)
    layer = layer_of(4, 64, 64)
    x, ids = torch.randn(2, 64).to(BF16), torch.tensor([[2, 2, 1], [0, 3, 0]], dtype=torch.int32)
    weights = torch.tensor([[0.75, 0.25, 0.5], [0.125, 1.0, 0.25]])
    once = torch.tensor([[2, -1, 1], [0, 3, -1]], dtype=torch.int32)
    sums = torch.tensor([[1.0, 0.0, 0.5], [0.375, 1.0, 0.0]])
    assert torch.equal(run(x, layer, ids, weights), run(x, layer, once, sums))


def test_a_weight_that_is_not_finite_stays_with_the_tokens_of_its_expert() -> None:
    torch.manual_seed(9)
    layer = layer_of(4, 64, 64)
    x, ids = torch.randn(2, 64).to(BF16), torch.tensor([[1], [3]], dtype=torch.int32)
    for weights in (layer.gate_up, layer.down):
        before = weights[3, 5, 7].item()
        weights[3, 5, 7] = torch.inf
        out = run(x, layer, ids, torch.ones(2, 1))
        assert [bool(row.isfinite().all()) for row in out] == [True, False]
        weights[3, 5, 7] = before


def test_a_tiling_that_is_given_in_part() -> None:
    torch.manual_seed(10)
    layer = layer_of(3, 2048, 384)
    x, (ids, weights) = torch.randn(1, 2048).to(BF16), choice_of(1, 2, 3)
    expected = run(x, layer, ids, weights)
    for choice in (
        {"gate_up": _core.LinearChoice(stages=7), "down": _core.LinearChoice(stages=5)},
        {"gate_up": _core.LinearChoice(stage_boxes=8), "down": _core.LinearChoice(stage_boxes=4)},
        {"gate_up": _core.LinearChoice(block_outputs=16), "down": _core.LinearChoice(block_outputs=32)},
    ):
        assert torch.equal(run(x, layer, ids, weights, **choice), expected)


def test_tilings_have_the_same_bits() -> None:
    torch.manual_seed(5)
    layer = layer_of(12, 384, 640)
    x, (ids, weights) = torch.randn(11, 384).to(BF16), choice_of(11, 3, 12)
    expected = run(x, layer, ids, weights)
    for gate_up, down in (((16, 2, 8), (8, 2, 2)), ((16, 3, 8), (64, 3, 4)), ((16, 9, 8), (24, 3, 6))):
        choices = {
            name: _core.LinearChoice(block_outputs=outputs, stages=stages, stage_boxes=boxes)
            for name, (outputs, stages, boxes) in {"gate_up": gate_up, "down": down}.items()
        }
        assert torch.equal(run(x, layer, ids, weights, **choices), expected), (gate_up, down)


@pytest.mark.parametrize("hidden", [64, 2048, 8192, 1 << 24])
@pytest.mark.parametrize("experts", [1, 33, 512])
@pytest.mark.parametrize("tokens", [1, 32, 48, 64])
def test_every_problem_has_a_tiling(tokens: int, experts: int, hidden: int) -> None:
    (core,) = connected(1)
    for top_k in (1, 8, 16):
        core.prepare_experts(
            tokens=tokens,
            top_k=top_k,
            experts=experts,
            hidden=hidden,
            intermediate=384,
            data_type=list(registry.data_types()).index("bf16"),
            epilogue="silu_and_mul",
        )


def test_gelu() -> None:
    torch.manual_seed(6)
    layer = layer_of(3, 64, 64)
    x, (ids, weights) = torch.randn(2, 64).to(BF16), choice_of(2, 1, 3)
    out = run(x, layer, ids, weights, "gelu_tanh_and_mul")
    for token, expert in enumerate(ids[:, 0].tolist()):
        gate, up = (layer.gate_up[expert].float() @ x[token].float()).chunk(2)
        state = torch.nn.functional.gelu(gate, approximate="tanh") * up * weights[token, 0]
        torch.testing.assert_close(out[token].float(), layer.down[expert].float() @ state, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"tokens": 65}, "65 tokens; it takes 1 to 64"),
        ({"tokens": 0}, "0 tokens; it takes 1 to 64"),
        ({"top_k": 17}, "17 experts of a token; it takes 1 to 16"),
        ({"experts": 513}, "513 experts; it takes 1 to 512"),
        (
            {"hidden": 192, "scale_strides": [(1, 1, 1)] * 2},
            "192 columns of the hidden state; it takes multiples of 128",
        ),
        ({"hidden": 96}, "96 columns of the hidden state; it takes multiples of 64"),
        ({"intermediate": 0}, "0 columns of the intermediate state; it takes multiples of 64"),
        ({"epilogue": "none"}, "it needs an activation of gate and up"),
        ({"data_type": list(registry.data_types()).index("fp32")}, "it has no kernels for"),
        (
            {"gate_up": _core.LinearChoice(block_outputs=24)},
            "block_outputs of gate and up is 24; it must be 16",
        ),
        ({"down": _core.LinearChoice(block_outputs=72)}, "block_outputs is 72; it must be a multiple of 8 up to 64"),
        ({"gate_up": _core.LinearChoice(stage_boxes=4)}, "stage_boxes is 4; it must be a multiple of 8 up to 8"),
        ({"down": _core.LinearChoice(stage_boxes=3)}, "stage_boxes is 3; it must be a multiple of 2 up to 8"),
        ({"gate_up": _core.LinearChoice(stages=1)}, "stages is 1; it must be 2 to 16"),
        ({"gate_up": _core.LinearChoice(stages=16)}, "bytes of shared memory"),
    ],
)
def test_what_is_not_served(wrong: dict[str, Any], text: str) -> None:
    (core,) = connected(1)
    problem = {
        "tokens": 64,
        "top_k": 2,
        "experts": 8,
        "hidden": 512,
        "intermediate": 512,
        "data_type": list(registry.data_types()).index("bf16"),
        "epilogue": "silu_and_mul",
    }
    with pytest.raises(ValueError, match=text):
        core.prepare_experts(**{**problem, **wrong})


# ---- Communicator.fused_experts --------------------------------------------------------------------------------------


def operands() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    layer, (ids, weights) = layer_of(4, 128, 64), choice_of(3, 2, 4)
    x = torch.randn(3, 128).to(BF16)
    return dict(zip(NAMES, (x, layer.gate_up, layer.down, weights, ids), strict=True))


NAMES = ("x", "gate_up_weight", "down_weight", "topk_weights", "topk_ids")


def fp8_operands() -> dict[str, torch.Tensor]:
    torch.manual_seed(12)
    layer, (ids, weights) = fp8_layer_of(4, 256, 128), choice_of(3, 2, 4)
    given = dict(zip(NAMES, (torch.randn(3, 256).to(BF16), layer.gate_up, layer.down, weights, ids), strict=True))
    return given | {"gate_up_scale": layer.scales[0], "down_scale": layer.scales[1]}


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins one element behind a multiple of 16 bytes."""
    memory = tensor.new_empty(tensor.numel() + 9)
    begin = (16 - memory.data_ptr() % 16) % 16 // tensor.element_size() + 1
    return memory[begin : begin + tensor.numel()].view(tensor.shape).copy_(tensor)


def call_the_method() -> dict[str, int]:
    given = operands()
    x, gate_up, down, weights, ids = given.values()
    expected = run(x, Layer(gate_up, down), ids, weights)
    with make_communicator() as comm:
        assert comm.accepts_fused_experts(**given)
        assert torch.equal(comm.fused_experts(**given), expected)
        assert torch.equal(comm.fused_experts(**{**given, "x": unaligned(x)}), expected)
        others = {**given, "topk_ids": ids + 3}
        assert torch.equal(comm.fused_experts(**others, first_expert=3, num_experts=8), expected)
        assert torch.equal(comm.try_fused_experts(**others, first_expert=3, num_experts=7), expected)
        for out in (torch.empty_like(x), unaligned(x)):
            version = out._version
            assert comm.fused_experts(**given, out=out) is out
            assert torch.equal(out, expected)
            assert out._version > version
        gelu = comm.fused_experts(**given, activation="gelu_tanh")
        assert torch.equal(gelu, run(x, Layer(gate_up, down), ids, weights, "gelu_tanh_and_mul"))
        of_fp8 = fp8_operands()
        x, gate_up, down, weights, ids, *scales = of_fp8.values()
        expected = run(x, Layer(gate_up, down, tuple(scales)), ids, weights)
        assert comm.accepts_fused_experts(**of_fp8)
        assert torch.equal(comm.fused_experts(**of_fp8), expected)
        assert torch.equal(comm.fused_experts(**{**of_fp8, "down_scale": scales[1].mT.contiguous().mT}), expected)
        for factor in (4.0, -0.5):  # powers of two scale all roundings
            assert torch.equal(comm.fused_experts(**of_fp8, routed_scaling_factor=factor), factor * expected)
        tried = comm.try_fused_experts(**of_fp8)
        assert tried is not None
        assert torch.equal(tried, expected)
        assert comm.try_fused_experts(**{**of_fp8, "down_scale": None}) is None
        counted: Counter[str] = Counter()
        for calls in comm.stats().calls:
            counted[calls.operation] += calls.calls
    with pytest.raises(RuntimeError):
        comm.accepts_fused_experts(**given)
    return counted


def test_the_method(ranks: RankPool) -> None:
    for calls in ranks.run(2, call_the_method):
        assert calls == {"fused_experts": 12}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(3, 128)}, "x is torch.float32, which is not one of torch.bfloat16, torch.float16"),
    ({"x": torch.zeros(3, 128, dtype=FP16)}, "gate_up_weight is torch.bfloat16; it must be torch.float16"),
    ({"x": torch.zeros(128, dtype=BF16)}, "x has shape (128,); it must have 2 sizes"),
    ({"x": torch.zeros(3, 256, dtype=BF16)[:, ::2]}, "x: the tensor is not contiguous"),
    ({"x": None}, "x: a NoneType is not a tensor"),
    ({"gate_up_weight": torch.zeros(4, 64, 128, dtype=BF16)}, "it must be (4, 128, 128)"),
    ({"topk_ids": torch.zeros(3, 2, dtype=torch.int64)}, "topk_ids is torch.int64; it must be torch.int32"),
    ({"topk_weights": torch.zeros(3, 2, dtype=BF16)}, "topk_weights is torch.bfloat16; it must be torch.float32"),
    ({"topk_weights": torch.zeros(3, 3)}, "topk_weights has shape (3, 3)"),
    ({"activation": "relu"}, "activation is 'relu'; it must be one of silu, gelu_tanh"),
    ({"num_experts": 3}, "num_experts is 3; it must be a whole number of 4, as weights have, to 65536"),
    ({"num_experts": 65537}, "num_experts is 65537; it must be a whole number of 4, as weights have, to 65536"),
    ({"first_expert": 1}, "first_expert is 1; with 4 experts in weights and num_experts None it must be a whole"),
    ({"num_experts": 6, "first_expert": 3}, "first_expert is 3; with 4 experts in weights and num_experts 6 it"),
    ({"num_experts": 6, "first_expert": -1}, "it must be a whole number up to 2"),
    ({"routed_scaling_factor": 2}, "routed_scaling_factor is 2; it must be a finite float of 32 bits"),
    ({"routed_scaling_factor": 1e39}, "routed_scaling_factor is 1e+39; it must be a finite float of 32 bits"),
    ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor is nan; it must be a finite float of 32 bits"),
    ({"out": torch.zeros(3, 64, dtype=BF16)}, "must be contiguous and like the result"),
    ({"out": torch.zeros(3, 128)}, "must be contiguous and like the result"),
]


WRONG_FP8: list[tuple[dict[str, Any], str]] = [
    ({"gate_up_scale": None}, "gate_up_scale: a NoneType is no tensor of scales, which FP8 weights need"),
    ({"down_scale": 1.0}, "down_scale: a float is no tensor of scales, which FP8 weights need"),
    (
        {"down_scale": torch.ones(4, 2, 1, dtype=BF16)},
        "down_scale is (4, 2, 1) of torch.bfloat16; it must be (4, 2, 1)",
    ),
    ({"gate_up_scale": torch.ones(4, 1, 2)}, "gate_up_scale is (4, 1, 2) of torch.float32; it must be (4, 2, 2)"),
    ({"gate_up_scale": torch.ones(4, 2, 2, requires_grad=True)}, "gate_up_scale: the tensor requires grad"),
    ({"gate_up_scale": None, "down_scale": None}, "gate_up_weight is torch.float8_e4m3fn; it must be torch.bfloat16"),
    ({"gate_up_weight": torch.zeros(4, 256, 256, dtype=BF16)}, "is torch.bfloat16; it must be torch.float8_e4m3fn"),
    (
        {
            "gate_up_weight": torch.zeros(4, 128, 256, dtype=FP8),
            "down_weight": torch.zeros(4, 256, 64, dtype=FP8),
        },
        "64 columns of the intermediate state: it takes multiples of 128",
    ),
]


def refuse() -> None:
    given = operands()
    x, weights, ids = given["x"], given["topk_weights"], given["topk_ids"]
    many = {"x": x.repeat(22, 1), "topk_weights": weights.repeat(22, 1), "topk_ids": ids.repeat(22, 1)}
    narrow = {
        "x": x[:, :96].contiguous(),
        "gate_up_weight": given["gate_up_weight"][:, :, :96].contiguous(),
        "down_weight": given["down_weight"][:, :96].contiguous(),
    }
    wrong = [
        *WRONG,
        (many, "66 tokens: it takes 1 to 64"),
        (narrow, "96 columns of the hidden state: it takes multiples of 64"),
        ({"down_weight": unaligned(given["down_weight"])}, "which is no multiple of 16 bytes: pass a copy, made once"),
        ({"out": x}, "out overlaps x"),
        ({"x": x.clone().requires_grad_()}, "the tensor requires grad"),
    ]
    with make_communicator() as comm:
        for change, text in wrong:
            with pytest.raises(UnsupportedInputError) as caught:
                comm.fused_experts(**{**given, **change})
            assert text in str(caught.value), (change, str(caught.value))
            queried = {name: value for name, value in {**given, **change}.items() if name != "out"}
            assert comm.accepts_fused_experts(**queried) == ("out" in change or "made once" in text)
        of_fp8 = fp8_operands()
        for change, text in WRONG_FP8:
            with pytest.raises(UnsupportedInputError, match=re.escape(text)):
                comm.fused_experts(**{**of_fp8, **change})
            assert not comm.accepts_fused_experts(**{**of_fp8, **change})
        with FakeTensorMode(), pytest.raises(UnsupportedInputError):
            comm.fused_experts(**{name: torch.empty(t.shape, dtype=t.dtype) for name, t in given.items()})
        assert torch.equal(torch.compile(comm.fused_experts, backend="eager")(**given), comm.fused_experts(**given))


def test_what_the_method_refuses(ranks: RankPool) -> None:
    ranks.run(1, refuse)
