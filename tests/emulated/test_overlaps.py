"""Tensors of one call that share memory: one element is too much, none is not, whichever two they are."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import RankPool, make_communicator

from llm_comm import Communicator, UnsupportedInputError
from llm_comm.operations.operation import overlap

ROWS, HIDDEN = 2, 64
EPS = 1e-5
#: The tensors of a fused call that are written, and those that share no memory with them.
WRITTEN = ("out", "residual_out")
OTHERS = ("x", "residual", "weight", "scale", "out", "residual_out")


def usual(quantize: str | None) -> dict[str, torch.Tensor]:
    rows = (ROWS, HIDDEN)
    scales = {None: {}, "static": {"scale": torch.ones(1)}, "dynamic": {"scale": torch.ones(ROWS)}}
    return {
        "x": torch.ones(rows, dtype=torch.bfloat16),
        "residual": torch.ones(rows, dtype=torch.bfloat16),
        "weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "out": torch.ones(rows, dtype=torch.bfloat16 if quantize is None else torch.float8_e4m3fn),
        "residual_out": torch.ones(rows, dtype=torch.bfloat16),
        **scales[quantize],
    }


def beside(first: torch.Tensor, second: torch.Tensor, gap_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies in one buffer, the second so many bytes behind the end of the first; of less than 0 they overlap."""
    begin = first.nbytes + gap_bytes
    buffer = torch.zeros(begin + second.nbytes + 16, dtype=torch.uint8)
    placed = []
    for tensor, offset in ((first, 0), (second, begin)):
        inside = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        inside.copy_(tensor)
        placed.append(inside)
    return placed[0], placed[1]


def call(comm: Communicator, quantize: str | None, tensors: dict[str, torch.Tensor]) -> None:
    given = dict(tensors)
    x, residual, weight = (given.pop(name) for name in ("x", "residual", "weight"))
    comm.all_reduce_add_rms_norm(x, residual, weight, EPS, quantize=quantize, **given)  # type: ignore[arg-type]


def check_pairs(quantize: str | None) -> None:
    """Each pair in both orders, an element into each other, and side by side."""
    with make_communicator() as comm:
        for written, other in itertools.product(WRITTEN, OTHERS):
            tensors = usual(quantize)
            if written == other or other not in tensors:
                continue
            for first, second in ((written, other), (other, written)):
                # What lies behind has to be aligned to its elements.
                step = max(tensors[first].element_size(), tensors[second].element_size())
                apart = dict(zip((first, second), beside(tensors[first], tensors[second], 0), strict=True))
                call(comm, quantize, {**tensors, **apart})
                into = dict(zip((first, second), beside(tensors[first], tensors[second], -step), strict=True))
                with pytest.raises(UnsupportedInputError, match="overlaps"):
                    call(comm, quantize, {**tensors, **into})
        check_same(comm, quantize)


def check_same(comm: Communicator, quantize: str | None) -> None:
    """What begins where another does: the norm may take the place of x, and the new residual that of the residual."""
    for written, other in (("out", "x"), ("out", "residual"), ("residual_out", "residual"), ("residual_out", "x")):
        tensors = usual(quantize)
        is_allowed = (written, other) in {("out", "x"), ("residual_out", "residual")}
        memory = tensors[other].view(torch.uint8).flatten()
        # Another view of the memory: what is compared are not the objects.
        view = memory[: tensors[written].nbytes].view(tensors[written].dtype).view(ROWS, HIDDEN)
        if is_allowed and tensors[written].dtype == tensors[other].dtype:
            call(comm, quantize, {**tensors, written: view})
            continue
        with pytest.raises(UnsupportedInputError, match="overlaps"):
            call(comm, quantize, {**tensors, written: view})


@pytest.mark.parametrize("quantize", [None, "static", "dynamic"])
def test_tensors_of_a_fused_call(ranks: RankPool, quantize: str | None) -> None:
    ranks.run(2, check_pairs, quantize)


def check_residual_in_place() -> None:
    """Written where it is, it may touch x, but share nothing with it."""
    with make_communicator() as comm:
        for x_is_first in (True, False):
            for gap in (0, -2):
                tensors = usual(None)
                pair = beside(tensors["x"], tensors["residual"], gap)
                x, residual = pair if x_is_first else pair[::-1]
                arguments = {"residual_out": residual}
                if gap == 0:
                    comm.all_reduce_add_rms_norm(x, residual, tensors["weight"], EPS, **arguments)
                    continue
                with pytest.raises(UnsupportedInputError, match="residual overlaps x"):
                    comm.all_reduce_add_rms_norm(x, residual, tensors["weight"], EPS, **arguments)


def test_a_residual_that_is_written_in_place(ranks: RankPool) -> None:
    ranks.run(2, check_residual_in_place)


def check_plain(dtype: torch.dtype) -> None:
    with make_communicator() as comm:
        values = torch.ones(40, dtype=dtype)
        for x_is_first in (True, False):
            for elements in (0, 1, 39):
                pair = beside(values, values, -elements * values.element_size())
                x, out = pair if x_is_first else pair[::-1]
                if elements == 0:
                    assert comm.all_reduce(x, out).eq(comm.world_size).all()
                    continue
                with pytest.raises(UnsupportedInputError, match="out overlaps x"):
                    comm.all_reduce(x, out)
        assert comm.all_reduce(values, values.view(8, 5)).eq(comm.world_size).all()  # the same memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_input_and_output_of_an_all_reduce(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(2, check_plain, dtype)


@pytest.mark.parametrize(("gap", "is_overlap"), [(0, False), (4, False), (-4, True), (-36, True)])
def test_buffers_of_calls_by_name(gap: int, is_overlap: bool) -> None:
    first, second = beside(torch.ones(10), torch.ones(10), gap)
    assert overlap(first, second) == overlap(second, first) == is_overlap
