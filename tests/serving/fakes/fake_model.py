"""What the fake engines have in common: a model whose greedy tokens depend on the prompt, and what they are told to do.

``FAKE_ENGINE`` in the environment: a JSON object {arm: what goes wrong}, where the arm is told from the options and the
environment, as in a real engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

VOCABULARY = 50
_STEP_S = {
    "nccl": 0.0008,
    "default": 0.0006,
    "llm_comm": 0.0004,
    "llm_comm_unfused": 0.0005,
    "llm_comm_no_linear": 0.00045,
    "free": 0.0002,
    "free_norm": 0.00015,
}
_OF_THE_START = {
    "llm_comm_unfused": "; not fused with RMSNorm: fuse is false (LLM_COMM_FUSE)",
    "llm_comm_no_linear": "; linear layers are vLLM's: fuse_linear is false (LLM_COMM_FUSE_LINEAR)",
}


def arm(disable_custom_all_reduce: bool) -> str:
    if disable_custom_all_reduce:
        return "nccl"
    if os.environ["LLM_COMM_ENABLE"] == "1":
        if os.environ.get("LLM_COMM_FUSE_LINEAR") == "0":
            return "llm_comm_no_linear"
        return "llm_comm_unfused" if os.environ.get("LLM_COMM_FUSE") == "0" else "llm_comm"
    if os.environ["BENCH_SERVING_FREE_NORMS"] == "1":
        return "free_norm"
    return "free" if os.environ["BENCH_SERVING_FREE"] == "1" else "default"


def fault(name: str) -> str:
    return str(json.loads(os.environ.get("FAKE_ENGINE", "{}")).get(name, ""))


def start(name: str, backend_line: str) -> str:
    """Writes what the log of the engine would say; returns the fault of this arm."""
    what = fault(name)
    if what == "crash":
        raise RuntimeError("CUDA error: no kernel image is available")
    if what == "hang":
        time.sleep(600)
    print(backend_line)
    if name.startswith("llm_comm") != (what == "pretends"):
        print(
            "INFO llm_comm 0.1.0 is active for group tp:0 (2 ranks, VMM): all-reduce one_shot to 48 KiB, then the rest"
            + _OF_THE_START.get(name, "")
        )
        if os.environ.get("LLM_COMM_BATCH_INVARIANT_LINEAR") == "llm_comm":
            print("INFO ...; linear layers by llm_comm at every size (batch_invariant_linear)")
    if name in ("llm_comm", "llm_comm_no_linear") and what not in ("pretends", "does not fuse"):
        print("INFO llm_comm: first all-reduce fused with its RMSNorm (2 ranks, shape (1, 64))")
        if os.environ.get("LLM_COMM_FUSE_LINEAR") == "1":
            print(
                "INFO llm_comm: first column-parallel linear layer computed by llm_comm "
                "(2 ranks, shape (1, 64), weight (128, 64))"
            )
    if name.startswith("llm_comm"):
        print("INFO llm_comm: first all_gather of group tp:0 (2 ranks, shape (1, 64))")
    if name in ("free", "free_norm"):
        print("INFO bench_serving: all-reduces of this group return uninitialised memory (tp:0)")
    if name == "free_norm":
        print("INFO bench_serving: residual adds and norms behind sums do nothing")
    if os.environ["BENCH_SERVING_WEIGHTS"] == "scaled":
        print("INFO bench_serving: scaled weights")
    sys.stdout.flush()
    return what


def tell_mode(deterministic: bool) -> None:
    if deterministic:
        print("INFO bench_serving: the engine is in its deterministic mode", flush=True)


def step(name: str) -> None:
    _launched.extend(_KERNELS)
    time.sleep(_STEP_S[name])


LAYERS = 4
_KERNELS = ["embedding", *["nvjet_qkv", "flash_fwd", "all_reduce"] * LAYERS, "ArgMaxOps"]
_launched: list[str] = []
_recorders: dict[int, Any] = {}


class Profile:
    """Stands in for torch.profiler.profile: what the fake engine launches while it records, 5 us apart."""

    def __init__(self, records: bool) -> None:
        self._records = records
        self.profiler = SimpleNamespace(kineto_results=self)

    def start(self) -> None:
        self._first = len(_launched)

    def stop(self) -> None:
        self._names = _launched[self._first :] if self._records else []

    def events(self) -> list[Any]:
        import torch

        device = torch.autograd.DeviceType
        kernels = [event(device.CUDA, number, name) for number, name in enumerate(self._names)]
        return [event(device.CPU, 0, "cudaGraphLaunch"), *kernels]


def event(device: Any, number: int, name: str) -> Any:
    of = {"device_type": device, "name": name, "start_ns": 5000 * number, "duration_ns": 3000, "device_resource_id": 7}
    return SimpleNamespace(**{key: lambda value=value: value for key, value in of.items()})


def on_workers(method: str, ranks: int, what: str, arguments: dict[str, str]) -> None:
    """Does on all ranks what the plugin of the harness does in a worker."""
    import torch
    from llm_comm_bench.kernel_profile import Recorder

    if what == "profiler ends the engine":
        raise RuntimeError("EngineCore encountered an issue")
    torch.cuda.synchronize = lambda: None
    torch.cuda._sleep = lambda cycles: _launched.append("at::cuda::(anonymous namespace)::spin_kernel(long)")
    torch.profiler.profile = lambda activities: Profile(what != "records nothing")
    for rank in range(ranks):
        recorder = _recorders.setdefault(rank, Recorder())
        if method == "begin_kernel_section":
            recorder.begin_section()
        else:
            {"start_kernel_profile": recorder.start, "stop_kernel_profile": recorder.stop}[method](rank, **arguments)


def token(prompt: list[int], position: int, what: str, batch: int) -> int:
    noise = time.perf_counter_ns() if what == "random tokens" else 0
    noise += batch if what == "tokens by batch" and position > 5 else 0
    return (sum(prompt) + 7 * position + noise) % VOCABULARY


def logit(prompt: list[int], token: int, what: str) -> float:
    return ((sum(prompt) + token * 31) % 17) * (1.5 if what == "wrong logits" and token % 2 else 1.0)
