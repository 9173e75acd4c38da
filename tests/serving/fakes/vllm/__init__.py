"""Stands in for vLLM: as much of it as bench_serving uses, and its log."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import fake_model

from vllm.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["LLM", "SamplingParams", "TokensPrompt"]


def TokensPrompt(prompt_token_ids: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": prompt_token_ids}


@dataclass
class _Request:
    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)


class _Engine:
    def __init__(self, arm: str, fault: str) -> None:
        self._arm, self._fault = arm, fault
        self._requests: dict[str, _Request] = {}
        self.paused = False
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_request(self, name: str, prompt: dict[str, Any], params: SamplingParams) -> None:
        assert prompt["type"] == "token"
        assert params.output_kind is RequestOutputKind.DELTA
        self._requests[name] = _Request(prompt["prompt_token_ids"], params)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[Any]:
        assert not self.paused
        fake_model.step(self._arm)
        outputs = []
        batch = len(self._requests)
        for name, request in list(self._requests.items()):
            token = fake_model.token(request.prompt, len(request.tokens), self._fault, batch)
            request.tokens.append(token)
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[token])]))
            if len(request.tokens) == request.params.max_tokens:
                del self._requests[name]
        return outputs


class LLM:
    def __init__(self, **options: Any) -> None:
        assert options["load_format"] == "dummy"
        assert options["worker_extension_cls"] == "llm_comm_bench.vllm_worker.Extension"
        self._arm = fake_model.arm(options["disable_custom_all_reduce"])
        backends = "'PYNCCL'" if self._arm == "nccl" else "'CUSTOM', 'PYNCCL'"
        line = f"INFO Using [{backends}] all-reduce backends (in dispatch order) for group 'tp:0' out of potential"
        self._fault = fake_model.start(self._arm, line)
        self._options = options
        self.llm_engine = _Engine(self._arm, self._fault)

    def collective_rpc(self, method: str, kwargs: dict[str, str] | None = None) -> None:
        if kwargs is not None:
            return fake_model.on_workers(method, self._options["tensor_parallel_size"], self._fault, kwargs)
        if method == "fill_with_scaled_weights":
            return
        if method == "tell_mode":
            return fake_model.tell_mode(os.environ["VLLM_BATCH_INVARIANT"] == "1")
        assert method == "tell_process"
        self._workers: list[subprocess.Popen[bytes]] = []
        for rank in range(self._options["tensor_parallel_size"]):
            process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            self._workers.append(process)
            print(f"INFO bench_serving: rank {rank} of group tp is process {process.pid}", flush=True)
            if self._fault == "prophetic":
                print(f"ERROR Worker proc VllmWorker-{rank} died unexpectedly (exit code: -9)", flush=True)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if self._fault == "ignores the dead":
            return
        if self._fault not in ("nameless", "prophetic"):
            print(f"ERROR Worker proc VllmWorker-{rank} died unexpectedly (exit code: -9)", flush=True)
        for worker in self._workers:
            worker.kill()
        os._exit(0 if self._fault == "content" else 1)

    def sleep(self, level: int, mode: str) -> None:
        assert (level, mode) == (0, "keep")
        self.llm_engine.paused = True

    def wake_up(self, tags: list[str]) -> None:
        assert tags == ["scheduling"]
        self.llm_engine.paused = False

    def generate(self, prompts: list[dict[str, Any]], params: SamplingParams, use_tqdm: bool) -> list[Any]:
        assert params.logprobs == -1
        assert self._options["logprobs_mode"] == "raw_logits"
        (prompt,) = prompts
        entries = {
            token: SimpleNamespace(logprob=fake_model.logit(prompt["prompt_token_ids"], token, self._fault))
            for token in reversed(range(fake_model.VOCABULARY))
        }
        return [SimpleNamespace(outputs=[SimpleNamespace(logprobs=[entries])])]
