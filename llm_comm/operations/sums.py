"""The methods of a communicator for all-reduces, alone and with the norm behind them."""

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

# Global names cost less than attributes.
_is_compiling = torch.compiler.is_compiling
_Tensor = torch.Tensor


class Sums:
    """Mixin of ``Communicator``: all-reduces, alone and fused with the norm, and their ``accepts`` and ``plan``."""

    name: str
    _operations: torch_operators.Operations
    _other_operations: GenericOperations
    # ``run`` of them, found with one look-up each.
    _all_reduce: Callable[..., Any]
    _all_reduce_add_rms_norm: Callable[..., tuple[torch.Tensor, ...]]

    # ---- Operations ---------------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, out: Any = None) -> Any:
        """Sums ``x`` over all ranks, accumulated in fp32 in rank order and rounded once: bitwise the same on all ranks.

        Args:
            x: Contiguous tensor of any shape, bfloat16, float16 or float32, on this communicator's device; or an array
                with DLPack or ``__cuda_array_interface__``.
            out: Where the sum goes: like ``x``, which it may be, but must not overlap otherwise. None: a new tensor.

        Returns:
            ``out``, or a new tensor (array) like ``x``.

        Raises:
            UnsupportedInputError: ``accepts(x)`` is false, or ``out`` does not fit ``x``.
            CommunicatorError: This or an earlier call has failed: PeerTimeout, LaunchError, MismatchError or
                ConcurrentUseError.
        """
        # Host time of a call is a bar: this path makes no Python call that it can do without.
        if _is_compiling() or type(x) is not _Tensor or _is_watched():
            return self._dispatch_all_reduce(x, out)
        return self._all_reduce(x, out)

    def try_all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """``all_reduce(x, out)`` where ``accepts(x)``, else None: in one look at ``x``, for engines that then go their
        own way. The same on all ranks.

        Args:
            x, out: As of ``all_reduce``.

        Returns:
            ``out``, or a new tensor like ``x``; None: nothing has been summed.

        Raises:
            UnsupportedInputError: ``x`` is accepted, and ``out`` does not fit it.
            CommunicatorError: ``x`` is accepted, and this or an earlier call has failed, as of ``all_reduce``.
        """
        if _is_compiling() or type(x) is not _Tensor or _is_watched():
            result: torch.Tensor | None = self._dispatch_all_reduce(x, out) if self.accepts(x) else None
        else:
            result = self._all_reduce(x, out, True)
        return result

    def _dispatch_all_reduce(self, x: Any, out: Any) -> Any:
        """What is no ordinary tensor, or not one yet."""
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
    ) -> tuple[torch.Tensor, ...]:
        """Sums ``x`` over all ranks, adds ``residual`` and norms each row, in one kernel.

        The sum is bitwise that of ``all_reduce``, and the new residual bitwise the torch sum of it and ``residual``.
        The normed rows are ``new_residual / sqrt(mean(new_residual ** 2) + eps) * (weight + weight_bias)`` computed in
        fp32 and rounded once; a row's bits do not depend on the rows beside it. Norms of Gemma are those with a
        ``weight_bias`` of 1, and engines round them once as well. (vLLM's other norms round before the multiplication
        by the weight too.) Where the sum of the squares overflows fp32 a row becomes zeros, as in the engines.

        With ``quantize`` the normed rows, rounded to the dtype of ``x``, become FP8 e4m3, beyond +-448 saturated; NaN
        stays NaN. ``"static"``: multiplied by ``1 / scale``, as vLLM's ``static_scaled_fp8_quant``. ``"dynamic"``:
        divided by a scale for each row, its largest magnitude / 448 but at least 1 / (448 * 512), as vLLM's
        ``rms_norm_dynamic_per_token_quant``. (SGLang's per-token kernel multiplies by the reciprocal and has no least
        scale.) ``"group..."``: divided by a scale for each 128 elements of a row, their largest magnitude, but at least
        1e-10, / 448. That and the scales are bitwise what vLLM's ``per_token_group_quant_fp8`` makes of the same normed
        rows (``csrc/quantization/w8a8/fp8/per_token_group_quant.cu`` there), except that NaN stays NaN. SGLang's
        multiplies by reciprocals, so its last bits may differ where scales are no powers of two.

        ====================================  =======================  ==========================================
        ``quantize``                          strides of the scales    as in the engines' functions
        ====================================  =======================  ==========================================
        ``"group"``                           (hidden / 128, 1)
        ``"group_column_major"``              (1, tokens)              ``column_major_scales``
        ``"group_column_major_tma"``          (1, tokens rounded up    that and ``tma_aligned_scales`` (vLLM) or
                                              to a multiple of 4)      ``scale_tma_aligned`` (SGLang)
        ``"..._ue8m0"``, each of the three    the same                 ``use_ue8m0``
        ====================================  =======================  ==========================================

        With ``_ue8m0`` scales are rounded up to powers of two, at least 2^-33, and stay float32: four of them in an
        int32, as DeepGEMM wants them on Blackwell, are not made.

        Args:
            x: [..., hidden], contiguous, bfloat16 or float16; hidden is a multiple of 8 up to 16384.
            residual: Like ``x``, the same on all ranks; None adds nothing, and the new residual is the sum.
            weight: [hidden], of the dtype of ``x``.
            eps: Added to the mean of the squares; the same on all ranks, as is ``weight_bias``.
            weight_bias: Added to the weights in fp32, in which it must be a finite number.
            out: Where the normed rows go: like ``x``, which it may be, or float8_e4m3fn. None: a new tensor.
            residual_out: Where the new residual goes: like ``x``; it may be ``residual``, or ``x``. None: a new tensor.
            quantize: None, ``"static"``, ``"dynamic"``, or one of the table: hidden is a multiple of 128 then, and
                ``x`` has two dimensions if scales go by columns.
            scale: ``"static"``: float32, one element, required. Else where the scales go, float32; None: a new tensor.
                ``"dynamic"``: an element for each row, [..., 1] if new. ``"group..."``: [..., hidden / 128], of these
                strides. What lies between the columns is not written.

        Returns:
            ``(normed, new_residual)``; with ``"dynamic"`` and ``"group..."`` ``(normed, new_residual, scale)``.

        Raises:
            UnsupportedInputError: ``accepts_all_reduce_add_rms_norm(x, weight, quantize)`` is false, or another tensor
                does not fit. The sum has not been made then: call ``all_reduce``.
            CommunicatorError: This or an earlier call has failed, as of ``all_reduce``.
        """
        if (
            _is_compiling()
            or type(x) is not _Tensor
            or type(residual) not in _PLAIN
            or type(weight) not in _WEIGHTS
            or type(scale) not in _PLAIN
            or _is_watched()
        ):
            operands, name = {"x": x, "residual": residual, "weight": weight}, "all_reduce_add_rms_norm"
            return torch_operators.add_rms_norm(
                name, operands, eps, weight_bias, out, residual_out, quantize, scale, self.name
            )
        return self._all_reduce_add_rms_norm(x, residual, weight, eps, weight_bias, out, residual_out, quantize, scale)

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
    ) -> tuple[torch.Tensor, ...] | None:
        """``all_reduce_add_rms_norm`` where it serves all of these, else None: in one look at them, for engines that
        then go their own way. The same on all ranks.

        Args:
            x, residual, weight, eps, weight_bias, out, residual_out, quantize, scale: As of
                ``all_reduce_add_rms_norm``.

        Returns:
            What that returns; None: nothing has been summed.

        Raises:
            CommunicatorError: The call is served, and this or an earlier one has failed, as of ``all_reduce``.
        """
        operands = x, residual, weight, eps
        options: dict[str, Any] = {"out": out, "residual_out": residual_out, "quantize": quantize, "scale": scale}
        return attempt(
            partial(self.accepts_all_reduce_add_rms_norm, x, weight, quantize),
            partial(self.all_reduce_add_rms_norm, *operands, weight_bias=weight_bias, **options),
        )

    # ---- What would be served -----------------------------------------------------------------------------------

    def accepts(self, x: Any) -> bool:
        """Whether ``all_reduce(x)`` is served. Depends on shape, dtype, layout, kind of device, and whether a gradient
        by ``x`` would be asked for (not under no_grad or inference_mode), so all ranks that run the same program with
        the same kind of tensor get the same answer.

        Raises:
            UnsupportedInputError: ``x`` is neither a tensor nor an array that torch can use.
        """
        tensor = x if isinstance(x, torch.Tensor) else arrays.as_tensor(x)
        calls = self._operations.all_reduce
        return calls.accepts_traced(tensor) if _is_traced(tensor) else calls.accepts(tensor)

    def accepts_all_reduce_add_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, quantize: str | None = None
    ) -> bool:
        """Whether ``all_reduce_add_rms_norm`` of ``x`` and ``weight`` is served. Depends on the same as ``accepts``, of
        both, so all ranks that run the same program with the same kinds of tensors get the same answer."""
        calls = self._operations.all_reduce_add_rms_norm
        if _is_traced(x):
            return calls.accepts_traced(x, weight, quantize)
        return calls.accepts(x, weight, quantize)

    def plan(self, x: Any) -> Plan:
        """What ``all_reduce(x)`` would run, and why; ``"declined"`` is the algorithm of an input that is not served.

        Raises:
            UnsupportedInputError: As of ``accepts``.
        """
        return self._operations.all_reduce.plan(arrays.as_tensor(x))

    def plan_all_reduce_add_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, quantize: str | None = None) -> Plan:
        """What ``all_reduce_add_rms_norm`` of ``x`` and ``weight`` would run, and why; ``"declined"`` is the algorithm
        of an input that is not served."""
        return self._operations.all_reduce_add_rms_norm.plan(x, weight, quantize)

    #: Names of before each operation had its own in them, for a release.
    accepts_fused = accepts_all_reduce_add_rms_norm
    plan_fused = plan_all_reduce_add_rms_norm

    def plan_for(self, operation: str, x: torch.Tensor, *, row: int = 0, **parameters: float) -> Plan:
        """What ``run`` of an operation would do for buffers like ``x``, and why.

        Raises:
            UnsupportedInputError: There is no such operation, or a parameter is missing or unknown.
        """
        return self._other_operations.plan(operation, x, row, parameters)
