"""Replacement of ``flashinfer.comm.allreduce_fusion``: llm_comm computes the calls that it supports.

The fused norms of vLLM (``compilation/passes/fusion/allreduce_rms_fusion.py``) and of SGLang
(``layers/flashinfer_comm_fusion.py``) end in this public function. In an engine release that was not tested llm_comm
replaces none of the engine's functions, and this one alone.

A call identifies its group by a FlashInfer workspace. ``note_group`` writes the group's ranks into each new workspace.
``around_fusion`` serves a call if its group was registered with ``serve``, and if llm_comm supports its pattern,
arguments and shape. FlashInfer computes all other calls. The decision depends only on arguments that are equal on all
ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llm_comm.communicator import Communicator
from llm_comm.errors import UnsupportedInputError
from llm_comm.operations.fp8 import FP8

_RANKS = "llm_comm_ranks"
#: Names in FlashInfer's ``AllReduceFusionPattern``: all-reduce; all-reduce, residual add and RMSNorm; the latter with
#: static FP8 quantization, and with NVFP4.
_SUM, _NORM, _NORM_FP8 = "kAllReduce", "kARResidualRMSNorm", "kARResidualRMSNormFP8Quant"
_NORM_FP4 = "kARResidualRMSNormFP4Quant"
#: Modes of ``quantize`` by names in FlashInfer's ``QuantizationSFLayout``.
_LAYOUTS = {"SWIZZLED_128x4": "nvfp4", "LINEAR": "nvfp4_linear"}
#: Arguments that do not change the result of the supported patterns, except that ``_NORM_FP4`` has scales in the layout
#: of ``layout_code``. With quantization neither FlashInfer nor llm_comm writes ``norm_out``.
_WITHOUT_EFFECT = frozenset(
    {"workspace", "pattern", "launch_with_pdl", "trigger_completion_at_end", "layout_code", "use_oneshot", "fp32_acc"}
)
_NORMS = frozenset({"input", "residual_in", "residual_out", "rms_gamma", "rms_eps", "weight_bias", "norm_out"})
_READ = {
    _SUM: frozenset({"input", "output"}),
    _NORM: _NORMS,
    _NORM_FP8: _NORMS | {"quant_out", "scale_factor"},
    _NORM_FP4: _NORMS | {"quant_out", "scale_factor", "scale_out"},
}
#: FlashInfer's default of ``rms_eps``.
_EPS = 1e-6


class _Served(NamedTuple):
    communicator: Communicator
    fuses: bool
    say: Callable[[torch.Tensor], None]


_served: dict[tuple[int, ...], _Served] = {}


def serve(
    group: dist.ProcessGroup, communicator: Communicator, *, fuses: bool, say: Callable[[torch.Tensor], None]
) -> None:
    """Register ``group``, so that llm_comm computes its calls. Must be called on all ranks of the group, or on none.

    Args:
        group: Group with the ranks of ``communicator``.
        communicator: Communicator that computes the calls.
        fuses: Whether fused norms are served, and not only plain all-reduces.
        say: Called with the input of each fused norm that llm_comm has computed.
    """
    _served[tuple(dist.get_process_group_ranks(group))] = _Served(communicator, fuses, say)


def leave(communicator: Communicator) -> None:
    """Give the calls of the groups of ``communicator`` back to FlashInfer."""
    for ranks in [ranks for ranks, served in _served.items() if served.communicator is communicator]:
        del _served[ranks]


def leave_group(group: dist.ProcessGroup) -> None:
    """Give the calls of ``group`` back to FlashInfer."""
    _served.pop(tuple(dist.get_process_group_ranks(group)), None)


def note_group(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call FlashInfer's function that makes a workspace, and write the group's ranks into the workspace."""
    workspace = original(*args, **kwargs)
    group = kwargs.get("group")
    if isinstance(group, dist.ProcessGroup):
        # A class may refuse new attributes. FlashInfer then computes the calls of its workspaces.
        with contextlib.suppress(AttributeError):
            setattr(workspace, _RANKS, tuple(dist.get_process_group_ranks(group)))
    return workspace


def around_fusion(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement of ``flashinfer.comm.allreduce_fusion``: compute the call by llm_comm, else by FlashInfer."""
    # Engines pass keyword arguments. Positional ones are left to FlashInfer: their order may change with a release.
    result = None if args else _by_llm_comm(kwargs)
    return original(*args, **kwargs) if result is None else result


def _by_llm_comm(call: dict[str, Any]) -> torch.Tensor | None:
    """Compute a call, given its keyword arguments; None if the group is not served or llm_comm declines the call."""
    served = _served.get(getattr(call.get("workspace"), _RANKS, ()))
    if served is None:
        return None
    kind = _kind_of(call)
    if kind is None or not (served.fuses or kind == _SUM):
        return None
    if any(_has_effect(value) for name, value in call.items() if name not in _READ[kind] | _WITHOUT_EFFECT):
        return None
    x: torch.Tensor = call["input"]
    if kind == _SUM:
        with contextlib.suppress(UnsupportedInputError):  # ``output`` does not fit, which is so on all ranks
            return served.communicator.try_all_reduce(x, call.get("output"))
        return None
    residual, weight, scale = (call.get(name) for name in ("residual_in", "rms_gamma", "scale_factor"))
    if residual is None or weight is None or (kind != _NORM and not isinstance(scale, torch.Tensor)):
        return None
    options: dict[str, Any] = {"quantize": None, "scale": None}
    if kind == _NORM_FP8:
        options = {"quantize": "static", "scale": scale}
    elif kind == _NORM_FP4:
        quantize, scales = _layout_of(call), call.get("scale_out")
        if quantize is None or not isinstance(scales, torch.Tensor):
            return None
        options = {"quantize": quantize, "scale": _as_e4m3(scales), "global_scale": scale}
    results = served.communicator.try_all_reduce_add_rms_norm(
        x,
        residual,
        weight,
        call.get("rms_eps", _EPS),
        weight_bias=call.get("weight_bias") or 0.0,
        out=call.get("norm_out" if kind == _NORM else "quant_out"),
        residual_out=call.get("residual_out"),
        **options,
    )
    if results is None:
        return None
    served.say(x)
    return results[0]


def _has_effect(value: Any) -> bool:
    """Return whether an argument asks for anything. None and 0 ask for nothing."""
    return value is not None and not (isinstance(value, (int, float)) and value == 0)


def _kind_of(call: dict[str, Any]) -> str | None:
    """Return the name of the call's pattern; None if llm_comm does not support the pattern."""
    from flashinfer.comm import AllReduceFusionPattern as Pattern

    return next((kind for kind in _READ if getattr(Pattern, kind, None) == call.get("pattern")), None)


def _layout_of(call: dict[str, Any]) -> str | None:
    """Return the mode of ``quantize`` whose scales have the layout of a call with NVFP4; None if there is none."""
    from flashinfer.comm import QuantizationSFLayout as Layout

    code = call.get("layout_code")
    if code is None:  # FlashInfer's default
        return _LAYOUTS["SWIZZLED_128x4"]
    return next((_LAYOUTS[name] for name in _LAYOUTS if getattr(Layout, name, None) == code), None)


def _as_e4m3(scales: torch.Tensor) -> torch.Tensor:
    """View a buffer of NVFP4 scales as float8_e4m3fn. Engines give float8_e4m3fn, uint8 or int32; FlashInfer takes the
    address alone."""
    is_other = scales.dtype in (torch.uint8, torch.int32) and scales.dim() > 0 and scales.is_contiguous()
    return scales.view(FP8) if is_other else scales
