"""Stands in for the command ``vllm``: serve, bench serve and bench latency."""

from __future__ import annotations

import http.server
import json
import sys
import urllib.request
from pathlib import Path

import vllm


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def engine(model: str) -> vllm.LLM:
    return vllm.LLM(
        model=model,
        load_format=option("--load-format"),
        disable_custom_all_reduce="--disable-custom-all-reduce" in sys.argv,
        worker_extension_cls="llm_comm_bench.vllm_worker.Extension",
    )


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


def serve() -> None:
    model = sys.argv[2]
    assert json.loads((Path(model) / "tokenizer.json").read_text())["model"]["type"] == "WordLevel"
    engine(model)
    http.server.HTTPServer(("127.0.0.1", int(option("--port"))), Health).serve_forever()


def bench_serve() -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{option('--port')}/health"):
        pass
    latencies = {f"{kind}_{name}_ms": 2.0 for name in ("ttft", "tpot", "itl") for kind in ("mean", "median", "p99")}
    content = {"completed": int(option("--num-prompts")), "failed": 0, **latencies}
    (Path(option("--result-dir")) / option("--result-filename")).write_text(json.dumps(content))


def bench_latency() -> None:
    engine(option("--model"))
    seconds = [0.5 + 0.01 * int(option("--output-len"))] * int(option("--num-iters"))
    Path(option("--output-json")).write_text(json.dumps({"avg_latency": seconds[0], "latencies": seconds}))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        {"serve": bench_serve, "latency": bench_latency}[sys.argv[2]]()
