"""The same tensors get the same answer whoever asks: before a first call, beside prepared ones, and while tracing."""

from __future__ import annotations

import pytest
import torch
from fused_reference import EPS
from harness import RankPool, make_communicator

from llm_comm import Communicator, UnsupportedInputError

ROWS, HIDDEN = 4, 64
BF16, FP16 = torch.bfloat16, torch.float16


def ones(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


#: Operands of as many elements as those that a call was prepared for, so that sizes alone do not tell them apart.
FUSED_OPERANDS = {
    "usual": (ones(ROWS, HIDDEN), ones(HIDDEN), None, True),
    "static": (ones(ROWS, HIDDEN), ones(HIDDEN), "static", True),
    "dynamic": (ones(ROWS, HIDDEN), ones(HIDDEN), "dynamic", True),
    "groups of longer rows": (ones(ROWS, HIDDEN), ones(HIDDEN), "group", False),
    "groups": (ones(2, 2 * HIDDEN), ones(2 * HIDDEN), "group", True),
    "groups by columns": (ones(2, 2 * HIDDEN), ones(2 * HIDDEN), "group_column_major_tma_ue8m0", True),
    "three dimensions of groups": (ones(1, 2, 2 * HIDDEN), ones(2 * HIDDEN), "group_ue8m0", True),
    "three dimensions by columns": (ones(1, 2, 2 * HIDDEN), ones(2 * HIDDEN), "group_column_major", False),
    "blocks": (ones(ROWS, HIDDEN), ones(HIDDEN), "nvfp4", True),
    "three dimensions of blocks": (ones(2, 2, HIDDEN), ones(HIDDEN), "mxfp8_linear", True),
    "blocks of longer rows": (ones(16, 16), ones(16), "mxfp8", False),
    "other quantization": (ones(ROWS, HIDDEN), ones(HIDDEN), "int8", False),
    "three dimensions": (ones(2, 2, HIDDEN), ones(HIDDEN), None, True),
    "other type": (ones(ROWS, HIDDEN, dtype=FP16), ones(HIDDEN, dtype=FP16), None, True),
    "type without kernels": (ones(ROWS, HIDDEN, dtype=torch.float32), ones(HIDDEN, dtype=torch.float32), None, False),
    "weight of other type": (ones(ROWS, HIDDEN), ones(HIDDEN, dtype=FP16), None, False),
    "weight of two dimensions": (ones(ROWS, HIDDEN), ones(1, HIDDEN), None, False),
    "longer rows": (ones(2, 2 * HIDDEN), ones(HIDDEN), None, False),
    "rows of 4": (ones(HIDDEN, ROWS), ones(ROWS), None, False),
    "columns": (ones(HIDDEN, ROWS).t(), ones(HIDDEN), None, False),
    "strided weight": (ones(ROWS, HIDDEN), ones(2 * HIDDEN)[::2], None, False),
    "elsewhere": (ones(ROWS, HIDDEN).to("meta"), ones(HIDDEN), None, False),
    "weight elsewhere": (ones(ROWS, HIDDEN), ones(HIDDEN).to("meta"), None, False),
}

INPUTS = {
    "usual": (ones(ROWS, HIDDEN), True),
    "flat": (ones(ROWS * HIDDEN), True),
    "columns": (ones(HIDDEN, ROWS).t(), False),
    "every other one": (ones(ROWS, 2 * HIDDEN)[:, ::2], False),
    "type without kernels": (ones(ROWS, HIDDEN, dtype=torch.float64), False),
    "whole numbers": (ones(ROWS, HIDDEN, dtype=torch.int16), False),
    "elsewhere": (ones(ROWS, HIDDEN).to("meta"), False),
}


def check_fused(comm: Communicator) -> None:
    calls = comm._operations.all_reduce_add_rms_norm
    for name, (x, weight, quantize, is_served) in FUSED_OPERANDS.items():
        answers = comm.accepts_all_reduce_add_rms_norm(x, weight, quantize), calls.accepts_traced(x, weight, quantize)
        assert answers == (is_served, is_served), f"{name}: {answers}"
        if is_served:
            scale = torch.ones(1) if quantize == "static" else None
            given = {"global_scale": torch.ones(1) if quantize == "nvfp4" else None}
            comm.all_reduce_add_rms_norm(x, None, weight, EPS, quantize=quantize, scale=scale, **given)
            continue
        with pytest.raises(UnsupportedInputError):
            comm.all_reduce_add_rms_norm(x, None, weight, EPS, quantize=quantize)


def check_plain(comm: Communicator) -> None:
    for name, (x, is_served) in INPUTS.items():
        answers = comm.accepts(x), comm._operations.all_reduce.accepts_traced(x)
        assert answers == (is_served, is_served), f"{name}: {answers}"
        if is_served:
            assert comm.all_reduce(x).eq(comm.world_size).all()
            continue
        assert comm.try_all_reduce(x) is None
        with pytest.raises(UnsupportedInputError):
            comm.all_reduce(x)


def check_negated(comm: Communicator) -> None:
    """Of the size of prepared calls: their memory does not hold their values. (Tracing does not ask; the call does.)"""
    x, weight = ones(ROWS, HIDDEN), ones(HIDDEN)
    negated = torch._neg_view(x)
    assert not comm.accepts(negated)
    assert comm.try_all_reduce(negated) is None
    with pytest.raises(UnsupportedInputError, match="negated"):
        comm.all_reduce(negated)
    for operands in ((negated, weight), (x, torch._neg_view(weight))):
        assert not comm.accepts_all_reduce_add_rms_norm(*operands)
        with pytest.raises(UnsupportedInputError, match="negated"):
            comm.all_reduce_add_rms_norm(operands[0], None, operands[1], EPS)


def check_twice() -> None:
    """The second time, calls of all that is served are prepared."""
    with make_communicator() as comm:
        for _ in range(2):
            check_fused(comm)
            check_plain(comm)
            check_negated(comm)


def test_answers_do_not_depend_on_who_asks(ranks: RankPool) -> None:
    ranks.run(2, check_twice)
