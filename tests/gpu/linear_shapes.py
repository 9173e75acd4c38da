"""Layers by which the kernel's own choice of a tiling is fitted, and layers by which it is judged.

Both lists were drawn at random, before anything was fitted, from the layers of these models at TP=1, 2, 4 and 8. No
layer of a model in ``JUDGED`` is in ``FITTED``, also where another model has one of its shape.
"""

from __future__ import annotations

from typing import NamedTuple


class Layer(NamedTuple):
    """``operation``: as a tuning table names it. Of silu-and-mul, ``outputs`` of gate, and as many of up."""

    operation: str
    outputs: int
    inputs: int
    model: str

    @property
    def has_silu(self) -> bool:
        """Whether silu-and-mul stands behind it."""
        return self.operation.startswith("linear_silu_and_mul")

    @property
    def is_fp8(self) -> bool:
        """Whether operands are FP8."""
        return "_fp8" in self.operation

    @property
    def has_blocks(self) -> bool:
        """Whether scales are those of blocks."""
        return self.operation.endswith("_blocks")


FITTED = (
    Layer("linear", 640, 2880, "GPT-OSS-120B qkv TP=8"),
    Layer("linear", 640, 3072, "Llama-3.2-3B qkv TP=8"),
    Layer("linear", 1280, 5120, "Qwen3-32B qkv TP=8"),
    Layer("linear", 1536, 2048, "Llama-3.2-1B qkv TP=2"),
    Layer("linear", 1536, 2560, "Qwen3-4B qkv TP=4"),
    Layer("linear", 1792, 12288, "Mistral-Large-123B qkv TP=8"),
    Layer("linear", 2048, 1024, "Llama-3.2-1B o TP=2"),
    Layer("linear", 2048, 2048, "Llama-3.2-1B o TP=1"),
    Layer("linear", 2048, 3072, "Llama-3.2-3B gate_up TP=8"),
    Layer("linear", 2048, 4096, "Llama-3.2-1B down TP=2"),
    Layer("linear", 2048, 8192, "Llama-3.2-1B down TP=1"),
    Layer("linear", 2304, 16384, "Llama-3-405B qkv TP=8"),
    Layer("linear", 2560, 1024, "Qwen3-4B o TP=4"),
    Layer("linear", 2560, 2048, "Qwen3-4B o TP=2"),
    Layer("linear", 2560, 2432, "Qwen3-4B down TP=4"),
    Layer("linear", 2560, 4096, "Qwen3-4B o TP=1"),
    Layer("linear", 2880, 1024, "GPT-OSS-120B o TP=4"),
    Layer("linear", 2880, 2048, "GPT-OSS-120B o TP=2"),
    Layer("linear", 3072, 1024, "Llama-3.2-3B down TP=8"),
    Layer("linear", 3584, 12288, "Mistral-Large-123B qkv TP=4"),
    Layer("linear", 4096, 512, "Llama-3-8B o TP=8"),
    Layer("linear", 4096, 1536, "Qwen3-8B down TP=8"),
    Layer("linear", 4096, 3072, "Llama-3.2-3B gate_up TP=4"),
    Layer("linear", 4096, 4096, "Llama-3-8B o TP=1"),
    Layer("linear", 4096, 7168, "Llama-3-8B down TP=2"),
    Layer("linear", 4096, 12288, "Qwen3-8B down TP=1"),
    Layer("linear", 4608, 4096, "Qwen3-235B-A22B qkv TP=2"),
    Layer("linear", 5120, 6400, "Qwen3-32B down TP=4"),
    Layer("linear", 5120, 17920, "Phi-4 down TP=1"),
    Layer("linear", 8192, 1024, "Llama-3-70B o TP=8"),
    Layer("linear", 8192, 8192, "Llama-3-70B o TP=1"),
    Layer("linear", 9728, 2560, "Qwen3-4B gate_up TP=2"),
    Layer("linear", 12288, 3072, "Mistral-Large-123B o TP=4"),
    Layer("linear", 12288, 3584, "Mistral-Large-123B down TP=8"),
    Layer("linear", 12288, 7168, "Mistral-Large-123B down TP=4"),
    Layer("linear", 12288, 14336, "Mistral-Large-123B down TP=2"),
    Layer("linear", 12800, 5120, "Qwen3-32B gate_up TP=4"),
    Layer("linear", 16384, 2048, "Llama-3.2-1B gate_up TP=1"),
    Layer("linear", 16384, 4096, "Llama-3-405B o TP=4"),
    Layer("linear", 16384, 8192, "Llama-3-405B o TP=2"),
    Layer("linear", 24576, 4096, "Qwen3-8B gate_up TP=1"),
    Layer("linear", 25600, 5120, "Qwen3-32B gate_up TP=2"),
    Layer("linear", 28672, 8192, "Llama-3-70B gate_up TP=2"),
    Layer("linear", 29568, 8192, "Qwen2.5-72B gate_up TP=2"),
    Layer("linear_silu_and_mul", 1216, 2560, "Qwen3-4B gate_up TP=8"),
    Layer("linear_silu_and_mul", 2048, 2048, "Llama-3.2-1B gate_up TP=4"),
    Layer("linear_silu_and_mul", 2048, 3072, "Llama-3.2-3B gate_up TP=4"),
    Layer("linear_silu_and_mul", 2240, 5120, "Phi-4 gate_up TP=8"),
    Layer("linear_silu_and_mul", 2432, 2560, "Qwen3-4B gate_up TP=4"),
    Layer("linear_silu_and_mul", 3200, 5120, "Qwen3-32B gate_up TP=8"),
    Layer("linear_silu_and_mul", 6144, 4096, "Qwen3-8B gate_up TP=2"),
    Layer("linear_silu_and_mul", 6400, 5120, "Qwen3-32B gate_up TP=4"),
    Layer("linear_silu_and_mul", 6656, 16384, "Llama-3-405B gate_up TP=8"),
    Layer("linear_silu_and_mul", 7168, 8192, "Llama-3-70B gate_up TP=4"),
    Layer("linear_silu_and_mul", 7168, 12288, "Mistral-Large-123B gate_up TP=4"),
    Layer("linear_silu_and_mul", 12800, 5120, "Qwen3-32B gate_up TP=2"),
    Layer("linear_silu_and_mul", 17920, 5120, "Phi-4 gate_up TP=1"),
    Layer("linear_silu_and_mul", 25600, 5120, "Qwen3-32B gate_up TP=1"),
    Layer("linear_fp8", 1536, 2048, "Llama-3.2-1B qkv TP=2"),
    Layer("linear_fp8", 1536, 2560, "Qwen3-4B qkv TP=4"),
    Layer("linear_fp8", 1792, 12288, "Mistral-Large-123B qkv TP=8"),
    Layer("linear_fp8", 2560, 2048, "Qwen3-4B o TP=2"),
    Layer("linear_fp8", 2560, 8192, "Llama-3-70B qkv TP=4"),
    Layer("linear_fp8", 3072, 2560, "Qwen3-4B qkv TP=2"),
    Layer("linear_fp8", 4096, 2048, "Llama-3.2-1B gate_up TP=4"),
    Layer("linear_fp8", 4096, 3072, "Llama-3.2-3B gate_up TP=4"),
    Layer("linear_fp8", 4096, 12288, "Qwen3-8B down TP=1"),
    Layer("linear_fp8", 4608, 4096, "Qwen3-235B-A22B qkv TP=2"),
    Layer("linear_fp8", 5120, 4480, "Phi-4 down TP=4"),
    Layer("linear_fp8", 5120, 8960, "Phi-4 down TP=2"),
    Layer("linear_fp8", 5120, 17920, "Phi-4 down TP=1"),
    Layer("linear_fp8", 7168, 8192, "Llama-3-70B gate_up TP=8"),
    Layer("linear_fp8", 13312, 16384, "Llama-3-405B gate_up TP=8"),
    Layer("linear_fp8", 14336, 12288, "Mistral-Large-123B qkv TP=1"),
    Layer("linear_fp8", 16384, 13312, "Llama-3-405B down TP=4"),
    Layer("linear_fp8", 28672, 4096, "Llama-3-8B gate_up TP=1"),
)

JUDGED = (
    Layer("linear", 1792, 5120, "Qwen2.5-14B qkv TP=4"),
    Layer("linear", 2048, 5376, "Gemma-3-27B qkv TP=4"),
    Layer("linear", 3072, 2880, "Falcon-3-10B down TP=8"),
    Layer("linear", 3072, 11520, "Falcon-3-10B down TP=2"),
    Layer("linear", 3456, 5120, "Qwen2.5-14B gate_up TP=8"),
    Layer("linear", 3584, 1024, "Gemma-2-9B o TP=4"),
    Layer("linear", 3584, 7168, "Gemma-2-9B down TP=2"),
    Layer("linear", 4608, 7168, "Yi-34B qkv TP=2"),
    Layer("linear", 5120, 1792, "Mistral-Nemo-12B down TP=8"),
    Layer("linear", 5120, 3584, "Mistral-Nemo-12B down TP=4"),
    Layer("linear", 5376, 1024, "Gemma-3-27B o TP=4"),
    Layer("linear", 23040, 3072, "Falcon-3-10B gate_up TP=2"),
    Layer("linear", 28672, 3584, "Gemma-2-9B gate_up TP=1"),
    Layer("linear", 28672, 5120, "Mistral-Nemo-12B gate_up TP=1"),
    Layer("linear_silu_and_mul", 2688, 5376, "Gemma-3-27B gate_up TP=8"),
    Layer("linear_silu_and_mul", 3456, 5120, "Qwen2.5-14B gate_up TP=4"),
    Layer("linear_silu_and_mul", 3584, 3584, "Gemma-2-9B gate_up TP=4"),
    Layer("linear_silu_and_mul", 5376, 5376, "Gemma-3-27B gate_up TP=4"),
    Layer("linear_silu_and_mul", 20480, 7168, "Yi-34B gate_up TP=1"),
    Layer("linear_fp8", 2048, 5376, "Gemma-3-27B qkv TP=4"),
    Layer("linear_fp8", 3584, 2048, "Gemma-2-9B o TP=2"),
    Layer("linear_fp8", 3584, 5120, "Qwen2.5-14B qkv TP=2"),
    Layer("linear_fp8", 7168, 5120, "Qwen2.5-14B qkv TP=1"),
    Layer("linear_fp8", 8192, 5376, "Gemma-3-27B qkv TP=1"),
    Layer("linear_fp8", 13824, 5120, "Qwen2.5-14B gate_up TP=2"),
)

#: Layers of FP8 with scales of blocks. They were not drawn, and nothing is fitted to them.
BLOCKS = (
    Layer("linear_fp8_blocks", 6144, 4096, "Qwen3-8B-FP8 qkv TP=1"),
    Layer("linear_fp8_blocks", 4096, 4096, "Qwen3-8B-FP8 o TP=1"),
    Layer("linear_fp8_blocks", 4096, 12288, "Qwen3-8B-FP8 down TP=1"),
    Layer("linear_fp8_blocks", 5120, 4096, "Qwen3-32B-FP8 o TP=2"),
    Layer("linear_fp8_blocks", 5120, 6400, "Qwen3-32B-FP8 down TP=4"),
    Layer("linear_fp8_blocks", 3072, 1536, "DeepSeek-V3 q_b TP=8"),
    Layer("linear_fp8_blocks", 7168, 2048, "DeepSeek-V3 o TP=8"),
    Layer("linear_fp8_blocks", 7168, 2304, "DeepSeek-V3 down TP=8"),
    Layer("linear_silu_and_mul_fp8_blocks", 3072, 4096, "Qwen3-8B-FP8 gate_up TP=4"),
    Layer("linear_silu_and_mul_fp8_blocks", 2304, 7168, "DeepSeek-V3 gate_up TP=8"),
)
LISTS = {"fitted": FITTED, "judged": JUDGED, "blocks": BLOCKS}
