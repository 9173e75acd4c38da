"""Layer of q, k and v with norms of heads, rotary position embedding and the write to the cache, by the emulated
kernel. The expected bits are those of a plain layer, norm, rotation and copy, each rounded once."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from cores import connected
from harness import RankPool, make_communicator
from rope_reference import normed_and_rotated
from test_experts import unaligned

from llm_comm import UnsupportedInputError, _core, registry

BF16, FP16 = torch.bfloat16, torch.float16
NUMBERS = {BF16: "bf16", FP16: "fp16"}
UNTOUCHED = 7.0


class Shape(NamedTuple):
    """Numbers of heads and outputs of a layer, and how heads are rotated."""

    q_heads: int
    kv_heads: int
    head_size: int = 128
    rotary_size: int = 128
    inputs: int = 192
    interleaved: bool = False
    normed: bool = False

    @property
    def outputs(self) -> int:
        return (self.q_heads + 2 * self.kv_heads) * self.head_size


class Layer(NamedTuple):
    """Operands of a layer."""

    shape: Shape
    x: torch.Tensor
    weight: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    bias: torch.Tensor | None
    norms: tuple[torch.Tensor, torch.Tensor] | None
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None


EPS = 1e-5


def layer(
    shape: Shape,
    tokens: int,
    dtype: torch.dtype = BF16,
    *,
    biased: bool = False,
    angles: torch.dtype = torch.float32,
    numbers: torch.dtype = torch.int64,
    cached: bool = True,
) -> Layer:
    torch.manual_seed(tokens + shape.outputs)
    rows, blocks, block_slots = 50, 12, 16
    cache = None
    if cached:
        # Keys and values beside each other in the rows of one tensor, heads before slots.
        both = torch.full((blocks, shape.kv_heads, block_slots, 2 * shape.head_size), UNTOUCHED, dtype=dtype)
        keys, values = both.transpose(1, 2).split(shape.head_size, dim=-1)
        cache = keys, values, torch.randperm(blocks * block_slots)[:tokens].to(numbers)
    return Layer(
        shape,
        torch.randn(tokens, shape.inputs).to(dtype),
        (torch.randn(shape.outputs, shape.inputs) / shape.inputs**0.5).to(dtype),
        torch.randint(rows, (tokens,)).to(numbers),
        torch.randn(rows, shape.rotary_size).to(angles),
        torch.randn(shape.outputs).to(dtype) if biased else None,
        (torch.randn(shape.head_size).to(dtype), torch.randn(shape.head_size).to(dtype)) if shape.normed else None,
        cache,
    )


def run(of: Layer, block_rows: int = 0, stages: int = 0, **others: Any) -> torch.Tensor:
    (core,) = connected(1)
    call: Any = core.prepare_rope(problem(of, **others), block_rows=block_rows, stages=stages)
    out = torch.full((len(of.x), of.shape.outputs), torch.nan, dtype=of.x.dtype)
    operands = [of.x, of.weight, of.bias, out, of.positions, of.cos_sin, *(of.norms or (None, None))]
    operands += of.cache or (None, None, None)
    assert call(*(0 if tensor is None else tensor.data_ptr() for tensor in operands), 0)
    core.wait_for(0)
    return out


def not_rotated(of: Layer) -> Layer:
    """Return the layer with angles of 0, without norms and cache."""
    half = of.shape.rotary_size // 2
    cos_sin = torch.cat([torch.ones(len(of.cos_sin), half), torch.zeros(len(of.cos_sin), half)], 1)
    return of._replace(cos_sin=cos_sin.to(of.cos_sin.dtype), norms=None, cache=None)


def problem(of: Layer, **others: Any) -> _core.RopeProblem:
    shape, cache = of.shape, None
    if of.cache is not None:
        keys, values, slots = of.cache
        strides = keys.stride()[:3], values.stride()[:3]
        cache = (*keys.shape[:2], len(slots), slots.dtype is torch.int64, *strides)
    given = {
        "tokens": len(of.x),
        "inputs": shape.inputs,
        "outputs": shape.outputs,
        "data_type": list(registry.data_types()).index(NUMBERS[of.x.dtype]),
        "head_size": shape.head_size,
        "kv_heads": shape.kv_heads,
        "rotary_size": shape.rotary_size,
        "is_interleaved": shape.interleaved,
        "has_norms": of.norms is not None,
        "epsilon": EPS,
        "positions": len(of.cos_sin),
        "has_fp32_angles": of.cos_sin.dtype is torch.float32,
        "has_64_bit_positions": of.positions.dtype is torch.int64,
        "cache": cache,
    }
    return _core.RopeProblem(**{**given, **others})


def expected(of: Layer, qkv: torch.Tensor) -> torch.Tensor:
    """Norms and rotations of what a plain layer returned."""
    shape = of.shape
    return normed_and_rotated(
        *(qkv, of.positions, of.cos_sin),
        head_size=shape.head_size,
        kv_heads=shape.kv_heads,
        norm_weights=of.norms,
        eps=EPS,
        interleaved=shape.interleaved,
    )


def check_cache(of: Layer, qkv: torch.Tensor) -> None:
    """The cache holds k and v of each token with a slot, and nothing else has changed."""
    assert of.cache is not None
    keys, values, slots = of.cache
    heads = qkv.unflatten(1, (-1, of.shape.head_size))
    block_slots = keys.shape[1]
    for part, first in ((keys, of.shape.q_heads), (values, of.shape.q_heads + of.shape.kv_heads)):
        wanted = torch.full(part.shape, UNTOUCHED, dtype=part.dtype)
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < len(keys) * block_slots:
                wanted[slot // block_slots, slot % block_slots] = heads[token, first : first + of.shape.kv_heads]
        assert torch.equal(part, wanted)


SHAPES = [
    Shape(8, 1),
    Shape(4, 2, 64, 64, 320),
    Shape(3, 1, 128, 64),  # half of a head is rotated
    Shape(2, 1, 256, 64, 128),
    Shape(3, 1, 128, 128, interleaved=True),
    Shape(5, 2, 64, 32, interleaved=True),
    Shape(8, 1, normed=True),
    Shape(2, 1, 64, 64, 128, normed=True),
    Shape(2, 1, 128, 64, interleaved=True, normed=True),
    Shape(1, 1, 256, 256, normed=True),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 9, 32])
def test_linear_rope(shape: Shape, tokens: int) -> None:
    tokens = min(tokens, 16) if shape.normed and shape.head_size > 128 else tokens
    dtype, is_odd = (FP16 if tokens == 9 else BF16), tokens == 9
    of = layer(
        shape,
        tokens,
        dtype,
        biased=is_odd,
        angles=dtype if is_odd else torch.float32,
        numbers=torch.int32 if is_odd else torch.int64,
    )
    qkv = run(of)
    plain = run(not_rotated(of))
    exact = of.x.double() @ of.weight.double().T + (0 if of.bias is None else of.bias.double())
    torch.testing.assert_close(plain.double(), exact, rtol=2**-7, atol=2**-9)
    wanted = expected(of, plain)
    # A product and a sum are rounded together here, and separately there.
    torch.testing.assert_close(qkv.float(), wanted.float(), rtol=2**-7, atol=2**-7)
    values = slice((shape.q_heads + shape.kv_heads) * shape.head_size, None)
    assert torch.equal(qkv[:, values], wanted[:, values])
    check_cache(of, qkv)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_token_is_the_same_beside_any_others_and_with_any_tiling(interleaved: bool) -> None:
    of = layer(Shape(4, 2, 64, 64, 64 * 70, interleaved, normed=True), 20, cached=False)
    together = run(of)
    for token in (0, 7, 19):
        one = slice(token, token + 1)
        alone = of._replace(x=of.x[one].contiguous(), positions=of.positions[one].contiguous())
        assert torch.equal(run(alone)[0], together[token])
    few = of._replace(x=of.x[:7].contiguous(), positions=of.positions[:7].contiguous())
    for block_rows, stages in ((16, 1), (16, 3), (32, 1)):
        assert torch.equal(run(few, block_rows, stages), together[:7])
    of.x[1] = torch.nan
    assert torch.equal(run(of)[2:], together[2:])


def test_tokens_without_a_slot() -> None:
    """Slots may be negative, beyond the cache, or fewer than tokens."""
    of = layer(Shape(2, 1, 64, 64, 64), 5)
    assert of.cache is not None
    keys, values, slots = of.cache
    for number in (torch.int64, torch.int32):
        given = slots[:4].to(number)
        given[1], given[2] = -1, keys.shape[0] * keys.shape[1]
        keys.fill_(UNTOUCHED), values.fill_(UNTOUCHED)
        one = of._replace(cache=(keys, values, given))
        check_cache(one, run(one))


def test_positions_that_are_not_in_the_table() -> None:
    of = layer(Shape(2, 1, 64, 32, 64), 3)
    wanted = run(of)
    of.positions[1], of.positions[2] = -1, len(of.cos_sin)
    found = run(of).unflatten(1, (-1, 64))
    assert torch.equal(found[0], wanted.unflatten(1, (-1, 64))[0])
    assert found[1:, :3, :32].isnan().all()
    assert torch.equal(found[1:, :3, 32:], wanted.unflatten(1, (-1, 64))[1:, :3, 32:])
    assert torch.equal(found[1:, 3], wanted.unflatten(1, (-1, 64))[1:, 3])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"tokens": 0}, "0 tokens; it takes 1 to 32"),
        ({"tokens": 33}, "33 tokens; it takes 1 to 32"),
        ({"inputs": 96}, "96 inputs; it takes multiples of 64"),
        ({"outputs": 0}, "0 outputs; it takes multiples of 64"),
        ({"data_type": 2}, "it has no kernels for fp32"),
        ({"head_size": 0}, "heads of 0 outputs, of 256"),
        ({"head_size": 96}, "heads of 96 outputs, of 256"),
        ({"kv_heads": 2}, "2 heads of k and as many of v, of 4 heads"),
        ({"kv_heads": 2**31}, "2147483648 heads of k"),
        ({"rotary_size": 24}, "it rotates 24 of 64 outputs of a head"),
        ({"rotary_size": 128}, "it rotates 128 of 64 outputs of a head"),
        ({"positions": 0}, "0 rows of angles"),
        ({"cache": (2**16, 2**16, 1, True, (8, 8, 8), (8, 8, 8))}, "65536 blocks of 65536 slots"),
        ({"cache": (2, 0, 1, True, (8, 8, 8), (8, 8, 8))}, "2 blocks of 0 slots"),
        ({"cache": (2, 16, 4, True, (8, 8, 8), (8, 8, 8))}, "4 slots of 3 tokens"),
        ({"cache": (2, 16, 3, True, (8, 8, 8), (8, 4, 8))}, "strides of the cache are no multiples of 8"),
    ],
)
def test_problems_that_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        run(layer(Shape(2, 1, 64, 64, 64), 3), **wrong)


@pytest.mark.parametrize(
    ("block_rows", "stages", "text"),
    [
        (48, 0, "blocks of 48 rows, with heads of 64 of which 32 rotate"),
        (24, 0, "blocks of 24 rows"),
        (16, 9, "9 stages of 16 rows take"),
    ],
)
def test_tilings_that_are_refused(block_rows: int, stages: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run(layer(Shape(2, 1, 64, 32, 64), 3), block_rows, stages)


# ---- Communicator.linear_rope ----------------------------------------------------------------------------------------


def operands(of: Layer) -> dict[str, Any]:
    shape = of.shape
    return {
        "x": of.x,
        "weight": of.weight,
        "positions": of.positions,
        "cos_sin": of.cos_sin,
        "head_size": shape.head_size,
        "kv_heads": shape.kv_heads,
        "bias": of.bias,
        "norm_weights": of.norms,
        "eps": EPS,
        "interleaved": shape.interleaved,
        "cache": of.cache,
    }


def call_the_method() -> dict[str, int]:
    of = layer(Shape(2, 1, 64, 64, 128, normed=True), 3, biased=True)
    wanted = run(of)
    with make_communicator() as comm:
        given = operands(of)
        assert comm.accepts_linear_rope(**given)
        for x in (of.x, unaligned(of.x)):
            of.cache[0].fill_(UNTOUCHED), of.cache[1].fill_(UNTOUCHED)
            version = of.cache[0]._version
            qkv = comm.linear_rope(**{**given, "x": x})
            assert of.cache[0]._version > version  # torch knows that the cache is written
            assert torch.equal(qkv, wanted)
            check_cache(of, qkv)
        with torch.inference_mode():
            of_inference = (*(part.clone() for part in of.cache[:2]), of.cache[2])
            assert torch.equal(comm.linear_rope(**{**given, "cache": of_inference}), wanted)
        plain = {**given, "norm_weights": None, "cache": None, "bias": None}
        found = comm.try_linear_rope(**plain)
        assert torch.equal(found, run(of._replace(norms=None, cache=None, bias=None)))
        counted = {calls.operation: calls.calls for calls in comm.stats().calls}
        assert comm.try_linear_rope(**{**given, "kv_heads": 2, "cache": None}) is None
        assert [declined.count for declined in comm.stats().declined if declined.operation == "linear_rope"] == [1]
        assert not comm.prefers_linear_rope(1280, 8192, 1)  # not measured here
    with pytest.raises(RuntimeError):
        comm.accepts_linear_rope(**given)
    with make_communicator(fuse_linear=True) as comm:
        assert comm.prefers_linear_rope(1280, 8192, 32)
        assert not comm.prefers_linear_rope(1280, 8192, 33)
    return counted


def test_the_method(ranks: RankPool) -> None:
    for calls in ranks.run(2, call_the_method):
        assert calls == {"linear_rope": 4}


def wrong_arguments() -> list[tuple[dict[str, Any], str]]:
    of = layer(Shape(2, 1, 64, 64, 128, normed=True), 3, biased=True)
    keys, values, slots = of.cache
    return [
        ({"x": of.x.float()}, "x is torch.float32, which is not one of torch.bfloat16, torch.float16"),
        ({"x": of.x[0]}, "x has shape (128,); it must have 2 sizes"),
        ({"x": torch.zeros(33, 128, dtype=BF16)}, "33 tokens, 128 inputs and 256 outputs: it takes 1 to 32 tokens"),
        ({"x": of.x[:, :64].contiguous()}, "columns of weight: 128, it must be 64"),
        ({"x": None}, "x: a NoneType is not a tensor"),
        ({"weight": of.weight.half()}, "weight is torch.float16; it must be torch.bfloat16"),
        ({"positions": of.positions[:2]}, "positions: 2, it must be 3"),
        ({"positions": of.positions.float()}, "positions has dtype torch.float32"),
        ({"cos_sin": of.cos_sin.half()}, "cos_sin is torch.float16; it must be torch.bfloat16 or torch.float32"),
        ({"cos_sin": of.cos_sin[:, :24].contiguous()}, "it rotates 24 of 64 outputs of a head"),
        ({"bias": torch.zeros(8, dtype=BF16)}, "bias: 8, it must be 256"),
        ({"norm_weights": of.norms[0]}, "it must be None or a tuple of 2 tensors"),
        ({"norm_weights": (of.norms[0], of.norms[1][:8])}, "k_norm_weight: 8, it must be 64"),
        ({"norm_weights": (of.norms[0], None)}, "norm_weights has a None"),
        ({"norm_weights": (None, None)}, "norm_weights has a None"),
        ({"cache": (keys, values, slots[:0])}, "slots is empty: give no cache"),
        ({"cache": (keys, values, None)}, "cache has no slots"),
        ({"head_size": 0}, "head_size is 0; it must be a number from 1 to 256"),
        ({"head_size": True}, "head_size is True"),
        ({"kv_heads": 2, "cache": None}, "2 heads of k and as many of v, of 4 heads"),
        ({"interleaved": 1}, "interleaved is 1; it must be true or false"),
        ({"eps": "1e-6"}, "eps is '1e-6'; it must be a number from 0 to 1"),
        ({"eps": float("nan")}, "eps is nan; it must be a number from 0 to 1"),
        ({"cache": (keys, values)}, "it must be None or a tuple of 3 tensors"),
        ({"cache": (keys, values, slots.float())}, "slots has dtype torch.float32"),
        ({"cache": (keys.float(), values, slots)}, "key_cache is torch.float32; it must be torch.bfloat16"),
        ({"cache": (keys, values[:3], slots)}, "they must be equal"),
        ({"cache": (keys, values[..., :32], slots)}, "value_cache has shape"),
        ({"cache": (None, values, slots)}, "key_cache is a NoneType, not a tensor"),
    ]


def call_with_wrong_arguments() -> None:
    given = operands(layer(Shape(2, 1, 64, 64, 128, normed=True), 3, biased=True))
    with make_communicator() as comm:
        for wrong, text in wrong_arguments():
            assert not comm.accepts_linear_rope(**{**given, **wrong}), wrong
            assert comm.try_linear_rope(**{**given, **wrong}) is None
            with pytest.raises(UnsupportedInputError, match=re.escape(text)):
                comm.linear_rope(**{**given, **wrong})
        with pytest.raises(UnsupportedInputError, match="weight begins at"):
            comm.linear_rope(**{**given, "weight": unaligned(given["weight"])})
        _, values, slots = given["cache"]
        overlapping = given["x"].view(1, 1, 1, -1)[..., :64].expand(12, 16, 1, 64)
        with pytest.raises(UnsupportedInputError, match="key_cache"):
            comm.linear_rope(**{**given, "cache": (overlapping, values, slots)})


def test_arguments_that_are_refused(ranks: RankPool) -> None:
    ranks.run(1, call_with_wrong_arguments)
