"""Options of llm_comm in an engine: loading, and the changes that a group or a mode of the engine needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from llm_comm.communicator import Communicator
from llm_comm.config import EngineOptions, check_names, load_with_unknown, refuse_wire
from llm_comm.installation import VERSION
from llm_comm.integrations.joining import SwitchedOffError
from llm_comm.options import MIB, OPTIONS

#: Value of ``max_message_bytes`` that is larger than any message: llm_comm serves all-reduces of all sizes.
EVERY_SIZE = 1 << 60


#: Warnings that this process has logged. Every group loads the options, and a warning is logged once.
_warned: set[str] = set()


def load(log: logging.Logger, /, **options: Any) -> EngineOptions:
    """Return the options of this rank. Precedence: defaults < LLM_COMM_CONFIG < LLM_COMM_* < ``options``.

    Unknown variables and unknown options of the file give warnings, not errors: an engine with an older llm_comm must
    start with the settings of a newer one. An unknown name on one rank cannot make ranks differ, since no rank uses it.

    Args:
        log: Logger for warnings.
        options: Options by name, which override all other sources.

    Raises:
        ConfigError: A value is not allowed, or the file cannot be read.
    """
    return load_with_unknown(lambda what, _: _warn(what, log), **options)


def known(section: Mapping[Any, Any], place: str, log: logging.Logger) -> dict[str, Any]:
    """Return the known options of a section in the engine's own configuration. Unknown names give warnings.

    Args:
        section: Options by name.
        place: Name of the section for warnings.
        log: Logger for warnings.
    """
    check_names(section, dict.fromkeys(section, place), lambda what, _: _warn(what, log))
    return {name: value for name, value in section.items() if name in OPTIONS}


def _warn(what: str, log: logging.Logger) -> None:
    if what not in _warned:
        _warned.add(what)
        log.warning("llm_comm: %s is ignored: llm_comm %s does not have it (docs/options.md)", what, VERSION)


def options_of(communicator: Communicator) -> EngineOptions:
    """Return the options of a communicator that an engine integration has made, with their engine-only fields."""
    return cast(EngineOptions, communicator.config)


def seconds_at_start(config: EngineOptions, device: torch.device, usual_s: float) -> float:
    """Return the seconds that a measurement at the engine's start may take, by option ``tune_at_start``; 0: none.

    With ``"auto"`` nothing is measured on emulated GPUs and on GPUs shared by several ranks.

    Args:
        config: Options of the group.
        device: Device of this rank.
        usual_s: Budget for ``"auto"``.
    """
    if config.tune_at_start != "auto":
        return float(config.tune_at_start)
    return usual_s if device.type == "cuda" and not config.share_gpu else 0.0


def check_gather_scatter_wanted(config: EngineOptions, group_name: str) -> EngineOptions:
    """Return ``config`` for a group that uses all-gather and reduce-scatter but no all-reduce.

    Raises:
        SwitchedOffError: Both operations are switched off, so llm_comm has nothing to do in the group.
    """
    if not (config.all_gather or config.reduce_scatter):
        raise SwitchedOffError(f"all_gather and reduce_scatter are false, and group {group_name} does nothing else")
    return config


def share_memory(config: EngineOptions, kind: str, served: Sequence[str]) -> EngineOptions:
    """Return ``config`` with this group's share of the default ``workspace_bytes``.

    The default is for all groups of a process together. The first group (tensor parallelism) gets half of it; the
    others share the other half equally. A ``workspace_bytes`` that the operator has set is for each group, unchanged.

    Args:
        config: Options of the group.
        kind: Kind of the group, such as "tp".
        served: Kinds of all groups that llm_comm serves in this process, in the order of their creation.
    """
    if len(served) < 2 or "workspace_bytes" in config.origins:
        return config
    half = config.workspace_bytes // 2
    return config.replace(workspace_bytes=half if kind == served[0] else half // (len(served) - 1) // MIB * MIB)


def in_rank_order(config: EngineOptions, mode: str, log: logging.Logger) -> EngineOptions:
    """Return ``config`` with ``sum="rank_order"``, for an engine mode that needs reproducible all-reduces.

    Reductions in the NVLink switch (``sum="any"``) add in another order.
    """
    if config.sum == "rank_order":
        return config
    log.info("llm_comm: sum is %r, but %s is on: sums are made in rank order", config.sum, mode)
    return config.replace(sum="rank_order")


def for_batch_invariance(config: EngineOptions, mode: str, is_on: bool, log: logging.Logger) -> EngineOptions:
    """Return ``config`` for an engine that has a batch-invariant mode.

    With the mode on, all-reduces add in rank order at all message sizes. With the mode off, both
    ``batch_invariant_*`` options have no effect.

    Args:
        config: Options of the group.
        mode: Name of the mode for the log.
        is_on: Whether the mode is on.
        log: Logger for changes.

    Raises:
        ConfigError: The mode is on, and option ``wire`` asks for quantized all-reduces.
    """
    if not is_on:
        is_usual = config.batch_invariant_norm == config.batch_invariant_linear == "engine"
        return config if is_usual else config.replace(batch_invariant_norm="engine", batch_invariant_linear="engine")
    refuse_wire(config, f"{mode} is on", "turn the mode off")
    config = in_rank_order(config, mode, log)
    if "max_message_bytes" not in config.origins:
        # All algorithms of llm_comm add in the same order, but the engine's all-reduce can add in another order. So no
        # batch size may fall back to the engine.
        config = config.replace(max_message_bytes=EVERY_SIZE)
    return config


def why_not_at_every_size(config: EngineOptions, engine: str) -> str | None:
    """Return the reason why llm_comm cannot compute the norms of all batches, or None.

    The engine's norms round differently, so a token's result would change with the size of its batch.

    Args:
        config: Result of ``for_batch_invariance``.
        engine: Name of the engine.
    """
    limit = config.max_message_bytes
    if limit is not None and limit >= EVERY_SIZE:
        return None
    origin = config.origins.get("max_message_bytes", "default")
    return f"max_message_bytes is {limit} ({origin}), and norms of larger batches would be {engine}'s, with other bits"
