"""FP8 and NVFP4: quantization of normed rows, and the scales of the FP8 operands of linear layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from llm_comm import _core
from llm_comm.operations.operands import why_not_operand

FP8 = torch.float8_e4m3fn
#: Elements of a row that share a scale in the modes ``GROUPS``.
GROUP_SIZE = 128
#: Multiple to which the column stride of TMA scales is rounded up: 4 fp32 values, the 16 bytes that TMA requires.
_ALIGNED_ROWS = 4

#: Modes with a scale for each group of 128 elements. "column_major" in the name changes the layout from row-major.
GROUPS = (
    "group",
    "group_column_major",
    "group_column_major_tma",
    "group_ue8m0",
    "group_column_major_ue8m0",
    "group_column_major_tma_ue8m0",
)
#: Elements of a row that share a scale of one byte, in the modes with blocks. "_linear" in the name changes the layout
#: of the scales from tiles to rows.
BLOCKS = {"nvfp4": 16, "nvfp4_linear": 16, "mxfp8": 32, "mxfp8_linear": 32}
#: Modes with FP4 values, which need a global scale.
NVFP4 = frozenset({"nvfp4", "nvfp4_linear"})
#: Rows and blocks of a tile of scales.
_TILE = (128, 4)
#: Value of each mode in the kernels: ``Quantization`` in csrc/algorithms/all_reduce_add_rms_norm/operation.cuh, which
#: lists the names too.
CODES = {name: code for code, name in enumerate((None, "static", "dynamic", *GROUPS, *BLOCKS))}
#: Dtype of results if neither ``out_dtype`` nor ``out`` gives one.
DEFAULT_OUT_DTYPE = torch.bfloat16
_OUT_DTYPES = (torch.bfloat16, torch.float16)
#: Largest stride of block scales of x: the kernel has 32 bits for it.
_MAX_STRIDE = 2**32 - 1


def makes_scales(quantize: str | None) -> bool:
    """Return whether the kernel computes scales, which the call then returns."""
    return quantize is not None and quantize != "static"


def takes(quantize: str | None, row: int, dimensions: int) -> bool:
    """Return whether mode ``quantize`` exists for a tensor with ``row`` elements in its last of ``dimensions``
    dimensions."""
    if quantize in BLOCKS:
        return row % BLOCKS[quantize] == 0
    if quantize not in GROUPS:
        return quantize in CODES
    return row % GROUP_SIZE == 0 and (dimensions == 2 or "column_major" not in quantize)


def why_not(quantize: str | None, shape: Sequence[int] | None = None) -> str:
    """Return why mode ``quantize`` does not exist, or does not fit rows of ``shape``, or ""."""
    if quantize not in CODES:
        return f"quantize is {quantize!r}: it must be None, {', '.join(repr(name) for name in CODES if name)}"
    if shape is None or takes(quantize, shape[-1], len(shape)):
        return ""
    size = BLOCKS.get(str(quantize), GROUP_SIZE)
    if shape[-1] % size != 0:
        return f"rows of {shape[-1]} elements: quantize={quantize!r} takes a multiple of {size}"
    return f"x has shape {tuple(shape)}: quantize={quantize!r} takes two dimensions"


def normed_layout(quantize: str | None, x: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of the normed rows of ``x``. NVFP4 has two values in a byte."""
    if quantize in NVFP4:
        return (*x.shape[:-1], x.shape[-1] // 2), torch.uint8
    return tuple(x.shape), x.dtype if quantize is None else FP8


def empty_normed(quantize: str | None, x: torch.Tensor) -> torch.Tensor:
    """Allocate the normed rows of ``x``, which ``takes`` must accept."""
    shape, dtype = normed_layout(quantize, x)
    return x.new_empty(shape, dtype=dtype) if quantize in NVFP4 else torch.empty_like(x, dtype=dtype)


def empty_scales(quantize: str, x: torch.Tensor) -> torch.Tensor:
    """Allocate the scales of the rows of ``x``, which ``takes`` must accept.

    Scales are float32: [..., 1], or [..., hidden / 128] for groups. Scales of blocks are float8_e4m3fn for NVFP4 and
    uint8 for MXFP8: [..., hidden / 16 or 32], or tiles [rows, blocks] rounded up to multiples of 128 and 4.

    The fused kernel writes the padding of tiles, as vLLM's ``scaled_fp4_quant`` does: zeros. Matrix products of the
    engines read padding, and NaN in it has reached results (vllm-project/vllm#38148). No fill kernel is needed.
    """
    shape, strides = _layout(quantize, x.shape)
    return x.new_empty_strided(shape, strides, dtype=_scale_dtype(quantize))


def why_not_scales(quantize: str, scale: torch.Tensor, x: torch.Tensor) -> str:
    """Return why ``scale`` cannot hold the scales of the rows of ``x``, or "". ``takes`` must accept ``x``."""
    if quantize in GROUPS:
        shape, strides = _layout(quantize, x.shape)
        steps = zip(shape, scale.stride(), strides, strict=False)
        # The stride of a dimension of size 1 has no effect.
        fits = scale.shape == shape and all(size == 1 or found == wanted for size, found, wanted in steps)
        how = f"have shape {shape} and strides {strides}"
    else:
        count = 1 if quantize == "static" else x.numel() // x.shape[-1]
        if quantize in BLOCKS:
            count = math.prod(_layout(quantize, x.shape)[0])
        fits = scale.numel() == count and scale.is_contiguous()
        how = f"be contiguous and have {count} elements"
    dtype = _scale_dtype(quantize)
    if fits and scale.dtype is dtype and scale.device == x.device:
        return ""
    is_ = f"{tuple(scale.shape)}, strides {scale.stride()}, {scale.dtype}, {scale.device}"
    return f"scale ({is_}) must {how}, and be {str(dtype).removeprefix('torch.')} on {x.device}"


def why_not_global_scale(quantize: str | None, global_scale: torch.Tensor | None) -> str:
    """Return why ``global_scale`` is missing, or why the mode takes none, or ""."""
    if (quantize in NVFP4) == (global_scale is not None):
        return ""
    if global_scale is None:
        return f"quantize={quantize!r} needs global_scale, a float32 tensor of one element"
    return f"global_scale with quantize={quantize!r}: only NVFP4 takes it"


def _is_linear(quantize: str) -> bool:
    return quantize.endswith("_linear")


def _scale_dtype(quantize: str) -> torch.dtype:
    """Return the dtype of scales: e8m0 scales of MXFP8 are uint8, as in the engines."""
    if quantize not in BLOCKS:
        return torch.float32
    return FP8 if quantize in NVFP4 else torch.uint8


def _layout(quantize: str, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of the scales that a call computes.

    Column-major ones have the strides of ``per_token_group_quant_fp8`` in vLLM and SGLang: (1, rows), or for TMA (1,
    rows rounded up to a multiple of 4).
    """
    *outer, row = shape
    scales: tuple[int, ...] = (*outer, row // GROUP_SIZE if quantize in GROUPS else 1)
    if quantize in BLOCKS:
        scales = (*outer, row // BLOCKS[quantize])
        if not _is_linear(quantize):
            sizes = math.prod(outer), scales[-1]
            scales = tuple((size + step - 1) // step * step for size, step in zip(sizes, _TILE, strict=True))
    if quantize in GROUPS and "column_major" in quantize:
        rows = outer[0]
        is_for_tma = "tma" in quantize
        return scales, (1, (rows + _ALIGNED_ROWS - 1) // _ALIGNED_ROWS * _ALIGNED_ROWS if is_for_tma else rows)
    strides = [1]
    for size in scales[:0:-1]:
        strides.insert(0, strides[0] * size)
    return scales, tuple(strides)


class Scaling(NamedTuple):
    """Scales and output dtype of a call with FP8 operands, not yet validated.

    Both operands have block scales, or neither has. A block of x has ``GROUP_SIZE`` inputs of one token. A block of the
    weight has ``GROUP_SIZE`` inputs of ``GROUP_SIZE`` rows.

    Attributes:
        x: float32. One scale, one for each row of ``x``, or block scales [..., inputs / 128].
        weight: float32. One scale, one for each row of the weight, or block scales [rows / 128, rounded up,
            inputs / 128].
        out_dtype: Dtype of the result.
    """

    x: Any
    weight: Any
    out_dtype: Any

    @staticmethod
    def of(x_scale: Any, weight_scale: Any, out_dtype: Any, out: Any = None) -> Scaling | None:
        """Build from the arguments of a method. Return None if all three are None."""
        if x_scale is None and weight_scale is None and out_dtype is None:
            return None
        return Scaling(x_scale, weight_scale, out_dtype or getattr(out, "dtype", DEFAULT_OUT_DTYPE))

    def kind(self) -> tuple[Any, ...] | None:
        """Return the cache key of a prepared layer, as far as scales determine it; None if the scales are not plain
        tensors."""
        x, weight = self.x, self.weight
        if not (isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)) or x.is_nested or weight.is_nested:
            return None
        if x.layout is not torch.strided:  # it has no strides
            return None
        return x.shape, x.stride(), weight.shape, self.out_dtype

    def is_dense_on(self, device: torch.device) -> bool:
        """Return whether the scales, which must be tensors, can be read on ``device``. The cache key does not depend on
        it."""
        x, weight = self.x, self.weight
        return _is_readable_on(x, device) and _is_plain_on(weight, device) and not (x.is_neg() or weight.is_neg())

    def of_blocks(self, x: torch.Tensor, rows: int) -> bool:
        """Return whether the scales have the shapes of block scales, for ``x`` and ``rows`` rows of the weight.

        One block of inputs and one scale of the weight fit both readings. They are then scales of rows and of a tensor,
        which give the same products.
        """
        if self.x.dim() == 0 or self.weight.dim() != 2:
            return False
        blocks = x.shape[-1] // GROUP_SIZE
        if self.x.shape != (*x.shape[:-1], blocks) or self.weight.shape != (-(-rows // GROUP_SIZE), blocks):
            return False
        return blocks > 1 or self.weight.numel() != 1

    def whose(self, x: torch.Tensor, rows: int) -> tuple[int, int]:
        """Return the core's numbers (``SCALE_OF_...``) for the granularity of both scales, which must be supported."""
        if self.of_blocks(x, rows):
            return _core.SCALE_OF_BLOCK, _core.SCALE_OF_BLOCK
        of_x, of_weight = (
            _core.SCALE_OF_TENSOR if scale.numel() == 1 else _core.SCALE_OF_ROW for scale in (self.x, self.weight)
        )
        return of_x, of_weight

    def strides_of_blocks(self) -> tuple[int, int]:
        """Return the strides of block scales of x in elements: between tokens, and between blocks.

        Dimensions of size 1 have the stride of contiguous scales, whatever torch reports. Scales of more than two
        dimensions must be contiguous.
        """
        *outer, blocks = self.x.shape
        token = self.x.stride(0) if len(outer) == 1 and outer[0] > 1 else blocks
        return token, self.x.stride(-1) if blocks > 1 else 1

    def accepts_traced(self, device: torch.device, x: torch.Tensor, rows: int) -> bool:
        """Return whether ``why_not`` returns "". For torch.compile, which cannot trace texts that contain sizes."""
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
        """Return why the scales do not fit x and ``rows`` rows of the weight, or "".

        Block scales have the two shapes that ``of_blocks`` checks. Otherwise only the number of elements matters:
        [rows], [rows, 1] and similar shapes all mean one scale for each row.
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
    """Return whether a scale is a dense fp32 tensor on ``device`` that needs no gradient."""
    return _is_readable_on(scale, device) and scale.is_contiguous()


def _is_readable_on(scale: torch.Tensor, device: torch.device) -> bool:
    """Return whether a scale is an fp32 tensor on ``device``, of any strides, that needs no gradient."""
    return (
        scale.dtype is torch.float32
        and scale.device == device
        and scale.layout is torch.strided
        and not scale.is_nested
        and not (torch.is_grad_enabled() and scale.requires_grad)
    )
