"""Measurement by ``vllm bench latency``: ``python -m bench_serving.engines.bench_latency JOB``.

That command times whole generations of one batch size. A decode step is therefore the difference between a long and a
short generation, which needs two starts of vLLM for each batch size. TTFT, TPOT and ITL are not available.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from bench_serving.engines import measure, vllm
from bench_serving.engines.command_line import arguments
from bench_serving.engines.measure import WARM_UP_TOKENS
from bench_serving.settings import Job


def command(job: Job, batch: int, output_tokens: int, result: Path) -> list[str]:
    """Return the command that times ``batch`` requests of ``output_tokens`` tokens."""
    settings = job.settings
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "latency"),
        *arguments(vllm.options(settings, job.disable_custom_all_reduce, job.own_fusion)),
        *("--input-len", str(settings.prompt_tokens), "--output-len", str(output_tokens), "--batch-size", str(batch)),
        *("--num-iters-warmup", "1", "--num-iters", str(settings.iterations), "--disable-detokenize"),
        *("--output-json", str(result)),
    ]


def main() -> None:
    job = Job.read(Path(sys.argv[1]))
    settings, directory = job.settings, Path(job.result).parent
    short, long = min(WARM_UP_TOKENS, settings.output_tokens - 1), settings.output_tokens
    batches = {}
    for batch in settings.batch_sizes:
        seconds = {}
        for tokens in (short, long):
            file = directory / f"latency-{batch}-{tokens}.json"
            subprocess.run(command(job, batch, tokens, file), check=True)
            seconds[tokens] = median(json.loads(file.read_text(encoding="utf-8"))["latencies"])
        step = (seconds[long] - seconds[short]) / (long - short) * 1e3
        batches[batch] = {"method": "vllm bench latency", "decode_ms": [step]}
        measure.say(f"batch {batch}: {step:.2f} ms a step")
    measure.write_result(job, {"arm": job.arm, "start_s": None, "batches": batches})


if __name__ == "__main__":
    main()
