"""Measurement of a server by the engine's own serving benchmark: ``python -m bench_serving.engines.serve JOB``.

vLLM: ``vllm serve`` and ``vllm bench serve``; SGLang: ``sglang.launch_server`` and ``sglang.bench_serving``. Each
client keeps one request open, and there is one client for each request of a batch. The time of a decode step is the
median TPOT.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from bench_serving.engines import measure, sglang, vllm
from bench_serving.engines.command_line import arguments
from bench_serving.settings import Job, Settings

_LATENCIES = [f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl") for kind in ("mean", "median", "p99")]


def model_directory(settings: Settings, parent: Path) -> Path:
    """Create a model directory: the model's config.json, and a tokenizer in which token 17 is the word "t17".

    Serving benchmarks send text. This tokenizer needs no download, and a round trip through text keeps the number of
    tokens.
    """
    directory = parent / Path(settings.model).name
    directory.mkdir(exist_ok=True)
    shutil.copy(Path(settings.model) / "config.json", directory)
    vocabulary = {f"t{token}": token for token in range(settings.config()["vocab_size"])}
    # Special tokens also match inside of words, so the name must not be a prefix of another word.
    vocabulary["</s>"] = vocabulary.pop("t2")
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": settings.max_model_len,
        "eos_token": "</s>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    return directory


def server_command(job: Job, model: Path, port: int) -> list[str]:
    """Return the command that starts the engine's server."""
    if job.settings.engine == "vllm":
        options = vllm.options(job.settings, job.disable_custom_all_reduce, job.own_fusion)
        command = ["vllm.entrypoints.cli.main", "serve", str(model)]
        del options["model"]
    else:
        options = sglang.options(job.settings, job.disable_custom_all_reduce, job.own_fusion)
        command = ["sglang.launch_server"]
        options["model_path"] = str(model)
    del options["skip_tokenizer_init"]
    return [sys.executable, "-m", *command, "--host", "127.0.0.1", "--port", str(port), *arguments(options)]


def client_command(settings: Settings, model: Path, port: int, count: int, result: Path) -> list[str]:
    """Return the command that benchmarks the server with ``count`` concurrent requests."""
    prompts = count * settings.iterations
    common = [
        *("--model", str(model), "--port", str(port), "--num-prompts", str(prompts), "--max-concurrency", str(count)),
        *("--random-input-len", str(settings.prompt_tokens), "--random-output-len", str(settings.output_tokens)),
        *("--seed", str(settings.seed), "--host", "127.0.0.1", "--disable-tqdm"),
    ]
    if settings.engine == "vllm":
        own = ["vllm.entrypoints.cli.main", "bench", "serve", "--backend", "vllm", "--dataset-name", "random"]
        own += ["--ignore-eos", "--num-warmups", str(count), "--percentile-metrics", "ttft,tpot,itl"]
        own += ["--save-result", "--result-dir", str(result.parent), "--result-filename", result.name]
    else:
        own = [
            "sglang.bench_serving",
            "--backend",
            "sglang",
            "--dataset-name",
            "random-ids",
            "--random-range-ratio",
            "1",
        ]
        own += ["--warmup-requests", str(count), "--output-file", str(result)]
    return [sys.executable, "-m", *own, *common]


def read_result(path: Path, requests: int) -> dict[str, Any]:
    """Read the output of a serving benchmark with ``requests`` requests: a JSON object, or one in each line, of which
    the last counts.

    Raises:
        RuntimeError: Not all requests were completed.
    """
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
    if content.get("completed") != requests:  # SGLang does not report failed requests
        raise RuntimeError(f"{content.get('completed')} of {requests} requests were completed ({path})")
    return {"method": "serve", "decode_ms": [content["median_tpot_ms"]], "latencies": _pick(content)}


def _pick(content: dict[str, Any]) -> dict[str, float]:
    return {name: content[name] for name in _LATENCIES}


def main() -> None:
    job = Job.read(Path(sys.argv[1]))
    settings, directory = job.settings, Path(job.result).parent
    model = model_directory(settings, directory)
    port = _free_port()
    begin = time.perf_counter()
    server = subprocess.Popen(server_command(job, model, port))
    _wait_until_up(server, port)
    start_s = time.perf_counter() - begin
    measure.say(f"server is up after {start_s:.0f} s")
    batches = {}
    for count in settings.batch_sizes:
        file = directory / f"serve-{count}.json"
        file.unlink(missing_ok=True)  # SGLang appends to the file
        subprocess.run(client_command(settings, model, port, count, file), check=True)
        batches[count] = read_result(file, count * settings.iterations)
        measure.say(f"batch {count}: {batches[count]['decode_ms'][0]:.2f} ms a token")
    measure.write_result(job, {"arm": job.arm, "start_s": start_s, "batches": batches})
    server.terminate()
    server.wait()


def _free_port() -> int:
    """Return a port that is not in use, below those that Linux gives to connections: an engine opens many of these
    before its server listens."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _wait_until_up(server: subprocess.Popen[bytes], port: int) -> None:
    while True:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
