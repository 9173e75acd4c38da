"""Stands in for SGLang: as much of it as bench_serving uses, and its log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import fake_model

from sglang.srt.managers import io_struct


class Engine:
    def __init__(self, **options: Any) -> None:
        assert options["load_format"] == "dummy"
        if not options.get("enforce_disable_flashinfer_allreduce_fusion", True):
            backend = options["flashinfer_allreduce_fusion_backend"]
            print(f"FlashInfer AllReduce Fusion enabled and workspace initialized: backend={backend}, rank=0")
        self._ranks = options["tp_size"]
        self._arm = fake_model.arm(options["disable_custom_all_reduce"])
        state = "none" if self._arm == "nccl" else "CustomAllReduceV2, disabled=False"
        line = f"[TP0] bench_serving: custom all-reduce of group tp:0: {state}"
        self._fault = fake_model.start(self._arm, line)
        fake_model.tell_mode(options.get("enable_deterministic_inference", False))
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = _TokenizerManager(self)

    def generate(
        self,
        input_ids: list[list[int]],
        sampling_params: dict[str, Any],
        stream: bool = False,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
    ) -> Any:
        if stream:
            return self._stream(input_ids, sampling_params["max_new_tokens"])
        *_, last = self._steps(input_ids, sampling_params["max_new_tokens"])
        meta: dict[str, Any] = {}
        if return_logprob:
            tokens = reversed(range(top_logprobs_num))
            logits = [(fake_model.logit(input_ids[0], token, self._fault), token, None) for token in tokens]
            meta = {"output_top_logprobs": [logits]}
        return [{"output_ids": tokens, "meta_info": meta} for tokens in last]

    def collective_rpc(self, method: str, **parameters: str) -> None:
        fake_model.on_workers(method, self._ranks, self._fault, parameters)

    def shutdown(self) -> None:
        assert not self.tokenizer_manager.paused

    def _stream(self, input_ids: list[list[int]], count: int) -> Iterator[dict[str, Any]]:
        for tokens in self._steps(input_ids, count):
            for index, own in enumerate(tokens):
                yield {"index": index, "output_ids": list(own), "meta_info": {}}

    def _steps(self, input_ids: list[list[int]], count: int) -> Iterator[list[list[int]]]:
        tokens: list[list[int]] = [[] for _ in input_ids]
        for position in range(count):
            fake_model.step(self._arm)
            for own, prompt in zip(tokens, input_ids, strict=True):
                own.append(fake_model.token(prompt, position, self._fault, len(input_ids)))
            yield tokens


class _TokenizerManager:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.paused = False
        self.model_config = SimpleNamespace(vocab_size=fake_model.VOCABULARY)

    async def _async_dispatch_to_scheduler(self, message: io_struct.Message) -> None:
        self.paused = message.pauses

    async def generate_request(self, request: io_struct.GenerateReqInput, _: None) -> AsyncIterator[Any]:
        assert self.paused
        while self.paused:
            await asyncio.sleep(0.001)
        yield self._engine.generate(request.input_ids, request.sampling_params)
