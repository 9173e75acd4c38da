"""FP8: the quantization of normed rows, and the scales of operands of linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from llm_comm import _core
from llm_comm.operations.operands import why_not_operand

FP8 = torch.float8_e4m3fn
#: Elements of a row that share a scale, in the modes of ``GROUPS``.
GROUP_SIZE = 128
#: Rows that scales by columns are padded to: 16 bytes, as TMA wants.
_ALIGNED_ROWS = 4

#: A scale for each group. Without more it lies by rows.
GROUPS = (
    "group",
    "group_column_major",
    "group_column_major_tma",
    "group_ue8m0",
    "group_column_major_ue8m0",
    "group_column_major_tma_ue8m0",
)
#: By ``quantize``: Quantization in csrc/algorithms/all_reduce_add_rms_norm/operation.cuh, where the names stand too.
CODES = {name: code for code, name in enumerate((None, "static", "dynamic", *GROUPS))}
#: Of results, where neither ``out_dtype`` nor ``out`` says so.
DEFAULT_OUT_DTYPE = torch.bfloat16
_OUT_DTYPES = (torch.bfloat16, torch.float16)
#: Of scales of blocks of x.
_MAX_STRIDE = 2**32 - 1


def makes_scales(quantize: str | None) -> bool:
    """Whether a call returns scales."""
    return quantize is not None and quantize != "static"


def takes(quantize: str | None, row: int, dimensions: int) -> bool:
    """Whether there is such a quantization, of a tensor of rows of so many elements with so many dimensions."""
    if quantize not in GROUPS:
        return quantize in CODES
    return row % GROUP_SIZE == 0 and (dimensions == 2 or "column_major" not in quantize)


def why_not(quantize: str | None, shape: Sequence[int] | None = None) -> str:
    """Why there is no such quantization, or none of rows of this shape, or ""."""
    if quantize not in CODES:
        return f"quantize is {quantize!r}: it must be None, {', '.join(repr(name) for name in CODES if name)}"
    if shape is None or takes(quantize, shape[-1], len(shape)):
        return ""
    if shape[-1] % GROUP_SIZE != 0:
        return f"rows of {shape[-1]} elements: quantize={quantize!r} takes a multiple of {GROUP_SIZE}"
    return f"x has shape {tuple(shape)}: quantize={quantize!r} takes two dimensions"


def empty_scales(quantize: str, x: torch.Tensor) -> torch.Tensor:
    """Where the scales of rows like ``x`` go, if it takes them: float32, [..., 1], or of groups [..., hidden / 128]."""
    return x.new_empty_strided(*_layout(quantize, x.shape), dtype=torch.float32)


def why_not_scales(quantize: str, scale: torch.Tensor, x: torch.Tensor) -> str:
    """Why a tensor of the caller's cannot be the scales of rows like ``x``, if it takes them, or ""."""
    if quantize in GROUPS:
        shape, strides = _layout(quantize, x.shape)
        steps = zip(shape, scale.stride(), strides, strict=False)
        # Where there is one of something, nobody takes a step.
        fits = scale.shape == shape and all(size == 1 or found == wanted for size, found, wanted in steps)
        how = f"have shape {shape} and strides {strides}"
    else:
        count = 1 if quantize == "static" else x.numel() // x.shape[-1]
        fits = scale.numel() == count and scale.is_contiguous()
        how = f"be contiguous and have {count} elements"
    if fits and scale.dtype is torch.float32 and scale.device == x.device:
        return ""
    is_ = f"{tuple(scale.shape)}, strides {scale.stride()}, {scale.dtype}, {scale.device}"
    return f"scale ({is_}) must {how}, and be float32 on {x.device}"


def _layout(quantize: str, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the scales that a call makes.

    Those by columns have the strides of vLLM's and SGLang's ``per_token_group_quant_fp8``: (1, rows), or, for TMA,
    (1, rows rounded up to a multiple of 4).
    """
    *outer, row = shape
    scales = (*outer, row // GROUP_SIZE if quantize in GROUPS else 1)
    if quantize in GROUPS and "column_major" in quantize:
        rows = outer[0]
        is_for_tma = "tma" in quantize
        return scales, (1, (rows + _ALIGNED_ROWS - 1) // _ALIGNED_ROWS * _ALIGNED_ROWS if is_for_tma else rows)
    strides = [1]
    for size in scales[:0:-1]:
        strides.insert(0, strides[0] * size)
    return scales, tuple(strides)


class Scaling(NamedTuple):
    """What a call with FP8 operands says of them. Nothing is checked yet.

    Scales of blocks are those of both operands: a scale for ``GROUP_SIZE`` inputs of a token, and one for as many
    inputs of ``GROUP_SIZE`` rows of the weight.

    Attributes:
        x: fp32, one scale, one for each row of x, or [..., inputs / 128] of blocks.
        weight: fp32, one scale, one for each row of the weight, or [rows / 128, inputs / 128] of blocks, rounded up.
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
        if x.layout is not torch.strided:  # it has no strides
            return None
        return x.shape, x.stride(), weight.shape, self.out_dtype

    def is_dense_on(self, device: torch.device) -> bool:
        """Whether scales, known to be tensors, can be read there: what changes no prepared layer."""
        x, weight = self.x, self.weight
        return _is_readable_on(x, device) and _is_plain_on(weight, device) and not (x.is_neg() or weight.is_neg())

    def of_blocks(self, x: torch.Tensor, rows: int) -> bool:
        """Whether tensors of these shapes are scales of blocks of x and of so many rows of the weight.

        Where numbers of scales are those of tensors or rows, they are that.
        """
        if self.x.dim() == 0 or self.weight.dim() != 2:
            return False
        blocks = x.shape[-1] // GROUP_SIZE
        if self.x.shape != (*x.shape[:-1], blocks) or self.weight.shape != (-(-rows // GROUP_SIZE), blocks):
            return False
        return blocks > 1 or self.weight.numel() != 1

    def whose(self, x: torch.Tensor, rows: int) -> tuple[int, int]:
        """As the core takes it of scales that are served: whose each scale of x is, and each of the weight."""
        if self.of_blocks(x, rows):
            return _core.SCALE_OF_BLOCK, _core.SCALE_OF_BLOCK
        of_x, of_weight = (
            _core.SCALE_OF_TENSOR if scale.numel() == 1 else _core.SCALE_OF_ROW for scale in (self.x, self.weight)
        )
        return of_x, of_weight

    def strides_of_blocks(self) -> tuple[int, int]:
        """Elements from one token's scales of blocks to the next one's, and from a block's scale to the next one's."""
        *outer, blocks = self.x.shape
        token = self.x.stride(0) if len(outer) == 1 and outer[0] > 1 else blocks
        return token, self.x.stride(-1) if blocks > 1 else 1

    def accepts_traced(self, device: torch.device, x: torch.Tensor, rows: int) -> bool:
        """Whether ``why_not`` finds nothing, for torch.compile, which cannot trace texts with sizes."""
        if self.out_dtype not in _OUT_DTYPES or not (
            isinstance(self.x, torch.Tensor) and isinstance(self.weight, torch.Tensor)
        ):
            return False
        if not (_is_readable_on(self.x, device) and _is_plain_on(self.weight, device)):
            return False
        if self.of_blocks(x, rows):
            return self._has_strides_of_blocks()
        return self.x.is_contiguous() and all(
            scale.numel() == 1 or scale.numel() == count
            for scale, count in ((self.x, x.shape[:-1].numel()), (self.weight, rows))
        )

    def why_not(self, device: torch.device, x: torch.Tensor, rows: int) -> str:
        """Why these are no scales of x and of a weight of so many rows, or "".

        Whether rows have scales of their own is told by their number alone: [rows], [rows, 1] and the like all do.
        Scales of blocks are told by both shapes.
        """
        if self.out_dtype not in _OUT_DTYPES:
            return f"results of FP8 operands are torch.bfloat16 or torch.float16, not {self.out_dtype}"
        tokens, blocks = x.shape[:-1].numel(), x.shape[-1] // GROUP_SIZE
        of_both = isinstance(self.x, torch.Tensor) and isinstance(self.weight, torch.Tensor)
        of_blocks = of_both and self.of_blocks(x, rows)
        for name, scale, count in (("x_scale", self.x, tokens), ("weight_scale", self.weight, rows)):
            if not isinstance(scale, torch.Tensor):
                return f"{name} is a {type(scale).__name__}, not a tensor: {FP8} operands need both scales"
            why = why_not_operand(scale, device, strided=of_blocks and scale is self.x)
            if why:
                return f"{name}: {why}"
            if scale.dtype is not torch.float32:
                return f"{name} is {scale.dtype}; it must be torch.float32"
            if not of_blocks and scale.numel() not in (1, count):
                return (
                    f"{name} has shape {tuple(scale.shape)}: it must be one scale, or one for each of {count} rows; "
                    f"or x_scale is {[*x.shape[:-1], blocks]} and weight_scale {[-(-rows // GROUP_SIZE), blocks]}, "
                    f"for blocks of {GROUP_SIZE}"
                )
        if of_blocks and not self._has_strides_of_blocks():
            return (
                f"x_scale has shape {tuple(self.x.shape)} and strides {self.x.stride()}: it must be contiguous, or "
                f"have two dimensions and strides of 1 and more"
            )
        return ""

    def _has_strides_of_blocks(self) -> bool:
        if self.x.dim() == 2:
            return all(0 < stride <= _MAX_STRIDE for stride in self.strides_of_blocks())
        is_contiguous: bool = self.x.is_contiguous()
        return is_contiguous


def _is_plain_on(scale: torch.Tensor, device: torch.device) -> bool:
    """Whether a scale is a tensor of fp32 there, dense and constant."""
    return _is_readable_on(scale, device) and scale.is_contiguous()


def _is_readable_on(scale: torch.Tensor, device: torch.device) -> bool:
    """Whether a scale is a tensor of fp32 there, of any strides, and constant."""
    return (
        scale.dtype is torch.float32
        and scale.device == device
        and scale.layout is torch.strided
        and not scale.is_nested
        and not (torch.is_grad_enabled() and scale.requires_grad)
    )
