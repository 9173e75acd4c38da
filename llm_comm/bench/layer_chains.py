"""Timing of linear layers on one rank, in a few milliseconds each: chains of layers with cold weights in a CUDA graph.

A graph holds one layer for each weight. Together the weights exceed the L2 cache, so each is read from device memory,
as in a model. Engines measure layers with it when they start (``integrations/layer_tuning.py``), and so do tests.
``llm-comm bench`` and ``llm-comm tune`` align the ranks and repeat more often.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from llm_comm import _core, registry
from llm_comm.bench.timing import capture
from llm_comm.communicator import Communicator
from llm_comm.errors import LlmCommError
from llm_comm.operations.fp8 import GROUP_SIZE, Scaling, empty_scales
from llm_comm.operations.operation import TORCH_TYPES

#: Standard deviation of FP8 weights. Few of them are subnormal, which have less relative precision.
FP8_SPREAD = 16.0
#: Bytes of a chain's weights relative to the L2 cache. With a factor near 1 part of a weight would still be cached.
_COLD = 2.5
#: L2 cache size in bytes that is assumed if torch does not report it.
_USUAL_L2_BYTES = 64 << 20
_FEWEST_WEIGHTS = 4
_DELAY_CYCLES = 100_000  # GPU sleep before a replay; longer than the host takes to enqueue it
_EMULATED_WEIGHTS = 2
_WEIGHTS_SEED = 2000
#: Outputs and inputs of a spacer layer, which takes about as long as a fused all-reduce, and its tiling.
_SPACER = (64, 2048)
_SPACER_CHOICE = _core.LinearChoice(block_outputs=8, stages=2, stage_boxes=4)


_Link = TypeVar("_Link")


def make_weights(
    count: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, rank: int
) -> list[torch.Tensor]:
    """Create random weights of ``count`` layers with ``shape`` [outputs, inputs].

    Results of standard normal inputs have a variance of 1; FP8 weights have the standard deviation ``FP8_SPREAD``
    instead. Weights of zeros would draw less power and time too fast.
    """
    whole = torch.empty(count, *shape, dtype=dtype, device=device)
    random = torch.Generator(device).manual_seed(_WEIGHTS_SEED + rank)
    if dtype.itemsize == 1:
        for weight in whole:
            weight.copy_(torch.empty(shape, device=device).normal_(0, FP8_SPREAD, generator=random))
    else:
        whole.normal_(0, shape[1] ** -0.5, generator=random)
    if device.type == "cuda":
        # llm_comm's layers read weights before earlier kernels of the stream have ended.
        torch.cuda.synchronize(device)
    return list(whole)


def cold_weights(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Create random weights of [outputs, inputs] that together exceed the L2 cache by the factor ``_COLD``."""
    count = _EMULATED_WEIGHTS
    if device.type == "cuda":
        l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or _USUAL_L2_BYTES
        count = max(_FEWEST_WEIGHTS, -(-int(_COLD * l2_bytes) // (shape[0] * shape[1] * dtype.itemsize)))
    return make_weights(count, shape, dtype, device, rank=0)


def time_chain(call: Callable[[_Link], object], links: Sequence[_Link], reps: int, device: torch.device) -> float:
    """Return the microseconds of one layer: the median over ``reps`` runs of a chain of layers.

    Args:
        call: Enqueues a layer on the current stream.
        links: What ``call`` is given for each layer of the chain, such as weights from ``cold_weights``.
        reps: Number of timed runs.
        device: Device of the layers.
    """
    if device.type != "cuda":
        return _median_us([_host_seconds(call, links) for _ in range(reps)], len(links))
    for link in links[:2]:
        call(link)
    turn = iter(links)
    graph = capture(lambda: call(next(turn)), len(links))
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
    for begin, end in events:
        torch.cuda._sleep(_DELAY_CYCLES)
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize(device)
    return _median_us([begin.elapsed_time(end) / 1e3 for begin, end in events], len(links))


def _host_seconds(call: Callable[[_Link], object], links: Sequence[_Link]) -> float:
    start = time.perf_counter()
    for link in links:
        call(link)
    return time.perf_counter() - start


def _median_us(seconds: Sequence[float], layers: int) -> float:
    return statistics.median(seconds) / layers * 1e6


def time_fastest(
    calls: Sequence[Callable[[torch.Tensor], object]], weights: Sequence[torch.Tensor], reps: int
) -> float:
    """Time several kernels of one layer and return the microseconds of the fastest.

    Calls that raise RuntimeError are skipped: some GPUs lack torch's kernel for FP8 with a scale for each row.

    Raises:
        RuntimeError: All calls failed.
    """
    times: list[float] = []
    for call in calls:
        try:
            times.append(time_chain(call, weights, reps, weights[0].device))
        except RuntimeError:
            if call is calls[-1] and not times:
                raise
    return min(times)


# ---- Calls of a layer -----------------------------------------------------------------------------------------------


def problem_of(x: torch.Tensor, out: torch.Tensor, scales: Sequence[torch.Tensor], silu: bool) -> _core._LinearProblem:
    """Return the arguments that describe a layer to the core.

    Args:
        x: [tokens, inputs].
        out: [tokens, outputs].
        scales: Scales of x and of the weight; empty unless they are FP8.
        silu: The layer is gate and up with silu-and-mul.
    """
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
    """Create scales of 1 for FP8 operands: of rows, or block scales in the layout of the engines' kernels.

    Args:
        x: [tokens, inputs].
        rows: Rows of the weight.
        blocks: Create block scales.

    Returns:
        float32 scales of x and of the weight: [tokens, 1] and [rows, 1], or [tokens, inputs / 128] with column-major
        strides for TMA and [rows / 128, rounded up, inputs / 128].
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
    """Return a call of the layer with a given tiling, for which ``Communicator.linear`` has no parameter.

    The call raises LlmCommError if the communicator has failed.

    Raises:
        ValueError: The kernel does not support the tiling.
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
    """Return candidate tilings of a layer: the kernel's own, then others by the time that its model estimates."""
    return comm._handle.core().linear_choices(**problem_of(x, out, scales, silu))


def spacer_of(comm: Communicator) -> Callable[[], object]:
    """Return a call of a short layer, which stands for an all-reduce between the layers of a chain.

    Its small tiling leaves room for a block of the next layer on the same multiprocessor, as an all-reduce does.
    """
    outputs, inputs = _SPACER
    x, weight = (torch.ones(rows, inputs, dtype=torch.bfloat16, device=comm.device) for rows in (1, outputs))
    return partial(call_of_choice(comm, x, x.new_empty(1, outputs), (), False, _SPACER_CHOICE), weight)


def layer_by_torch(
    x: torch.Tensor, out: torch.Tensor, scales: Sequence[torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a call of the layer by torch, which uses cuBLAS on a GPU.

    The call writes to ``out``; with FP8 operands it returns a new tensor like ``out``.
    """
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
    """Return a call of an FP8 layer by vLLM's ``cutlass_scaled_mm``, which must be loaded. It writes to ``out``."""
    x_scale, weight_scale = scales
    of_weight = weight_scale.t() if has_block_scales(x, scales) else weight_scale

    def call(weight: torch.Tensor) -> torch.Tensor:
        torch.ops._C.cutlass_scaled_mm(out, x, weight.t(), x_scale, of_weight, None)
        return out

    return call


def layer_by_deep_gemm(
    x: torch.Tensor, out: torch.Tensor, scales: Sequence[torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a call of an FP8 layer with block scales by DeepGEMM, as vLLM calls it. It writes to ``out``."""
    x_scale, weight_scale = scales

    def call(weight: torch.Tensor) -> torch.Tensor:
        torch.ops.vllm.fp8_gemm_nt_op(x, x_scale, weight, weight_scale, out, False)  # scales are no powers of 2
        return out

    return call


def layer_by_flashinfer(x: torch.Tensor, scales: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a call of an FP8 layer with block scales by FlashInfer, as vLLM calls it.

    The kernel takes x in bf16 and quantizes it. The result is a new tensor.
    """
    plain, weight_scale = x.to(torch.bfloat16), scales[1]
    return lambda weight: torch.ops.vllm.flashinfer_fp8_blockscale_gemm(plain, weight, weight_scale)


def quantization_before(x: torch.Tensor, scales: Sequence[torch.Tensor]) -> Callable[[], object] | None:
    """Return a call of vLLM's quantization that writes ``x`` and its block scales.

    It runs before kernels that take x in FP8, so that their times compare with FlashInfer's kernel, which quantizes x.
    None: vLLM's operator is not loaded, or the scales are not block scales.
    """
    is_loaded = x.device.type == "cuda" and hasattr(torch.ops._C, "per_token_group_fp8_quant")
    if not scales or not has_block_scales(x, scales) or not is_loaded:
        return None
    plain, largest = x.to(torch.bfloat16), torch.finfo(x.dtype).max
    numbers = (GROUP_SIZE, 1e-10, -largest, largest)
    return lambda: torch.ops._C.per_token_group_fp8_quant(plain, x, scales[0], *numbers, False, True, True)


def behind(first: Callable[[], object] | None, call: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Return a call that runs ``first``, unless it is None, and then the layer."""
    if first is None:
        return call

    def both(weight: torch.Tensor) -> Any:
        first()
        return call(weight)

    return both


def has_block_scales(x: torch.Tensor, scales: Sequence[torch.Tensor]) -> bool:
    """Return whether the scales of an FP8 layer are block scales. False with 128 inputs, where both have one scale for
    each row of x."""
    return scales[0].numel() > len(x)


def calls_of_others(
    x: torch.Tensor, out: torch.Tensor, scales: Sequence[torch.Tensor], silu: bool
) -> list[Callable[[torch.Tensor], object]]:
    """Return calls of the layer by the kernels of engines: torch's, and for FP8 those of vLLM that are loaded.

    Each call includes what llm_comm's kernel replaces. Gate and up are followed by ``glu``, which reads and writes the
    same bytes as silu-and-mul. Layers with block scales are preceded by vLLM's quantization, if it is loaded.
    """
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
