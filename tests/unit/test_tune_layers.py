"""Tuning of linear layers: what becomes of what was measured, and a run on an emulated GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from llm_comm import Communicator, Config
from llm_comm.bench import tune_layers
from llm_comm.bench.linear_report import LayerRow as Measured
from llm_comm.bench.linear_report import MeasuredTuning
from llm_comm.bench.report import Result
from llm_comm.cli import commands, launch
from llm_comm.planning.catalogue import load_table, table_text
from llm_comm.planning.layers import LayerRow
from llm_comm.planning.tables import TuningTable


def measured(
    tokens: int, us: float | None, cublas_us: float | None, best_us: float | None = None, **of: Any
) -> Measured:
    shape = {"outputs": 128, "inputs": 64, "pdl": True, **of}
    other = "cublas + silu" if shape.get("silu") else "scaled_mm" if shape.get("fp8") else "cublas"
    results = {"llm_comm": Result(us=us), other: Result(us=cublas_us)}
    best = None if best_us is None else MeasuredTuning(16, 3, 2, Result(us=best_us))
    return Measured(tokens=tokens, layers=9, results=results, best=best, **shape)


def row(up_to: int, is_faster: bool, us: float | None, cublas_us: float | None, *choice: int) -> LayerRow:
    return LayerRow("linear", 128, 64, True, up_to, is_faster, *(choice or (0, 0, 0)), us, cublas_us)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (measured(4, 5.0, 6.0), row(4, True, 5.0, 6.0)),
        (measured(4, 5.0, 6.0, 4.0), row(4, True, 4.0, 6.0, 16, 3, 2)),
        (measured(4, 5.0, 6.0, 4.96), row(4, True, 5.0, 6.0)),  # no better than noise
        (measured(4, 6.0, 6.05), row(4, False, 6.0, 6.05)),  # as little
        (measured(4, 7.0, 6.0, 5.0), row(4, True, 5.0, 6.0, 16, 3, 2)),
        (measured(4, None, 6.0, 5.0), row(4, True, 5.0, 6.0, 16, 3, 2)),
        (measured(4, None, 6.0), row(4, False, None, 6.0)),
        (measured(4, 5.0, None), row(4, False, 5.0, None)),
        (measured(4, 5.00049, 6.0004), row(4, True, 5.0, 6.0)),
        (measured(4, 5.0, 6.0, silu=True), row(4, True, 5.0, 6.0)._replace(operation="linear_silu_and_mul")),
        (measured(4, 5.0, 6.0, fp8=True), row(4, True, 5.0, 6.0)._replace(operation="linear_fp8")),
    ],
)
def test_the_row_of_what_was_measured(one: Measured, expected: LayerRow) -> None:
    assert tune_layers.rows_of([one]) == (expected,)


def test_layers_of_fp8_are_compared_with_the_faster_of_others() -> None:
    one = measured(4, 5.0, 6.0, fp8=True)
    for us, faster in ((5.5, True), (4.9, False), (7.0, True), (None, True)):
        both = dataclasses.replace(one, results={**one.results, "vllm cutlass": Result(us=us)})
        (found,) = tune_layers.rows_of([both])
        assert (found.is_faster, found.cublas_us) == (faster, min(us or 6.0, 6.0))


def test_neighbours_that_run_alike_are_one_row_with_the_figures_of_the_largest() -> None:
    found = [measured(1, 4.0, 6.0), measured(8, 5.0, 6.0), measured(16, 6.0, 6.0), measured(32, 5.0, 7.0)]
    assert tune_layers.rows_of(found) == (row(8, True, 5.0, 6.0), row(16, False, 6.0, 6.0), row(32, True, 5.0, 7.0))
    of_others = [{"inputs": 128}, {"pdl": False}, {"silu": True}, {"fp8": True}, {}]
    assert len(tune_layers.rows_of([measured(1, 4.0, 6.0, **of) for of in of_others])) == 5


def test_layers_that_were_not_measured_stay() -> None:
    old = row(4, True, 1.0, 2.0)
    others = (old._replace(pdl=False), old._replace(inputs=192), old._replace(outputs=64))
    table = TuningTable("t", {}, 0, layers=(others[0], old, old._replace(up_to=64), *others[1:]))
    new = row(16, False, 3.0, 2.0)
    assert table.with_layers((new,)).layers == (*others, new)
    assert table.with_layers(()) == table


def test_what_is_printed() -> None:
    text = tune_layers.line(row(8, True, 5.0, 6.0))
    assert text == "  8 tokens     5.00 us  linear 128x64 PDL on  as the kernel chooses   cuBLAS     6.00"
    text = tune_layers.line(row(64, False, None, 6.0, 16, 3, 2)._replace(pdl=False))
    assert text == (
        " 64 tokens        - us  linear 128x64 PDL off  block_outputs=16 stages=3 stage_boxes=2   cuBLAS     6.00"
        "   not faster: left to the engine"
    )
    text = tune_layers.line(row(8, True, 5.0, 6.0)._replace(operation="linear_silu_and_mul"))
    assert text == (
        "  8 tokens     5.00 us  linear_silu_and_mul 128x64 PDL on  as the kernel chooses   cuBLAS + silu     6.00"
    )


def test_layers_are_measured_and_become_rows_of_a_file(
    group: dist.ProcessGroup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Communicator(group, "cpu", Config.load({}, pdl=False)) as comm:
        found = tune_layers.measure(comm, group, [(64, 128), (128, 64)], (9, 1), 1)
        table = comm.table
    shapes = [(one.outputs, one.inputs, one.tokens, one.pdl) for one in found]
    assert shapes == [(64, 128, 1, False), (64, 128, 9, False), (128, 64, 1, False), (128, 64, 9, False)]
    for one in found:
        assert not one.wrong
        assert set(one.results) == {"llm_comm", "mm"}, "the layer alone"
        assert all(result.us for result in one.results.values())
        assert len({choice[:3] for choice in one.choices}) == len(one.choices) > 3
        assert one.best is not None
        assert one.best.result.us
    rows = tune_layers.rows_of(found, on_gpu=False)
    assert [shown.split()[0] for shown in capsys.readouterr().out.splitlines()] == [str(r.up_to) for r in rows]
    assert {r.up_to for r in rows if r.outputs == 64} <= {1, 9}
    assert max(r.up_to for r in rows) == 9
    path = tmp_path / "table.yaml"
    general = table._replace(rows={}, layers=rows)
    text = table_text("emulated", 2, general, {}).replace(
        "rows:\n",
        "rows:\n  - {operation: all_reduce, up_to: 9, algorithm: one_shot, protocol: LL, blocks: 1, "
        "tile_lines: 1, depth: 0}\n",
        1,
    )
    path.write_text(text, encoding="utf-8")
    assert load_table(path).table.layers == rows


def test_gate_and_up_are_measured_with_their_activation(group: dist.ProcessGroup) -> None:
    with Communicator(group, "cpu", Config.load({})) as comm:
        (found,) = tune_layers.measure(comm, group, [(64, 128)], (3,), 1, silu=True)
        assert (found.outputs, found.inputs, found.silu, found.wrong) == (64, 128, True, False)
        assert set(found.results) == {"llm_comm", "mm + silu"}
        (row_,) = tune_layers.rows_of([found], on_gpu=False)
        assert row_.layer() == ("linear_silu_and_mul", 64, 128, True)
        preferred = row_._replace(is_faster=True)
        comm.use_table(comm.table.with_layers((preferred,)))
        assert comm.prefers_linear_silu_and_mul(64, 128, 3)
        assert not comm.prefers_linear(64, 128, 3)


def test_layers_of_fp8_are_measured(group: dist.ProcessGroup) -> None:
    with Communicator(group, "cpu", Config.load({})) as comm:
        (found,) = tune_layers.measure(comm, group, [(64, 128)], (3,), 1, fp8=True)
        assert (found.outputs, found.inputs, found.fp8, found.wrong) == (64, 128, True, False)
        assert set(found.results) == {"llm_comm", "mm"}
        assert len(found.choices) > 3
        (row_,) = tune_layers.rows_of([found], on_gpu=False)
        assert row_.layer() == ("linear_fp8", 64, 128, True)
        comm.use_table(comm.table.with_layers((row_._replace(is_faster=True),)))
        assert comm.prefers_linear(64, 128, 3, fp8=True)
        assert not comm.prefers_linear(64, 128, 3)
        assert not comm.prefers_linear_silu_and_mul(64, 128, 3, fp8=True)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--silu-layers", "64x100"], "--silu-layers 64x100: outputs and inputs are multiples of 64 up to 16777216"),
        (["--layers", "100x64"], "--layers 100x64: outputs and inputs are multiples of 64 up to 16777216"),
        (
            ["--fp8-layers", "64x192"],
            "--fp8-layers 64x192: outputs and inputs are multiples of 64, inputs of 128, up to 16777216",
        ),
        (["--layers", "64x64", "--tokens", "1,65"], "--tokens 1,65: 1 to 64 each"),
        (["--operations", "none"], "--operations none: there is nothing to measure"),
    ],
)
def test_options_that_cannot_work(
    options: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "place", lambda *_, **__: launch.Placement(2, on_gpu=True))
    monkeypatch.setattr(launch, "spawn", lambda *_: pytest.fail("ranks were started"))
    assert commands.main(["tune", *options]) == 2
    assert f"ConfigError: {complaint}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--layers", "--silu-layers"])
def test_layers_alone_can_be_measured(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    started: list[Any] = []
    monkeypatch.setattr(launch, "place", lambda *_, **__: launch.Placement(2, on_gpu=True))
    monkeypatch.setattr(launch, "spawn", lambda *call: started.append(call) or 0)
    assert commands.main(["tune", "--operations", "none", option, "64x128"]) == 0
    assert len(started) == 1
