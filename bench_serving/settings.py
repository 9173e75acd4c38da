"""Settings of a run, and the job file that the harness passes to the engine's process."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_serving.arms import ARMS

SHAPES = Path(__file__).parent / "model_shapes"
#: Batch sizes of the check's requests, chosen so that each all-reduce algorithm takes part.
CHECK_BATCHES = (1, 4, 16)
CHECK_TOKENS = 32
#: Length of the shorter prompts whose logits are compared. A prefill this short uses the code path of decode: norms are
#: fused with their all-reduces, and linear layers are llm_comm's. Longer prefills often use only llm_comm's all-reduce.
FEW_TOKENS = 32
#: Option of SGLang that fuses all-reduces with norms through FlashInfer.
FLASHINFER_OPTION = "flashinfer_allreduce_fusion_backend"


@dataclass(frozen=True)
class Settings:
    """Settings common to all arms.

    Attributes:
        engine: "vllm" or "sglang".
        model: Directory with a config.json.
        layers: Number of layers, None for the model's own.
        tensor_parallel_size: Number of tensor-parallel ranks.
        batch_sizes: Numbers of requests that decode together; one measurement each.
        prompt_tokens: Length of their prompts.
        output_tokens: Tokens generated for each request.
        iterations: Timed batches of each size.
        prefill_tokens: Prompt lengths whose prefill is timed; one measurement each.
        prefill_iterations: Timed prefills of each length.
        enforce_eager: Run without CUDA graphs.
        weights: "dummy" for the engine's own ``--load-format dummy``; "scaled" for random weights of the scale of a
            trained model that differ between ranks (see plugins/llm_comm_bench/weights.py).
        engine_options: Further arguments of the engine's Python class, by name.
        mode: What runs: the engine in a process of the harness ("latency", "check"), or its own benchmark ("serve",
            "bench-latency").
        check: Generate the data by which arms are compared.
        deterministic: Run the engine in its batch-invariant mode, and compare tokens over batches and starts.
        as_deployed: Leave every switch of the engine as it is, NVLink multicast and the kernels of attention included.
        profile: Record the kernels of some steps after all measurements.
        seed: Seed of the prompts.
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
    as_deployed: bool = False
    profile: bool = False
    seed: int = 0

    @property
    def program(self) -> str:
        """Module of ``bench_serving.engines`` that runs the job."""
        return {"serve": "serve", "bench-latency": "bench_latency"}.get(self.mode, self.engine)

    @property
    def data_parallel_attention(self) -> bool:
        """True if SGLang splits attention by requests instead of by heads."""
        return self.engine == "sglang" and bool(self.engine_options.get("enable_dp_attention"))

    @property
    def fuses_by_flashinfer(self) -> bool:
        """True if SGLang is configured to fuse all-reduces with norms through FlashInfer."""
        return self.engine == "sglang" and bool(self.engine_options.get(FLASHINFER_OPTION))

    @property
    def max_model_len(self) -> int:
        """Longest request in tokens, rounded up so that small changes of the options keep compile caches valid."""
        longest = max(
            self.prompt_tokens + self.output_tokens,
            self.prompt_tokens + CHECK_TOKENS,
            *(tokens + 1 for tokens in self.prefill_tokens),
        )
        return -(-(longest + 8) // 128) * 128

    @property
    def captured(self) -> list[int]:
        """Batch sizes that occur, ascending. CUDA graphs are captured for these."""
        return sorted({*self.batch_sizes, *(CHECK_BATCHES if self.check else ())})

    def config(self) -> dict[str, Any]:
        """Return the model's config.json."""
        content: dict[str, Any] = json.loads((Path(self.model) / "config.json").read_text(encoding="utf-8"))
        return content

    @property
    def model_layers(self) -> int:
        """Number of layers of the model as it runs."""
        return int(self.layers or self.config().get("num_hidden_layers", 0))

    def config_overrides(self) -> dict[str, Any]:
        """Return the changes to make in the model's configuration."""
        overrides: dict[str, Any] = {}
        if self.layers is not None:
            overrides["num_hidden_layers"] = self.layers
        if self.config()["max_position_embeddings"] < self.max_model_len:
            # Longer than the model was trained for. This only lengthens the rotary table.
            overrides["max_position_embeddings"] = self.max_model_len
        return overrides

    def prompts(self, count: int, length: int, purpose: str) -> list[list[int]]:
        """Return token ids [count][length], equal in all arms and repeats."""
        source = random.Random(f"{self.seed} {purpose} {count} {length}")
        vocabulary = self.config()["vocab_size"]
        return [[source.randrange(10, vocabulary) for _ in range(length)] for _ in range(count)]

    def check_prompts(self) -> dict[int, list[list[int]]]:
        """Return the prompts whose first logits are compared, by length."""
        count = max(CHECK_BATCHES[:2])
        lengths = sorted({min(FEW_TOKENS, self.prompt_tokens), self.prompt_tokens})
        return {length: self.prompts(count, length, "check") for length in lengths}

    def decode_prompts(self, count: int) -> list[list[int]]:
        """Return the prompts of a timed batch of ``count`` requests. In deterministic mode: the first ones of the
        largest batch."""
        of = max(self.batch_sizes) if self.deterministic else count
        return self.prompts(of, self.prompt_tokens, "decode")[:count]


@dataclass(frozen=True)
class Job:
    """One start of the engine: written by the harness, read by the engine's process.

    Attributes:
        settings: What to measure.
        arm: Name of the arm.
        disable_custom_all_reduce: See ``Arm``.
        result: File to write.
        endless: Decode until the engine is killed, instead of measuring.
    """

    settings: Settings
    arm: str
    disable_custom_all_reduce: bool
    result: str
    endless: bool = False

    @property
    def own_fusion(self) -> bool:
        """See ``Arm``."""
        return ARMS[self.arm].own_fusion

    def write(self, path: Path) -> None:
        """Write the job file."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Job:
        """Read a job file."""
        content = json.loads(path.read_text(encoding="utf-8"))
        return Job(**{**content, "settings": settings_from_dict(content["settings"])})


def settings_from_dict(content: dict[str, Any]) -> Settings:
    """Inverse of ``dataclasses.asdict``, also after a round trip through JSON."""
    tuples = {name: tuple(content[name]) for name in ("batch_sizes", "prefill_tokens")}
    return Settings(**{**content, **tuples})
