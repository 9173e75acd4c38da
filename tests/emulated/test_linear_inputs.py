"""What the operations with a linear layer take; what they do not is an error on all ranks, before anything runs."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from fused_reference import EPS, FP8
from harness import RankPool, make_communicator
from linear_calls import INPUTS, NORM, OUTPUTS, RESIDUAL, TOKENS, WEIGHT, X, accept_all, call_all, compute_right, ones

from llm_comm import UnsupportedInputError

# ---- Operands of the layer -------------------------------------------------------------------------------------------

#: Operands, and what is said of them. Where there is "{}" stands the name of the weight.
DECLINED: dict[str, tuple[torch.Tensor, torch.Tensor, str]] = {
    "no token": (X[:0], WEIGHT, "0 tokens: it takes 1 to 64"),
    "65 tokens": (ones(65, INPUTS), WEIGHT, "65 tokens: it takes 1 to 64"),
    "65 tokens in two dimensions": (ones(5, 13, INPUTS), WEIGHT, "65 tokens: it takes 1 to 64"),
    "96 inputs": (ones(2, 96), ones(64, 96), "96 inputs: it takes multiples of 64 up to 16777216"),
    "32 outputs": (X, WEIGHT[:32], "32 outputs: it takes multiples of 64 up to 16777216"),
    "no inputs": (X[:, :0], ones(64, 0), "0 inputs: it takes multiples of 64"),
    "no outputs": (X, WEIGHT[:0], "0 outputs: it takes multiples of 64"),
    "other inputs": (X, ones(64, 64), "{} has shape (64, 64): it must be [outputs, inputs] with the inputs of a row"),
    "as many elements": (ones(2 * TOKENS, INPUTS // 2), WEIGHT, "{} has shape (64, 128): it must be"),
    "weight of a conv": (X, WEIGHT.view(64, INPUTS, 1), "{} has shape (64, 128, 1)"),
    "weight of one dimension": (X, ones(INPUTS), "{} has shape (128,)"),
    "x of no dimension": (torch.tensor(1.0).bfloat16(), WEIGHT, "a row of x, ()"),
    "fp32": (X.float(), WEIGHT.float(), "torch.float32 is not one of torch.bfloat16, torch.float16"),
    "int16": (X.short(), WEIGHT.short(), "torch.int16 is not one of"),
    "fp8 weight": (X, WEIGHT.to(FP8), "{} is torch.float8_e4m3fn, x is torch.bfloat16"),
    "weight of other type": (X, WEIGHT.half(), "{} is torch.float16, x is torch.bfloat16"),
    "strided x": (ones(TOKENS, 2 * INPUTS)[:, ::2], WEIGHT, "x: the tensor is not contiguous"),
    "columns": (ones(INPUTS, TOKENS).t(), WEIGHT, "x: the tensor is not contiguous"),
    "transposed weight": (X, ones(INPUTS, OUTPUTS).t(), "{}: the tensor is not contiguous"),
    "elsewhere": (X.to("meta"), WEIGHT, "x: the tensor is on meta, the communicator on cpu"),
    "weight elsewhere": (X, WEIGHT.to("meta"), "{}: the tensor is on meta, the communicator on cpu"),
    "sparse x": (X.to_sparse(), WEIGHT, "x: the tensor is torch.sparse_coo"),
    "sparse weight": (X, WEIGHT.to_sparse(), "{}: the tensor is torch.sparse_coo"),
    "negated x": (torch._neg_view(X), WEIGHT, "x: the tensor is a negated view"),
    "negated weight": (X, torch._neg_view(WEIGHT), "{}: the tensor is a negated view"),
}


def decline(name: str) -> list[str]:
    x, weight, _ = DECLINED[name]
    texts = []
    with make_communicator(fuse_linear=True) as comm:
        for _ in range(2):  # the second time, calls of as many elements are prepared
            # Tracing does not ask who has another's memory; the call does.
            if "negated" not in name:
                assert not comm._operations.linear._accepts_traced(x, weight)
            if x.layout is torch.strided and weight.layout is torch.strided:
                assert accept_all(comm, x, weight) == [False] * 3
            for call in call_all(comm, x, weight):
                with pytest.raises(UnsupportedInputError) as error:
                    call()
                texts.append(str(error.value))
            assert comm.try_linear(x, weight) is None
            assert comm.try_linear_all_reduce_add_rms_norm(x, weight, None, NORM, EPS) is None
            compute_right(comm)
    return texts


@pytest.mark.parametrize("name", DECLINED)
def test_declined_operands(ranks: RankPool, name: str) -> None:
    first, second = ranks.run(2, decline, name)
    assert first == second
    names = ("linear", "linear_all_reduce", "linear_all_reduce_add_rms_norm") * 2
    for operation, text in zip(names, first, strict=True):
        reason = DECLINED[name][2].format("weight" if operation == "linear" else "linear_weight")
        assert text.startswith(f"{operation}: ")
        assert reason in text


def decline_nested() -> None:
    rows = [torch.ones(1, INPUTS).bfloat16(), torch.ones(3, INPUTS).bfloat16()]
    with make_communicator() as comm:
        for layout in (torch.strided, torch.jagged):
            nested = torch.nested.nested_tensor(rows, layout=layout)
            for x, weight in ((nested, WEIGHT), (X, nested)):
                assert not comm.accepts_linear(x, weight)
                with pytest.raises((UnsupportedInputError, RuntimeError, NotImplementedError)):
                    comm.linear(x, weight)
        compute_right(comm)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(ranks: RankPool) -> None:
    ranks.run(2, decline_nested)


ACCEPTED: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "usual": (X, WEIGHT),
    "fp16": (X.half(), WEIGHT.half()),
    "a row": (X[0], WEIGHT),
    "64 tokens": (ones(64, INPUTS), WEIGHT),
    "more dimensions": (ones(2, 1, 3, INPUTS), WEIGHT),
    "square": (ones(64, 64), ones(64, 64)),
    "misaligned": (ones(TOKENS * INPUTS + 1)[1:].view(TOKENS, INPUTS), WEIGHT),
}


def accept() -> None:
    with make_communicator() as comm:
        for name, (x, weight) in ACCEPTED.items():
            norm = NORM.to(x.dtype)
            inputs = x.shape[-1]
            for _ in range(2):
                assert comm.accepts_linear(x, weight), name
                assert comm._operations.linear._accepts_traced(x, weight), name
                assert comm.accepts_linear_all_reduce(x, weight), name
                assert comm.accepts_linear_all_reduce_add_rms_norm(x, weight, norm), name
                assert comm.linear(x, weight).eq(inputs).all(), name
                assert comm.linear_all_reduce(x, weight).eq(inputs * comm.world_size).all(), name
                normed, _ = comm.linear_all_reduce_add_rms_norm(x, weight, None, norm, EPS)
                assert normed.eq(1).all(), name


def test_accepted_operands(ranks: RankPool) -> None:
    ranks.run(2, accept)


def decline_what_is_no_tensor() -> None:
    with make_communicator() as comm:
        array = torch.ones(TOKENS, INPUTS).half().numpy()
        for x, weight, wrong in ((array, WEIGHT.half(), "x"), (X, None, "weight"), (X, [1.0], "weight")):
            name = type(x if wrong == "x" else weight).__name__
            for call in call_all(comm, x, weight):
                with pytest.raises(UnsupportedInputError, match=f"{wrong} is a {name}, not a tensor"):
                    call()
        compute_right(comm)


def test_what_is_no_tensor(ranks: RankPool) -> None:
    ranks.run(2, decline_what_is_no_tensor)


def misalign_the_weight() -> None:
    """Of which torch would have to make a copy at every call."""
    with make_communicator() as comm:
        weight = ones(OUTPUTS * INPUTS + 8)[1:-7].view(OUTPUTS, INPUTS)
        assert accept_all(comm, X, weight) == [True] * 3
        for _ in range(2):
            for call in call_all(comm, X, weight):
                with pytest.raises(UnsupportedInputError, match=r"weight begins at 0x\w+, .* 16 bytes: pass a copy"):
                    call()
            compute_right(comm)
        for call in call_all(comm, X, weight.clone()):
            call()


def test_a_weight_that_is_not_aligned(ranks: RankPool) -> None:
    ranks.run(2, misalign_the_weight)


# ---- What comes behind the layer -------------------------------------------------------------------------------------


def try_each() -> None:
    gate_up, beside = ones(2 * OUTPUTS, INPUTS), torch.empty(WEIGHT.numel() + 1).to(WEIGHT.dtype)[1:].view_as(WEIGHT)
    with make_communicator(fuse_linear=True) as comm:
        assert torch.equal(comm.try_linear(X, WEIGHT), comm.linear(X, WEIGHT))
        assert torch.equal(comm.try_linear_silu_and_mul(X, gate_up), comm.linear_silu_and_mul(X, gate_up))
        operands = X, WEIGHT, RESIDUAL, NORM, EPS
        tried, called = (
            call(*operands, weight_bias=1.0)
            for call in (comm.try_linear_all_reduce_add_rms_norm, comm.linear_all_reduce_add_rms_norm)
        )
        assert all(torch.equal(one, other) for one, other in zip(tried, called, strict=True))
        assert not torch.equal(called[0], comm.linear_all_reduce_add_rms_norm(*operands)[0])
        # Not aligned, no layer, not contiguous, of another dtype.
        assert comm.try_linear(X, beside) is comm.try_linear(X, torch.nested.nested_tensor([WEIGHT])) is None
        assert comm.try_linear_silu_and_mul(X, gate_up.t()) is comm.try_linear_silu_and_mul(X, gate_up[:96]) is None
        assert comm.try_all_reduce_add_rms_norm(RESIDUAL, RESIDUAL.t().contiguous().t(), NORM, EPS) is None
        assert comm.try_all_reduce_add_rms_norm(RESIDUAL, None, NORM, EPS, out=RESIDUAL.half()) is None
        assert comm.try_all_reduce_add_rms_norm(RESIDUAL, None, NORM, EPS, weight_bias=math.inf) is None
        compute_right(comm)
    with make_communicator(fuse_linear=False) as comm:
        assert comm.try_linear(X, WEIGHT) is comm.try_linear_silu_and_mul(X, gate_up) is None
        assert comm.try_linear_all_reduce_add_rms_norm(*operands) is None


def test_what_only_tries_returns_none_for_what_is_declined_or_not_preferred(ranks: RankPool) -> None:
    ranks.run(2, try_each)


LIMIT = TOKENS * OUTPUTS * 2


def go_to_the_limit() -> None:
    with make_communicator(max_message_bytes=LIMIT) as comm:
        compute_right(comm)
        larger = ones(TOKENS + 1, INPUTS)
        assert accept_all(comm, larger, WEIGHT) == [True, False, False]
        assert comm.linear(larger, WEIGHT).eq(INPUTS).all()
        with mock.patch.object(comm._operations.linear, "enqueue") as enqueue:
            for call in call_all(comm, larger, WEIGHT)[1:]:
                with pytest.raises(
                    UnsupportedInputError, match=f"^linear_all_reduce.*more than max_message_bytes={LIMIT}"
                ):
                    call()
            enqueue.assert_not_called()
        compute_right(comm)


def test_sums_that_are_too_large(ranks: RankPool) -> None:
    ranks.run(2, go_to_the_limit)


def go_alone() -> None:
    with make_communicator() as comm:
        assert accept_all(comm, X, WEIGHT) == [True, True, False]
        with pytest.raises(UnsupportedInputError, match=r"linear_all_reduce_add_rms_norm: .*one rank"):
            comm.linear_all_reduce_add_rms_norm(X, WEIGHT, None, NORM, EPS)
        compute_right(comm)


def test_norms_of_one_rank_are_declined(ranks: RankPool) -> None:
    ranks.run(1, go_alone)


NORMS: dict[str, tuple[dict[str, Any], str]] = {
    "weight of other length": ({"norm_weight": ones(128)}, r"weight has shape \(128,\)"),
    "weight of two dimensions": ({"norm_weight": ones(1, 64)}, r"weight has shape \(1, 64\)"),
    "weight of other type": ({"norm_weight": NORM.half()}, "weight is torch.float16, x is torch.bfloat16"),
    "strided weight": ({"norm_weight": ones(128)[::2]}, "weight is not contiguous"),
    "weight elsewhere": ({"norm_weight": NORM.to("meta")}, "weight is on meta"),
    "negated weight": ({"norm_weight": torch._neg_view(NORM)}, "weight: the tensor is a negated view"),
    "unknown quantization": ({"quantize": "int8"}, "quantize is 'int8'"),
    "outputs that are no row": ({"linear_weight": ones(16448, INPUTS), "norm_weight": ones(16448)}, "rows of 16448"),
}
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "residual like x": ({"residual": X}, "residual "),
    "residual of other shape": ({"residual": RESIDUAL[:1]}, "residual "),
    "residual of other type": ({"residual": RESIDUAL.half()}, "residual "),
    "out like x": ({"out": X.clone()}, "out "),
    "out for FP8": ({"out": RESIDUAL.clone(), "quantize": "dynamic"}, "out .*float8_e4m3fn"),
    "out is no tensor": ({"out": [1.0]}, "out is a list, not a tensor"),
    "no scale": ({"quantize": "static"}, "needs scale"),
    "scale without quantization": ({"scale": torch.ones(1)}, "scale without quantize"),
    "weight_bias is infinite": ({"weight_bias": math.inf}, "weight_bias is inf"),
    **NORMS,
}


def reject_norm(name: str) -> str:
    given, message = MISFITS[name]
    usual = {"x": X, "linear_weight": WEIGHT, "residual": None, "norm_weight": NORM, "eps": EPS}
    call = {**usual, **given}
    asked = [call["x"], call["linear_weight"], call["norm_weight"], call.get("quantize")]
    with make_communicator() as comm:
        for _ in range(2):  # the second time, usual calls are prepared
            assert comm.accepts_linear_all_reduce_add_rms_norm(*asked) == (name not in NORMS)
            with (
                mock.patch.object(comm._operations.linear, "enqueue") as enqueue,
                pytest.raises(UnsupportedInputError, match=f"^linear_all_reduce_add_rms_norm: .*{message}") as error,
            ):
                comm.linear_all_reduce_add_rms_norm(**call)
            enqueue.assert_not_called()
            compute_right(comm)
    return str(error.value)


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_a_norm(ranks: RankPool, name: str) -> None:
    assert len(set(ranks.run(2, reject_norm, name))) == 1


OUTS: dict[str, tuple[dict[str, Any], str]] = {
    "shorter": (
        {"out": ones(1, OUTPUTS)},
        r"out \(\(1, 64\), torch.bfloat16, cpu\) must be contiguous and like the result",
    ),
    "like x": ({"out": X.clone()}, "like the result"),
    "other type": ({"out": ones(TOKENS, OUTPUTS, dtype=torch.float16)}, "like the result"),
    "strided": ({"out": ones(TOKENS, 2 * OUTPUTS)[:, ::2]}, "like the result"),
    "elsewhere": ({"out": ones(TOKENS, OUTPUTS).to("meta")}, "like the result"),
    "sparse": ({"out": ones(TOKENS, OUTPUTS).to_sparse()}, "out: the tensor is torch.sparse_coo"),
    "no tensor": ({"out": [1.0]}, "out a list"),
    "negated": ({"out": torch._neg_view(ones(TOKENS, OUTPUTS))}, "out: the tensor is a negated view"),
}


def reject_out(name: str) -> None:
    given, message = OUTS[name]
    call = {"x": X, "weight": WEIGHT, **given}
    with make_communicator() as comm:
        for operation in (comm.linear, comm.linear_all_reduce):
            with (
                mock.patch.object(comm._operations.linear, "enqueue") as enqueue,
                pytest.raises(UnsupportedInputError, match=message),
            ):
                operation(call["x"], call["weight"], out=call["out"])
            enqueue.assert_not_called()
        compute_right(comm)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", OUTS)
def test_out_that_does_not_fit(ranks: RankPool, name: str, world: int) -> None:
    ranks.run(world, reject_out, name)


def write_beside() -> None:
    buffer = ones(TOKENS * INPUTS + TOKENS * OUTPUTS)
    x, out = buffer[: TOKENS * INPUTS].view(TOKENS, INPUTS), buffer[TOKENS * INPUTS :]
    with make_communicator() as comm:
        assert comm.linear(x, WEIGHT, out=out).eq(INPUTS).all()
        assert comm.linear_all_reduce(x, WEIGHT, out=out).eq(INPUTS * comm.world_size).all()
        assert x.eq(1).all()


def test_out_beside_x(ranks: RankPool) -> None:
    ranks.run(2, write_beside)
