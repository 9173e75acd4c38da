"""The whole comparison, with fake engines in place of the real ones: processes, logs, results, failures, reports."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import llm_comm
from bench_serving import arms, cli, comparison, processes
from bench_serving.settings import Settings

FAKES = Path(__file__).parent / "fakes"
ARMS = ("nccl", "default", "llm_comm", "llm_comm_unfused", "free")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": 20000, "max_position_embeddings": 64}))
    return directory


class Harness:
    """Runs the comparison on a fake engine; ``faults`` says by arm what the engine does wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Path, out: Path) -> None:
        self._monkeypatch, self._model, self.out = monkeypatch, model, out
        monkeypatch.setenv("PYTHONPATH", str(FAKES))
        monkeypatch.syspath_prepend(FAKES)  # where the versions are looked up

    def run(self, *options: str, faults: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        self._monkeypatch.setenv("FAKE_ENGINE", json.dumps(faults or {}))
        status = cli.main(
            [
                *("--model", str(self._model), "--tp", "2", "--batch-sizes", "1,3", "--output-tokens", "12"),
                *("--prompt-tokens", "4", "--prefill-tokens", "16,32", "--iterations", "2", "--out", str(self.out)),
                *options,
            ]
        )
        return status, json.loads((self.out / "report.json").read_text())


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> Harness:
    return Harness(monkeypatch, model, tmp_path / "out")


@pytest.mark.parametrize("engine", cli.ENGINES)
def test_the_whole_comparison(harness: Harness, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = harness.run("--engine", engine, "--check", "--repeats", "2")
    assert status == 0, capsys.readouterr().out
    assert [(run["repeat"], run["arm"]) for run in report["runs"]] == [
        *((0, arm) for arm in ARMS),
        *((1, arm) for arm in reversed(ARMS)),
    ]
    assert all(run["evidence"] for run in report["runs"])
    assert list(report["decode"]) == ["1", "3"]
    for by_arm in report["decode"].values():
        assert set(by_arm) == set(ARMS)
        for arm, entry in by_arm.items():
            assert len(entry["decode_ms"]["values"]) == 2
            assert entry["decode_ms"]["min"] <= entry["decode_ms"]["median"] <= entry["decode_ms"]["max"]
            for name in ("ttft", "tpot", "itl"):
                assert all(entry[f"{kind}_{name}_ms"] > 0 for kind in ("mean", "median", "p99"))
            assert set(entry["speedup_over"]) == {"nccl", "default"} - {arm}
    assert list(report["prefill"]) == ["16", "32"]
    assert all(by_arm["llm_comm"]["ttft_ms"]["median"] > 0 for by_arm in report["prefill"].values())
    assert report["check"]["passed"]
    assert report["check"]["tokens"]["llm_comm"]["identical"]
    assert report["check"]["tokens"]["llm_comm"]["repeats"] == 2
    assert list(report["check"]["logits"]["llm_comm"]) == ["4"]  # prompts are shorter than those of few tokens
    assert report["check"]["logits"]["llm_comm"]["4"]["distance_to_nccl"] == 0
    assert "free" not in report["check"]["tokens"]
    assert report["versions"][engine]
    assert "flashinfer-python" in report["versions"]
    assert report["variables"]["VLLM_FLASHINFER_ALLREDUCE_BACKEND"] == "trtllm"
    assert report["variables"]["NCCL_NVLS_ENABLE"] == "0"
    assert (harness.out / "report.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "[10/10] nccl, repeat 2 of 2" in printed
    assert "free is a bound, not an engine" in printed


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_as_deployed(
    harness: Harness, engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    status, report = harness.run("--engine", engine, "--as-deployed", "--repeats", "1")
    assert status == 0
    assert {run["arm"] for run in report["runs"]} == {"default", "llm_comm"}
    assert report["variables"]["NCCL_NVLS_ENABLE"] == "1"
    assert "VLLM_FLASHINFER_ALLREDUCE_BACKEND" not in report["variables"]
    printed = capsys.readouterr().out
    for run in report["runs"]:
        assert run["evidence"]
        paths = "\n".join(f"  {line}" for line in run["evidence"])
        assert f"code paths of {run['arm']}, by the log of its first start:\n{paths}" in printed


def test_sglang_with_flashinfer(harness: Harness) -> None:
    option = "flashinfer_allreduce_fusion_backend=trtllm"
    given = ("--engine", "sglang", "--arms", "nccl,default,llm_comm", "--repeats", "1", "--engine-option", option)
    status, report = harness.run(*given)
    assert status == 0
    fused = {run["arm"]: "FlashInfer AllReduce Fusion" in "\n".join(run["evidence"]) for run in report["runs"]}
    assert fused == {"nccl": False, "default": True, "llm_comm": True}


@pytest.mark.parametrize(("mode", "milliseconds"), [("serve", 2.0), ("bench-latency", 10.0)])
def test_the_engines_own_benchmarks(harness: Harness, mode: str, milliseconds: float) -> None:
    status, report = harness.run("--mode", mode, "--arms", "nccl,llm_comm", "--repeats", "1")
    assert status == 0
    for by_arm in report["decode"].values():
        assert by_arm["llm_comm"]["decode_ms"]["median"] == pytest.approx(milliseconds)
        assert by_arm["llm_comm"]["speedup_over"]["nccl"]["median"] == pytest.approx(1)
        assert by_arm["llm_comm"].get("p99_itl_ms") == (2.0 if mode == "serve" else None)


def test_a_failing_arm_is_reported_and_costs_no_other_result(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = harness.run("--repeats", "1", faults={"default": "crash"})
    assert status == 1
    assert set(report["decode"]["1"]) == {*ARMS} - {"default"}
    assert set(report["decode"]["1"]["llm_comm"]["speedup_over"]) == {"nccl"}
    failures = {run["arm"]: run["failure"] for run in report["runs"]}
    assert "no kernel image is available" in failures["default"]
    assert not failures["llm_comm"]
    assert "FAILED default, repeat 0: ended with status 1, no result" in capsys.readouterr().out


def test_a_hanging_arm_is_ended(harness: Harness) -> None:
    status, report = harness.run(
        "--arms", "llm_comm,nccl", "--repeats", "1", "--timeout", "6", faults={"llm_comm": "hang"}
    )
    assert status == 1
    assert report["runs"][0]["failure"].startswith("no result within 6 s")
    assert set(report["decode"]["1"]) == {"nccl"}


@pytest.mark.parametrize("arm", ["llm_comm", "default"])
def test_an_arm_that_is_not_what_it_says_does_not_count(harness: Harness, arm: str) -> None:
    status, report = harness.run("--arms", f"nccl,{arm}", "--repeats", "1", faults={arm: "pretends"})
    assert status == 1
    assert report["runs"][1]["failure"].startswith(f"not the arm {arm}: the log")
    assert set(report["decode"]["1"]) == {"nccl"}


def test_an_arm_that_was_to_fuse_and_did_not_does_not_count(harness: Harness) -> None:
    options = ("--arms", "llm_comm", "--repeats", "1")
    status, report = harness.run(*options, faults={"llm_comm": "does not fuse"})
    assert status == 1
    assert "does not say that llm_comm has fused an all-reduce" in report["runs"][0]["failure"]
    status, _ = harness.run(*options, "--enforce-eager", faults={"llm_comm": "does not fuse"})
    assert status == 0


def test_arms_that_are_not_compared_by_default(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_COMM_FUSE_LINEAR", "1")  # of which the arm without linear layers makes 0
    status, report = harness.run("--arms", "llm_comm,llm_comm_no_linear", "--repeats", "1")
    assert status == 0
    assert set(report["decode"]["1"]) == {"llm_comm", "llm_comm_no_linear"}
    evidence = {run["arm"]: "\n".join(run["evidence"]) for run in report["runs"]}
    assert "first column-parallel linear layer" in evidence["llm_comm"]
    assert "first column-parallel linear layer" not in evidence["llm_comm_no_linear"]
    assert "fuse_linear is false (LLM_COMM_FUSE_LINEAR)" in evidence["llm_comm_no_linear"]


def test_the_bound_without_norms(harness: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = harness.run("--arms", "free,free_norm", "--repeats", "1")
    assert status == 0
    evidence = {run["arm"]: "\n".join(run["evidence"]) for run in report["runs"]}
    assert ["norms behind sums do nothing" in evidence[arm] for arm in ("free", "free_norm")] == [False, True]
    said = capsys.readouterr().out
    assert "free is a bound, not an engine: its all-reduces return uninitialised memory\n" in said
    assert "free_norm is a bound, not an engine: its all-reduces return uninitialised memory, and the adds" in said


@pytest.mark.parametrize(
    ("fault", "said"), [("random tokens", "tokens differ"), ("wrong logits", "logits differ from nccl's")]
)
def test_the_check_fails_on_wrong_results(harness: Harness, fault: str, said: str) -> None:
    options = ("--mode", "check", "--arms", "nccl,llm_comm", "--repeats", "2")
    status, report = harness.run(*options, faults={"llm_comm": fault})
    assert status == 1
    assert not report["decode"]
    assert any(said in failure for failure in report["check"]["failures"])


@pytest.mark.parametrize("engine", cli.ENGINES)
@pytest.mark.parametrize("mode", ["latency", "check"])
def test_tokens_are_compared_over_batches_and_starts(
    harness: Harness, engine: str, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--engine", engine, "--mode", mode, "--deterministic", "--arms", "default,llm_comm,free", "--repeats", "3")
    status, report = harness.run(*given)
    assert status == 0, capsys.readouterr().out
    iterations = 2 if mode == "latency" else 1
    compared = report["invariance"]
    assert compared["passed"]
    assert set(compared["arms"]) == {"default", "llm_comm"}
    entry = compared["arms"]["llm_comm"]
    assert (entry["starts"], entry["batch_sizes"], entry["prompts"]) == (3, [1, 3], 3)
    assert entry["generations"] == 3 * (1 + 3) * iterations
    assert entry["distinct_tokens"] > 1
    assert report["settings"]["deterministic"]
    assert bool(report["decode"]) == (mode == "latency")
    assert not report["check"]
    assert any("deterministic mode" in line for line in report["runs"][0]["evidence"])
    printed = capsys.readouterr().out
    assert "tokens over batch sizes and starts: passed" in printed
    assert "distinct tokens) in batches of 1, 3 at 3 starts: identical" in printed
    assert ", deterministic mode, torch" in printed


@pytest.mark.parametrize("fault", ["tokens by batch", "random tokens"])
def test_tokens_that_depend_on_batch_or_start_fail(
    harness: Harness, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--mode", "check", "--deterministic", "--arms", "default,llm_comm", "--repeats", "2")
    status, report = harness.run(*given, faults={"llm_comm": fault})
    assert status == 1
    compared = report["invariance"]
    assert [entry["identical"] for entry in compared["arms"].values()] == [True, False]
    (failure,) = compared["failures"]
    assert failure.startswith("llm_comm: ")
    if fault == "tokens by batch":
        assert "2 of 8 generations differ" in failure
        assert "prompt 0 from token 6 on (start 0, batch 3; first: start 0, batch 1)" in failure
    assert "DIFFERENT" in capsys.readouterr().out


def test_an_interrupted_comparison_is_resumed(
    harness: Harness, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--arms", "nccl,llm_comm", "--repeats", "1")
    status, _ = harness.run(*options, faults={"llm_comm": "crash"})
    assert status == 1
    capsys.readouterr()
    status, report = harness.run(*options, "--resume")
    assert status == 0
    assert "nccl, repeat 1 of 1: kept" in capsys.readouterr().out
    assert set(report["decode"]["1"]) == {"nccl", "llm_comm"}
    with pytest.raises(SystemExit, match="made with other settings"):
        harness.run(*options, "--resume", "--enforce-eager")
    with pytest.raises(SystemExit, match="made with another commit; give another --out"):
        harness.run(*options, "--resume", "--commit", "another")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    with pytest.raises(SystemExit, match="made with another model"):
        harness.run(*options, "--resume")
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("LLM_COMM_ALGORITHM", "two_shot")
    with pytest.raises(SystemExit, match="made with another variables"):
        harness.run(*options, "--resume")


def test_the_environment_of_an_engine(tmp_path: Path) -> None:
    inherited = {
        "LLM_COMM_ENABLE": "1",
        "VLLM_PLUGINS": "x",
        "NCCL_NVLS_ENABLE": "1",
        "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "mnnvl",
        "LLM_COMM_PDL": "0",
        "PYTHONPATH": "a",
    }
    environment = processes.environment({"LLM_COMM_ENABLE": "0"}, inherited)
    assert environment["LLM_COMM_ENABLE"] == "0"
    assert "VLLM_PLUGINS" not in environment
    assert environment["NCCL_NVLS_ENABLE"] == "0"
    assert environment["VLLM_FLASHINFER_ALLREDUCE_BACKEND"] == "trtllm"
    assert environment["LLM_COMM_PDL"] == "0"
    assert environment["PYTHONPATH"].split(os.pathsep) == [os.path.abspath("a"), str(processes.PLUGINS)]
    as_deployed = processes.environment({}, inherited, as_deployed=True)
    assert as_deployed["NCCL_NVLS_ENABLE"] == "1"
    assert as_deployed["VLLM_FLASHINFER_ALLREDUCE_BACKEND"] == "mnnvl"
    assert "VLLM_PLUGINS" not in as_deployed


def test_an_engine_that_takes_the_library_for_nccl_loads_no_other_part_of_llm_comm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llm_comm, "nccl_library", lambda: "/of/llm_comm.so")
    settings = Settings("vllm", "")
    environment = comparison.arm_environment(arms.ARMS["nccl_library"], settings)
    assert environment["VLLM_NCCL_SO_PATH"] == environment["SGLANG_NCCL_SO_PATH"] == "/of/llm_comm.so"
    assert environment["VLLM_PLUGINS"] == environment["SGLANG_PLUGINS"] == "llm_comm_bench"
    assert "LLM_COMM_ENABLE" not in environment  # 0 would turn the library off too
    others = [arm for arm in arms.ARMS.values() if not arm.nccl_library]
    assert not any("VLLM_NCCL_SO_PATH" in comparison.arm_environment(arm, settings) for arm in others)


def test_the_check_quantizes_short_prompts() -> None:
    wire = arms.ARMS["llm_comm_wire"]
    of_check = comparison.arm_environment(wire, Settings("vllm", "", check=True))
    assert (of_check["LLM_COMM_WIRE"], of_check["LLM_COMM_WIRE_MIN_BYTES"]) == ("fp8", "64K")
    assert "LLM_COMM_WIRE_MIN_BYTES" not in comparison.arm_environment(wire, Settings("vllm", ""))
    assert "LLM_COMM_WIRE" not in comparison.arm_environment(arms.ARMS["llm_comm"], Settings("vllm", "", check=True))


def test_deterministic_mode_reaches_engine_and_llm_comm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_comm, "nccl_library", lambda: "/of/llm_comm.so")
    usual, mode = Settings("vllm", ""), Settings("vllm", "", deterministic=True)
    ours = ("LLM_COMM_DETERMINISTIC", "LLM_COMM_BATCH_INVARIANT_NORM", "LLM_COMM_BATCH_INVARIANT_LINEAR")
    apart = {"llm_comm_unfused", "llm_comm_dsl", "llm_comm_no_linear"}
    for arm in arms.ARMS.values():
        environment = comparison.arm_environment(arm, mode)
        assert environment["VLLM_BATCH_INVARIANT"] == "1"
        linear = "engine" if arm.name in apart else "llm_comm"
        assert [environment.get(name) for name in ours] == (["1", "llm_comm", linear] if arm.llm_comm else [None] * 3)
        assert not {"VLLM_BATCH_INVARIANT", *ours} & set(comparison.arm_environment(arm, usual))


SMI = """#!/bin/sh
case "$*" in
"-i 2,3 --query-gpu=index,memory.used"*) printf '2, 70233, 81559\\n3, 512, 81559\\n' ;;
"--query-gpu=index,memory.used"*) printf '0, [N/A], [N/A]\\n1, 4, 81559\\n2, 70233, 81559\\n' ;;
*) exit 1 ;;
esac
"""


@pytest.mark.parametrize(("visible", "is_busy"), [("2,3", True), (None, False)])
def test_gpus_that_others_use_are_told(
    harness: Harness,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    visible: str | None,
    is_busy: bool,
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    status, report = harness.run("--arms", "llm_comm", "--repeats", "1", faults={"llm_comm": "crash"})
    assert status == 1
    busy = "GPU 2: 70233 of 81559 MiB are in use by other processes"
    assert report["runs"][0]["evidence"] == ([busy] if is_busy else [])
    assert (f"WARNING: {busy}: this run may fail" in capsys.readouterr().out) == is_busy


def test_a_session_leaves_no_process_behind(tmp_path: Path) -> None:
    grandchild = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    )
    command = [sys.executable, "-c", f"{grandchild} print('[bench] up', flush=True); time.sleep(600)"]
    shown: list[str] = []
    with processes.Session(command, dict(os.environ), tmp_path / "log", tmp_path) as session:
        session.wait_for(lambda: "up" in shown and len(session.processes) == 2, 30, shown.append)
        running = session.processes
        assert len(running) == 2
    assert shown == ["up"]
    assert not processes.members(session.process.pid)
