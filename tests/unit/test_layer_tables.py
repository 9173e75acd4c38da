"""What tuning tables say of linear layers: their files, which layers an engine gives to llm_comm, and how they run."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from cores import connected
from tables import plain_row

from llm_comm import ConfigError, _core
from llm_comm.config import EngineOptions
from llm_comm.integrations.linear import about_linear, why_not_any
from llm_comm.operations.fp8 import Scaling
from llm_comm.operations.linear import Linear
from llm_comm.planning.catalogue import load_table, table_text
from llm_comm.planning.layers import LayerRow, tokens_by_size, weights_of
from llm_comm.planning.planner import Planner
from llm_comm.planning.tables import TuningTable, by_operation

SMALL = LayerRow("linear", 128, 64, True, 4, True, 16, 2, 1, us=4.5, cublas_us=6.25)
LARGE = LayerRow("linear", 128, 64, True, 32, False)
WITHOUT_PDL = LayerRow("linear", 128, 64, False, 16, True, stages=1)
OTHER = LayerRow("linear", 64, 128, True, 64, True)
LAYERS = (SMALL, LARGE, WITHOUT_PDL, OTHER)
TABLE = TuningTable("mine.yaml", by_operation([plain_row(256, "one_shot", 4, 8, 0)]), 256, layers=LAYERS)


def write(path: Path, table: TuningTable, layers: Any = None) -> Path:
    content = yaml.safe_load(table_text("NVIDIA X", 2, table, {}))
    if layers is not None:
        content["layers"] = layers
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def planner_of(layers: tuple[LayerRow, ...] = LAYERS, **options: Any) -> Planner:
    return Planner(2, TABLE._replace(layers=layers), EngineOptions.load({}, **options), mock.Mock())


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(table_text("NVIDIA X", 2, TABLE, {}), encoding="utf-8")
    assert load_table(path).table == TABLE
    path.write_text(table_text("NVIDIA X", 2, TABLE._replace(layers=()), {}), encoding="utf-8")
    assert "layers" not in path.read_text(encoding="utf-8")
    assert load_table(path).table.layers == ()


def test_layers_of_a_file_in_any_order_and_with_the_least_that_a_row_says(tmp_path: Path) -> None:
    least = {"operation": "linear", "outputs": 64, "inputs": 64, "pdl": True, "is_faster": True}
    entries = [{**least, "up_to": 4}, SMALL.entry(), {**least, "up_to": 8}]
    layers = load_table(write(tmp_path / "mine.yaml", TABLE, entries)).table.layers
    assert layers == (LayerRow("linear", 64, 64, True, 4, True), SMALL, LayerRow("linear", 64, 64, True, 8, True))


def test_tables_that_choose_alike_have_one_digest() -> None:
    without_figures = TABLE._replace(layers=tuple(row.without_figures() for row in LAYERS))
    assert without_figures.digest() == TABLE.digest()
    for layers in ((), LAYERS[1:], (SMALL._replace(stages=3), *LAYERS[1:])):
        assert TABLE._replace(layers=layers).digest() != TABLE.digest()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"operation": "linaer"}, r"operation is 'linaer' \(did you mean linear\?\); valid: linear"),
        ({"outputs": 100}, "outputs is 100; it must be a multiple of 64 up to 16777216"),
        ({"inputs": 0}, "inputs is 0"),
        ({"inputs": 64.0}, r"inputs is 64\.0"),
        ({"inputs": (1 << 24) + 64}, "inputs is 16777280"),
        ({"pdl": 1}, "pdl is 1; it must be true or false"),
        ({"is_faster": "yes"}, "is_faster is 'yes'; it must be true or false"),
        ({"up_to": 65}, "up_to is 65; it must be a number of tokens, 1 to 64"),
        ({"up_to": 0}, "up_to is 0"),
        ({"up_to": True}, "up_to is true"),
        ({"block_outputs": 12}, "block_outputs is 12; it must be 0 .* to 64 in steps of 8"),
        ({"block_outputs": 72}, "block_outputs is 72"),
        ({"stages": 17}, r"stages is 17; it must be 0 \(as the kernel finds best\) to 16$"),
        ({"stages": -1}, "stages is -1"),
        ({"stage_boxes": 9}, "stage_boxes is 9"),
        ({"us": "fast"}, "us is 'fast'; it must be a number of microseconds"),
        ({"cublas_us": True}, "cublas_us is true"),
        ({"stage": 3}, r"no such key as stage \(did you mean stages\?\)"),
    ],
)
def test_a_row_that_is_not_valid(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", TABLE, [OTHER.entry(), {**SMALL.entry(), **change}])
    with pytest.raises(ConfigError, match=f"line .*layer 2, .*{complaint}"):
        load_table(path)


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        (
            [SMALL.entry(), OTHER.entry(), SMALL.entry()],
            "layer 3, .* sorted by up_to, in tokens; the one before says 4",
        ),
        ([["linear"]], "layer 1, .*: it must be 'key: value' pairs"),
        ([{"operation": "linear", "outputs": 64}], "layer 1, .*: it lacks inputs, pdl, up_to, is_faster"),
        ({"a": 1}, "layers is .*; it must be a list of rows"),
    ],
)
def test_layers_that_are_not_valid(layers: Any, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_table(write(tmp_path / "mine.yaml", TABLE, layers))


@pytest.mark.parametrize("fuse_linear", ["auto", True, False])
@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize(
    ("outputs", "inputs", "tokens"),
    [(128, 64, 1), (128, 64, 4), (128, 64, 5), (128, 64, 16), (128, 64, 33), (64, 128, 64), (64, 64, 1)],
)
def test_which_layers_an_engine_gives_away(
    outputs: int, inputs: int, tokens: int, pdl: bool, fuse_linear: bool | str
) -> None:
    faster_up_to = {(128, 64, True): 4, (128, 64, False): 16, (64, 128, True): 64}
    expected = tokens <= faster_up_to.get((outputs, inputs, pdl), 0) if fuse_linear == "auto" else fuse_linear
    assert planner_of(pdl=pdl, fuse_linear=fuse_linear).prefers_layer("linear", outputs, inputs, tokens) is expected


@pytest.mark.parametrize(
    ("outputs", "inputs", "tokens"), [(64, 64, 0), (64, 64, 65), (96, 64, 1), (64, 96, 1), (0, 64, 1)]
)
def test_what_no_kernel_serves_is_never_given_away(outputs: int, inputs: int, tokens: int) -> None:
    assert not planner_of(fuse_linear=True).prefers_layer("linear", outputs, inputs, tokens)


@pytest.mark.parametrize(
    ("operation", "outputs", "inputs", "most"),
    [
        ("linear", 3072, 4096, 64),
        ("linear", 3904, 4096, 64),  # 31.98 MB
        ("linear", 3968, 4096, 32),
        ("linear", 1280, 8192, 32),  # long rows
        ("linear", 15616, 4096, 32),  # 127.9 MB
        ("linear", 15680, 4096, 0),
        ("linear", 64, 16384 + 64, 0),
        ("linear_silu_and_mul", 7808, 4096, 32),
        ("linear_silu_and_mul", 7872, 4096, 0),
        ("linear_fp8", 3072, 8192, 64),
        ("linear_fp8", 15616, 8192, 32),
        ("linear_silu_and_mul_fp8", 1920, 8192, 64),
    ],
)
def test_layers_that_no_table_has_are_given_away_by_size(operation: str, outputs: int, inputs: int, most: int) -> None:
    limits = {"slot_bytes": 0, "sm_count": 132, "max_cluster": 16, "compute_capability": 90}

    def planner(layers: tuple[LayerRow, ...] = (), pdl: bool = True, **others: int) -> Planner:
        config = EngineOptions.load({}, pdl=pdl)
        return Planner(2, TABLE._replace(layers=layers), config, _core.Limits(**{**limits, **others}))

    def given(planner: Planner) -> int:
        return max((t for t in range(1, 66) if planner.prefers_layer(operation, outputs, inputs, t)), default=0)

    assert given(planner()) == most
    assert planner().most_preferred_tokens() == 64
    for other in (planner(pdl=False), planner(compute_capability=100), planner(sm_count=114)):
        assert given(other) == other.most_preferred_tokens() == 0
    row = LayerRow(operation, outputs, inputs, True, 16, True)
    assert given(planner((row,))) == 16
    assert given(planner((row._replace(is_faster=False),))) == 0


def test_another_table_counts_at_once() -> None:
    planner = planner_of()
    assert planner.prefers_layer("linear", 128, 64, 4)
    planner.table = TABLE._replace(layers=(LARGE,))
    assert not planner.prefers_layer("linear", 128, 64, 4)


def test_most_tokens_of_what_is_given_away() -> None:
    assert planner_of().most_preferred_tokens() == 64
    assert planner_of(pdl=False).most_preferred_tokens() == 16
    assert planner_of(layers=(SMALL, LARGE)).most_preferred_tokens() == 4
    assert planner_of(layers=(LARGE,)).most_preferred_tokens() == 0
    assert planner_of(layers=(), fuse_linear=True).most_preferred_tokens() == 64
    assert planner_of(fuse_linear=False).most_preferred_tokens() == 0


@pytest.mark.parametrize(
    ("options", "layers", "why"),
    [
        ({}, LAYERS, None),
        ({"fuse_linear": True}, (), None),
        ({"fuse_linear": False}, LAYERS, r"fuse_linear is false \(Python\)"),
        ({}, (LARGE,), "fuse_linear is 'auto', and mine.yaml has no layer that is faster with pdl on"),
        ({"pdl": False}, (SMALL,), "mine.yaml has no layer that is faster with pdl off"),
    ],
)
def test_why_an_engine_gives_none_away(options: dict[str, Any], layers: tuple[LayerRow, ...], why: str | None) -> None:
    planner = planner_of(layers, **options)
    communicator: Any = mock.Mock(
        config=planner.config, table=planner.table, max_preferred_tokens=planner.most_preferred_tokens()
    )
    found = why_not_any(communicator)
    text = about_linear(communicator, "vLLM", found, 64)
    if why is None:
        assert found is None
        assert text == "; linear layers of up to 64 tokens by llm_comm"
    else:
        assert found is not None
        assert re.search(why, found)
        assert text == f"; linear layers are vLLM's: {found}"
    communicator.config = planner.config.replace(batch_invariant_linear="llm_comm")
    assert about_linear(communicator, "vLLM", found, 64) == "", "something else is said of them"


def choices_of(core: mock.Mock) -> list[tuple[int, int, int]]:
    choices = [call.kwargs["choice"] for call in core.prepare_linear.mock_calls]
    return [(choice.block_outputs, choice.stages, choice.stage_boxes) for choice in choices]


@pytest.mark.parametrize(
    ("tokens", "pdl", "choice"),
    [(1, True, (16, 2, 1)), (4, True, (16, 2, 1)), (5, True, (0, 0, 0)), (33, True, (0, 0, 0)), (1, False, (0, 1, 0))],
)
def test_a_layer_runs_as_its_row_says(tokens: int, pdl: bool, choice: tuple[int, int, int]) -> None:
    core = mock.Mock()
    layers = Linear(mock.Mock(device=torch.device("cpu"), core=mock.Mock(return_value=core)), planner_of(pdl=pdl))
    layers.find("linear", torch.empty(tokens, 64, dtype=torch.float16), torch.empty(128, 64, dtype=torch.float16))
    assert choices_of(core) == [choice]


def test_rows_of_layers_with_silu_and_mul_are_their_own() -> None:
    core = mock.Mock()
    planner = planner_of((SMALL, SMALL._replace(operation="linear_silu_and_mul", stages=3)))
    handle = mock.Mock(device=torch.device("cpu"), core=mock.Mock(return_value=core))
    x, weight = torch.empty(1, 64, dtype=torch.float16), torch.empty(256, 64, dtype=torch.float16)
    Linear(handle, planner, epilogue="silu_and_mul").find("linear_silu_and_mul", x, weight)
    assert choices_of(core) == [(16, 3, 1)]


FP8 = LayerRow("linear_fp8", 128, 128, True, 4, True, 24, 3, 2)


@pytest.mark.parametrize(
    ("rows", "tokens", "choice"),
    [
        ((SMALL, FP8), 4, (24, 3, 2)),
        ((SMALL._replace(inputs=128),), 4, (0, 0, 0)),  # of bf16
        ((SMALL._replace(operation="linear_silu_and_mul"),), 4, (0, 0, 0)),
        ((SMALL, FP8), 5, (0, 0, 0)),
        ((), 4, (0, 0, 0)),
    ],
)
def test_how_a_layer_of_fp8_runs(rows: tuple[LayerRow, ...], tokens: int, choice: tuple[int, int, int]) -> None:
    core = mock.Mock()
    planner = planner_of(rows)
    layers = Linear(mock.Mock(device=torch.device("cpu"), core=mock.Mock(return_value=core)), planner)
    x, weight = (torch.empty(count, 128, dtype=torch.float8_e4m3fn) for count in (tokens, 128))
    layers.find("linear", x, weight, Scaling(torch.ones(tokens, 1), torch.ones(1), torch.float16))
    assert choices_of(core) == [choice]
    (call,) = core.prepare_linear.mock_calls
    assert call.kwargs["scales"] == (True, False)


BLOCKS = FP8._replace(operation="linear_fp8_blocks", inputs=256, block_outputs=40)


@pytest.mark.parametrize(
    ("rows", "choice"),
    [((FP8._replace(inputs=256), BLOCKS), (40, 3, 2)), ((FP8._replace(inputs=256),), (0, 0, 0)), ((), (0, 0, 0))],
)
def test_how_a_layer_with_scales_of_blocks_runs(rows: tuple[LayerRow, ...], choice: tuple[int, int, int]) -> None:
    core = mock.Mock()
    layers = Linear(mock.Mock(device=torch.device("cpu"), core=mock.Mock(return_value=core)), planner_of(rows))
    x, weight = (torch.empty(count, 256, dtype=torch.float8_e4m3fn) for count in (4, 128))
    layers.find("linear", x, weight, Scaling(torch.ones(2, 4).t(), torch.ones(1, 2), torch.float16))
    assert choices_of(core) == [choice]
    (call,) = core.prepare_linear.mock_calls
    assert (call.kwargs["scales"], call.kwargs["x_scale_strides"]) == ((2, 2), (1, 4))


@pytest.mark.parametrize("operation", ["linear_fp8_blocks", "linear_silu_and_mul_fp8_blocks"])
def test_layers_with_scales_of_blocks_are_a_kind_of_their_own(operation: str, tmp_path: Path) -> None:
    row = BLOCKS._replace(operation=operation)
    planner = planner_of((row, row._replace(operation=operation.removesuffix("_blocks"), inputs=128)))
    assert planner.prefers_layer(operation, 128, 256, 4)
    assert not planner.prefers_layer(operation, 128, 128, 4)
    assert not planner.prefers_layer(operation.removesuffix("_blocks"), 128, 256, 4)
    assert planner_of((), fuse_linear=True).prefers_layer(operation, 64, 128, 1)
    assert not planner_of((), fuse_linear=True).prefers_layer(operation, 64, 192, 1), "no whole block of inputs"
    assert tokens_by_size(operation, 128, 256) == 0 < tokens_by_size("linear_fp8", 128, 256), "none was measured"
    assert weights_of(operation) == weights_of(operation.removesuffix("_fp8_blocks"))
    path = write(tmp_path / "mine.yaml", TABLE, [row.entry()])
    assert load_table(path).table.layers == (row,)
    with pytest.raises(ConfigError, match="inputs is 192; it must be a multiple of 128"):
        load_table(write(path, TABLE, [{**row.entry(), "inputs": 192}]))


def test_rows_of_bf16_give_no_layer_of_fp8_away() -> None:
    planner = planner_of((SMALL._replace(is_faster=True),))
    assert not planner.prefers_layer("linear_fp8", 128, 64, 1)
    assert not planner.prefers_layer("linear_fp8", 128, 128, 1)
    assert planner_of((FP8,)).prefers_layer("linear_fp8", 128, 128, 4)
    everything = planner_of((), fuse_linear=True)
    assert everything.prefers_layer("linear_fp8", 64, 128, 1)
    assert not everything.prefers_layer("linear_fp8", 64, 192, 1)


def test_a_row_that_the_device_is_out_of_resources_for_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    core = mock.Mock()
    core.prepare_linear.side_effect = [ValueError("2 stages take 1 byte too many"), "a layer"]
    layers = Linear(mock.Mock(device=torch.device("cpu"), core=mock.Mock(return_value=core)), planner_of())
    with caplog.at_level(logging.WARNING, logger="llm_comm"):
        prepared = layers.find(
            "linear", torch.empty(1, 64, dtype=torch.float16), torch.empty(128, 64, dtype=torch.float16)
        )
    assert prepared.run == "a layer"
    assert choices_of(core) == [(16, 2, 1), (0, 0, 0)]
    assert "tuning table mine.yaml: 2 stages take 1 byte too many" in caplog.text


def test_the_core_has_the_bounds_that_rows_have() -> None:
    (core,) = connected(1)
    problem = {"tokens": 1, "inputs": 2048, "outputs": 64, "data_type": 0, "epilogue": "none"}
    largest = {"block_outputs": 64, "stages": 16, "stage_boxes": 8}
    beyond = {"block_outputs": 72, "stages": 17, "stage_boxes": 9}
    for name, value in largest.items():
        core.prepare_linear(**problem, choice=_core.LinearChoice(**{"stage_boxes": 1, name: value}))
    for name, value in beyond.items():
        with pytest.raises(ValueError, match=name):
            core.prepare_linear(**problem, choice=_core.LinearChoice(**{"stage_boxes": 1, name: value}))
