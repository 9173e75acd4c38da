"""Measurement in SGLang's offline engine, which starts the same scheduler processes as the server.

Tokens are timed when the client of this process receives them. The single Python process that distributes the tokens
does not distort the times: steps of 64 streamed requests took no longer than the difference between a long and a short
generation without streaming. (Reports up to 2026-11-21 in docs/results have both.) That difference includes the
variation of two prefills, up to 6 % of a step.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from bench_serving.engines import measure
from bench_serving.metrics import Request
from bench_serving.settings import Job, Settings

#: Seconds that are ample for requests to reach the scheduler.
_SENDING_S = 0.5


def options(settings: Settings, disable_custom_all_reduce: bool, own_fusion: bool = True) -> dict[str, Any]:
    """Return the arguments of ``sglang.Engine``. ``own_fusion``: see ``arms.Arm``.

    Attention and sampling use only kernels of SGLang and Triton, unless the engine runs as deployed.
    """
    result: dict[str, Any] = {
        "model_path": settings.model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tp_size": settings.tensor_parallel_size,
        "dtype": "bfloat16",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_radix_cache": True,
        "mem_fraction_static": 0.7,
        "max_running_requests": max(settings.captured),
        "chunked_prefill_size": 8192,
        "disable_prefill_cuda_graph": True,
        "disable_custom_all_reduce": disable_custom_all_reduce,
        # SGLang turns this fusion on by default for some models, possibly with NVLink multicast. If the fusion is
        # wanted, `cli.settings_of` has verified that the backend is another.
        "enforce_disable_flashinfer_allreduce_fusion": not (own_fusion and settings.fuses_by_flashinfer),
        "random_seed": settings.seed,
        "log_level": "info",
    }
    if settings.as_deployed:
        for switch in ("attention_backend", "sampling_backend", "enforce_disable_flashinfer_allreduce_fusion"):
            del result[switch]
    if settings.deterministic:
        result["enable_deterministic_inference"] = True
    if settings.enforce_eager:
        result["disable_decode_cuda_graph"] = True
    else:
        result |= {"cuda_graph_max_bs_decode": max(settings.captured), "cuda_graph_bs_decode": settings.captured}
    overrides = settings.config_overrides()
    if overrides:
        result["json_model_override_args"] = json.dumps(overrides)
    return result | settings.engine_options


class Sglang:
    """Implementation of ``measure.Engine``."""

    def __init__(self, job: Job) -> None:
        import sglang

        self._engine = sglang.Engine(**options(job.settings, job.disable_custom_all_reduce, job.own_fusion))

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[Request]:
        requests = [Request() for _ in prompts]
        begin = time.perf_counter()
        chunks = self._engine.generate(input_ids=prompts, sampling_params=_greedy(output_tokens), stream=True)
        for chunk in chunks:
            now = time.perf_counter() - begin
            request = requests[chunk["index"]]
            # A chunk holds all tokens generated so far.
            new = chunk["output_ids"][len(request.tokens) :]
            if new:
                request.arrived(now, new)
        return requests

    def generate_together(self, prompts: list[list[int]], output_tokens: int) -> list[Request]:
        requests = []
        for output in self._engine.loop.run_until_complete(self._together(prompts, output_tokens)):
            request = Request()
            request.arrived(0.0, output["output_ids"])
            requests.append(request)
        return requests

    async def _together(self, prompts: list[list[int]], output_tokens: int) -> list[dict[str, Any]]:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, GenerateReqInput, PauseGenerationReqInput

        manager = self._engine.tokenizer_manager
        # Pause only the scheduler, so that its queue fills. The manager's own pause would hold the requests back, and
        # SGLANG_ENABLE_COLOCATED_BATCH_GEN would slow down every decode step, including timed ones.
        await manager._async_dispatch_to_scheduler(PauseGenerationReqInput(mode="in_place"))
        request = GenerateReqInput(input_ids=prompts, sampling_params=_greedy(output_tokens))
        answer = asyncio.ensure_future(manager.generate_request(request, None).__anext__())
        await asyncio.sleep(_SENDING_S)
        await manager._async_dispatch_to_scheduler(ContinueGenerationReqInput(torch_empty_cache=False))
        outputs: list[dict[str, Any]] = await answer
        return outputs

    def first_logits(self, prompt: list[int]) -> list[float]:
        vocabulary = self._engine.tokenizer_manager.model_config.vocab_size
        (output,) = self._engine.generate(
            input_ids=[prompt], sampling_params=_greedy(1), return_logprob=True, top_logprobs_num=vocabulary
        )
        (entries,) = output["meta_info"]["output_top_logprobs"]
        by_token = {token: logprob for logprob, token, _ in entries}
        return [by_token[token] for token in sorted(by_token)]

    def on_workers(self, method: str, **arguments: str) -> None:
        self._engine.collective_rpc(method, **arguments)

    def close(self) -> None:
        self._engine.shutdown()


def _greedy(tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0}


if __name__ == "__main__":
    measure.run(Sglang)
