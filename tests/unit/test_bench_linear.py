"""The benchmark of linear layers: what it calls wrong, what it tries, and how it reports."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llm_comm.bench import linear, linear_report, report, timing
from llm_comm.bench.fused import add_rms_norm
from llm_comm.bench.layer_chains import make_weights
from llm_comm.bench.linear_arms import FUSED, Arm, Names, silu_and_mul
from llm_comm.bench.linear_operands import Judge, Operands, SiluJudge
from llm_comm.bench.linear_report import LayerRow, MeasuredTuning
from llm_comm.bench.report import Progress, Result
from llm_comm.cli import commands, launch
from llm_comm.cli.launch import Placement
from llm_comm.errors import ConfigError, PeerTimeout, UnsupportedInputError

CPU = torch.device("cpu")
ON_GPU, EMULATED = Names.of(True), Names.of(False)


def operands_of(dtype: torch.dtype = torch.bfloat16, tokens: int = 3, rank: int = 0) -> Operands:
    return Operands.of(make_weights(2, (128, 192), dtype, CPU, rank), tokens, rank)


def right(operands: Operands, index: int) -> torch.Tensor:
    """What a right layer returns: products summed in fp32, and rounded once."""
    return (operands.x.float() @ operands.weights[index].float().t()).to(operands.x.dtype)


# ---- What is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_right_layers_are_accepted(dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    operands = operands_of(dtype)
    judge = Judge(operands, group)
    for index in range(2):
        out = right(operands, index)
        assert judge.layer(out, index, rounds_once=True) <= 1.0
        assert judge.layer(out, index, rounds_once=False) <= 1.0
        chain = add_rms_norm(out, operands.residual, operands.norm_weight)
        for layer_once in (True, False):
            assert judge.chain(chain, index, layer_once, sum_rounds_once=True) <= 1.0
        assert judge.chain_without_sum(chain, index) <= 1.0


@pytest.mark.parametrize("rounds_once", [True, False])
def test_wrong_layers_are_noticed(rounds_once: bool, group: dist.ProcessGroup) -> None:
    operands = operands_of()
    judge, out = Judge(operands, group), right(operands, 0)
    assert judge.layer(right(operands, 1), 0, rounds_once) > 1.0, "the layer of another weight"
    assert judge.layer(operands.out, 0, rounds_once) > 1.0, "nothing was written"
    for place in ((0, 0), (2, 127)):
        changed = out.clone()
        changed[place] += 0.5
        assert judge.layer(changed, 0, rounds_once) > 1.0


def test_a_layer_that_leaves_out_an_input_is_noticed(group: dist.ProcessGroup) -> None:
    operands = operands_of()
    out = (operands.x[:, :-1].float() @ operands.weights[0][:, :-1].float().t()).bfloat16()
    assert Judge(operands, group).layer(out, 0, rounds_once=True) > 1.0


def test_a_layer_that_rounds_twice_is_noticed_where_it_must_not(group: dist.ProcessGroup) -> None:
    operands = operands_of()
    x, weight = operands.x.float(), operands.weights[0].float()
    halves = ((x[:, half] @ weight[:, half].t()).bfloat16() for half in (slice(0, 96), slice(96, None)))
    out = sum(halves)
    assert isinstance(out, torch.Tensor)
    judge = Judge(operands, group)
    assert judge.layer(out, 0, rounds_once=True) > 1.0
    assert judge.layer(out, 0, rounds_once=False) <= 1.0


@pytest.mark.parametrize("which", [0, 1])
def test_wrong_chains_are_noticed(which: int, group: dist.ProcessGroup) -> None:
    operands = operands_of()
    judge = Judge(operands, group)
    chain = add_rms_norm(right(operands, 0), operands.residual, operands.norm_weight)
    chain[which][1, 5] += 0.5
    assert judge.chain(chain, 0, True, True) > 1.0
    assert judge.chain(chain, 0, False, False) > 1.0
    assert judge.chain_without_sum(chain, 0) > 1.0


def test_ranks_have_their_own_layers_and_share_the_residual() -> None:
    one, other = operands_of(rank=0), operands_of(rank=1)
    assert torch.equal(one.residual, other.residual)
    assert torch.equal(one.norm_weight, other.norm_weight)
    assert not torch.equal(one.x, other.x)
    assert not torch.equal(one.weights[0], other.weights[0])


# ---- Silu-and-mul ---------------------------------------------------------------------------------------------------


def silu_operands(dtype: torch.dtype) -> Operands:
    return Operands.of(make_weights(2, (256, 192), dtype, CPU, 0), 3, 0, silu=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_right_projections_are_accepted(dtype: torch.dtype) -> None:
    operands = silu_operands(dtype)
    assert (operands.out.shape, operands.silu, operands_of().silu) == ((3, 128), True, False)
    judge = SiluJudge(operands)
    for index in range(2):
        products = right(operands, index)
        once = silu_and_mul(products.float()).to(dtype)
        assert 0 < judge.layer(once, index, rounds_once=True) <= 1.0
        assert 0 < judge.layer(silu_and_mul(products), index, rounds_once=False) <= 1.0


@pytest.mark.parametrize("rounds_once", [True, False])
def test_wrong_projections_are_noticed(rounds_once: bool) -> None:
    operands = silu_operands(torch.bfloat16)
    judge, products = SiluJudge(operands), right(operands, 0)
    gate, up = products.chunk(2, dim=-1)
    out = silu_and_mul(products)
    assert judge.layer(silu_and_mul(torch.cat([up, gate], dim=-1)), 0, rounds_once) > 1.0
    assert judge.layer(gate * up, 0, rounds_once) > 1.0
    assert judge.layer(operands.out, 0, rounds_once) > 1.0, "nothing was written"
    assert judge.layer(silu_and_mul(right(operands, 1)), 0, rounds_once) > 1.0, "the layer of another weight"
    for place in ((0, 0), (2, 127)):
        changed = out.clone()
        changed[place] += 0.5
        assert judge.layer(changed, 0, rounds_once) > 1.0


# ---- How it measures ------------------------------------------------------------------------------------------------


class LoneComm:
    """Stands for an emulated communicator of one rank."""

    rank, world_size, device, is_emulated = 0, 1, CPU, True


def bench(group: dist.ProcessGroup, comm: Any = None) -> linear.LayerBench:
    return linear.LayerBench([(True, comm or LoneComm())], group, 2, Progress(False))


def arm(operands: Operands, judge: Judge, call: Any) -> Arm:
    return Arm("arm", call, lambda found, index: judge.layer(found[0], index, True))


def test_a_right_result_is_timed_and_a_wrong_one_is_not(group: dist.ProcessGroup) -> None:
    operands = operands_of()
    judge = Judge(operands, group)
    first = right(operands, 0)

    def layer(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((operands.x.float() @ weight.float().t()).bfloat16(),)

    timed = bench(group)._measure(arm(operands, judge, layer), operands.weights, "")
    assert timed.us is not None
    assert not timed.wrong
    stale = bench(group)._measure(arm(operands, judge, lambda _: (first,)), operands.weights, "")
    assert stale.wrong
    assert stale.us is None


def test_what_is_refused_is_left_out_and_what_fails_ends_the_run(group: dist.ProcessGroup) -> None:
    operands = operands_of()
    judge = Judge(operands, group)

    def fail(error: Exception) -> Result:
        def call(_: torch.Tensor) -> tuple[torch.Tensor, ...]:
            raise error

        return bench(group)._measure(arm(operands, judge, call), operands.weights, "")

    for error in (UnsupportedInputError("too many rows\nand more"), RuntimeError("too many rows\nand more")):
        assert fail(error) == Result(skipped="too many rows")
    with pytest.raises(PeerTimeout):
        fail(PeerTimeout("rank 1 is gone", rank=0, peer=1))


def test_weights_are_used_in_turn() -> None:
    weights = [torch.tensor(float(n)) for n in range(3)]
    call = linear.in_turn(lambda weight: (weight,), weights)
    assert [float(call()[0]) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


class Recorder:
    """Stands for CUDA graphs: what is captured runs at once, and a replay does nothing.

    Attributes:
        captured: By graph, the numbers of the weights that it reads.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured: list[list[int]] = []
        self._is_capturing = False
        monkeypatch.setattr(timing, "capture", self._capture)
        monkeypatch.setattr(timing, "CudaClock", timing.HostClock)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)

    @property
    def is_capturing(self) -> bool:
        return self._is_capturing

    def read(self, weight: int) -> None:
        if self._is_capturing:
            self.captured[-1].append(weight)

    def _capture(self, call: Any, calls: int) -> Any:
        self.captured.append([])
        self._is_capturing = True
        for _ in range(calls):
            call()
        self._is_capturing = False
        return SimpleNamespace(replay=lambda: None)


@pytest.mark.parametrize("is_wrong_in_graphs", [False, True])
def test_a_graph_is_checked_too_and_reads_other_weights_than_what_comes_ahead(
    is_wrong_in_graphs: bool, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    operands = Operands.of(make_weights(5, (64, 64), torch.bfloat16, CPU, 0), 3, 0)
    numbers = {weight.data_ptr(): index for index, weight in enumerate(operands.weights)}

    def layer(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        index = numbers[weight.data_ptr()]
        recorder.read(index)
        return (right(operands, 4 if is_wrong_in_graphs and recorder.is_capturing else index),)

    comm = SimpleNamespace(is_emulated=False, device=CPU)
    result = bench(group, comm)._measure(arm(operands, Judge(operands, group), layer), operands.weights, "")
    assert result.wrong is is_wrong_in_graphs
    timed_graphs = [] if is_wrong_in_graphs else [[0, 1, 2], [3, 4]]
    assert recorder.captured == [[0, 1, 2, 3], *timed_graphs]
    assert (result.us is None) is is_wrong_in_graphs


@pytest.mark.parametrize(
    ("is_emulated", "given", "weights", "calls"),
    [(True, None, 2, 2), (True, 100, 4, 4), (False, None, 629146 + 2, 629146), (False, 1, 2 + 2, 2)],
)
def test_calls_before_the_clock_have_weights_of_their_own(
    is_emulated: bool, given: int | None, weights: int, calls: int, group: dist.ProcessGroup
) -> None:
    """Else the first that are timed would find theirs in the cache."""
    comm = SimpleNamespace(is_emulated=is_emulated)
    count = bench(group, comm)._weights(1000 if given is None else 25, given)
    assert count == weights
    assert bench(group, comm)._calls([torch.empty(0)] * count) == calls


# ---- The command line -----------------------------------------------------------------------------------------------


def parse(*argv: str) -> argparse.Namespace:
    return commands.build_parser().parse_args(["bench", "linear", *argv])


def test_options() -> None:
    args = parse("--shapes", "8192x1024,64X128,8192x1024", "--tokens", "16,1,16", "--pdl", "off", "--weights", "1M")
    assert args.shapes == ((8192, 1024), (64, 128))
    assert args.tokens == (16, 1)
    assert (args.pdl, args.weights, args.choices) == ("off", 1 << 20, False)
    assert parse("--silu").silu
    args = parse()
    assert not args.silu
    assert (args.shapes, args.tokens, args.pdl, args.reps, args.world) == (None, None, "both", None, None)


@pytest.mark.parametrize(
    "argv",
    [
        ["--shapes", "8192"],
        ["--shapes", "64x64x64"],
        ["--shapes", "64x"],
        ["--shapes", ""],
        ["--tokens", "0"],
        ["--tokens", "1,"],
        ["--pdl", "maybe"],
        ["--weights", "0"],
    ],
)
def test_wrong_options(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(*argv)
    assert exit_.value.code == 2


@pytest.mark.parametrize(
    "argv",
    [
        ["--shapes", "64x96"],
        ["--shapes", "96x64"],
        ["--shapes", f"64x{1 << 25}"],
        ["--tokens", "1,4097"],
        ["--choices", "--world", "2"],
        ["--world", "17"],
        ["--world", "1", "--device", "cuda"],
        ["--json", "/no/such/directory/x.json"],
        ["--plot", "/no/such/directory/x.png"],
    ],
)
def test_options_that_cannot_work_are_refused_before_any_rank_starts(
    argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(linear.launch, "usable_gpus", lambda: (0, "none here"))
    monkeypatch.setattr(linear.launch, "spawn", lambda *_: pytest.fail("started ranks"))
    args = parse("--world", "2", *argv)
    args.argv = []
    with pytest.raises(ConfigError):
        linear.run(args)


@pytest.mark.parametrize("option", ["--silu", "--fp8", "--choices"])
def test_only_plain_layers_have_many_tokens(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(linear.launch, "usable_gpus", lambda: (0, "none here"))
    monkeypatch.setattr(linear.launch, "spawn", lambda *_: pytest.fail("started ranks"))
    args = parse("--world", "1", "--tokens", "1,65", option)
    args.argv = []
    with pytest.raises(ConfigError, match=f"{option} with --tokens 1,65: it takes 1 to 64"):
        linear.run(args)


@pytest.mark.parametrize(
    ("gpus", "world", "device", "expected"),
    [
        (1, None, "auto", (1, True)),
        (4, None, "auto", (4, True)),
        (4, 1, "auto", (1, True)),
        (0, 1, "auto", (1, False)),
        (1, 1, "emulated", (1, False)),
        (1, None, "emulated", (4, False)),
        (0, None, "auto", (4, False)),
        (1, 2, "auto", (2, False)),
    ],
)
def test_one_rank_runs_where_it_is_asked_for_or_there_is_one_gpu(
    gpus: int, world: int | None, device: str, expected: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(linear.launch, "usable_gpus", lambda: (gpus, "why"))
    placement = launch.place(world, device, least=1)
    assert (placement.world, placement.on_gpu) == expected
    assert bool(placement.reason) != placement.on_gpu


def test_a_launched_group_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear.launch, "usable_gpus", lambda: (1, ""))
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launch.place(None, "auto", least=1) == Placement(1, True)
    with pytest.raises(ConfigError, match="contradicts"):
        launch.place(2, "auto", least=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.place(None, "emulated", least=1).world == 2
    with pytest.raises(ConfigError, match="contradicts"):
        launch.place(1, "auto", least=1)


# ---- What is reported -----------------------------------------------------------------------------------------------


def timed(us: float) -> Result:
    return Result(us=us, min_us=us, error=0.5)


def row(**changes: Any) -> LayerRow:
    results = {
        "llm_comm": timed(4.0),
        FUSED: timed(8.0),
        ON_GPU.layer_and_ours: timed(12.0),
        ON_GPU.layer: timed(5.0),
        ON_GPU.layer_and_other: timed(20.0),
        ON_GPU.layer_and_norm: timed(6.0),
    }
    return LayerRow(8192, 1024, 4, True, 30, {**results, **changes.pop("results", {})}, **changes)


def test_leads_are_over_the_best_other_and_communication_for_free_is_no_rival() -> None:
    found = row().as_dict(compared=True)
    assert (found["over_cublas"], found["speedup"], found["best_other"]) == (1.25, 1.5, "cublas + llm_comm")
    assert found["over_free_communication"] == 0.75
    layers, chains = linear_report.tables([row()], compared=True).strip().split("\n\n")
    head, line = layers.splitlines()
    assert head.split()[:5] == ["layer", "tokens", "PDL", "llm_comm", "cublas"]
    assert line.split() == ["8192x1024", "4", "on", "4.00", "5.00", "1.25x"]
    assert chains.splitlines()[1].split("  ")[-1].strip() == "0.75x"
    assert "1.50x  cublas + llm_comm" in chains


def test_nothing_leads_that_was_wrong_or_did_not_run() -> None:
    wrong = row(results={"llm_comm": Result(error=3.0), ON_GPU.layer_and_ours: Result(skipped="too large")})
    found = wrong.as_dict(compared=True)
    assert (found["over_cublas"], found["best_other"], found["wrong"]) == (None, "cublas + nccl", ["llm_comm"])
    assert "- BAD" in linear_report.tables([wrong], compared=True)
    assert linear_report.remarks_on([wrong]) == [
        "cublas + llm_comm left out at 8192x1024 4 PDL on: too large",
        "BAD at 8192x1024 4 PDL on: llm_comm",
        report.BAD_REMARK,
    ]


def test_nothing_leads_on_emulated_gpus() -> None:
    emulated = LayerRow(64, 64, 1, False, 2, {"llm_comm": timed(4.0), EMULATED.layer: timed(5.0)})
    assert linear_report.tables([emulated], compared=False).split() == [
        *("layer", "tokens", "PDL", "llm_comm", "mm"),
        *("64x64", "1", "off", "4.00", "5.00"),
    ]
    found = emulated.as_dict(compared=False)
    assert (found["over_cublas"], found["speedup"]) == (None, None)


def test_choices_are_reported_and_a_wrong_one_is_an_error() -> None:
    choices = [MeasuredTuning(32, 6, 2, timed(3.0)), MeasuredTuning(64, 3, 8, timed(9.0))]
    found = row(choices=choices, best=choices[0])
    assert not found.wrong
    line = linear_report.tables([found], compared=True).splitlines()[1]
    assert line.split()[5:] == ["1.25x", "3.00", "1.67x", "32,", "6", "of", "2"]
    as_dict = found.as_dict(compared=True)
    assert as_dict["best_choice"]["block_outputs"] == 32
    assert [choice["result"]["us"] for choice in as_dict["choices"]] == [3.0, 9.0]
    bad = row(choices=[MeasuredTuning(32, 6, 2, Result(error=2.0))])
    assert bad.wrong_ones() == ["32 outputs, 6 of 2"]
    assert bad.wrong


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    linear_report.plot(tmp_path / "plot.svg", [row(), row(results={FUSED: Result(skipped="why")})], "title")
    assert (tmp_path / "plot.svg").read_bytes().startswith(b"<?xml")
