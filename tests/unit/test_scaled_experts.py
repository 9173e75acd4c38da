"""FP8 experts of both engines: which weights and scales llm_comm computes with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm_comm.integrations.experts import scaled, unquantized

EXPERTS, HIDDEN, INNER = 3, 256, 384
BLOCKS = {"w13_weight": (EXPERTS, 2 * INNER // 128, HIDDEN // 128), "w2_weight": (EXPERTS, HIDDEN // 128, INNER // 128)}


def layer_of(suffix: str, **scales: torch.Tensor | None) -> Any:
    """Return a layer with FP8 weights and ``scales`` by the names of weights; those not given are of blocks."""
    layer = SimpleNamespace(
        w13_weight=torch.empty(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.float8_e4m3fn),
        w2_weight=torch.empty(EXPERTS, HIDDEN, INNER, dtype=torch.float8_e4m3fn),
    )
    for name, shape in BLOCKS.items():
        setattr(layer, name + suffix, scales.get(name, torch.rand(shape)))
    return layer


def test_scales_of_blocks_are_taken_as_they_are() -> None:
    layer = layer_of("_scale_inv")
    for block in ([128, 128], (128, 128)):
        weights = scaled(layer, block)
        assert weights is not None
        assert weights[:2] == (layer.w13_weight, layer.w2_weight)
        for scale, name in ((weights.gate_up_scale, "w13_weight"), (weights.down_scale, "w2_weight")):
            assert scale is not None
            assert scale.data_ptr() == getattr(layer, f"{name}_scale_inv").data_ptr()
            assert scale.shape == BLOCKS[name]
    layer.w13_weight_scale_inv = torch.nn.Parameter(layer.w13_weight_scale_inv)
    weights = scaled(layer, [128, 128])
    assert weights is not None
    assert type(weights.gate_up_scale) is torch.Tensor  # without a gradient


def test_a_scale_of_each_expert_is_that_of_all_its_blocks() -> None:
    scales = {name: torch.rand(EXPERTS) for name in BLOCKS}
    weights = scaled(layer_of("_scale", **scales), None)
    assert weights is not None
    for found, name in ((weights.gate_up_scale, "w13_weight"), (weights.down_scale, "w2_weight")):
        assert found is not None
        assert found.data_ptr() == scales[name].data_ptr()
        assert torch.equal(found, scales[name].view(EXPERTS, 1, 1).expand(BLOCKS[name]))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    "change",
    [
        lambda scale: None,
        lambda scale: scale.to(torch.uint8),
        lambda scale: scale.to(torch.int32),
        lambda scale: scale.bfloat16(),
        lambda scale: scale.transpose(1, 2),
        lambda scale: scale[:, :, :1],
        lambda scale: scale[:2],
        lambda scale: scale[:, 0, 0],
        lambda scale: scale.repeat(1, 1, 4),
    ],
)
def test_other_scales_of_blocks_are_declined(change: Any, name: str) -> None:
    layer = layer_of("_scale_inv", **{name: change(torch.rand(BLOCKS[name]))})
    assert scaled(layer, [128, 128]) is None


@pytest.mark.parametrize("block", [[1, 32], [64, 128], [128, 64], [128], [], [256, 256]])
def test_other_blocks_are_declined(block: list[int]) -> None:
    assert scaled(layer_of("_scale_inv"), block) is None


@pytest.mark.parametrize("shape", [(), (1,), (EXPERTS, 2), (EXPERTS, 2 * INNER), (EXPERTS, 1, 1)])
def test_other_scales_of_tensors_are_declined(shape: tuple[int, ...]) -> None:
    layer = layer_of("_scale", w13_weight=torch.rand(shape), w2_weight=torch.rand(EXPERTS))
    assert scaled(layer, None) is None


def test_a_method_and_the_names_of_its_scales_must_agree() -> None:
    assert scaled(layer_of("_scale"), [128, 128]) is None
    assert scaled(layer_of("_scale_inv"), None) is None


def test_weights_that_do_not_divide_into_blocks_are_declined() -> None:
    layer = layer_of("_scale_inv")
    layer.w2_weight = torch.empty(EXPERTS, HIDDEN, INNER + 64, dtype=torch.float8_e4m3fn)
    layer.w2_weight_scale_inv = torch.rand(EXPERTS, HIDDEN // 128, INNER // 128 + 1)
    assert scaled(layer, [128, 128]) is None


def test_each_form_of_weights_has_its_own_measurement() -> None:
    of_experts = {name: torch.rand(EXPERTS) for name in BLOCKS}
    of_blocks = scaled(layer_of("_scale_inv"), [128, 128])
    assert of_blocks is not None
    kinds = {of_blocks.kind(), unquantized(layer_of("")).kind()}
    found = scaled(layer_of("_scale", **of_experts), None)
    assert found is not None
    kinds.add(found.kind())
    bf16 = SimpleNamespace(w13_weight=of_blocks.gate_up_weight.bfloat16(), w2_weight=of_blocks.down_weight.bfloat16())
    kinds.add(unquantized(bf16).kind())
    assert len(kinds) == 4
    again = scaled(layer_of("_scale_inv"), [128, 128])
    assert again is not None
    assert again.kind() in kinds
