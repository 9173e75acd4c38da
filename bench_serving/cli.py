"""The command line, and the comparison from start to end."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench_serving import checks, engine_logs, processes, report, schedule, summary
from bench_serving.arms import ARMS, Arm
from bench_serving.settings import SHAPES, Job, Settings, settings_from_dict
from bench_serving.summary import Run

ENGINES = ("vllm", "sglang")


def parser() -> argparse.ArgumentParser:
    shapes = ", ".join(sorted(path.parent.name for path in SHAPES.glob("*/config.json")))
    options = argparse.ArgumentParser(
        prog="python -m bench_serving",
        description="Compares decode latency in a real engine with all-reduces done by NCCL, by the engine itself and "
        "by llm_comm, with random weights. Each run is a fresh start of the engine.",
    )
    options.add_argument("--engine", choices=ENGINES, default="vllm")
    options.add_argument(
        "--mode",
        choices=("latency", "serve", "check"),
        default="latency",
        help="latency: the engine in its own process (default); serve: a server, timed by the engine's own serving "
        "benchmark; check: no times, only --check",
    )
    options.add_argument("--model", default="llama-2-70b", help=f"a directory with a config.json, or one of: {shapes}")
    options.add_argument("--layers", type=_positive, metavar="N", help="shorten the model, to try things out")
    options.add_argument("--tensor-parallel-size", "--tp", type=_positive, default=8, metavar="N")
    options.add_argument("--arms", type=_arms, default=list(ARMS), metavar="A,B", help=f"of {', '.join(ARMS)}")
    options.add_argument("--batch-sizes", type=_sizes, default=(1, 4, 16, 64), metavar="N,N")
    options.add_argument("--prompt-tokens", type=_positive, default=128, metavar="N")
    options.add_argument("--output-tokens", type=_positive, default=136, metavar="N")
    options.add_argument("--iterations", type=_positive, default=3, metavar="N", help="timed batches of each size")
    options.add_argument(
        "--prefill-tokens", type=int, default=4096, metavar="N", help="time a prefill of so many tokens; 0: do not"
    )
    options.add_argument("--repeats", type=_positive, default=2, metavar="N", help="starts of each arm")
    options.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    options.add_argument(
        "--check",
        action="store_true",
        help="also compare tokens over the repeats and logits with nccl's (scaled weights)",
    )
    options.add_argument(
        "--weights",
        choices=("dummy", "scaled"),
        help="dummy: the engine's own (default); scaled: as large as a trained model's, other ones on each rank",
    )
    options.add_argument(
        "--engine-option",
        type=_engine_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a further argument of vllm.LLM or sglang.Engine, in all arms; the value is JSON or text",
    )
    options.add_argument("--seed", type=int, default=0, help="of the prompts")
    options.add_argument(
        "--timeout", type=float, default=300, metavar="S", help="of each run, start of the engine included"
    )
    options.add_argument("--out", type=Path, default=Path("bench_serving_results"), metavar="DIR")
    options.add_argument(
        "--resume", action="store_true", help="keep the runs that are complete in --out and do the rest"
    )
    options.add_argument("--commit", help="of llm_comm, for the report, where git cannot tell")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_positive(part) for part in text.split(",")))


def _arms(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown arm {unknown[0]!r}; valid: {', '.join(ARMS)}")
    return names


def _engine_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE, e.g. attention_backend=triton")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def settings_of(options: argparse.Namespace) -> Settings:
    """What the options mean for a run.

    Raises:
        SystemExit: They contradict each other, or the model is not there.
    """
    check = options.check or options.mode == "check"
    model = SHAPES / options.model if (SHAPES / options.model).is_dir() else Path(options.model)
    if not (model / "config.json").is_file():
        raise SystemExit(f"--model {options.model}: neither a known shape nor a directory with a config.json")
    if check and options.weights == "dummy":
        raise SystemExit(
            "--check needs --weights scaled: the engine's dummy weights are the same on all ranks and so small that an "
            "all-reduce hardly shows in the logits"
        )
    if options.mode == "serve" and (check or options.weights == "scaled"):
        raise SystemExit("--mode serve takes neither --check nor --weights scaled: use --mode latency or check")
    if options.output_tokens < 2:
        raise SystemExit("--output-tokens must be at least 2: decoding begins with the second token")
    return Settings(
        engine=options.engine,
        model=str(model.resolve()),
        layers=options.layers,
        tensor_parallel_size=options.tensor_parallel_size,
        batch_sizes=options.batch_sizes,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        iterations=options.iterations,
        prefill_tokens=options.prefill_tokens,
        enforce_eager=options.enforce_eager,
        weights=options.weights or ("scaled" if check else "dummy"),
        engine_options=dict(options.engine_option),
        serving=options.mode == "serve",
        timing=options.mode != "check",
        check=check,
        seed=options.seed,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison. Returns 0 if every run succeeded and the check, if any, passed."""
    options = parser().parse_args(argv)
    settings = settings_of(options)
    out: Path = options.out.resolve()
    (out / "runs").mkdir(parents=True, exist_ok=True)
    order = schedule.interleaved(options.arms, options.repeats)
    runs: list[Run] = []
    for number, (repeat, name) in enumerate(order, 1):
        title = f"[{number}/{len(order)}] {name}, repeat {repeat + 1} of {options.repeats}"
        directory = out / "runs" / f"{repeat:02}-{name}"
        run = _kept(directory, settings, repeat, name) if options.resume else None
        if run is None:
            print(title, flush=True)
            run = run_once(settings, ARMS[name], repeat, directory, options.timeout)
        else:
            print(f"{title}: kept", flush=True)
        runs.append(run)
        if run.failure:
            print(f"  FAILED: {run.failure}", flush=True)
        # After every run: whoever is interrupted keeps what there is.
        content = _write(out, options, settings, runs, argv)
    print(f"\n{report.text(content)}\n\n{out / 'report.json'}")
    try:
        report.plot(out / "report.png", content)
    except ImportError:
        print("no plot: matplotlib is not installed. --resume where it is makes the plot from these results")
    passed = content["check"].get("passed", True) if content["check"] else True
    return 0 if passed and not any(run.failure for run in runs) else 1


def run_once(settings: Settings, arm: Arm, repeat: int, directory: Path, timeout_s: float) -> Run:
    """Starts the engine, measures, and makes sure that it was the arm that ran."""
    directory.mkdir(parents=True, exist_ok=True)
    result, log = directory / "result.json", directory / "log.txt"
    Job(settings, arm.name, arm.disable_custom_all_reduce, str(result)).write(directory / "job.json")
    scaled = settings.weights == "scaled"
    extra = {
        **arm.environment,
        "BENCH_SERVING_FREE": str(int(arm.free)),
        "BENCH_SERVING_WEIGHTS": settings.weights,
    }
    outcome = processes.run(
        processes.module_command(
            f"bench_serving.engines.{'serve' if settings.serving else settings.engine}", str(directory / "job.json")
        ),
        # In SGLang, whose log is terse, the plugin also tells which all-reduce a group has.
        processes.environment(extra, os.environ, with_plugins=arm.free or scaled or settings.engine == "sglang"),
        log,
        result,
        timeout_s,
        lambda line: print(f"  {line}", flush=True),
    )
    return _judged(settings, arm, repeat, outcome, result, log)


def _judged(settings: Settings, arm: Arm, repeat: int, outcome: processes.Outcome, result: Path, log: Path) -> Run:
    if outcome.failure:
        shown = engine_logs.tail(outcome.log)
        return Run(repeat, arm.name, outcome.seconds, f"{outcome.failure}; the log ({log}) ends with:\n{shown}")
    try:
        found = engine_logs.evidence(settings.engine, arm, settings.weights, settings.tensor_parallel_size, outcome.log)
    except ValueError as error:
        return Run(repeat, arm.name, outcome.seconds, f"not the arm {arm.name}: {error} ({log})")
    return Run(repeat, arm.name, outcome.seconds, evidence=found, result=json.loads(result.read_text(encoding="utf-8")))


def _kept(directory: Path, settings: Settings, repeat: int, name: str) -> Run | None:
    """The run that lies in ``directory``, if it is complete and was made with the same settings."""
    result, log, job = (directory / file for file in ("result.json", "log.txt", "job.json"))
    if not (result.is_file() and log.is_file() and job.is_file()):
        return None
    theirs = settings_from_dict(json.loads(job.read_text(encoding="utf-8"))["settings"])
    if dataclasses.replace(theirs, model=settings.model) != settings:
        raise SystemExit(f"--resume: {directory} was made with other settings; give another --out")
    outcome = processes.Outcome(0.0, "", log.read_text(encoding="utf-8", errors="replace"))
    run = _judged(settings, ARMS[name], repeat, outcome, result, log)
    return None if run.failure else run


def _write(
    out: Path, options: argparse.Namespace, settings: Settings, runs: Sequence[Run], argv: Sequence[str] | None
) -> dict[str, Any]:
    done = next((run.result for run in runs if run.result is not None), {})
    versions = {**done.get("versions", {})}
    gpu, _, driver = _first_line("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").partition(
        ", "
    )
    content = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "bench_serving", *(sys.argv[1:] if argv is None else argv)]),
        "engine": settings.engine,
        "device": f"{settings.tensor_parallel_size}x {gpu or 'unknown GPU'}",
        "driver": driver or None,
        "versions": versions,
        "commit": options.commit or versions.get("commit") or _commit(),
        "variables": _variables(os.environ),
        "settings": dataclasses.asdict(settings),
        "repeats": options.repeats,
        "arms": {name: ARMS[name].label for name in options.arms},
        **summary.summarize(runs),
        "check": checks.summarize(runs),
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
    report.write_json(out / "report.json", content)
    return content


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What of the environment may bear on the figures."""
    prefixes = ("LLM_COMM_", "NCCL_", "VLLM_", "SGLANG_", "TORCH_SYMM_MEM_", "NVSHMEM_", "CUDA_VISIBLE_DEVICES")
    return {
        name: value
        for name, value in sorted(processes.environment({}, environment, with_plugins=False).items())
        if name.startswith(prefixes)
    }


def _commit() -> str | None:
    git = ("git", "-C", str(processes.ROOT))
    return _first_line(*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or None


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0].strip()
