"""What engine integrations change in the options of an operator: for groups, and for modes of the engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from llm_comm.communicator import Communicator
from llm_comm.config import EngineOptions, check_names, load_with_unknown
from llm_comm.installation import VERSION
from llm_comm.integrations.joining import SwitchedOffError
from llm_comm.options import MIB, OPTIONS

#: For ``max_message_bytes``, where a sum must not depend on its size: larger than any message.
EVERY_SIZE = 1 << 60


#: What this process has warned of: every group of it loads the options.
_warned: set[str] = set()


def load(log: logging.Logger, /, **options: Any) -> EngineOptions:
    """The options of this rank: defaults < LLM_COMM_CONFIG < LLM_COMM_* < ``options``.

    Unknown variables, and unknown options of the file, are warnings: an engine that goes back to an older llm_comm
    starts with the settings of a newer one. Where one rank alone has such a name, the ranks stay alike: nobody uses it.

    Args:
        log: Takes the warnings.

    Raises:
        ConfigError: A value that is not allowed, or a file that cannot be read.
    """
    return load_with_unknown(lambda what, _: _warn(what, log), **options)


def known(section: Mapping[Any, Any], place: str, log: logging.Logger) -> dict[str, Any]:
    """The options of a section of an engine's own configuration. Others are warnings, as of ``load``.

    Args:
        place: The section, in words.
        log: Takes the warnings.
    """
    check_names(section, dict.fromkeys(section, place), lambda what, _: _warn(what, log))
    return {name: value for name, value in section.items() if name in OPTIONS}


def _warn(what: str, log: logging.Logger) -> None:
    if what not in _warned:
        _warned.add(what)
        log.warning("llm_comm: %s is ignored: llm_comm %s does not have it (docs/options.md)", what, VERSION)


def options_of(communicator: Communicator) -> EngineOptions:
    """Options of a communicator that an engine integration has made."""
    return cast(EngineOptions, communicator.config)


def seconds_at_start(config: EngineOptions, device: torch.device, usual_s: float) -> float:
    """How long something may be measured at the start of an engine, by option ``tune_at_start``; 0: not at all. On
    emulated and shared GPUs nothing is, unless the option is a number.

    Args:
        device: Of this rank.
        usual_s: Where the option is ``"auto"``.
    """
    if config.tune_at_start != "auto":
        return float(config.tune_at_start)
    return usual_s if device.type == "cuda" and not config.share_gpu else 0.0


def check_parts_wanted(config: EngineOptions, group_name: str) -> EngineOptions:
    """``config``, for a group that gathers and scatters and never sums.

    Raises:
        SwitchedOffError: Neither is wanted.
    """
    if not (config.all_gather or config.reduce_scatter):
        raise SwitchedOffError(f"all_gather and reduce_scatter are false, and group {group_name} does nothing else")
    return config


def share_memory(config: EngineOptions, kind: str, served: Sequence[str]) -> EngineOptions:
    """``config`` with this group's share of ``workspace_bytes``, which by default all groups of a process take
    together: the first one, that of tensor parallelism, a half, the others equal parts of the other half.

    Args:
        config: What an operator has chosen in there is for each group.
        kind: Which group it is for.
        served: All groups that llm_comm is going to serve in this process, in the order in which they are made.
    """
    if len(served) < 2 or "workspace_bytes" in config.origins:
        return config
    half = config.workspace_bytes // 2
    return config.replace(workspace_bytes=half if kind == served[0] else half // (len(served) - 1) // MIB * MIB)


def in_rank_order(config: EngineOptions, mode: str, log: logging.Logger) -> EngineOptions:
    """``config`` for a mode of an engine in which sums must not depend on who makes them: not in the NVLink switch,
    whatever option ``sum`` says."""
    if config.sum == "rank_order":
        return config
    log.info("llm_comm: sum is %r, but %s is on: sums are made in rank order", config.sum, mode)
    return config.replace(sum="rank_order")


def for_batch_invariance(config: EngineOptions, mode: str, is_on: bool, log: logging.Logger) -> EngineOptions:
    """``config`` for an engine that has a mode in which a token's result must not depend on its batch.

    Args:
        mode: Its name, for the log.
        is_on: Whether the engine is in it.
    """
    if not is_on:
        is_usual = config.batch_invariant_norm == config.batch_invariant_linear == "engine"
        return config if is_usual else config.replace(batch_invariant_norm="engine", batch_invariant_linear="engine")
    config = in_rank_order(config, mode, log)
    if "max_message_bytes" not in config.origins:
        # A sum must not depend on the size of its batch. llm_comm sums alike at every size; to change over to the
        # engine's all-reduce at some size would change the order of summation there.
        config = config.replace(max_message_bytes=EVERY_SIZE)
    return config


def why_not_at_every_size(config: EngineOptions, engine: str) -> str | None:
    """Why norms of some messages would be the engine's, which have other bits than those of llm_comm, if so.

    Args:
        config: What ``for_batch_invariance`` returned.
        engine: Its name.
    """
    limit = config.max_message_bytes
    if limit is not None and limit >= EVERY_SIZE:
        return None
    origin = config.origins.get("max_message_bytes", "default")
    return f"max_message_bytes is {limit} ({origin}), and norms of larger batches would be {engine}'s, with other bits"
