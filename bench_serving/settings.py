"""What one run measures, as the harness hands it to the process that runs the engine."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_serving.arms import ARMS

SHAPES = Path(__file__).parent / "model_shapes"
#: Requests of the check are generated in batches of these sizes, so that each all-reduce algorithm takes part.
CHECK_BATCHES = (1, 4, 16)
CHECK_TOKENS = 32
#: Of the shorter prompts whose logits are compared. So few tokens take the ways of a decode step: norms are fused with
#: their sums, and linear layers are llm_comm's. Of longer prefills it often makes the sums alone.
FEW_TOKENS = 32
#: SGLang's option that has it fuse all-reduces with norms by FlashInfer.
FLASHINFER_OPTION = "flashinfer_allreduce_fusion_backend"


@dataclass(frozen=True)
class Settings:
    """All that the arms have in common.

    Attributes:
        engine: "vllm" or "sglang".
        model: Directory with a config.json.
        layers: Number of layers, None for the model's own.
        batch_sizes: Requests that decode at once; one measurement each.
        prompt_tokens: Length of their prompts.
        output_tokens: Tokens generated for each request.
        iterations: Timed batches of each size.
        prefill_tokens: Prompt lengths that are prefilled; one measurement each.
        prefill_iterations: Timed prefills of each length.
        weights: "dummy" for the engine's own ``--load-format dummy``; "scaled" for random weights of the scale of a
            trained model that differ from rank to rank (see plugins/llm_comm_bench/weights.py).
        engine_options: Further arguments of the engine's Python class, by name.
        mode: What runs: the engine in a process of the harness ("latency", "check") or its own benchmark ("serve",
            "bench-latency").
        check: Whether to generate what the arms are compared by.
        deterministic: Whether the engine is in the mode in which a token's result does not depend on its batch; its
            tokens are compared over batches and starts.
        seed: Of the prompts.
    """

    engine: str
    model: str
    layers: int | None = None
    tensor_parallel_size: int = 8
    batch_sizes: tuple[int, ...] = (1, 4, 16, 64)
    prompt_tokens: int = 128
    output_tokens: int = 136
    iterations: int = 2
    prefill_tokens: tuple[int, ...] = (4096,)
    prefill_iterations: int = 6
    enforce_eager: bool = False
    weights: str = "dummy"
    engine_options: dict[str, Any] = field(default_factory=dict)
    mode: str = "latency"
    check: bool = False
    deterministic: bool = False
    seed: int = 0

    @property
    def program(self) -> str:
        """Module of ``bench_serving.engines`` that does it."""
        return {"serve": "serve", "bench-latency": "bench_latency"}.get(self.mode, self.engine)

    @property
    def data_parallel_attention(self) -> bool:
        """Whether SGLang computes attention by requests rather than by heads."""
        return self.engine == "sglang" and bool(self.engine_options.get("enable_dp_attention"))

    @property
    def fuses_by_flashinfer(self) -> bool:
        """Whether SGLang is asked to fuse all-reduces with norms by FlashInfer."""
        return self.engine == "sglang" and bool(self.engine_options.get(FLASHINFER_OPTION))

    @property
    def max_model_len(self) -> int:
        """Longest request in tokens, rounded up so that small changes of the options keep compiled caches valid."""
        longest = max(
            self.prompt_tokens + self.output_tokens,
            self.prompt_tokens + CHECK_TOKENS,
            *(tokens + 1 for tokens in self.prefill_tokens),
        )
        return -(-(longest + 8) // 128) * 128

    @property
    def captured(self) -> list[int]:
        """Batch sizes that occur, for which CUDA graphs are captured; ascending."""
        return sorted({*self.batch_sizes, *(CHECK_BATCHES if self.check else ())})

    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        content: dict[str, Any] = json.loads((Path(self.model) / "config.json").read_text(encoding="utf-8"))
        return content

    def config_overrides(self) -> dict[str, Any]:
        """What the engine is to change in the model's configuration."""
        overrides: dict[str, Any] = {}
        if self.layers is not None:
            overrides["num_hidden_layers"] = self.layers
        if self.config()["max_position_embeddings"] < self.max_model_len:
            # Longer than the model was trained for: it changes the length of the rotary table and nothing else.
            overrides["max_position_embeddings"] = self.max_model_len
        return overrides

    def prompts(self, count: int, length: int, purpose: str) -> list[list[int]]:
        """Token ids [count][length], the same in all arms and repeats."""
        source = random.Random(f"{self.seed} {purpose} {count} {length}")
        vocabulary = self.config()["vocab_size"]
        return [[source.randrange(10, vocabulary) for _ in range(length)] for _ in range(count)]

    def check_prompts(self) -> dict[int, list[list[int]]]:
        """Those whose first logits are compared, by their length."""
        count = max(CHECK_BATCHES[:2])
        lengths = sorted({min(FEW_TOKENS, self.prompt_tokens), self.prompt_tokens})
        return {length: self.prompts(count, length, "check") for length in lengths}

    def decode_prompts(self, count: int) -> list[list[int]]:
        """Those of a timed batch of ``count`` requests; in deterministic mode the first ones of the largest batch."""
        of = max(self.batch_sizes) if self.deterministic else count
        return self.prompts(of, self.prompt_tokens, "decode")[:count]


@dataclass(frozen=True)
class Job:
    """One start of the engine: written by the harness, read by the process that runs the engine.

    Attributes:
        settings: What to do.
        arm: Name of the arm.
        disable_custom_all_reduce: Of the arm.
        result: File to write.
        endless: Decode until something ends the engine, instead of what ``settings`` says.
    """

    settings: Settings
    arm: str
    disable_custom_all_reduce: bool
    result: str
    endless: bool = False

    @property
    def own_fusion(self) -> bool:
        """Of the arm."""
        return ARMS[self.arm].own_fusion

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Job:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Job(**{**content, "settings": settings_from_dict(content["settings"])})


def settings_from_dict(content: dict[str, Any]) -> Settings:
    """The inverse of ``dataclasses.asdict``, also after a way through JSON."""
    tuples = {name: tuple(content[name]) for name in ("batch_sizes", "prefill_tokens")}
    return Settings(**{**content, **tuples})
