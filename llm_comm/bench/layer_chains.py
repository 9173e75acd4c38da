"""Times of linear layers on one rank, in a few milliseconds each: chains of layers with cold weights in a CUDA graph.

A graph holds a layer for each of the weights, so many that none is in the L2 cache when its turn comes, as in a model.
Engines tune by it at their start (``integrations/layer_tuning.py``), and tests go by it. ``llm-comm bench`` and
``tune`` align the ranks and repeat more often.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from llm_comm import _core, registry
from llm_comm.bench.timing import capture
from llm_comm.communicator import Communicator
from llm_comm.errors import LlmCommError
from llm_comm.operations.fp8 import GROUP_SIZE, Scaling, empty_scales
from llm_comm.operations.operation import TORCH_TYPES

#: Standard deviation of FP8 operands: small ones lose no more than others.
FP8_SPREAD = 16.0
#: By how much the weights of a chain exceed the L2 cache, which keeps part of what was read before.
_COLD = 2.5
#: Of a GPU that does not say how large its L2 cache is.
_USUAL_L2_BYTES = 64 << 20
_FEWEST_WEIGHTS = 4
_DELAY_CYCLES = 100_000  # longer than the host takes to enqueue a replay
_EMULATED_WEIGHTS = 2
_WEIGHTS_SEED = 2000
#: Outputs and inputs of a spacer, which takes about as long as a fused all-reduce, and its tiling.
_SPACER = (64, 2048)
_SPACER_CHOICE = _core.LinearChoice(block_outputs=8, stages=2, stage_boxes=4)


def make_weights(
    count: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, rank: int
) -> list[torch.Tensor]:
    """Random weights of so many layers of [outputs, inputs]; what a layer makes of normal inputs has a variance of 1,
    of FP8 with its scales. Zeros would draw less power, and so run faster."""
    whole = torch.empty(count, *shape, dtype=dtype, device=device)
    random = torch.Generator(device).manual_seed(_WEIGHTS_SEED + rank)
    if dtype.itemsize == 1:
        for weight in whole:
            weight.copy_(torch.empty(shape, device=device).normal_(0, FP8_SPREAD, generator=random))
    else:
        whole.normal_(0, shape[1] ** -0.5, generator=random)
    if device.type == "cuda":
        # llm_comm's layers read weights before what is ahead in the stream has ended.
        torch.cuda.synchronize(device)
    return list(whole)


def cold_weights(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Random weights of [outputs, inputs], more than the L2 cache holds."""
    count = _EMULATED_WEIGHTS
    if device.type == "cuda":
        l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or _USUAL_L2_BYTES
        count = max(_FEWEST_WEIGHTS, -(-int(_COLD * l2_bytes) // (shape[0] * shape[1] * dtype.itemsize)))
    return make_weights(count, shape, dtype, device, rank=0)


def time_chain(call: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor], reps: int) -> float:
    """Microseconds a layer: the median of ``reps`` runs of ``call`` with each of the weights in turn.

    Args:
        call: Enqueues a layer with this weight on the current stream.
        weights: As of ``cold_weights``.
        reps: Timed runs.
    """
    device = weights[0].device
    if device.type != "cuda":
        return _median_us([_host_seconds(call, weights) for _ in range(reps)], len(weights))
    for weight in weights[:2]:
        call(weight)
    turn = iter(weights)
    graph = capture(lambda: call(next(turn)), len(weights))
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
    for begin, end in events:
        torch.cuda._sleep(_DELAY_CYCLES)
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize(device)
    return _median_us([begin.elapsed_time(end) / 1e3 for begin, end in events], len(weights))


def _host_seconds(call: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor]) -> float:
    start = time.perf_counter()
    for weight in weights:
        call(weight)
    return time.perf_counter() - start


def _median_us(seconds: Sequence[float], layers: int) -> float:
    return statistics.median(seconds) / layers * 1e6


def time_fastest(
    calls: Sequence[Callable[[torch.Tensor], object]], weights: Sequence[torch.Tensor], reps: int
) -> float:
    """Time calls, and return the microseconds of the fastest that the device has kernels for: some GPUs lack torch's
    kernel for FP8 with a scale for each row.

    Raises:
        RuntimeError: It has none.
    """
    times: list[float] = []
    for call in calls:
        try:
            times.append(time_chain(call, weights, reps))
        except RuntimeError:
            if call is calls[-1] and not times:
                raise
    return min(times)


# ---- Calls of a layer -----------------------------------------------------------------------------------------------


def problem_of(x: torch.Tensor, out: torch.Tensor, scales: Sequence[torch.Tensor], silu: bool) -> _core._LinearProblem:
    """A layer as the core takes it. ``scales``: of x and of the weight, where they are FP8."""
    name = next(name for name, dtype in TORCH_TYPES.items() if dtype is out.dtype)
    rows = out.shape[1] * (2 if silu else 1)
    return {
        "tokens": x.shape[0],
        "inputs": x.shape[1],
        "outputs": out.shape[1],
        "data_type": tuple(registry.data_types()).index(name),
        "epilogue": "silu_and_mul" if silu else "none",
        "scales": Scaling(scales[0], scales[1], out.dtype).whose(x, rows) if scales else None,
    }


def unit_scales(x: torch.Tensor, rows: int, blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of 1 for FP8 operands, of rows or of blocks. Those of blocks lie as the kernels of engines take them.

    Args:
        x: [tokens, inputs].
        rows: Of the weight.
        blocks: Whether they are those of blocks.
    """
    if not blocks:
        return x.new_ones(len(x), 1, dtype=torch.float32), x.new_ones(rows, 1, dtype=torch.float32)
    of_weight = x.new_ones(-(-rows // GROUP_SIZE), x.shape[1] // GROUP_SIZE, dtype=torch.float32)
    return empty_scales("group_column_major_tma", x).fill_(1.0), of_weight


def call_of_choice(
    comm: Communicator,
    x: torch.Tensor,
    out: torch.Tensor,
    scales: Sequence[torch.Tensor],
    silu: bool,
    choice: _core.LinearChoice,
) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """The layer of a weight by one tiling, which ``Communicator.linear`` does not take.

    Raises:
        ValueError: There is no such kernel.
    """
    strides = None
    if scales and has_block_scales(x, scales):
        strides = Scaling(scales[0], scales[1], out.dtype).strides_of_blocks()
    run = comm._handle.core().prepare_linear(choice=choice, x_scale_strides=strides, **problem_of(x, out, scales, silu))

    def call(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        stream = 0 if comm.is_emulated else torch.cuda.current_stream(comm.device).cuda_stream
        of_scales = (scale.data_ptr() for scale in scales)
        if not run(x.data_ptr(), weight.data_ptr(), out.data_ptr(), 0, *of_scales, stream):  # 0: no bias
            comm.check()
            raise LlmCommError("the communicator has failed")
        return (out,)

    return call


def choices_of(
    comm: Communicator, x: torch.Tensor, out: torch.Tensor, scales: Sequence[torch.Tensor], silu: bool
) -> list[_core.LinearChoice]:
    """Tilings of a layer that are worth a try, the fastest first as the kernel expects it."""
    return comm._handle.core().linear_choices(**problem_of(x, out, scales, silu))


def spacer_of(comm: Communicator) -> Callable[[], object]:
    """A short layer, for chains in which layers do not stand behind each other alone. Its tiling leaves room for a
    block of the next layer on the same multiprocessor, as that of an all-reduce does."""
    outputs, inputs = _SPACER
    x, weight = (torch.ones(rows, inputs, dtype=torch.bfloat16, device=comm.device) for rows in (1, outputs))
    return partial(call_of_choice(comm, x, x.new_empty(1, outputs), (), False, _SPACER_CHOICE), weight)


def layer_by_torch(
    x: torch.Tensor, out: torch.Tensor, scales: Sequence[torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer of a weight by torch, and so by cuBLAS. With scales, of FP8, the result is a new tensor like ``out``,
    else it is ``out``."""
    if not scales:
        return lambda weight: torch.mm(x, weight.t(), out=out)
    x_scale, weight_scale = scales
    if has_block_scales(x, scales):
        if x.device.type == "cuda":
            by_block = weight_scale.t()
            return lambda weight: torch._scaled_mm(x, weight.t(), x_scale, by_block, out_dtype=out.dtype)
        of_x = x_scale.repeat_interleave(GROUP_SIZE, 1)
        of_weight = weight_scale.repeat_interleave(GROUP_SIZE, 0).repeat_interleave(GROUP_SIZE, 1)
        return lambda weight: ((x.float() * of_x) @ (weight.float() * of_weight[: len(weight)]).t()).to(out.dtype)
    if x.device.type != "cuda":
        return lambda weight: (x.float() @ weight.float().t() * weight_scale.view(1, -1) * x_scale).to(out.dtype)
    of_weight = weight_scale.view(1, -1) if weight_scale.numel() > 1 else weight_scale
    by_row = {"scale_a": x_scale, "scale_b": of_weight}
    return lambda weight: torch._scaled_mm(x, weight.t(), **by_row, out_dtype=out.dtype, use_fast_accum=True)


def layer_by_vllm(
    x: torch.Tensor, out: torch.Tensor, scales: Sequence[torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer of a weight of FP8 by vLLM's kernel, which must be loaded; the result is ``out``."""
    x_scale, weight_scale = scales
    of_weight = weight_scale.t() if has_block_scales(x, scales) else weight_scale

    def call(weight: torch.Tensor) -> torch.Tensor:
        torch.ops._C.cutlass_scaled_mm(out, x, weight.t(), x_scale, of_weight, None)
        return out

    return call


def layer_by_deep_gemm(
    x: torch.Tensor, out: torch.Tensor, scales: Sequence[torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer of a weight of FP8 with scales of blocks by DeepGEMM, as vLLM calls it; the result is ``out``."""
    x_scale, weight_scale = scales

    def call(weight: torch.Tensor) -> torch.Tensor:
        torch.ops.vllm.fp8_gemm_nt_op(x, x_scale, weight, weight_scale, out, False)  # scales are no powers of 2
        return out

    return call


def layer_by_flashinfer(x: torch.Tensor, scales: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer of a weight of FP8 with scales of blocks by FlashInfer, as vLLM calls it: of bf16, which it quantizes
    itself. The result is a new tensor."""
    plain, weight_scale = x.to(torch.bfloat16), scales[1]
    return lambda weight: torch.ops.vllm.flashinfer_fp8_blockscale_gemm(plain, weight, weight_scale)


def quantization_before(x: torch.Tensor, scales: Sequence[torch.Tensor]) -> Callable[[], object] | None:
    """vLLM's quantization by blocks of what becomes ``x``; None: it is not loaded, or there are no scales of blocks.

    With it layers that take FP8 are compared with FlashInfer's, which has a quantization of its own.
    """
    is_loaded = x.device.type == "cuda" and hasattr(torch.ops._C, "per_token_group_fp8_quant")
    if not scales or not has_block_scales(x, scales) or not is_loaded:
        return None
    plain, largest = x.to(torch.bfloat16), torch.finfo(x.dtype).max
    numbers = (GROUP_SIZE, 1e-10, -largest, largest)
    return lambda: torch.ops._C.per_token_group_fp8_quant(plain, x, scales[0], *numbers, False, True, True)


def behind(first: Callable[[], object] | None, call: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """The call of a layer with what stands before it."""
    if first is None:
        return call

    def both(weight: torch.Tensor) -> Any:
        first()
        return call(weight)

    return both


def has_block_scales(x: torch.Tensor, scales: Sequence[torch.Tensor]) -> bool:
    """Return whether the scales of a layer of FP8 are those of blocks. Of one block of inputs ``False`` is as good."""
    return scales[0].numel() > len(x)


def calls_of_others(
    x: torch.Tensor, out: torch.Tensor, scales: Sequence[torch.Tensor], silu: bool
) -> list[Callable[[torch.Tensor], object]]:
    """The layer by the kernels that engines have for it: torch's, and of FP8 those of vLLM that are loaded. Behind gate
    and up stands an activation that reads and writes as silu-and-mul does, and before layers with scales of blocks
    vLLM's quantization, where it is loaded."""
    products = out.new_empty(len(x), 2 * out.shape[1]) if silu else out
    quantize = quantization_before(x, scales)
    layers = [layer_by_torch(x, products, scales)]
    if scales and x.device.type == "cuda" and hasattr(torch.ops._C, "cutlass_scaled_mm"):
        layers.append(layer_by_vllm(x, products, scales))
    if scales and has_block_scales(x, scales) and hasattr(torch.ops.vllm, "fp8_gemm_nt_op"):
        layers.append(layer_by_deep_gemm(x, products, scales))
    layers = [behind(quantize, layer) for layer in layers]
    if quantize is not None and hasattr(torch.ops.vllm, "flashinfer_fp8_blockscale_gemm"):
        layers.append(layer_by_flashinfer(x, scales))
    if not silu:
        return list(layers)

    def gated(layer: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.glu.out(layer(weight), -1, out=out)  # type: ignore[no-any-return]

    return [partial(gated, layer) for layer in layers]
