"""Which calls of FlashInfer's fused all-reduce llm_comm computes. With engines: the scenarios of ``integrations``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llm_comm.errors import UnsupportedInputError
from llm_comm.integrations import flashinfer_calls

ROWS, WEIGHT = torch.ones(2, 8), torch.ones(8)
SCALE, QUANTIZED = torch.ones(1), torch.empty(2, 8).to(torch.float8_e4m3fn)
NORM = {"residual_in": ROWS, "rms_gamma": WEIGHT, "rms_eps": 1e-5, "norm_out": torch.empty(2, 8)}
NORM_FP8 = {**NORM, "quant_out": QUANTIZED, "scale_factor": SCALE}
PACKED, SCALES = torch.empty(2, 4, dtype=torch.uint8), torch.empty(128, 4, dtype=torch.uint8).view(QUANTIZED.dtype)
NORM_FP4 = {**NORM, "quant_out": PACKED, "scale_out": SCALES, "scale_factor": SCALE, "layout_code": 0}
HINTS = {"launch_with_pdl": True, "trigger_completion_at_end": False, "use_oneshot": True, "fp32_acc": True}


class Sums:
    """Notes what a communicator is asked."""

    accepts = True

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def try_all_reduce(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
        self.asked.append(("sum", out))
        return x if self.accepts else None

    def try_all_reduce_add_rms_norm(self, x: torch.Tensor, *_: Any, **options: Any) -> Any:
        names = ("quantize", "out", "residual_out", "scale", "weight_bias")
        self.asked.append(tuple(options[name] for name in names))
        self.global_scale = options.get("global_scale")
        return (options["out"], x) if self.accepts else None


class Call:
    """FlashInfer's function, and a workspace of ``group``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        comm = importlib.import_module("flashinfer.comm")
        make = comm.create_allreduce_fusion_workspace
        self.workspace = flashinfer_calls.note_group(make, world_size=1, rank=0, group=group)

    def by(self, pattern: int, *args: Any, **kwargs: Any) -> str:
        def theirs(*_: Any, **__: Any) -> str:
            return "FlashInfer"

        result = flashinfer_calls.around_fusion(
            theirs, *args, **{"input": ROWS, "workspace": self.workspace, "pattern": pattern, **HINTS, **kwargs}
        )
        return result if isinstance(result, str) else "llm_comm"


@pytest.fixture
def sums(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Sums, Call]]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "integrations" / "shared" / "stand_ins"))
    made: Any = Sums()
    flashinfer_calls.serve(group, made, fuses=True, say=lambda _: None)
    yield made, Call(group)
    flashinfer_calls.leave(made)


def test_operands_go_where_flashinfer_would_put_them(sums: tuple[Sums, Call]) -> None:
    made, call = sums
    new = torch.empty(2, 8)
    assert call.by(0, output=new) == call.by(1, **NORM, residual_out=new, weight_bias=0.0) == "llm_comm"
    of_gemma = {"residual_out": ROWS, "layout_code": 0, "scale_out": None, "weight_bias": 1.0}
    assert call.by(2, **NORM_FP8, **of_gemma) == "llm_comm"
    expected = [("sum", new), (None, NORM["norm_out"], new, None), ("static", QUANTIZED, ROWS, SCALE)]
    assert [list(map(id, asked[:4])) for asked in made.asked] == [list(map(id, asked)) for asked in expected]
    assert [asked[4:] for asked in made.asked] == [(), (0.0,), (1.0,)]


@pytest.mark.parametrize(("layout", "quantize"), [(None, "nvfp4"), (0, "nvfp4"), (2, "nvfp4_linear")])
def test_norms_in_fp4(sums: tuple[Sums, Call], layout: int, quantize: str) -> None:
    made, call = sums
    assert call.by(3, **{**NORM_FP4, "layout_code": layout}, residual_out=ROWS) == "llm_comm"
    ((mode, out, residual_out, scale, weight_bias),) = made.asked
    assert (mode, weight_bias) == (quantize, 0.0)
    assert (out is PACKED, residual_out is ROWS, scale is SCALES, made.global_scale is SCALE) == (True,) * 4


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_scales_of_fp4_are_bytes_of_any_type(sums: tuple[Sums, Call], dtype: torch.dtype) -> None:
    made, call = sums
    scale_out = SCALES.view(dtype)
    assert call.by(3, **{**NORM_FP4, "scale_out": scale_out}) == "llm_comm"
    ((_, _, _, scale, _),) = made.asked
    assert (scale.dtype, scale.shape, scale.data_ptr()) == (SCALES.dtype, SCALES.shape, SCALES.data_ptr())


@pytest.mark.parametrize(
    ("pattern", "others"),
    [
        (0, {"weight_bias": 1.0}),
        (1, {**NORM, "output": ROWS}),
        (1, {**NORM, "an_argument_of_a_later_release": True}),
        (1, {**NORM, "residual_in": None}),
        (1, {**NORM, "workspace": object()}),
        (2, {**NORM_FP8, "scale_factor": 0.5}),
        (2, {**NORM_FP8, "scale_out": SCALE}),
        (3, NORM_FP8),
        (3, {**NORM_FP4, "layout_code": 1}),
        (3, {**NORM_FP4, "scale_out": None}),
        (3, {**NORM_FP4, "scale_factor": 0.5}),
        (5, NORM_FP4),
        (99, NORM),
    ],
)
def test_what_is_not_known_is_left_to_flashinfer(sums: tuple[Sums, Call], pattern: int, others: Any) -> None:
    made, call = sums
    assert (call.by(pattern, **others), made.asked) == ("FlashInfer", [])


def test_positions_groups_and_refusals_are_left_to_flashinfer(
    sums: tuple[Sums, Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, call = sums
    assert (call.by(1, ROWS, **NORM), made.asked) == ("FlashInfer", [])
    made.accepts = False
    assert (call.by(1, **NORM), call.by(0), len(made.asked)) == ("FlashInfer", "FlashInfer", 2)
    made.accepts = True

    def refuse(*_: Any) -> None:
        raise UnsupportedInputError("out overlaps x")

    monkeypatch.setattr(made, "try_all_reduce", refuse)
    assert call.by(0, output=ROWS[:1]) == "FlashInfer"
    flashinfer_calls.serve(dist.group.WORLD, made, fuses=False, say=lambda _: None)  # type: ignore[arg-type]
    assert call.by(1, **NORM) == "FlashInfer"
    flashinfer_calls.leave_group(dist.group.WORLD)  # type: ignore[arg-type]
    assert (call.by(0), len(made.asked)) == ("FlashInfer", 2)
