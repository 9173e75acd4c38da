"""``--profile`` from start to end on fake engines, its recorder, and its report."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bench_serving import cli, processes, profile
from bench_serving.settings import Settings

sys.path.append(str(processes.PLUGINS))

from llm_comm_bench.kernel_profile import Recorder, sections

FAKES = Path(__file__).parent / "fakes"
LAYERS = 4
WORKLOADS = ("batch-1", "batch-3", "prefill-16")


class Harness:
    """Runs the comparison with ``--profile`` on a fake engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self._monkeypatch, self.out, self._model = monkeypatch, directory / "out", directory / "tiny"
        self._model.mkdir()
        config = {"vocab_size": 20000, "max_position_embeddings": 64, "num_hidden_layers": LAYERS}
        (self._model / "config.json").write_text(json.dumps(config))
        monkeypatch.setenv("PYTHONPATH", str(FAKES))
        monkeypatch.syspath_prepend(FAKES)
        monkeypatch.setattr(profile, "_CLOCKS_S", 0.1)

    def run(self, *options: str, faults: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        self._monkeypatch.setenv("FAKE_ENGINE", json.dumps(faults or {}))
        given = [
            *("--model", str(self._model), "--tp", "2", "--batch-sizes", "1,3", "--output-tokens", "12"),
            *("--prompt-tokens", "4", "--prefill-tokens", "16", "--arms", "default,llm_comm", "--repeats", "1"),
            *("--profile", "--out", str(self.out), *options),
        ]
        return cli.main(given), json.loads((self.out / "report.json").read_text())


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Harness:
    return Harness(monkeypatch, tmp_path)


@pytest.mark.parametrize("engine", cli.ENGINES)
def test_kernels_of_all_workloads_and_arms_are_reported(
    harness: Harness, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = harness.run("--engine", engine)
    assert status == 0, capsys.readouterr().out
    assert set(report["decode"]["1"]) == {"default", "llm_comm"}
    assert tuple(report["profile"]["workloads"]) == WORKLOADS
    for name, by_arm in report["profile"]["workloads"].items():
        assert set(by_arm) == {"default", "llm_comm"}
        for by_rank in by_arm.values():
            assert set(by_rank) == {"0", "1"}
            for summary in by_rank.values():
                # A generation of 12 tokens has 12 passes in the fake engine, 5 prefills have 5; two are not complete.
                assert summary["steps"] == (3 if name == "prefill-16" else 10)
                assert [row["name"] for row in summary["layer"]] == ["nvjet_qkv", "flash_fwd", "all_reduce"]
                assert (summary["layer_us"], summary["layers_alike"]) == (pytest.approx(15), LAYERS)
                assert summary["span_us"] == pytest.approx(5 * (2 + 3 * LAYERS) - 2)
    printed = capsys.readouterr().out
    assert "profile of batch-1: 14 kernels in the median of 10 steps; 4 of 4 layers alike with 3 kernels" in printed
    assert f"profile: {profile.NOTE}" in printed
    assert "prefill-16, llm_comm: " in printed
    assert "linear/GEMM 29%, attention 29%, all-reduce/llm_comm 29%" in printed


def test_a_run_with_profile_is_resumed(harness: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = harness.run()
    (harness.out / "runs" / "00-default" / "kernels" / "batch-3.rank0.json.gz").unlink()  # as if it was interrupted
    capsys.readouterr()
    status, resumed = harness.run("--resume")
    printed = capsys.readouterr().out
    assert status == 0
    assert "[2/2] llm_comm, repeat 1 of 1: kept" in printed
    assert "default, repeat 1 of 1: kept" not in printed
    assert resumed["profile"] == report["profile"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "records nothing",
            "profile of batch-1: none (kernels of 0 of 3 workloads were recorded: CUPTI may be missing",
        ),
        ("profiler ends the engine", "profile failed, times are kept: RuntimeError: EngineCore encountered an issue"),
    ],
)
def test_a_profiler_that_fails_costs_no_times(
    harness: Harness, fault: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = harness.run(faults={"llm_comm": fault})
    assert status == 0
    assert said in capsys.readouterr().out
    assert set(report["decode"]["3"]) == {"default", "llm_comm"}
    assert "error" in report["profile"]["workloads"]["batch-1"]["llm_comm"]["0"]
    assert "error" not in report["profile"]["workloads"]["batch-1"]["default"]["0"]


def test_an_older_profile_does_not_stay_in_a_directory_that_is_used_again(harness: Harness) -> None:
    harness.run()
    _, report = harness.run("--arms", "llm_comm", faults={"llm_comm": "profiler ends the engine"})
    assert "No such file" in report["profile"]["workloads"]["batch-1"]["llm_comm"]["0"]["error"]


def test_the_analysis_is_repeated_and_drawn_without_the_engine(
    harness: Harness, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = harness.run()
    file = harness.out / "report.json"
    file.write_text(json.dumps({**report, "profile": {**report["profile"], "workloads": {}}}))
    capsys.readouterr()
    profile.main([str(file), "--again", "--plot", str(tmp_path / "layers.svg")])
    assert json.loads(file.read_text())["profile"] == report["profile"]
    assert "1 nvjet_qkv" in capsys.readouterr().out
    drawn = (tmp_path / "layers.svg").read_text()
    assert drawn.count("<!-- 3 -->") >= 2 * len(WORKLOADS)  # the third kernel of each layer has its number
    file.write_text(json.dumps({**report, "profile": {}}))
    with pytest.raises(SystemExit, match="has no profile; run bench_serving with --profile"):
        profile.main([str(file)])


def test_clocks_are_medians_by_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    lines = ["0, 1980, 610.5, 0x0", "1, [N/A], [N/A], 0x0", "0, 1500, 700.5, 0x4", "0, 1900, 690, 0x4", "0, 19"]
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + "exec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(profile, "_CLOCKS_S", 0.5)
    calls: list[int] = []
    profile.sample_clocks(tmp_path / "prefill-16", lambda: calls.append(1))
    assert calls
    assert json.loads((tmp_path / "prefill-16.clocks.json").read_text()) == {
        "0": {"sm_mhz": 1900, "power_w": 690, "clocks_event_reasons": ["0x0", "0x4"]}
    }


def test_a_recorder_without_cuda_says_so_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no CUDA")

    monkeypatch.setattr("torch.cuda.synchronize", fail)
    recorder = Recorder()
    recorder.start(1)
    recorder.begin_section()
    recorder.stop(1, str(tmp_path), "batch-1,batch-3")
    assert {file.name for file in tmp_path.iterdir()} == {"batch-1.rank1.json.gz", "batch-3.rank1.json.gz"}
    content = json.loads(gzip.decompress((tmp_path / "batch-1.rank1.json.gz").read_bytes()))
    assert content == {"error": "RuntimeError: no CUDA", "names": [], "kernels": []}


def test_sections_are_split_at_marks() -> None:
    mark = "at::cuda::spin_kernel(long)"
    first, second = ["a", "b"] * 10, ["a"] * 20
    names = ["before", mark, mark, *first, mark, "of another thread", mark, *second, mark]
    events = [(start, 1, name, 7) for start, name in enumerate(names)]
    assert [[name for _, _, name, _ in part] for part in sections(events[::-1])] == [first, second]
    assert sections([]) == []


def test_two_ranks_record(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.start(2)
    recorder.begin_section()
    recorder.stop(2, str(tmp_path), "batch-1")
    assert not list(tmp_path.iterdir())


def test_workloads_are_those_of_the_measurement() -> None:
    settings = Settings("vllm", "", batch_sizes=(1, 64), prefill_tokens=(4096, 8192), output_tokens=136)
    found = profile.workloads(settings)
    assert [workload.name for workload in found] == ["batch-1", "batch-64", "prefill-4096", "prefill-8192"]
    assert [(workload.tokens, workload.passes) for workload in found] == [(16, 15), (16, 15), (1, 5), (1, 5)]
