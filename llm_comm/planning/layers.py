"""The part of a tuning table that is about linear layers: by shape and number of tokens, whether llm_comm's kernel is
the faster one, and with which tunables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from llm_comm import _core
from llm_comm.config import Config

#: By the name of the communicator's method.
LINEAR = "linear"
LINEAR_SILU_AND_MUL = "linear_silu_and_mul"
LINEAR_GELU_TANH_AND_MUL = "linear_gelu_tanh_and_mul"
#: Methods whose kernel is that of another method, and so are its rows.
_MEASURED_AS = {LINEAR_GELU_TANH_AND_MUL: LINEAR_SILU_AND_MUL}
#: The same of FP8 operands, which are measured by themselves, and of FP8 operands with scales of blocks.
_OF_FP8 = {LINEAR: "linear_fp8", LINEAR_SILU_AND_MUL: "linear_silu_and_mul_fp8"}
_OF_BLOCKS = {LINEAR: "linear_fp8_blocks", LINEAR_SILU_AND_MUL: "linear_silu_and_mul_fp8_blocks"}
#: Tokens, bytes of a weight and bytes of its rows, up to which a layer that no table has is faster than cuBLAS, with
#: dependent launches: by 4 % at least, on H100 and H200 (docs/experiments/linear.md, "Beside cuBLAS").
_FASTER_UNMEASURED = ((64, 32_000_000, 10_752), (32, 128_000_000, 32_768))
_MEASURED_CAPABILITY, _MEASURED_SM_COUNT = 90, 132
#: Whether a device has room for all of them together, the core says when a layer is prepared.
_TUNABLES = ("block_outputs", "stages", "stage_boxes")


class LayerKey(NamedTuple):
    """What the rows of a layer have in common."""

    operation: str
    outputs: int
    inputs: int
    pdl: bool


class LayerRow(NamedTuple):
    """How a layer of so many outputs and inputs runs on up to ``up_to`` tokens."""

    operation: str
    outputs: int
    inputs: int
    #: Whether it was measured with dependent launches, and so counts where ``Config.pdl`` is on.
    pdl: bool
    up_to: int
    #: Than cuBLAS, where both were measured.
    is_faster: bool
    #: Outputs of a block, stages of its ring, and boxes of a stage. 0: as the kernel finds best.
    block_outputs: int = 0
    stages: int = 0
    stage_boxes: int = 0
    #: Of ``up_to`` tokens: microseconds a layer, and those of cuBLAS, with silu-and-mul behind it where the operation
    #: has that. They are for people who read a table; nothing is chosen by them.
    us: float | None = None
    cublas_us: float | None = None

    def without_figures(self) -> LayerRow:
        """What is chosen by."""
        return self._replace(us=None, cublas_us=None)

    def layer(self) -> LayerKey:
        """What rows that belong together have in common."""
        return LayerKey(*self[:4])

    def tunables(self) -> dict[str, int]:
        """By name."""
        return {name: getattr(self, name) for name in _TUNABLES}

    def choice(self) -> _core.LinearChoice:
        """As the core takes it."""
        return _core.LinearChoice(**self.tunables())

    def entry(self) -> dict[str, Any]:
        """What a file says of it."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def takes_features(features: int, multiple: int = _core.linear_multiple) -> bool:
    """Whether there are kernels for so many outputs or, with the multiple of their type, inputs."""
    return 0 < features <= _core.linear_max_features and features % multiple == 0


def inputs_multiple(fp8: bool) -> int:
    """What inputs of a layer are a multiple of."""
    return _core.linear_fp8_multiple if fp8 else _core.linear_multiple


def of_factors(operation: str, fp8: bool, block_scales: bool = False) -> str:
    """Name in tables of a method's layers, of FP8 operands or of others.

    Args:
        block_scales: Whether scales of FP8 operands are those of blocks.
    """
    operation = _MEASURED_AS.get(operation, operation)
    if fp8 and block_scales:
        return _OF_BLOCKS[operation]
    return _OF_FP8[operation] if fp8 else operation


def weights_of(operation: str) -> int:
    """Rows of the weight for an output: 2 where those of gate and up are one layer."""
    return 2 if operation in (LINEAR_SILU_AND_MUL, *(of[LINEAR_SILU_AND_MUL] for of in (_OF_FP8, _OF_BLOCKS))) else 1


def is_fp8(operation: str) -> bool:
    """Whether operands of a table's operation are FP8."""
    return operation in _OF_FP8.values() or has_block_scales(operation)


def has_block_scales(operation: str) -> bool:
    """Whether operands of a table's operation are FP8 with scales of blocks."""
    return operation in _OF_BLOCKS.values()


def choice_of_layer(
    rows: Iterable[LayerRow], operation: str, outputs: int, inputs: int, tokens: int, pdl: bool
) -> _core.LinearChoice:
    """With which tunables a layer runs: as its row says, else as the kernel finds best."""
    row = layer_row(rows, operation, outputs, inputs, tokens, pdl)
    return _core.LinearChoice() if row is None else row.choice()


def layer_row(
    rows: Iterable[LayerRow], operation: str, outputs: int, inputs: int, tokens: int, pdl: bool
) -> LayerRow | None:
    """The row that serves a layer; None where it was not measured, or not with so many tokens."""
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
    """Whether an engine is to compute a layer by llm_comm, as ``Config.fuse_linear`` says."""
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
    """Whether layers that no table has were measured on such devices."""
    return limits.compute_capability == _MEASURED_CAPABILITY and limits.sm_count >= _MEASURED_SM_COUNT


def tokens_by_size(operation: str, outputs: int, inputs: int) -> int:
    """Up to how many tokens a layer that no table has is faster than cuBLAS, by the size of its weight alone.

    Layers with scales of blocks have no such rule: none was measured.
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
    """Of the layers that are preferred; 0 where none is."""
    if config.fuse_linear != "auto":
        return _core.linear_max_tokens if config.fuse_linear else 0
    by_size = _FASTER_UNMEASURED[0][0] if config.pdl and is_measured(limits) else 0
    by_table = (row.up_to for row in rows if row.is_faster and row.pdl == config.pdl)
    return max([by_size, *by_table])
