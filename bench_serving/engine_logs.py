"""Verification by an engine's log that it did what its arm says."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bench_serving.arms import Arm
from bench_serving.settings import Settings

#: Log line of the plugin of arm `free`.
FREE_MARK = "bench_serving: all-reduces of this group return uninitialised memory"
#: Log line of the plugin of arm `free_norm`.
FREE_NORMS_MARK = "bench_serving: residual adds and norms behind sums do nothing"
#: Log line of the plugin that fills scaled weights.
WEIGHTS_MARK = "bench_serving: scaled weights"
#: Log line of the plugins in an engine's deterministic mode.
DETERMINISTIC_MARK = "bench_serving: the engine is in its deterministic mode"
#: Log line of the SGLang plugin about a group.
BACKEND_MARK = "bench_serving: custom all-reduce"

_ACTIVE = re.compile(r"llm_comm \S+ is active for (?:group )?\S*tp")
_LOSSY = re.compile(r"all-reduces[^\n;]* are quantized \(\w+\): lossy")
_PROGRAMS = re.compile(r"llm_comm \S+ is active for [^\n]*\bdsl:\w+ to ")
# Fused with a linear layer or without, whichever comes first.
_FUSED = re.compile(r"llm_comm: first (?:all-reduce|linear layer) fused with its")
# Missing if no table prefers a linear layer.
_LINEAR = re.compile(r"llm_comm: first (?:column-parallel )?linear layer [^\n]*")
# One line for each method of the engine that gathers or scatters. A model may use none.
_PARTS = re.compile(r"llm_comm: first \w*(?:all_gather|reduce_scatter)\w* of group [^\n]*")
# Line of the NCCL-compatible library about a communicator that it serves.
_NCCL_LIBRARY = re.compile(r"llm_comm-nccl \[\d+\] INFO communicator of \d+ ranks[^\n]*: served by [^\n]*")
_NORMS_APART = re.compile(r"not fused with RMSNorm: fuse is false")
_INVARIANT_LINEAR = re.compile(r"linear layers by llm_comm at every size")
_LINEAR_APART = re.compile(r"linear layers are \w+'s: fuse_linear is false")
_VLLM_BACKENDS = re.compile(r"Using \[([^\]]*)\] all-reduce backends[^\n]*for group 'tp[^\n]*")
# Lines about the workspace of vLLM's fusion through FlashInfer, and about FlashInfer's use of multicast.
_FLASHINFER = re.compile(r"Initialized FlashInfer All-?[Rr]educe")
_ANY_FLASHINFER = re.compile(r"Flash[Ii]nfer All-?[Rr]educe[^\n]*backend")
_MULTICAST = re.compile(r"backend[=:] ?mnnvl")
_SGLANG_FLASHINFER = re.compile(r"FlashInfer AllReduce Fusion enabled and workspace initialized: backend=trtllm")
# Kernel that vLLM has chosen for fp8 linear layers.
_FP8_KERNEL = re.compile(r"Selected \w+ for Fp8\w+")
_SGLANG_BACKEND = re.compile(re.escape(BACKEND_MARK) + r" of group tp:[^\n]*")


def evidence(settings: Settings, arm: Arm, log: str) -> list[str]:
    """Return the log lines that confirm that the engine ran ``arm`` with ``settings``.

    Raises:
        ValueError: The log contradicts the arm, or lacks a required line. The text says which.
    """
    found = []
    # vLLM's fusion is a pass over compiled graphs.
    fuses = arm.fuses and not (settings.enforce_eager and settings.engine == "vllm")
    found += _expect(log, _ACTIVE, arm.llm_comm, "llm_comm is active for the tensor-parallel group")
    if arm.lossy:
        _expect(log, _LOSSY, True, "large all-reduces are quantized")
    # With data-parallel attention, SGLang gathers and scatters instead of all-reducing, which leaves no norm to fuse.
    fused = fuses and not settings.data_parallel_attention
    if fused and settings.deterministic and settings.engine == "sglang":
        # only norms of some models and versions
        found += [line for line in [_line(log, _FUSED)] if line is not None]
    else:
        found += _expect(log, _FUSED, fused, "llm_comm has fused an all-reduce with its RMSNorm")
    if arm.llm_comm:
        parts = [match[0] for match in _PARTS.finditer(log)]
        if settings.data_parallel_attention and not parts:
            raise ValueError(f"the log does not say that llm_comm has gathered or scattered{_hints(log)}")
        found += parts
    else:
        _expect(log, _PARTS, False, "llm_comm has gathered or scattered")
    found += _expect(log, _NORMS_APART, arm.norms_apart, "llm_comm was told not to fuse")
    found += _expect(log, _PROGRAMS, arm.programs, "programs of llm_comm.dsl serve all-reduces")
    invariant = settings.deterministic and arm.llm_comm and not (arm.linear_apart or arm.norms_apart)
    found += _expect(log, _INVARIANT_LINEAR, invariant, "linear layers are llm_comm's at every size")
    if invariant or (fuses and not arm.linear_apart):
        found += [match[0] for match in _LINEAR.finditer(log)]
    else:
        _expect(log, _LINEAR, False, "llm_comm has computed a linear layer")
    # In other cases the log gives another reason for layers, such as that norms are not fused.
    if fuses == arm.fuses and not settings.deterministic:
        told = "llm_comm was told to leave linear layers alone"
        found += _expect(log, _LINEAR_APART, arm.linear_apart, told)
    found += _expect(log, re.compile(re.escape(FREE_MARK)), arm.free, "all-reduces are replaced by nothing")
    found += _expect(log, re.compile(re.escape(FREE_NORMS_MARK)), arm.free_norms, "norms are replaced by nothing")
    found += _expect(log, _NCCL_LIBRARY, arm.nccl_library, "llm_comm's library stands in for NCCL's")
    told = "the engine is in its deterministic mode"
    found += _expect(log, re.compile(re.escape(DETERMINISTIC_MARK)), settings.deterministic, told)
    scaled = settings.weights == "scaled"
    found += _expect(log, re.compile(re.escape(WEIGHTS_MARK)), scaled, "weights are scaled")
    if settings.as_deployed:
        patterns = (_VLLM_BACKENDS, _SGLANG_BACKEND, _ANY_FLASHINFER, _FP8_KERNEL)
        return found + [line for line in (_line(log, pattern) for pattern in patterns) if line is not None]
    _expect(log, _MULTICAST, False, "FlashInfer uses multicast")
    # Some engine versions turn off their custom all-reduce in deterministic mode.
    has_custom = settings.tensor_parallel_size in (2, 4, 6, 8) and not settings.deterministic
    found += {"vllm": _vllm, "sglang": _sglang}[settings.engine](arm, has_custom, log)
    if settings.engine == "sglang":
        # SGLang allocates this workspace even if llm_comm, which has precedence, fuses the norms.
        by_flashinfer = arm.own_fusion and settings.fuses_by_flashinfer and not settings.data_parallel_attention
        found += _expect(log, _SGLANG_FLASHINFER, by_flashinfer, "SGLang fuses all-reduces by FlashInfer")
    return found + [line for line in [_line(log, _FP8_KERNEL)] if line is not None]


def _expect(log: str, pattern: re.Pattern[str], wanted: bool, what: str) -> list[str]:
    line = _line(log, pattern)
    if wanted and line is None:
        raise ValueError(f"the log does not say that {what}{_hints(log)}")
    if not wanted and line is not None:
        raise ValueError(f"the log says that {what}, which this arm must not: {line}")
    return [] if line is None else [line]


def _vllm(arm: Arm, has_custom: bool, log: str) -> Iterable[str]:
    line = _line(log, _VLLM_BACKENDS)
    if line is None:
        raise ValueError("the log lacks vLLM's line about its all-reduce backends for the group tp")
    match = _VLLM_BACKENDS.search(line)
    assert match is not None
    if not arm.own_fusion:
        _expect(log, _FLASHINFER, False, "vLLM fuses by FlashInfer")
    custom = "'CUSTOM'" in match.group(1)
    if custom and arm.disable_custom_all_reduce:
        raise ValueError(f"vLLM's custom all-reduce is on, but this arm turns it off: {line}")
    others = set(re.findall(r"'(\w+)'", match.group(1))) - {"PYNCCL"}
    if others and arm.disable_custom_all_reduce:
        raise ValueError(f"not NCCL alone sums: {', '.join(sorted(others))} can be chosen as well: {line}")
    if not custom and not arm.disable_custom_all_reduce and has_custom:
        raise ValueError(f"vLLM's custom all-reduce should be on but is not: {line}")
    return [line]


def _sglang(arm: Arm, has_custom: bool, log: str) -> Iterable[str]:
    line = _line(log, _SGLANG_BACKEND)
    if line is None:
        raise ValueError("the log lacks the line about the custom all-reduce of the group tp")
    custom = "disabled=False" in line
    if custom and arm.disable_custom_all_reduce:
        raise ValueError(f"SGLang's custom all-reduce is on, but this arm turns it off: {line}")
    if not custom and not arm.disable_custom_all_reduce and has_custom:
        raise ValueError(f"SGLang's custom all-reduce should be on but is not: {line}")
    return [line]


def _line(log: str, pattern: re.Pattern[str]) -> str | None:
    match = pattern.search(log)
    if match is None:
        return None
    begin, end = log.rfind("\n", 0, match.start()) + 1, log.find("\n", match.end())
    return log[begin : end if end >= 0 else len(log)].strip()


def _hints(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if "llm_comm" in line and "not active" in line]
    return f"; it says: {lines[0]}" if lines else ""


def tail(log: str, lines: int = 25) -> str:
    """Return the end of a log, which usually holds the reason of a failure."""
    return "\n".join(log.rstrip().splitlines()[-lines:])
