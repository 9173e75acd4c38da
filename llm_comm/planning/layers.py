"""Linear layers in a tuning table: whether llm_comm's kernel is the faster one for a shape and number of tokens, and
its tiling."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from llm_comm import _core
from llm_comm.config import Config

#: Operations in tables. Layers without FP8 have the name of the communicator's method.
LINEAR = "linear"
LINEAR_SILU_AND_MUL = "linear_silu_and_mul"
LINEAR_GELU_TANH_AND_MUL = "linear_gelu_tanh_and_mul"
#: Methods that use the rows of another method, because both run the same kernel.
_MEASURED_AS = {LINEAR_GELU_TANH_AND_MUL: LINEAR_SILU_AND_MUL}
#: Operation of each method for FP8 operands with scales of tensors or rows, and with block scales. Both are measured
#: separately.
_OF_FP8 = {LINEAR: "linear_fp8", LINEAR_SILU_AND_MUL: "linear_silu_and_mul_fp8"}
_OF_BLOCKS = {LINEAR: "linear_fp8_blocks", LINEAR_SILU_AND_MUL: "linear_silu_and_mul_fp8_blocks"}
#: Bounds within which a layer without rows is preferred: tokens, bytes of the weight, bytes of a weight row. Measured
#: layers within them were at least 4 % faster than cuBLAS with dependent launches on H100 and H200
#: (docs/experiments/linear.md, "Beside cuBLAS").
_FASTER_UNMEASURED = ((64, 32_000_000, 10_752), (32, 128_000_000, 32_768))
_MEASURED_CAPABILITY, _MEASURED_SM_COUNT = 90, 132
#: Fields of the tiling. The core checks that they fit the device together when a layer is prepared.
_TUNABLES = ("block_outputs", "stages", "stage_boxes")


class LayerKey(NamedTuple):
    """Fields that the rows of one layer share."""

    operation: str
    outputs: int
    inputs: int
    pdl: bool


class LayerRow(NamedTuple):
    """Row of a tuning table: one layer for up to ``up_to`` tokens, from the next smaller row on."""

    operation: str
    outputs: int
    inputs: int
    #: Measured with dependent launches. The row counts only if ``Config.pdl`` is equal.
    pdl: bool
    up_to: int
    #: llm_comm was measured to be faster than the kernels it was compared with: cuBLAS, for FP8 also those of vLLM.
    is_faster: bool
    #: Tiling: weight rows of a thread block, stages of its ring, TMA tiles of a stage. 0: the kernel chooses.
    block_outputs: int = 0
    stages: int = 0
    stage_boxes: int = 0
    #: Microseconds of the layer with ``up_to`` tokens: by llm_comm, and by cuBLAS, followed by silu-and-mul if the
    #: operation includes it. For readers of the table; no decision depends on them.
    us: float | None = None
    cublas_us: float | None = None

    def without_figures(self) -> LayerRow:
        """Return the row without its times: all that decisions depend on."""
        return self._replace(us=None, cublas_us=None)

    def layer(self) -> LayerKey:
        """Return the fields that all rows of the layer share."""
        return LayerKey(*self[:4])

    def tunables(self) -> dict[str, int]:
        """Return the tiling by field name."""
        return {name: getattr(self, name) for name in _TUNABLES}

    def choice(self) -> _core.LinearChoice:
        """Return the tiling as the core takes it."""
        return _core.LinearChoice(**self.tunables())

    def entry(self) -> dict[str, Any]:
        """Return the row as a mapping for the table file, without absent times."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def takes_features(features: int, multiple: int = _core.linear_multiple) -> bool:
    """Return whether the kernels support this number of outputs, or of inputs with ``inputs_multiple``."""
    return 0 < features <= _core.linear_max_features and features % multiple == 0


def inputs_multiple(fp8: bool) -> int:
    """Return the multiple that the number of inputs must be."""
    return _core.linear_fp8_multiple if fp8 else _core.linear_multiple


def of_factors(operation: str, fp8: bool, block_scales: bool = False) -> str:
    """Return the operation in tables for a method and its operands.

    Args:
        operation: Name of the communicator's method.
        fp8: Operands are FP8.
        block_scales: The scales of FP8 operands are block scales.
    """
    operation = _MEASURED_AS.get(operation, operation)
    if fp8 and block_scales:
        return _OF_BLOCKS[operation]
    return _OF_FP8[operation] if fp8 else operation


def weights_of(operation: str) -> int:
    """Return the rows of the weight for an output: 2 for gate and up, else 1."""
    return 2 if operation in (LINEAR_SILU_AND_MUL, *(of[LINEAR_SILU_AND_MUL] for of in (_OF_FP8, _OF_BLOCKS))) else 1


def is_fp8(operation: str) -> bool:
    """Return whether the operands of a table's operation are FP8, with scales of any granularity."""
    return operation in _OF_FP8.values() or has_block_scales(operation)


def has_block_scales(operation: str) -> bool:
    """Return whether the operands of a table's operation are FP8 with block scales."""
    return operation in _OF_BLOCKS.values()


def choice_of_layer(
    rows: Iterable[LayerRow], operation: str, outputs: int, inputs: int, tokens: int, pdl: bool
) -> _core.LinearChoice:
    """Return the tiling of a layer: that of its row, or zeros, with which the kernel chooses."""
    row = layer_row(rows, operation, outputs, inputs, tokens, pdl)
    return _core.LinearChoice() if row is None else row.choice()


def layer_row(
    rows: Iterable[LayerRow], operation: str, outputs: int, inputs: int, tokens: int, pdl: bool
) -> LayerRow | None:
    """Return the first row of a layer with ``up_to >= tokens``. None: the table has no such row."""
    layer = (operation, outputs, inputs, pdl)
    return next((row for row in rows if row.layer() == layer and tokens <= row.up_to), None)


def is_preferred(
    rows: Iterable[LayerRow],
    config: Config,
    limits: _core.Limits,
    operation: str,
    outputs: int,
    inputs: int,
    tokens: int,
) -> bool:
    """Return whether an engine should use llm_comm for a layer, according to ``Config.fuse_linear``.

    With ``"auto"`` the rows of a layer decide. A layer with rows, but none for this many tokens, is not preferred. A
    layer without rows is preferred by ``tokens_by_size``, with dependent launches on measured devices only.
    """
    multiple = inputs_multiple(is_fp8(operation))
    if not (1 <= tokens <= _core.linear_max_tokens and takes_features(outputs) and takes_features(inputs, multiple)):
        return False
    if config.fuse_linear != "auto":
        return bool(config.fuse_linear)
    of_layer = [row for row in rows if row.layer() == (operation, outputs, inputs, config.pdl)]
    if of_layer:
        row = layer_row(of_layer, operation, outputs, inputs, tokens, config.pdl)
        return row is not None and row.is_faster
    return config.pdl and is_measured(limits) and tokens <= tokens_by_size(operation, outputs, inputs)


def is_measured(limits: _core.Limits) -> bool:
    """Return whether ``tokens_by_size`` was measured on this kind of device."""
    return limits.compute_capability == _MEASURED_CAPABILITY and limits.sm_count >= _MEASURED_SM_COUNT


def tokens_by_size(operation: str, outputs: int, inputs: int) -> int:
    """Return the number of tokens up to which a layer without rows is preferred, by the size of its weight; 0: never.

    Layers with block scales give 0: no such layer was measured for this rule.
    """
    if has_block_scales(operation):
        return 0
    row_bytes = inputs * (1 if is_fp8(operation) else 2)
    return next(
        (
            tokens
            for tokens, weight_limit, row_limit in _FASTER_UNMEASURED
            if weights_of(operation) * outputs * row_bytes <= weight_limit and row_bytes <= row_limit
        ),
        0,
    )


def most_tokens(rows: Iterable[LayerRow], config: Config, limits: _core.Limits) -> int:
    """Return an upper bound of the tokens of preferred layers; 0 if no layer is preferred."""
    if config.fuse_linear != "auto":
        return _core.linear_max_tokens if config.fuse_linear else 0
    by_size = _FASTER_UNMEASURED[0][0] if config.pdl and is_measured(limits) else 0
    by_table = (row.up_to for row in rows if row.is_faster and row.pdl == config.pdl)
    return max([by_size, *by_table])
