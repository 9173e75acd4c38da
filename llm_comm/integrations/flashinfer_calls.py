"""Calls of FlashInfer's fused all-reduce that llm_comm computes where it serves them.

The fused norms of vLLM (``compilation/passes/fusion/allreduce_rms_fusion.py``) and of SGLang
(``layers/flashinfer_comm_fusion.py``) end in ``flashinfer.comm.allreduce_fusion``, a public function. It is the seam
that stays in releases of an engine that were not tested, whose own functions llm_comm leaves alone.

A call names its group by a workspace. ``note_group`` writes the group's ranks into each workspace that is made.
``around_fusion`` serves calls of a group that has called ``serve``, and leaves all others to FlashInfer: other groups,
patterns, arguments, and shapes. The choice depends on arguments that all ranks have alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llm_comm.communicator import Communicator
from llm_comm.errors import UnsupportedInputError

_RANKS = "llm_comm_ranks"
#: ``AllReduceFusionPattern`` of FlashInfer: the sum; the sum, a residual and RMSNorm; the same rounded to FP8.
_SUM, _NORM, _NORM_FP8 = "kAllReduce", "kARResidualRMSNorm", "kARResidualRMSNormFP8Quant"
#: Arguments that change nothing in a result of these patterns. The norm of ``_NORM_FP8`` is written by none.
_WITHOUT_EFFECT = frozenset(
    {"workspace", "pattern", "launch_with_pdl", "trigger_completion_at_end", "layout_code", "use_oneshot", "fp32_acc"}
)
_NORMS = frozenset({"input", "residual_in", "residual_out", "rms_gamma", "rms_eps", "weight_bias", "norm_out"})
_READ = {
    _SUM: frozenset({"input", "output"}),
    _NORM: _NORMS,
    _NORM_FP8: _NORMS | {"quant_out", "scale_factor"},
}
#: The default of ``rms_eps``.
_EPS = 1e-6


class _Served(NamedTuple):
    communicator: Communicator
    fuses: bool
    say: Callable[[torch.Tensor], None]


_served: dict[tuple[int, ...], _Served] = {}


def serve(
    group: dist.ProcessGroup, communicator: Communicator, *, fuses: bool, say: Callable[[torch.Tensor], None]
) -> None:
    """Serve the calls of ``group`` from now on. To be called on all of its ranks, or on none.

    Args:
        group: The ranks of ``communicator``.
        communicator: Sums for the group.
        fuses: Whether norms are served too, and not sums alone.
        say: Called with ``x`` of each norm that was served.
    """
    _served[tuple(dist.get_process_group_ranks(group))] = _Served(communicator, fuses, say)


def leave(communicator: Communicator) -> None:
    """Leave the calls that ``communicator`` serves, if it does, to FlashInfer from now on."""
    for ranks in [ranks for ranks, served in _served.items() if served.communicator is communicator]:
        del _served[ranks]


def leave_group(group: dist.ProcessGroup) -> None:
    """Leave the calls of the ranks of ``group`` to FlashInfer from now on."""
    _served.pop(tuple(dist.get_process_group_ranks(group)), None)


def note_group(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a workspace as FlashInfer does, and write the ranks of its group into it."""
    workspace = theirs(*args, **kwargs)
    group = kwargs.get("group")
    if isinstance(group, dist.ProcessGroup):
        with contextlib.suppress(AttributeError):  # a class that takes no attributes: its calls are FlashInfer's
            setattr(workspace, _RANKS, tuple(dist.get_process_group_ranks(group)))
    return workspace


def around_fusion(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of ``flashinfer.comm.allreduce_fusion``, by llm_comm where it serves it."""
    # Engines pass names. What comes by position may be something else in another release.
    result = None if args else _by_llm_comm(kwargs)
    return theirs(*args, **kwargs) if result is None else result


def _by_llm_comm(call: dict[str, Any]) -> torch.Tensor | None:
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
        with contextlib.suppress(UnsupportedInputError):  # ``output`` does not fit, on all ranks alike
            return served.communicator.try_all_reduce(x, call.get("output"))
        return None
    residual, weight, scale = (call.get(name) for name in ("residual_in", "rms_gamma", "scale_factor"))
    if residual is None or weight is None or (kind == _NORM_FP8 and not isinstance(scale, torch.Tensor)):
        return None
    results = served.communicator.try_all_reduce_add_rms_norm(
        x,
        residual,
        weight,
        call.get("rms_eps", _EPS),
        weight_bias=call.get("weight_bias") or 0.0,
        out=call.get("norm_out" if kind == _NORM else "quant_out"),
        residual_out=call.get("residual_out"),
        quantize=None if kind == _NORM else "static",
        scale=None if kind == _NORM else scale,
    )
    if results is None:
        return None
    served.say(x)
    return results[0]


def _has_effect(value: Any) -> bool:
    """Return whether an argument asks for something: None and 0 do not."""
    return value is not None and not (isinstance(value, (int, float)) and value == 0)


def _kind_of(call: dict[str, Any]) -> str | None:
    """The pattern of a call, of those that llm_comm has; None: another one."""
    from flashinfer.comm import AllReduceFusionPattern as Pattern

    return next((kind for kind in _READ if getattr(Pattern, kind, None) == call.get("pattern")), None)
