"""Comparison from start to end: order of the runs, acceptance of each run, and the report."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import llm_comm
from bench_serving import checks, engine_logs, invariance, processes, profile, report, schedule, summary, versions
from bench_serving.arms import ARMS, Arm
from bench_serving.settings import Job, Settings, settings_from_dict
from bench_serving.summary import Run

#: File in a run's directory with the environment it was made in, besides its settings.
_RAN_ON = "ran_on.json"
#: Seconds that an engine may profile after it has written its times: for its start and end, and for each workload.
_PROFILE_S, _WORKLOAD_S = 120.0, 20.0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Definition of a comparison.

    Attributes:
        settings: Settings common to all arms.
        arms: Names of the arms.
        repeats: Starts of each arm.
        timeout_s: Time limit of each run in seconds.
        out: Existing directory for the results.
        command: Command line of the comparison, for the report.
        commit: Commit of llm_comm; None to ask git.
        resume: Keep complete runs that are in ``out``.
    """

    settings: Settings
    arms: Sequence[str]
    repeats: int
    timeout_s: float
    out: Path
    command: str
    commit: str | None = None
    resume: bool = False

    def run(self) -> dict[str, Any]:
        """Do all runs and return the report. ``report.json`` is updated after each run."""
        settings = self.settings
        ran_on = {
            "device": f"{settings.tensor_parallel_size}x {versions.device() or 'unknown GPU'}",
            "versions": versions.versions(settings.engine),
            "commit": self.commit or versions.commit(processes.ROOT),
            "variables": _variables(os.environ, self.settings.as_deployed),
            "model": _digest(settings.config()),
        }
        order = schedule.interleaved(self.arms, self.repeats)
        runs: list[Run] = []
        content: dict[str, Any] = {}
        for number, (repeat, name) in enumerate(order, 1):
            title = f"[{number}/{len(order)}] {name}, repeat {repeat + 1} of {self.repeats}"
            directory = profile.run_directory(self.out, repeat, name)
            run = kept(directory, settings, ran_on, repeat, name) if self.resume else None
            if run is None:
                print(title, flush=True)
                directory.mkdir(parents=True, exist_ok=True)
                report.write_json(directory / _RAN_ON, ran_on)
                busy = versions.busy_gpus(settings.tensor_parallel_size)
                for gpu in busy:
                    print(f"  WARNING: {gpu}: this run may fail, and its times are not the engine's alone", flush=True)
                run = run_once(settings, ARMS[name], repeat, directory, self.timeout_s)
                run = dataclasses.replace(run, evidence=(*busy, *run.evidence))
            else:
                print(f"{title}: kept", flush=True)
            runs.append(run)
            if run.failure:
                print(f"  FAILED: {run.failure}", flush=True)
            # after every run, so that an interrupted comparison keeps its results
            content = self._report(runs, ran_on)
            report.write_json(self.out / "report.json", content)
        return content

    def _profile(self, runs: Sequence[Run]) -> dict[str, Any]:
        return profile.summarize(self.settings, self.out, [(run.repeat, run.arm) for run in runs if not run.failure])

    def _report(self, runs: Sequence[Run], ran_on: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": self.command,
            "engine": self.settings.engine,
            **ran_on,
            "settings": dataclasses.asdict(self.settings),
            "repeats": self.repeats,
            "arms": {name: ARMS[name].label for name in self.arms},
            **summary.summarize(runs),
            "check": checks.summarize(
                runs,
                checks.tolerance(self.settings.config(), checks.wire(os.environ)),
                checks.tolerance(self.settings.config(), "fp8"),
            ),
            "invariance": invariance.summarize(runs),
            "profile": self._profile(runs) if self.settings.profile else {},
            "runs": [
                {
                    "repeat": run.repeat,
                    "arm": run.arm,
                    "seconds": round(run.seconds, 1),
                    "start_s": run.result["start_s"] if run.result else None,
                    "failure": run.failure,
                    "evidence": list(run.evidence),
                }
                for run in runs
            ],
        }


def arm_environment(arm: Arm, settings: Settings) -> dict[str, str]:
    """Return the environment variables of an arm, including those that the harness's plugins read."""
    plugins = {
        "BENCH_SERVING_FREE": str(int(arm.free)),
        "BENCH_SERVING_FREE_NORMS": str(int(arm.free_norms)),
        "BENCH_SERVING_WEIGHTS": settings.weights,
        "BENCH_SERVING_PROFILE": str(int(settings.profile)),
    }
    mode = _deterministic(arm) if settings.deterministic else {}
    if settings.check and arm.lossy:
        # The check's prompts are short: their sums are to be quantized too.
        mode = {**mode, "LLM_COMM_WIRE_MIN_BYTES": "64K"}
    return {**arm.environment, **mode, **plugins, **(_nccl_library() if arm.nccl_library else {})}


def _deterministic(arm: Arm) -> dict[str, str]:
    """Return the variables for batch-invariant mode: vLLM's (SGLang has an option), and llm_comm's part in either
    engine's."""
    mode = {"VLLM_BATCH_INVARIANT": "1"}
    if not arm.llm_comm:
        return mode
    linear = "engine" if arm.linear_apart or arm.norms_apart else "llm_comm"
    return {
        **mode,
        "LLM_COMM_DETERMINISTIC": "1",
        "LLM_COMM_BATCH_INVARIANT_NORM": "llm_comm",
        "LLM_COMM_BATCH_INVARIANT_LINEAR": linear,
    }


def _nccl_library() -> dict[str, str]:
    """Return the variables that make both engines load llm_comm's library instead of NCCL, and not its plugin."""
    path = llm_comm.nccl_library()
    return {
        "VLLM_NCCL_SO_PATH": path,
        "SGLANG_NCCL_SO_PATH": path,
        "VLLM_PLUGINS": processes.PLUGIN_NAME,
        "SGLANG_PLUGINS": processes.PLUGIN_NAME,
        "LLM_COMM_NCCL_DEBUG": "INFO",
    }


def run_once(settings: Settings, arm: Arm, repeat: int, directory: Path, timeout_s: float) -> Run:
    """Start the engine, measure, and verify by the log that the intended arm ran."""
    result, log = directory / "result.json", directory / "log.txt"
    shutil.rmtree(profile.directory(directory), ignore_errors=True)
    Job(settings, arm.name, arm.disable_custom_all_reduce, str(result)).write(directory / "job.json")
    outcome = processes.run(
        processes.module_command(f"bench_serving.engines.{settings.program}", str(directory / "job.json")),
        processes.environment(arm_environment(arm, settings), os.environ, settings.as_deployed),
        log,
        result,
        timeout_s,
        lambda line: print(f"  {line}", flush=True),
        processes.END_S + (_PROFILE_S + _WORKLOAD_S * len(profile.workloads(settings)) if settings.profile else 0),
    )
    return _judged(settings, arm, repeat, outcome, result, log)


def _judged(settings: Settings, arm: Arm, repeat: int, outcome: processes.Outcome, result: Path, log: Path) -> Run:
    if outcome.failure:
        shown = engine_logs.tail(outcome.log)
        return Run(repeat, arm.name, outcome.seconds, f"{outcome.failure}; the log ({log}) ends with:\n{shown}")
    try:
        found = engine_logs.evidence(settings, arm, outcome.log)
    except ValueError as error:
        return Run(repeat, arm.name, outcome.seconds, f"not the arm {arm.name}: {error} ({log})")
    return Run(repeat, arm.name, outcome.seconds, evidence=found, result=json.loads(result.read_text(encoding="utf-8")))


def kept(directory: Path, settings: Settings, ran_on: Mapping[str, Any], repeat: int, name: str) -> Run | None:
    """Return the complete run in ``directory``, or None. Its settings, versions and variables must be the present
    ones."""
    result, log, job, on = (directory / file for file in ("result.json", "log.txt", "job.json", _RAN_ON))
    if not (result.is_file() and log.is_file() and job.is_file() and on.is_file()):
        return None
    then = json.loads(on.read_text(encoding="utf-8"))
    differing = {key for key in {*then, *ran_on} if then.get(key) != ran_on.get(key)}
    if differing:
        raise SystemExit(
            f"--resume: {directory} was made with another {', '.join(sorted(differing))}; give another --out"
        )
    theirs = settings_from_dict(json.loads(job.read_text(encoding="utf-8"))["settings"])
    # The directories may have been moved. The model is compared by its content, in ran_on.
    if dataclasses.replace(theirs, model=settings.model) != settings:
        raise SystemExit(f"--resume: {directory} was made with other settings; give another --out")
    if settings.profile and not profile.is_complete(directory, settings):
        return None
    outcome = processes.Outcome(0.0, "", log.read_text(encoding="utf-8", errors="replace"))
    run = _judged(settings, ARMS[name], repeat, outcome, result, log)
    return None if run.failure else run


def _digest(config: Mapping[str, Any]) -> str:
    """Return a digest that identifies a model's configuration."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def _variables(environment: Mapping[str, str], as_deployed: bool) -> dict[str, str]:
    """Return the environment variables that can affect the measurement."""
    prefixes = ("LLM_COMM_", "NCCL_", "VLLM_", "SGLANG_", "TORCH_SYMM_MEM_", "NVSHMEM_", "CUDA_VISIBLE_DEVICES")
    return {
        name: value
        for name, value in sorted(processes.environment({}, environment, as_deployed).items())
        if name.startswith(prefixes)
    }
