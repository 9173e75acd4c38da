"""Scales of FP8 operands of linear layers: what they may be, and the types that go with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from llm_comm import arrays
from llm_comm.operations.operands import why_not_operand
from llm_comm.operations.quantization import FP8

#: Of results, where neither ``out_dtype`` nor ``out`` says so.
DEFAULT_OUT_DTYPE = torch.bfloat16
_OUT_DTYPES = (torch.bfloat16, torch.float16)


class Scaling(NamedTuple):
    """What a call with FP8 operands says of them. Nothing is checked yet.

    Attributes:
        x: fp32, one scale, or one for each row of x.
        weight: fp32, one scale, or one for each row of the weight.
        out_dtype: Of the result.
    """

    x: Any
    weight: Any
    out_dtype: Any

    @staticmethod
    def of(x_scale: Any, weight_scale: Any, out_dtype: Any, out: Any = None) -> Scaling | None:
        """Of the arguments of a method; None where there are none."""
        if x_scale is None and weight_scale is None and out_dtype is None:
            return None
        return Scaling(x_scale, weight_scale, out_dtype or getattr(out, "dtype", DEFAULT_OUT_DTYPE))

    def kind(self) -> tuple[Any, ...] | None:
        """What a prepared layer depends on, apart from its operands; None where there can be no such layer."""
        x, weight = self.x, self.weight
        if not (isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)) or x.is_nested or weight.is_nested:
            return None
        return x.shape, weight.shape, self.out_dtype

    def is_dense_on(self, device: torch.device) -> bool:
        """Whether scales, known to be tensors, can be read there: what changes no prepared layer."""
        return all(_is_plain_on(scale, device) and not scale.is_neg() for scale in (self.x, self.weight))

    def accepts_traced(self, device: torch.device, tokens: int, rows: int) -> bool:
        """Whether ``why_not`` finds nothing, for torch.compile, which cannot trace texts with sizes."""
        return self.out_dtype in _OUT_DTYPES and all(
            isinstance(scale, torch.Tensor)
            and _is_plain_on(scale, device)
            and (scale.numel() == 1 or scale.numel() == count)
            for scale, count in ((self.x, tokens), (self.weight, rows))
        )

    def why_not(self, device: torch.device, tokens: int, rows: int) -> str:
        """Why these are no scales of so many rows of x and of the weight, or "".

        Whether rows have scales of their own is told by their number alone: [rows], [rows, 1] and the like all do.
        """
        if self.out_dtype not in _OUT_DTYPES:
            return f"results of FP8 operands are torch.bfloat16 or torch.float16, not {self.out_dtype}"
        for name, scale, count in (("x_scale", self.x, tokens), ("weight_scale", self.weight, rows)):
            if not isinstance(scale, torch.Tensor):
                return f"{name} is a {type(scale).__name__}, not a tensor: {FP8} operands need both scales"
            why = why_not_operand(scale, device)
            if why:
                return f"{name}: {why}"
            if scale.dtype is not torch.float32:
                return f"{name} is {scale.dtype}; it must be torch.float32"
            if scale.numel() not in (1, count):
                return f"{name} has shape {tuple(scale.shape)}: it must be one scale, or one for each of {count} rows"
        return ""


def _is_plain_on(scale: torch.Tensor, device: torch.device) -> bool:
    """Whether a scale is a tensor of fp32 there, dense and constant."""
    return (
        scale.dtype is torch.float32
        and arrays.is_dense_on(scale, device)
        and not (torch.is_grad_enabled() and scale.requires_grad)
    )
