"""Measurement in vLLM's offline engine: tokens are timed when ``LLMEngine.step`` returns them."""

from __future__ import annotations

import time
from typing import Any

from bench_serving.engines import measure
from bench_serving.metrics import Request
from bench_serving.settings import Job, Settings

# Without these, inductor chooses forms of reductions, and combines kernels, by timings at each start. Another start
# would then add in another order.
_THE_SAME_AT_EACH_START = {"deterministic": True, "combo_kernels": False, "benchmark_combo_kernel": False}


def options(settings: Settings, disable_custom_all_reduce: bool, own_fusion: bool = True) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``. ``own_fusion``: see ``arms.Arm``."""
    result: dict[str, Any] = {
        "model": settings.model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "dtype": "bfloat16",
        "max_model_len": settings.max_model_len,
        "max_num_seqs": max(settings.captured),
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
        "enforce_eager": settings.enforce_eager,
        "disable_custom_all_reduce": disable_custom_all_reduce,
        "hf_overrides": settings.config_overrides(),
    }
    if not settings.enforce_eager:
        result["compilation_config"] = {"cudagraph_capture_sizes": settings.captured}
        if settings.check or settings.deterministic:
            result["compilation_config"]["inductor_compile_config"] = dict(_THE_SAME_AT_EACH_START)
    if settings.check:
        result |= {"max_logprobs": -1, "logprobs_mode": "raw_logits"}
    compilation = result.get("compilation_config", {}) | settings.engine_options.get("compilation_config", {})
    if not own_fusion or settings.deterministic:
        # In all arms, independent of --engine-option. The fusion is not batch-invariant: vLLM 0.33 turns it off in
        # deterministic mode itself, 0.26 does not.
        compilation["pass_config"] = {**compilation.get("pass_config", {}), "fuse_allreduce_rms": False}
    result |= settings.engine_options
    if compilation:
        result["compilation_config"] = compilation
    return result


def _options_of(job: Job) -> dict[str, Any]:
    return options(job.settings, job.disable_custom_all_reduce, job.own_fusion)


class Vllm:
    """Implementation of ``measure.Engine``."""

    def __init__(self, job: Job) -> None:
        from vllm import LLM

        extension = "llm_comm_bench.vllm_worker.Extension"
        self._llm = LLM(worker_extension_cls=extension, **_options_of(job))
        self._engine = self._llm.llm_engine
        self._sent = 0
        if job.settings.weights == "scaled":
            self._llm.collective_rpc("fill_with_scaled_weights")
        if job.settings.deterministic:
            self._llm.collective_rpc("tell_mode")
        if job.endless:
            self._llm.collective_rpc("tell_process")

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[Request]:
        begin = time.perf_counter()
        return self._collect(self._send(prompts, output_tokens), begin)

    def generate_together(self, prompts: list[list[int]], output_tokens: int) -> list[Request]:
        # Level 0 only stops the scheduler, so that requests queue up.
        self._llm.sleep(level=0, mode="keep")
        requests = self._send(prompts, output_tokens)
        begin = time.perf_counter()
        self._llm.wake_up(tags=["scheduling"])
        return self._collect(requests, begin)

    def first_logits(self, prompt: list[int]) -> list[float]:
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=-1)
        (output,) = self._llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
        (entries,) = output.outputs[0].logprobs
        return [entries[token].logprob for token in sorted(entries)]

    def on_workers(self, method: str, **arguments: str) -> None:
        self._llm.collective_rpc(method, kwargs=arguments)

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _send(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Request]:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        requests = {}
        for prompt in prompts:
            self._sent += 1
            name = f"bench-{self._sent}"
            params = SamplingParams(
                temperature=0.0,
                max_tokens=output_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self._engine.add_request(name, tokens_input(prompt), params)
            requests[name] = Request()
        return requests

    def _collect(self, requests: dict[str, Request], begin: float) -> list[Request]:
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter() - begin
            for output in outputs:
                tokens = output.outputs[0].token_ids
                if tokens:
                    requests[output.request_id].arrived(now, tokens)
        return list(requests.values())


if __name__ == "__main__":
    measure.run(Vllm)
