"""Measurements in a running engine, common to all engines."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from bench_serving import metrics, profile
from bench_serving.metrics import Request
from bench_serving.settings import CHECK_BATCHES, CHECK_TOKENS, Job

#: Tokens of a short generation, used to warm up and to subtract from a long one.
WARM_UP_TOKENS = 8
#: Log line at the begin of `endless`.
DECODING = "decoding without end"


class Engine(Protocol):
    """Running engine."""

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[Request]:
        """Generate ``output_tokens`` tokens greedily for each prompt, ignoring end-of-sequence. All prompts are sent at
        once."""

    def generate_together(self, prompts: list[list[int]], output_tokens: int) -> list[Request]:
        """Generate like ``generate``, but prefill all prompts in one step, so that the arithmetic is the same every
        time."""

    def first_logits(self, prompt: list[int]) -> list[float]:
        """Return the logits, or log probabilities, of the first token after ``prompt`` for the whole vocabulary."""

    def on_workers(self, method: str, **arguments: str) -> None:
        """Call a method that the harness's plugin has added to the engine's workers, on all ranks."""

    def close(self) -> None:
        """End the engine's processes."""


def say(text: str) -> None:
    """Log a progress line, which the harness shows."""
    print(f"[bench] {text}", flush=True)


def measure(engine: Engine, job: Job, start_s: float) -> None:
    """Do what the job asks for and write its result."""
    settings = job.settings
    result: dict[str, Any] = {"arm": job.arm, "start_s": round(start_s, 3)}
    say(f"engine is up after {start_s:.0f} s")
    generated: dict[int, list[list[Request]]] = {}
    if settings.mode != "check":
        result["batches"] = {}
        for count in settings.batch_sizes:
            result["batches"][count], generated[count] = _decode(engine, job, count)
        result["prefill_s"] = {tokens: _prefill(engine, job, tokens) for tokens in settings.prefill_tokens}
    elif settings.deterministic:
        for count in settings.batch_sizes:
            generated[count] = [engine.generate(settings.decode_prompts(count), settings.output_tokens)]
    if settings.deterministic:
        result["invariance"] = {
            count: [[request.tokens for request in batch] for batch in batches] for count, batches in generated.items()
        }
    if settings.check:
        result["check"] = _check(engine, job)
    write_result(job, result)
    # After the result, so that a profiler that fails or hangs costs no measurement.
    if settings.profile:
        _profile(engine, job)
    say("done")


def write_result(job: Job, result: dict[str, Any]) -> None:
    """Write the result file atomically: the harness waits for its appearance."""
    partial = Path(job.result + ".partial")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.replace(job.result)


def endless(engine: Engine, job: Job) -> None:
    """Decode until this process is ended."""
    (prompts, tokens) = job.settings.prompts(4, job.settings.prompt_tokens, "endless"), job.settings.output_tokens
    engine.generate(prompts, WARM_UP_TOKENS)
    say(DECODING)
    while True:
        engine.generate(prompts, tokens)


def _decode(engine: Engine, job: Job, count: int) -> tuple[dict[str, Any], list[list[Request]]]:
    """Return the measurements of batches of ``count`` requests, and the batches."""
    settings = job.settings
    prompts = settings.decode_prompts(count)
    engine.generate(prompts, WARM_UP_TOKENS)
    streams = [engine.generate(prompts, settings.output_tokens) for _ in range(settings.iterations)]
    decode_ms = [metrics.decode_ms(batch) for batch in streams]
    say(f"batch {count}: {', '.join(f'{ms:.2f}' for ms in decode_ms)} ms a step")
    measured = {
        "method": "arrivals",
        "decode_ms": decode_ms,
        "streams": [metrics.to_json(batch) for batch in streams],
    }
    return measured, streams


def _prefill(engine: Engine, job: Job, tokens: int) -> list[float]:
    (prompt,) = job.settings.prompts(1, tokens, "prefill")
    engine.generate([prompt], 1)
    seconds = [engine.generate([prompt], 1)[0].ttft for _ in range(job.settings.prefill_iterations)]
    say(f"prefill of {len(prompt)} tokens: {sorted(seconds)[len(seconds) // 2] * 1e3:.1f} ms")
    return seconds


def _profile(engine: Engine, job: Job) -> None:
    """Record the kernels of all workloads."""
    directory, settings = profile.directory(Path(job.result).parent), job.settings
    directory.mkdir(exist_ok=True)
    workloads = profile.workloads(settings)
    try:
        engine.on_workers("start_kernel_profile")
        for workload in workloads:
            engine.on_workers("begin_kernel_section")
            for _ in range(workload.times):
                engine.generate(workload.prompts(settings), workload.tokens)
        names = ",".join(workload.name for workload in workloads)
        engine.on_workers("stop_kernel_profile", directory=str(directory), names=names)
        for workload in workloads:
            summary = profile.summary_of(directory / workload.name, 0, workload, settings.model_layers)
            say(f"profile of {workload.name}: {profile.line(summary)}")
        for workload in (workload for workload in workloads if workload.is_prefill):
            run = functools.partial(engine.generate, workload.prompts(settings), 1)
            profile.sample_clocks(directory / workload.name, run)
    except Exception as error:
        say(f"profile failed, times are kept: {type(error).__name__}: {error}")


def _check(engine: Engine, job: Job) -> dict[str, Any]:
    settings = job.settings
    tokens = {}
    for count in CHECK_BATCHES:
        prompts = settings.prompts(count, settings.prompt_tokens, "check")
        tokens[count] = [request.tokens for request in engine.generate_together(prompts, CHECK_TOKENS)]
    by_length = settings.check_prompts()
    logits = {length: [engine.first_logits(prompt) for prompt in prompts] for length, prompts in by_length.items()}
    say(f"check: tokens of {sum(CHECK_BATCHES)} requests, logits of {sum(map(len, logits.values()))}")
    return {"tokens": tokens, "logits": logits}


def run(start: Any) -> None:
    """Main program of an engine's process. ``start(job)`` returns the running engine."""
    job = Job.read(Path(sys.argv[1]))
    begin = time.perf_counter()
    engine = start(job)
    if job.endless:
        endless(engine, job)
    measure(engine, job, time.perf_counter() - begin)
    engine.close()
    sys.stdout.flush()
    # Threads of the engine can keep the interpreter from exiting.
    os._exit(0)
