"""Router of experts: logits of few tokens and the experts that each token gets, by the emulated kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from cores import connected
from harness import RankPool, make_communicator
from test_experts import unaligned

from llm_comm import UnsupportedInputError, registry

BF16, FP16 = torch.bfloat16, torch.float16
NUMBERS = {BF16: "bf16", FP16: "fp16"}


class Routed(NamedTuple):
    weights: torch.Tensor
    ids: torch.Tensor
    logits: torch.Tensor


def run(
    x: torch.Tensor, weight: torch.Tensor, top_k: int, bias: torch.Tensor | None = None, renormalize: bool = True
) -> Routed:
    (core,) = connected(1)
    (tokens, hidden), experts = x.shape, len(weight)
    call: Any = core.prepare_router(
        tokens=tokens,
        experts=experts,
        top_k=top_k,
        hidden=hidden,
        data_type=list(registry.data_types()).index(NUMBERS[x.dtype]),
        renormalize=renormalize,
    )
    logits = torch.full((tokens, experts), torch.nan, dtype=x.dtype)
    weights, ids = torch.full((tokens, top_k), torch.nan), torch.full((tokens, top_k), -7, dtype=torch.int32)
    operands = (x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr())
    assert call(*operands, logits.data_ptr(), weights.data_ptr(), ids.data_ptr(), 0)
    core.wait_for(0)
    return Routed(weights, ids, logits)


def check(routed: Routed, renormalize: bool = True) -> None:
    """Choice and factors follow from the logits. A stable sort leaves equal ones in the order of experts."""
    top_k = routed.ids.shape[1]
    ordered, experts = routed.logits.float().sort(dim=1, descending=True, stable=True)
    assert torch.equal(routed.ids, experts[:, :top_k].int())
    of = ordered[:, :top_k] if renormalize else ordered
    expected = of.softmax(1)[:, :top_k]
    torch.testing.assert_close(routed.weights, expected, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden"),
    [
        (1, 1, 1, 64),
        (1, 128, 8, 2048),
        (2, 8, 2, 640),  # eight warps share the columns of eight experts
        (9, 33, 4, 576),
        (17, 60, 4, 128),
        (33, 130, 16, 320),
        (64, 512, 10, 64),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("renormalize", [True, False])
def test_router(tokens: int, experts: int, top_k: int, hidden: int, dtype: torch.dtype, renormalize: bool) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden).to(dtype)
    weight = (torch.randn(experts, hidden) / hidden**0.5).to(dtype)
    bias = torch.randn(experts).to(dtype) if renormalize else None
    routed = run(x, weight, top_k, bias, renormalize)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(routed.logits.double(), exact, rtol=2**-7, atol=2**-9)
    check(routed, renormalize)


def test_a_token_is_the_same_beside_any_others() -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(20, 192).to(BF16), torch.randn(40, 192).to(BF16)
    together = run(x, weight, 5)
    for token in (0, 7, 19):
        one = slice(token, token + 1)
        alone = run(x[one].contiguous(), weight, 5)
        assert all(torch.equal(own, of_all[one]) for own, of_all in zip(alone, together, strict=True))
    x[1] = torch.nan
    among = run(x, weight, 5)
    assert all(torch.equal(of_all[2:], before[2:]) for of_all, before in zip(among, together, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_equal_logits_and_those_that_are_no_numbers(dtype: torch.dtype) -> None:
    """One column is one: the logits are the weights of it."""
    values = torch.tensor(
        [
            [1.0, 2.0, 2.0, 2.0, -1.0, 2.0],
            [0.0, -0.0, 0.0, -1.0, -2.0, -0.0],
            [-3.0, -1.0, -2.0, -torch.inf, -1.0, -5.0],
            [1.0, torch.inf, 3.0, torch.inf, 2.0, 0.0],
            [1.0, torch.nan, 3.0, torch.inf, -torch.nan, 0.0],
            [-torch.inf] * 6,
        ]
    ).to(dtype)
    expected = [[1, 2, 3, 5], [0, 1, 2, 5], [1, 4, 2, 0], [1, 3, 2, 4], [1, 4, 3, 2], [0, 1, 2, 3]]
    x = torch.zeros(1, 64, dtype=dtype)
    x[0, 5] = 1.0
    for row, ids in zip(values, expected, strict=True):
        weight = torch.zeros(6, 64, dtype=dtype)
        weight[:, 5] = row
        routed = run(x, weight, 4)
        assert routed.ids.tolist() == [ids]
        finite = bool(row.isfinite().any() and not (row == torch.inf).any() and not row.isnan().any())
        assert bool(routed.weights.isfinite().all()) == finite
        if finite:
            check(routed)


def test_a_logit_that_underflows_is_no_less_than_zero() -> None:
    x, weight = torch.zeros(1, 64, dtype=FP16), torch.zeros(6, 64, dtype=FP16)
    x[0, 5], weight[0, 5], weight[3, 5] = 2**-6, -(2**-24), 1.0
    routed = run(x, weight, 4)
    assert routed.logits[0, 0].signbit()
    assert routed.ids.tolist() == [[3, 0, 1, 2]]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"tokens": 65}, "65 tokens; it takes 1 to 64"),
        ({"experts": 32, "top_k": 17}, "17 experts of a token; it takes 1 to 16"),
        ({"experts": 3, "top_k": 4}, "4 experts of a token; it takes 1 to 3"),
        ({"experts": 513}, "513 experts; it takes 1 to 512"),
        ({"hidden": 96}, "96 columns; it takes multiples of 64"),
        ({"data_type": list(registry.data_types()).index("fp32")}, "it has no kernels for"),
    ],
)
def test_what_is_not_served(wrong: dict[str, Any], text: str) -> None:
    (core,) = connected(1)
    problem = {
        "tokens": 64,
        "experts": 8,
        "top_k": 2,
        "hidden": 512,
        "data_type": list(registry.data_types()).index("bf16"),
        "renormalize": True,
    }
    with pytest.raises(ValueError, match=text):
        core.prepare_router(**{**problem, **wrong})


# ---- Communicator.moe_route ------------------------------------------------------------------------------------------


def operands() -> dict[str, Any]:
    torch.manual_seed(7)
    weight, bias = torch.randn(8, 128).to(BF16), torch.randn(8).to(BF16)
    return {"x": torch.randn(3, 128).to(BF16), "router_weight": weight, "top_k": 2, "bias": bias}


def call_the_method() -> dict[str, int]:
    given = operands()
    expected = run(*given.values())
    with make_communicator() as comm:
        assert comm.accepts_moe_route(**given)
        for x in (given["x"], unaligned(given["x"])):
            routed = comm.moe_route(**{**given, "x": x})
            assert all(torch.equal(a, b) for a, b in zip(routed, expected, strict=True))
        of_all = comm.try_moe_route(**given, renormalize=False)
        assert of_all is not None
        check(Routed(*of_all), renormalize=False)
        experts = torch.randn(8, 128, 128).to(BF16), torch.randn(8, 128, 64).to(BF16)
        assert comm.accepts_fused_experts(given["x"], *experts, *routed[:2])
        counted = {calls.operation: calls.calls for calls in comm.stats().calls}
    with pytest.raises(RuntimeError):
        comm.accepts_moe_route(**given)
    return counted


def test_the_method(ranks: RankPool) -> None:
    for calls in ranks.run(2, call_the_method):
        assert calls == {"moe_route": 3}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(3, 128)}, "x is torch.float32, which is not one of torch.bfloat16, torch.float16"),
    ({"router_weight": torch.zeros(8, 128)}, "router_weight is torch.float32; it must be torch.bfloat16"),
    ({"x": torch.zeros(128, dtype=BF16)}, "x has shape (128,); it must have 2 sizes"),
    ({"x": torch.zeros(3, 64, dtype=BF16)}, "x and router_weight must have as many columns"),
    ({"x": None}, "x: a NoneType is not a tensor"),
    ({"bias": torch.zeros(7, dtype=BF16)}, "and bias an element for each expert"),
    ({"bias": torch.zeros(8)}, "bias is torch.float32; it must be torch.bfloat16"),
    ({"top_k": 9}, "9 experts of a token, of 8"),
    ({"top_k": 0}, "0 experts of a token: it takes 1 to 16"),
    ({"top_k": 2.0}, "2.0 experts of a token: it takes 1 to 16"),
    ({"top_k": True}, "True experts of a token: it takes 1 to 16"),
    ({"renormalize": [1]}, "renormalize is [1]; it must be true or false"),
]


def refuse() -> None:
    given = operands()
    many = {"x": given["x"].repeat(22, 1)}
    with make_communicator() as comm:
        for wrong, text in [*WRONG, (many, "66 tokens: it takes 1 to 64")]:
            arguments = {**given, **wrong}
            assert comm.accepts_moe_route(**arguments) is False, text
            assert comm.try_moe_route(**arguments) is None, text
            with pytest.raises(UnsupportedInputError) as error:
                comm.moe_route(**arguments)
            assert text in str(error.value)
        with pytest.raises(UnsupportedInputError, match="which is no multiple of 16 bytes: pass a copy"):
            comm.moe_route(**{**given, "router_weight": unaligned(given["router_weight"])})
        assert len(comm.moe_route(**given)) == 3


def test_what_the_method_refuses(ranks: RankPool) -> None:
    ranks.run(1, refuse)
