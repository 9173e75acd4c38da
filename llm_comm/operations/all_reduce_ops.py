"""Mixin of ``Communicator``: methods of all-reduce, alone and fused with the norm after it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from llm_comm import arrays
from llm_comm.operations import torch_operators
from llm_comm.operations.generic import GenericOperations
from llm_comm.operations.operands import PLAIN as _PLAIN
from llm_comm.operations.operands import PLAIN_WEIGHTS as _WEIGHTS
from llm_comm.operations.operands import attempt
from llm_comm.operations.operands import is_traced as _is_traced
from llm_comm.operations.operands import is_watched as _is_watched
from llm_comm.planning.plan import Plan

# Global names are cheaper to look up than attributes.
_is_compiling = torch.compiler.is_compiling
_Tensor = torch.Tensor


class AllReduceOps:
    """Mixin of ``Communicator``: all-reduce, alone and fused with the norm, with their ``accepts`` and ``plan``
    queries."""

    name: str
    _operations: torch_operators.Operations
    _other_operations: GenericOperations
    # ``run`` of both operations, bound at set-up to save attribute look-ups.
    _all_reduce: Callable[..., Any]
    _all_reduce_add_rms_norm: Callable[..., tuple[torch.Tensor, ...]]

    # ---- Operations ---------------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, out: Any = None) -> Any:
        """Sum ``x`` over all ranks: accumulated in fp32 in rank order and rounded once, bitwise equal on all ranks.

        Option ``wire`` quantizes large messages: lossy, and bitwise equal on all ranks too.

        Args:
            x: Contiguous tensor of any shape, bfloat16, float16 or float32, on this communicator's device; or an array
                with DLPack or ``__cuda_array_interface__``.
            out: Output: like ``x``. It may be ``x`` itself; any other overlap is an error. None: a new tensor.

        Returns:
            ``out``, or a new tensor (array) like ``x``.

        Raises:
            UnsupportedInputError: ``accepts(x)`` is false, or ``out`` does not fit ``x``.
            CommunicatorError: This or an earlier call has failed: PeerTimeout, LaunchError, MismatchError or
                ConcurrentUseError.
        """
        # Host time of a call is measured and bounded: this path avoids every Python call that it can.
        if _is_compiling() or type(x) is not _Tensor or _is_watched():
            return self._dispatch_all_reduce(x, out)
        return self._all_reduce(x, out)

    def try_all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """``all_reduce(x, out)`` if ``accepts(x)``, else None. ``x`` is checked once, for engines that have their own
        fallback. All ranks get a tensor or all get None.

        Args:
            x, out: Arguments of ``all_reduce``.

        Returns:
            ``out``, or a new tensor like ``x``. None if ``x`` is declined and nothing was computed.

        Raises:
            UnsupportedInputError: ``x`` is accepted, and ``out`` does not fit it.
            CommunicatorError: ``x`` is accepted, and this or an earlier call has failed, see ``all_reduce``.
        """
        if _is_compiling() or type(x) is not _Tensor or _is_watched():
            result: torch.Tensor | None = self._dispatch_all_reduce(x, out) if self.accepts(x) else None
        else:
            result = self._all_reduce(x, out, True)
        return result

    def _dispatch_all_reduce(self, x: Any, out: Any) -> Any:
        """Handle arrays, tensor subclasses and traced tensors: through the registered torch operator, or as an
        array."""
        if isinstance(x, _Tensor):
            return torch_operators.all_reduce(x, out, self.name)
        return arrays.call(self.all_reduce, x, out)

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        weight_bias: float = 0.0,
        out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        quantize: str | None = None,
        scale: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Sum ``x`` over all ranks, add ``residual``, and apply RMSNorm to each row, in one kernel.

        The sum is bitwise that of ``all_reduce`` without option ``wire``. The new residual is bitwise the torch sum of
        that and ``residual``.

        The normed rows are ``new_residual / sqrt(mean(new_residual ** 2) + eps) * (weight + weight_bias)``, computed in
        fp32 and rounded once. A row's result does not depend on other rows. Gemma's norms have a ``weight_bias`` of 1,
        and engines round them once as well. vLLM's other norms also round before the multiplication by the weight. If
        the sum of squares overflows fp32, the row becomes zeros, as in the engines.

        ``quantize`` converts the normed rows, rounded to the dtype of ``x``, to FP8 e4m3, or to FP4 e2m1 for NVFP4.
        Values beyond +-448, or +-6, saturate; NaN stays NaN in FP8 and becomes 6 in FP4. The modes are:

        - ``"static"``: multiply by ``1 / scale``, as vLLM's ``static_scaled_fp8_quant``.
        - ``"dynamic"``: divide by one scale for each row, its largest magnitude / 448, at least 1 / (448 * 512). This
          is vLLM's ``rms_norm_dynamic_per_token_quant``. SGLang's per-token kernel multiplies by the reciprocal and has
          no lower bound.
        - ``"group..."``: divide by one scale for each 128 elements of a row, max(largest magnitude, 1e-10) / 448.
          Values and scales are bitwise those of vLLM's ``per_token_group_quant_fp8`` for the same normed rows
          (``csrc/quantization/w8a8/fp8/per_token_group_quant.cu`` there), except that NaN stays NaN. SGLang multiplies
          by reciprocals, so its last bits may differ if scales are no powers of two.
        - ``"nvfp4"``: FP4, two values to a byte, the first in the low half. A block of 16 elements has an e4m3 scale,
          its largest magnitude / 6 * ``global_scale``. Values are multiplied by ``global_scale`` / scale, or become 0
          if the scale is 0. This is FlashInfer's ``kARResidualRMSNormFP4Quant`` and vLLM's ``scaled_fp4_quant``. Both
          divide approximately, so a value halfway between two FP4 values may become the other one.
        - ``"mxfp8"``: FP8. A block of 32 elements has an e8m0 scale (OCP Microscaling Formats 1.0): its largest
          magnitude / 448, rounded up to a power of two, at least 2^-127. Values are divided by the scale, as by
          FlashInfer's ``mxfp8_quantize``.

        In both, NaN among numbers does not change a block's scale, and a block of NaN has scale NaN. Scales lie in
        tiles of 128 rows and 4 blocks, the layout 128x4 of cuBLAS, CUTLASS and FlashInfer. ``"nvfp4_linear"`` and
        ``"mxfp8_linear"`` store scales by rows.

        | ``quantize`` | strides of the scales | option in the engines' functions |
        |---|---|---|
        | ``"group"`` | (hidden / 128, 1) | none |
        | ``"group_column_major"`` | (1, tokens) | ``column_major_scales`` |
        | ``"group_column_major_tma"`` | (1, tokens rounded up to a multiple of 4) | vLLM: also ``tma_aligned_scales`` |
        | | | SGLang: also ``scale_tma_aligned`` |
        | ``"..._ue8m0"``, each of the three | the same | ``use_ue8m0`` |

        ``_ue8m0`` rounds scales up to powers of two, at least 2^-33, stored as float32. The packed form of four scales
        in an int32, which DeepGEMM takes on Blackwell, is not supported.

        Args:
            x: [..., hidden], contiguous, bfloat16 or float16; hidden is a multiple of 8 up to 16384.
            residual: Like ``x``, equal on all ranks. None adds nothing: the new residual is the sum.
            weight: [hidden], of the dtype of ``x``.
            eps: Added to the mean of the squares; equal on all ranks.
            weight_bias: Added to the weights in fp32; finite, equal on all ranks.
            out: Normed rows: like ``x``, float8_e4m3fn if quantized, or uint8 [..., hidden / 2] for NVFP4. May be
                ``x`` if not quantized. None: a new tensor.
            residual_out: New residual: like ``x``. May be ``residual`` or ``x``. None: a new tensor.
            quantize: None or a mode. Group modes need a multiple of 128 as hidden; column-major ones also a
                two-dimensional ``x``. NVFP4 needs a multiple of 16, MXFP8 of 32.
            scale: For ``"static"``: input, float32, one element, required. For other modes: output of the scales,
                float32; None: a new tensor. ``"dynamic"``: one element for each row, [..., 1] if new. ``"group..."``:
                [..., hidden / 128] with the strides of the table. Padding between columns is not written.
                NVFP4: float8_e4m3fn, [..., hidden / 16]. MXFP8: uint8, [..., hidden / 32]. Both are contiguous. In
                tiles, rows and blocks are rounded up to multiples of 128 and 4, and padding becomes 0.
            global_scale: For NVFP4: input, float32, one element, required; equal on all ranks.

        Returns:
            ``(normed, new_residual)``; if the call computes scales ``(normed, new_residual, scale)``.

        Raises:
            UnsupportedInputError: ``accepts_all_reduce_add_rms_norm(x, weight, quantize)`` is false, or another tensor
                does not fit. Nothing was computed: call ``all_reduce``.
            CommunicatorError: This or an earlier call has failed, see ``all_reduce``.
        """
        if (
            _is_compiling()
            or type(x) is not _Tensor
            or type(residual) not in _PLAIN
            or type(weight) not in _WEIGHTS
            or type(scale) not in _PLAIN
            or type(global_scale) not in _PLAIN
            or _is_watched()
        ):
            operands, name = {"x": x, "residual": residual, "weight": weight}, "all_reduce_add_rms_norm"
            return torch_operators.add_rms_norm(
                name, operands, eps, weight_bias, out, residual_out, quantize, scale, self.name, global_scale
            )
        return self._all_reduce_add_rms_norm(
            x, residual, weight, eps, weight_bias, out, residual_out, quantize, scale, None, global_scale
        )

    def try_all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        weight_bias: float = 0.0,
        out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        quantize: str | None = None,
        scale: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...] | None:
        """``all_reduce_add_rms_norm`` if it serves all arguments, else None. They are checked once, for engines that
        have their own fallback. All ranks get tensors or all get None.

        Args:
            x, residual, weight, eps, weight_bias, out, residual_out, quantize, scale, global_scale: Arguments of
                ``all_reduce_add_rms_norm``.

        Returns:
            Result of ``all_reduce_add_rms_norm``. None if nothing was computed.

        Raises:
            CommunicatorError: The call is served, and this or an earlier call has failed, see ``all_reduce``.
        """
        operands = x, residual, weight, eps
        options: dict[str, Any] = {"out": out, "residual_out": residual_out, "quantize": quantize, "scale": scale}
        options["global_scale"] = global_scale
        return attempt(
            partial(self.accepts_all_reduce_add_rms_norm, x, weight, quantize),
            partial(self.all_reduce_add_rms_norm, *operands, weight_bias=weight_bias, **options),
        )

    # ---- Queries ------------------------------------------------------------------------------------------------

    def accepts(self, x: Any) -> bool:
        """Return whether ``all_reduce(x)`` is served.

        The answer depends on shape, dtype, layout, kind of device, and whether ``x`` needs a gradient in grad mode.
        Ranks that run the same program with the same kind of tensor therefore get the same answer.

        Raises:
            UnsupportedInputError: ``x`` is neither a tensor nor an array that torch can use.
        """
        tensor = x if isinstance(x, torch.Tensor) else arrays.as_tensor(x)
        calls = self._operations.all_reduce
        return calls.accepts_traced(tensor) if _is_traced(tensor) else calls.accepts(tensor)

    def accepts_all_reduce_add_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, quantize: str | None = None
    ) -> bool:
        """Return whether ``all_reduce_add_rms_norm`` of ``x`` and ``weight`` is served.

        The answer depends on the same properties as ``accepts``, of both tensors, and on ``quantize``.
        """
        calls = self._operations.all_reduce_add_rms_norm
        if _is_traced(x):
            return calls.accepts_traced(x, weight, quantize)
        return calls.accepts(x, weight, quantize)

    def plan(self, x: Any) -> Plan:
        """Return the plan of ``all_reduce(x)``. The algorithm is ``"declined"`` for an input that is not served.

        Raises:
            UnsupportedInputError: See ``accepts``.
        """
        return self._operations.all_reduce.plan(arrays.as_tensor(x))

    def plan_all_reduce_add_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, quantize: str | None = None) -> Plan:
        """Return the plan of ``all_reduce_add_rms_norm`` of ``x`` and ``weight``; ``"declined"`` if it is not
        served."""
        return self._operations.all_reduce_add_rms_norm.plan(x, weight, quantize)

    #: Deprecated aliases.
    accepts_fused = accepts_all_reduce_add_rms_norm
    plan_fused = plan_all_reduce_add_rms_norm

    def plan_for(self, operation: str, x: torch.Tensor, *, row: int = 0, **parameters: float) -> Plan:
        """Return the plan of ``run`` of an operation for buffers like ``x``.

        Raises:
            UnsupportedInputError: The operation is unknown, or a parameter is missing or unknown.
        """
        return self._other_operations.plan(operation, x, row, parameters)
