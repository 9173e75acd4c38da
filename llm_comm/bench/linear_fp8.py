"""The ways to compute linear layers of FP8 that ``llm-comm bench linear --fp8`` times, and what judges their results.

Tensor cores of Hopper multiply FP8 exactly, but add with fewer bits than fp32 has: an instruction aligns its 32
products and the sum so far to the largest of them, and keeps 13 bits behind its leading one ("around 14 bits", 3.3.2 of
DeepSeek-V3, arXiv 2412.19437). What a sum may be off by follows from that, for operands that are known.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llm_comm.bench.linear_arms import Arm, Names, Operands
from llm_comm.bench.reference import worst
from llm_comm.bench.report import OURS
from llm_comm.communicator import Communicator

#: Column head of the kernel that vLLM uses.
CUTLASS = "vllm cutlass"
FP8_REMARK = "scaled_mm: torch._scaled_mm with fast accumulation"
#: Columns of an instruction, and of a box: boxes of even number are added by one team, the others by another.
_STEP, _BOX = 32, 128
#: What one addend of an instruction may lose, relative to the largest.
_CUT = 2.0**-13
#: By how much more kernels may be off that add in another order: one chain in place of two, or many.
_ANY_ORDER = 4.0


def sums_and_errors(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``x @ weight.T`` in float64, and what tensor cores may be off by in llm_comm's order.

    Args:
        x: [tokens, inputs], FP8. Inputs are whole boxes.
        weight: [outputs, inputs], FP8.
    """
    x, weight = x.double(), weight.double()
    total = torch.zeros(len(x), len(weight), dtype=torch.float64, device=x.device)
    allowed = torch.zeros_like(total)
    for team in range(2):
        partial, error = torch.zeros_like(total), torch.zeros_like(total)
        for box in range(team * _BOX, x.shape[1], 2 * _BOX):
            for first in range(box, box + _BOX, _STEP):
                of_x, of_weight = x[:, first : first + _STEP], weight[:, first : first + _STEP]
                largest = of_x.abs().amax(1, keepdim=True) * of_weight.abs().amax(1)
                error += (_STEP + 1) * _CUT * torch.maximum(largest, partial.abs() + error)
                partial += of_x @ of_weight.t()
        total += partial
        allowed += error + partial.abs() * 2.0**-23
    return total, allowed


def bound_of(total: Tensor, allowed: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A result in float64, and what it may be off by.

    Args:
        total, allowed: Of ``sums_and_errors``.
        scale: Of x times that of the weight, float64, like ``total`` or to be broadcast.
        dtype: To which results are rounded, once, behind two products with scales.
    """
    info = torch.finfo(dtype)
    exact = total * scale
    return exact, allowed * scale + exact.abs() * (info.eps / 2 + 2.0**-22) + info.tiny * info.eps


class Fp8Judge:
    """The results of all layers in float64, which judge those of an arm."""

    def __init__(self, operands: Operands) -> None:
        assert operands.scales is not None
        x_scale, weight_scale = operands.scales
        scale = x_scale.double().view(-1, 1) * weight_scale.double().view(1, -1)
        self._bounds = [
            bound_of(*sums_and_errors(operands.x, weight), scale, operands.out.dtype) for weight in operands.weights
        ]

    def layer(self, out: Tensor, index: int, rounds_once: bool) -> float:
        """As of ``Judge``: how far off a result is, as a fraction of what may be.

        Args:
            rounds_once: In llm_comm's order; otherwise in any.
        """
        exact, allowed = self._bounds[index]
        return worst(out.double() - exact, allowed * (1.0 if rounds_once else _ANY_ORDER))


def our_fp8_arm(comm: Communicator, operands: Operands, judge: Fp8Judge) -> Arm:
    """llm_comm's layer."""
    assert operands.scales is not None
    x_scale, weight_scale = operands.scales

    def call(weight: Tensor) -> tuple[Tensor, ...]:
        return (comm.linear(operands.x, weight, operands.out, x_scale=x_scale, weight_scale=weight_scale),)

    return Arm(OURS, call, lambda found, index: judge.layer(found[0], index, True))


def other_fp8_arms(comm: Communicator, operands: Operands, judge: Fp8Judge) -> Iterator[Arm]:
    """torch's layer, and vLLM's where it can be imported."""
    assert operands.scales is not None
    x, out, (x_scale, weight_scale) = operands.x, operands.out, operands.scales

    def by_torch(weight: Tensor) -> tuple[Tensor, ...]:
        if comm.is_emulated:
            products = x.float() @ weight.float().t()
            return ((products * weight_scale.view(1, -1) * x_scale).to(out.dtype),)
        of_weight = weight_scale.view(1, -1) if weight_scale.numel() > 1 else weight_scale
        scales = {"scale_a": x_scale, "scale_b": of_weight}
        return (torch._scaled_mm(x, weight.t(), **scales, out_dtype=out.dtype, use_fast_accum=True),)

    def by_cutlass(weight: Tensor) -> tuple[Tensor, ...]:
        torch.ops._C.cutlass_scaled_mm(out, x, weight.t(), x_scale, weight_scale, None)
        return (out,)

    def error(found: tuple[Tensor, ...], index: int) -> float:
        return judge.layer(found[0], index, False)

    yield Arm(Names.of(not comm.is_emulated, fp8=True).layer, by_torch, error)
    if not comm.is_emulated and _has_cutlass():
        yield Arm(CUTLASS, by_cutlass, error)


def _has_cutlass() -> bool:
    try:
        from vllm import _custom_ops  # noqa: F401
    except ImportError:
        return False
    return hasattr(torch.ops._C, "cutlass_scaled_mm")
