"""Linear layers that measure themselves when an engine starts: what becomes of times, and what is kept of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from llm_comm import Communicator, _core
from llm_comm.bench.layer_chains import (
    call_of_choice,
    calls_of_others,
    choices_of,
    layer_by_torch,
    make_weights,
    unit_scales,
)
from llm_comm.config import EngineOptions
from llm_comm.integrations import layer_tuning
from llm_comm.integrations.layer_tuning import TOKENS, LayerBench, budget_s, rows_of, tune
from llm_comm.integrations.measured_tables import MeasuredTables
from llm_comm.operations.fp8 import FP8
from llm_comm.planning.layers import LayerKey, LayerRow
from llm_comm.planning.models import Layer

LOG = logging.getLogger("test")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
O_PROJ, GATE_UP = Layer("o_proj", "linear", 64, 128), Layer("gate_up_proj", "linear_silu_and_mul", 64, 128)
KEY = LayerKey("linear", 64, 128, True)
ROWS = [LayerRow(*KEY, 1, True, 32, 2, 4, 5.0, 6.0), LayerRow(*KEY, 16, False, 64, 3, 1, 7.0, 6.5)]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLM_COMM_TABLE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def comm(group: dist.ProcessGroup, directory: Path) -> Iterator[Communicator]:
    with Communicator(group, "cpu", EngineOptions.load({}, tune_at_start=60)) as made:
        yield made


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOG.name]


# ---- Times ----------------------------------------------------------------------------------------------------------


def test_the_slowest_rank_counts() -> None:
    first, second, third = (8, 2, 1), (16, 2, 1), (24, 2, 1)
    of_rank_0 = [(10.0, [(*first, 5.0), (*second, 6.0), (*third, 1.0)]), (10.0, [(*first, 9.9)])]
    of_rank_1 = [(11.0, [(*second, 6.5), (*first, 8.0)]), (9.0, [(*first, 9.0)])]
    few, many = rows_of(KEY, (1, 16), [of_rank_0, of_rank_1])
    # The third tiling was not timed by both.
    assert few == LayerRow(*KEY, 1, True, *second, 6.5, 11.0)
    assert many == LayerRow(*KEY, 16, False, *first, 9.9, 10.0), "faster by no more than repeated runs differ"


def test_a_tiling_that_no_two_ranks_have_in_common() -> None:
    times = [(10.0, [(8, 2, 1, 1.0)])] * len(TOKENS), [(12.0, [(16, 2, 1, 1.0)])] * len(TOKENS)
    found = rows_of(KEY, TOKENS, times)
    assert found == [LayerRow(*KEY, tokens, False, cublas_us=12.0) for tokens in TOKENS]


def test_when_is_measured() -> None:
    def seconds(device: torch.device, **options: Any) -> float:
        return budget_s(EngineOptions.load({}, **options), device)

    assert seconds(CUDA) == 10.0
    assert seconds(CUDA, fuse_linear=True) == 10.0
    assert seconds(CUDA, share_gpu=True) == seconds(CPU) == seconds(CUDA, fuse_linear=False) == 0.0
    assert seconds(CUDA, tune_at_start=0) == 0.0
    assert seconds(CPU, tune_at_start=2.5) == seconds(CUDA, share_gpu=True, tune_at_start=2.5) == 2.5


def test_kernels_that_a_device_lacks_are_passed_over(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(weight: torch.Tensor) -> None:
        raise RuntimeError("only compiled for other devices")

    def calls(*operands: Any) -> list[Any]:
        return [lacks, lambda weight: weight.sum()]

    monkeypatch.setattr(layer_tuning, "calls_of_others", calls)
    assert all(theirs > 0 for theirs, _ in LayerBench(comm).times(KEY))
    monkeypatch.setattr(layer_tuning, "calls_of_others", lambda *_: [lacks])
    with pytest.raises(RuntimeError, match="only compiled for other devices"):
        LayerBench(comm).times(KEY)


@pytest.mark.parametrize("operation", ["linear_fp8_blocks", "linear_silu_and_mul_fp8_blocks"])
def test_layers_with_scales_of_blocks_are_measured(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    seen = []

    def calls(x: torch.Tensor, out: torch.Tensor, scales: Any, silu: bool) -> Any:
        seen.append((x.dtype, [tuple(scale.shape) for scale in scales], silu))
        return calls_of_others(x, out, scales, silu)

    monkeypatch.setattr(layer_tuning, "calls_of_others", calls)
    times = LayerBench(comm).times(LayerKey(operation, 192, 256, True))
    assert all(theirs > 0 and ours for theirs, ours in times)
    rows = 3 if "silu" in operation else 2  # blocks of 384 rows, or 192
    assert seen == [(FP8, [(tokens, 2), (rows, 2)], "silu" in operation) for tokens in (1, 16)]


def test_the_layer_that_scales_of_blocks_are_compared_with(comm: Communicator) -> None:
    (weight,) = make_weights(1, (192, 256), FP8, CPU, 0)
    x, out = torch.randn(3, 256).to(FP8), torch.empty(3, 192, dtype=torch.bfloat16)
    scales = unit_scales(x, 192, True)
    for scale in scales:
        scale.copy_(torch.rand(scale.shape) / 256)
    by_torch = layer_by_torch(x, out, scales)(weight)
    (ours,) = call_of_choice(comm, x, out, scales, False, _core.LinearChoice())(weight)
    assert torch.allclose(ours.float(), by_torch.float(), rtol=2**-7, atol=1e-3)


def test_the_kernels_of_vllm_that_layers_with_scales_of_blocks_are_compared_with() -> None:
    """By name: with vLLM's operators loaded, on a GPU."""
    called = []

    def named(name: str) -> mock.Mock:
        return mock.Mock(side_effect=lambda *_, **__: called.append(name))

    of_c = mock.Mock(cutlass_scaled_mm=named("cutlass"), per_token_group_fp8_quant=named("quantize"))
    of_vllm = mock.Mock(fp8_gemm_nt_op=named("deep_gemm"), flashinfer_fp8_blockscale_gemm=named("flashinfer"))
    x = mock.MagicMock(device=CUDA, dtype=FP8, shape=(3, 256))
    x.__len__.return_value = 3
    scales, out = (mock.Mock(numel=lambda: 6), mock.Mock()), mock.Mock(dtype=torch.bfloat16)
    operators = mock.Mock(_C=of_c, vllm=of_vllm)
    with mock.patch.object(torch, "ops", operators), mock.patch.object(torch, "_scaled_mm", named("torch")):
        for call in calls_of_others(x, out, scales, False):
            call(mock.Mock())
    with_quantization = [("quantize", name) for name in ("torch", "cutlass", "deep_gemm")]
    assert called == [name for pair in with_quantization for name in pair] + ["flashinfer"]


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("dtype", "blocks"), [(torch.bfloat16, False), (FP8, False), (FP8, True)])
@pytest.mark.parametrize("tokens", [1, 9, 64])
def test_bits_are_those_of_every_tiling(
    comm: Communicator, tokens: int, dtype: torch.dtype, blocks: bool, silu: bool
) -> None:
    # Blocks of outputs, of 24 and more rows, that have rows of two blocks of scales.
    inputs, outputs = 640, 192 if blocks else 64
    (weight,) = make_weights(1, (outputs * (1 + silu), inputs), dtype, CPU, 0)
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(3)).to(dtype)
    scales = (torch.rand(tokens, 1), torch.rand(len(weight), 1) / inputs) if dtype is FP8 else ()
    if blocks:
        scales = torch.rand(tokens, inputs // 128), torch.rand(-(-len(weight) // 128), inputs // 128) / inputs
    found, tilings = [], choices_of(comm, x, torch.empty(tokens, outputs, dtype=torch.bfloat16), scales, silu)
    for tiling in tilings:
        out = torch.full((tokens, outputs), torch.nan, dtype=torch.bfloat16)
        call_of_choice(comm, x, out, scales, silu, tiling)(weight)
        found.append(out.view(torch.int16))
    assert len({(t.block_outputs, t.stages, t.stage_boxes) for t in tilings}) > 6
    assert not any(out.view(torch.bfloat16).isnan().any() for out in found)
    assert all(torch.equal(out, found[0]) for out in found)


# ---- From one start to the next -------------------------------------------------------------------------------------


def test_what_was_measured_counts_and_is_kept(
    comm: Communicator, group: dist.ProcessGroup, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tune(comm, group, [O_PROJ, GATE_UP, O_PROJ, O_PROJ._replace(inputs=64, why_not="it has a bias")], LOG)
    assert "of 2 that emulated lacks are faster: 2 measured in" in about
    rows = comm.table.layers
    assert [(row.layer(), row.up_to) for row in rows] == [
        (key, tokens) for key in (KEY, LayerKey("linear_silu_and_mul", 64, 128, True)) for tokens in (1, 16)
    ]
    for row in rows:
        assert row.us, row
        assert row.cublas_us, row
        assert all(row.tunables().values()), row
    kept = sorted(directory.rglob("*"))
    assert [path.name for path in kept if path.is_file()] == [
        "linear_64x128_pdl.yaml",
        "linear_silu_and_mul_64x128_pdl.yaml",
    ]

    monkeypatch.setattr(LayerBench, "__init__", _fail)
    assert tune(comm, group, [O_PROJ, GATE_UP], LOG) == "", "the table has them now"
    with Communicator(group, "cpu", comm.config) as again:
        assert "of 2 that emulated lacks are faster: 0 measured in 0.0 s" in tune(again, group, [GATE_UP, O_PROJ], LOG)
        assert set(again.table.layers) == set(rows)
        x, weight = torch.ones(3, 128, dtype=torch.bfloat16), torch.ones(64, 128, dtype=torch.bfloat16)
        assert torch.equal(again.linear(x, weight), comm.linear(x, weight))


def _fail(*_: Any) -> None:
    raise AssertionError("it is measured")


def test_nothing_is_measured_where_the_option_says_so(group: dist.ProcessGroup, directory: Path) -> None:
    with Communicator(group, "cpu", EngineOptions.load({}, tune_at_start=0)) as comm:
        MeasuredTables(CPU, 1, LOG).write("linear_64x128_pdl", comm.table._replace(layers=tuple(ROWS)))
        assert tune(comm, group, [O_PROJ], LOG) == ""
        assert comm.table.layers == ()


def test_layers_for_which_there_is_no_time(group: dist.ProcessGroup, directory: Path) -> None:
    with Communicator(group, "cpu", EngineOptions.load({}, tune_at_start=1e-9)) as comm:
        MeasuredTables(CPU, 1, LOG).write("linear_64x128_pdl", comm.table._replace(layers=tuple(ROWS)))
        assert "(1 of 2 that emulated lacks are faster: 0 measured" in (
            about := tune(comm, group, [O_PROJ, GATE_UP], LOG)
        )
        assert about.endswith("s, no time for 1)")
        assert list(comm.table.layers) == ROWS, "of an earlier start"


def test_a_rank_that_cannot_measure_goes_by_sizes(
    comm: Communicator, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def times(bench: LayerBench, layer: LayerKey) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LayerBench, "times", times)
    assert tune(comm, group, [O_PROJ], LOG) == ""
    assert comm.table.layers == ()
    (said,) = warnings(caplog)
    assert said.startswith("llm_comm: linear layers were not measured, and are chosen by their sizes: measurement of")
    assert "CUDA out of memory" in said
