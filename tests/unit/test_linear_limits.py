"""What is said of linear layers before the core is asked agrees with what it says, and with what it is told."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from cores import connected

from llm_comm import Config, UnsupportedInputError, _core, registry
from llm_comm.operations.fp8 import Scaling
from llm_comm.operations.linear import Linear
from llm_comm.operations.operation import MAX_PREPARED, TORCH_TYPES
from llm_comm.planning.planner import Planner
from llm_comm.planning.tables import TuningTable
from llm_comm.runtime.statistics import StatisticsCollector

LARGEST = _core.linear_max_features
STEP = _core.linear_multiple
FP8_STEP = _core.linear_fp8_multiple
MOST = _core.linear_max_tokens
MANY = _core.linear_max_many_tokens
CPU = torch.device("cpu")
EMULATED = {"sm_count": 4, "max_shared_bytes": 227 << 10}


def layers_of(core: Any, epilogue: str = "none", many_tokens: bool = False) -> Linear:
    planner = Planner(1, TuningTable("test table", {}, 0), Config.load({}), mock.Mock())
    handle = mock.Mock(device=CPU, core=mock.Mock(return_value=core), statistics=StatisticsCollector())
    return Linear(handle, planner, epilogue, many_tokens)


def without_memory(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Some layers are larger than the machine that checks them."""
    return torch.empty(shape, dtype=dtype, device="meta")


LIMITS = list(
    itertools.product(
        [0, 1, MOST, MOST + 1],
        [STEP // 2, STEP, 3 * STEP // 2, LARGEST, LARGEST + STEP],
        [0, STEP, LARGEST - STEP // 2, LARGEST, LARGEST + STEP],
    )
)


@pytest.mark.parametrize("data_type", registry.data_types())
@pytest.mark.parametrize("epilogue", ["none", "silu_and_mul", "gelu_tanh_and_mul"])
def test_the_core_takes_what_is_accepted(data_type: str, epilogue: str) -> None:
    (core,) = connected(1)
    layers = layers_of(core, epilogue)
    layers._device = torch.device("meta")
    for tokens, inputs, outputs in LIMITS:
        compare_with_the_core(core, layers, data_type, tokens, inputs, outputs, epilogue)


def compare_with_the_core(
    core: Any, layers: Linear, data_type: str, tokens: int, inputs: int, outputs: int, epilogue: str
) -> None:
    what = f"{tokens} tokens, {inputs} inputs, {outputs} outputs"
    rows = 2 * outputs if epilogue != "none" else outputs
    dtype = TORCH_TYPES.get(data_type)
    accepted = dtype is not None
    if dtype is not None:
        x, weight = without_memory(tokens, inputs, dtype=dtype), without_memory(rows, inputs, dtype=dtype)
        accepted = layers.accepts(x, weight)
        assert layers._accepts_traced(x, weight) == accepted, what
    number = list(registry.data_types()).index(data_type)
    try:
        core.prepare_linear(
            tokens=tokens,
            inputs=inputs,
            outputs=outputs,
            data_type=number,
            epilogue=epilogue,
            choice=_core.LinearChoice(),
        )
    except ValueError:
        assert not accepted, what
    else:
        # More tokens are those of another operation.
        assert accepted or (tokens > MOST and epilogue == "none"), what


@pytest.mark.parametrize("shared_kib", [99, 163, 227])  # of sm_89, sm_80 and sm_90
@pytest.mark.parametrize("tokens", [1, MOST, MOST + 1, 128, 129, 300, MANY])
def test_any_number_of_tokens_fits_any_gpu(tokens: int, shared_kib: int) -> None:
    """With as many outputs for a block as its shared memory has room for, where there is enough to do."""
    layer = {"data_type": list(registry.data_types()).index("bf16"), "epilogue": "none", "sm_count": 132}
    blocks = {}
    for features in (STEP, 8192):
        choice = _core.linear_choice(
            **layer,
            tokens=tokens,
            inputs=features,
            outputs=features,
            choice=_core.LinearChoice(),
            max_shared_bytes=shared_kib << 10,
        )
        assert choice.stages * choice.stage_boxes >= min(2, features // STEP)
        blocks[features] = choice.block_outputs
    if tokens > MOST:
        tile_is_256 = tokens > 128
        assert blocks[8192] == (40 if tile_is_256 and shared_kib == 99 else 64)
    assert blocks[STEP] <= blocks[8192]


@pytest.mark.parametrize("inputs", [FP8_STEP, 256, 8192])
@pytest.mark.parametrize("tokens", [1, MOST, MOST + 1])
def test_choices_worth_a_try(tokens: int, inputs: int) -> None:
    """Each is one that the core takes, and the first its own."""
    (core,) = connected(1)
    data_type = list(registry.data_types()).index("bf16")
    for others in ({}, {"epilogue": "silu_and_mul"}, {"scales": (True, False)}):
        if others and tokens > MOST:
            continue
        layer = {
            "epilogue": "none",
            "tokens": tokens,
            "inputs": inputs,
            "outputs": 4096,
            "data_type": data_type,
            **others,
        }
        choices = core.linear_choices(**layer)
        found = [(choice.block_outputs, choice.stages, choice.stage_boxes) for choice in choices]
        assert len(set(found)) == len(found)
        assert len(found) == 1 if tokens > MOST else len(found) > 1
        for choice in choices:
            core.prepare_linear(**layer, choice=choice)
        own = _core.linear_choice(**layer, choice=_core.LinearChoice(), **EMULATED)
        assert found[0] == (own.block_outputs, own.stages, own.stage_boxes)


def test_layers_of_few_outputs_have_deep_rings_to_time() -> None:
    """The kernel does not choose one itself."""
    (core,) = connected(1)
    layer = {
        "epilogue": "none",
        "tokens": 1,
        "inputs": 8192,
        "outputs": 1280,
        "data_type": list(registry.data_types()).index("bf16"),
    }
    own = _core.linear_choice(**layer, choice=_core.LinearChoice(), **{**EMULATED, "sm_count": 132})
    assert (own.block_outputs, own.stages, own.stage_boxes) == (16, 7, 4)
    assert {(9, 8), (12, 4)} < {(choice.stages, choice.stage_boxes) for choice in core.linear_choices(**layer)}


@pytest.mark.parametrize("data_type", registry.data_types())
@pytest.mark.parametrize("tokens", [MOST, MOST + 1, 300, MANY, MANY + 1])
def test_the_core_takes_the_many_tokens_that_are_accepted(data_type: str, tokens: int) -> None:
    (core,) = connected(1)
    layers = layers_of(core, many_tokens=True)
    layers._device = torch.device("meta")
    dtype = TORCH_TYPES.get(data_type)
    x, weight = (without_memory(rows, STEP, dtype=dtype or torch.int32) for rows in (tokens, STEP))
    accepted = layers.accepts(x, weight)
    assert accepted == (dtype in (torch.bfloat16, torch.float16) and tokens <= MANY)
    layer = {
        "tokens": tokens,
        "inputs": STEP,
        "outputs": STEP,
        "data_type": list(registry.data_types()).index(data_type),
    }
    for others in ({}, {"epilogue": "silu_and_mul"}, {"scales": (True, False), "inputs": FP8_STEP}):
        is_served = accepted and (tokens <= MOST or not others)
        try:
            core.prepare_linear(**{"epilogue": "none", **layer, **others}, choice=_core.LinearChoice())
        except ValueError:
            assert not is_served
        else:
            assert is_served


@pytest.mark.parametrize("data_type", registry.data_types())
@pytest.mark.parametrize("inputs", [STEP, FP8_STEP, 3 * FP8_STEP // 2, LARGEST, LARGEST + FP8_STEP])
@pytest.mark.parametrize("epilogue", ["none", "silu_and_mul", "gelu_tanh_and_mul"])
def test_the_core_takes_the_fp8_that_is_accepted(data_type: str, inputs: int, epilogue: str) -> None:
    (core,) = connected(1)
    layers = layers_of(core, epilogue)
    layers._device = torch.device("meta")
    outputs, dtype = STEP, TORCH_TYPES.get(data_type)
    x, weight = (without_memory(rows, inputs, dtype=torch.float8_e4m3fn) for rows in (3, 2 * STEP))
    scales = without_memory(3, 1, dtype=torch.float32), without_memory(1, dtype=torch.float32)
    scaling = Scaling(*scales, dtype)
    accepted = layers.accepts(x, weight, scaling)
    assert layers._accepts_traced(x, weight, scaling) == accepted
    assert accepted == (dtype in (torch.bfloat16, torch.float16) and inputs % FP8_STEP == 0 and inputs <= LARGEST)
    number = list(registry.data_types()).index(data_type)
    layer = {"tokens": 3, "inputs": inputs, "outputs": outputs, "data_type": number, "epilogue": epilogue}
    try:
        core.prepare_linear(**layer, choice=_core.LinearChoice(), scales=(True, False))
    except ValueError:
        assert not accepted
    else:
        assert accepted


def test_scales_of_blocks_that_the_core_takes() -> None:
    (core,) = connected(1)
    layer = {
        "tokens": 3,
        "inputs": 2 * FP8_STEP,
        "outputs": STEP,
        "data_type": list(registry.data_types()).index("bf16"),
        "epilogue": "none",
    }
    block, row, tensor = _core.SCALE_OF_BLOCK, _core.SCALE_OF_ROW, _core.SCALE_OF_TENSOR
    for strides in (None, (2, 1), (1, 4)):
        core.prepare_linear(**layer, choice=_core.LinearChoice(), scales=(block, block), x_scale_strides=strides)
    for refused, strides, why in (
        ((block, row), None, "both operands have scales of blocks, or neither has"),
        ((tensor, block), None, "both operands have scales of blocks, or neither has"),
        ((block, block), (0, 1), "need strides of tokens and of blocks"),
        ((block, block), (2, 0), "need strides of tokens and of blocks"),
        ((3, 0), None, "there are no scales number 3"),
    ):
        with pytest.raises(ValueError, match=why):
            core.prepare_linear(**layer, choice=_core.LinearChoice(), scales=refused, x_scale_strides=strides)


def test_scales_of_blocks_take_shared_memory() -> None:
    layer = {
        "tokens": 8,
        "inputs": 64 * FP8_STEP,
        "outputs": 64,
        "data_type": list(registry.data_types()).index("bf16"),
        "epilogue": "none",
    }
    whole = _core.LinearChoice(block_outputs=64, stages=4, stage_boxes=2)
    ring = 4 * 2 * (64 + 8) * 128
    header = 1024 + 1024

    def fits(scales: int, max_shared_bytes: int) -> bool:
        try:
            _core.linear_choice(
                **layer, choice=whole, scales=(scales, scales), sm_count=132, max_shared_bytes=max_shared_bytes
            )
        except ValueError:
            return False
        return True

    assert fits(_core.SCALE_OF_ROW, header + ring)
    assert not fits(_core.SCALE_OF_BLOCK, header + ring + ring // 32 - 1)
    assert fits(_core.SCALE_OF_BLOCK, header + ring + ring // 32)


@pytest.mark.parametrize(("epilogue", "multiple"), [("none", 8), ("silu_and_mul", 16), ("gelu_tanh_and_mul", 16)])
def test_choices_of_a_block(epilogue: str, multiple: int) -> None:
    """As many rows of gate as of up, and results in lines of eight."""
    (core,) = connected(1)
    layer = {"tokens": 4, "inputs": 256, "outputs": 192, "data_type": list(registry.data_types()).index("bf16")}
    for block in range(1, 81):
        choice = _core.LinearChoice(block_outputs=block)
        if block <= 64 and block % multiple == 0:
            core.prepare_linear(**layer, epilogue=epilogue, choice=choice)
            continue
        why = f"it must be a multiple of {multiple}" if block <= 64 else "it must be 1 to 64"
        with pytest.raises(ValueError, match=f"^block_outputs is {block}; {why}$"):
            core.prepare_linear(**layer, epilogue=epilogue, choice=choice)


@pytest.mark.parametrize("epilogue", ["none", "silu_and_mul", "gelu_tanh_and_mul"])
def test_the_core_is_told_the_layer(epilogue: str) -> None:
    core = mock.Mock()
    layers = layers_of(core, epilogue)
    rows = 128 if epilogue == "none" else 256
    x, weight = torch.empty(2, 5, 192, dtype=torch.float16), torch.empty(rows, 192, dtype=torch.float16)
    prepared = layers.find("linear", x, weight)
    (call,) = core.prepare_linear.mock_calls
    choice, counter = call.kwargs.pop("choice"), call.kwargs.pop("counter")
    assert call.kwargs == {
        "tokens": 10,
        "inputs": 192,
        "outputs": 128,
        "data_type": list(registry.data_types()).index("fp16"),
        "epilogue": epilogue,
    }
    assert (choice.block_outputs, choice.stages, choice.stage_boxes) == (0, 0, 0), "the core chooses"
    counter.add()
    (counted,) = layers._handle.statistics.calls()
    assert (counted.operation, counted.algorithm, counted.bytes) == (layers._name, "linear", 2 * 1280)
    assert (prepared.shape, prepared.elements) == ((2, 5, 128), 1280)
    assert prepared.run is core.prepare_linear.return_value
    out = torch.empty(10, 128, dtype=torch.float16)
    assert layers.enqueue(prepared, x, weight, out) is prepared.run.return_value
    prepared.run.assert_called_once_with(x.data_ptr(), weight.data_ptr(), out.data_ptr(), 0, 0)
    bias = torch.empty(rows, dtype=torch.float16)
    assert layers.find("linear", x, weight, None, bias) is prepared
    layers.enqueue(prepared, x, weight, out, None, bias)
    prepared.run.assert_called_with(x.data_ptr(), weight.data_ptr(), out.data_ptr(), bias.data_ptr(), 0)


def test_what_is_kept() -> None:
    """By everything that a prepared layer rests on, and not without end."""
    core = mock.Mock()
    core.prepare_linear.side_effect = lambda **_: mock.Mock()
    layers = layers_of(core)
    weights = [torch.empty(outputs, 64, dtype=torch.float16) for outputs in (64, 128)]
    kinds = [
        (torch.empty(shape, dtype=dtype), weight.to(dtype))
        for shape in ((1, 64), (64,), (2, 64), (1, 2, 64))
        for dtype in (torch.float16, torch.bfloat16)
        for weight in weights
    ]
    first = [layers.find("linear", *kind) for kind in kinds]
    assert len({id(prepared) for prepared in first}) == len(kinds)
    for kind, prepared in zip(kinds, first, strict=True):
        assert layers.find("linear", *kind) is prepared
        assert prepared.shape == (*kind[0].shape[:-1], len(kind[1]))
    assert core.prepare_linear.call_count == len(kinds)
    layers.forget()
    assert layers.find("linear", *kinds[0]) is not first[0]
    layers._prepared.update({(number, number, number): first[0] for number in range(MAX_PREPARED)})  # type: ignore[misc]
    layers.find("linear", *kinds[-1])
    assert len(layers._prepared) <= MAX_PREPARED


def test_operands_beside_prepared_ones() -> None:
    """Of the same shapes: each look at them is there for a reason."""
    layers = layers_of(mock.Mock())
    x, weight = torch.ones(64, 64, dtype=torch.float16), torch.ones(64, 64, dtype=torch.float16)
    layers.find("linear", x, weight)
    strange = [
        (x.t(), weight, "x: .* not contiguous"),
        (x, weight.t(), "weight: .* not contiguous"),
        (torch._neg_view(x), weight, "x: .* negated"),
        (x, torch._neg_view(weight), "weight: .* negated"),
        (x, weight.bfloat16(), "weight is torch.bfloat16, x is torch.float16"),
        (x.to("meta"), weight, "x: .* on meta"),
        (x, weight.to("meta"), "weight: .* on meta"),
        (x.to_sparse(), weight, "x: the tensor is torch.sparse"),
        (x, weight.to_sparse(), "weight: the tensor is torch.sparse"),
        (x.clone().requires_grad_(), weight, "x: .* requires grad"),
        (x, weight.clone().requires_grad_(), "weight: .* requires grad"),
    ]
    for one, other, reason in strange:
        with pytest.raises(UnsupportedInputError, match=reason):
            layers.find("linear", one, other)
