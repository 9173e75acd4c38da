"""The options of llm_comm in vLLM, and which of vLLM's groups they make llm_comm serve."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import vllm.envs as envs
from vllm.config import get_current_vllm_config_or_none

from llm_comm.config import EngineOptions
from llm_comm.errors import ConfigError, quoted
from llm_comm.integrations import engine_config, joining
from llm_comm.integrations.vllm import gathering, seams
from llm_comm.integrations.vllm.seams import TABLE
from llm_comm.options import OPTIONS

logger = logging.getLogger("vllm.llm_comm")

SECTION = "llm_comm"
#: Groups in whose name the models sum activations. Others gather and scatter alone (``only_gathers``), or do neither.
GROUPS = ("tp", "dcp")


def why_not() -> str | None:
    """Why the current configuration of vLLM rules llm_comm out on all ranks, if it does."""
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return None
    if vllm_config.parallel_config.enable_elastic_ep:
        return "elastic expert parallelism insists on vLLM's own communicator"
    section = _section(vllm_config)
    with contextlib.suppress(ConfigError):  # told when the ranks join
        TABLE.untested = _options(vllm_config).untested
    if isinstance(section, dict) and section.get("enable") is False:
        return f"enable is false in additional_config[{SECTION!r}]"
    return None


def load_config() -> EngineOptions:
    """The options: defaults < LLM_COMM_CONFIG < LLM_COMM_* < ``additional_config["llm_comm"]`` of vLLM.

    Raises:
        ConfigError: A value that is not allowed, or a file that cannot be read.
    """
    vllm_config = get_current_vllm_config_or_none()
    config = _options(vllm_config)
    if "timeout_s" not in config.origins:
        is_told = vllm_config is not None and TABLE.has(seams.TIMEOUT)
        theirs = vllm_config.parallel_config.distributed_timeout_seconds if is_told else None
        config = config.replace(timeout_s=float(theirs or joining.ENGINE_TIMEOUT_S))
    return engine_config.for_batch_invariance(config, "VLLM_BATCH_INVARIANT", envs.VLLM_BATCH_INVARIANT, logger)


def _options(vllm_config: Any) -> EngineOptions:
    """The options of the operator, as of ``load_config``.

    Raises:
        ConfigError: As of ``load_config``.
    """
    config = engine_config.load(logger)
    section = {} if vllm_config is None else _section(vllm_config)
    if not isinstance(section, dict):
        raise ConfigError(
            f"additional_config[{SECTION!r}] is {quoted(section)}; expected options by name: {', '.join(OPTIONS)}"
        )
    section = engine_config.known(section, f"additional_config[{SECTION!r}]", logger)
    if section:
        try:
            config = engine_config.load(logger, **section)
        except ConfigError as error:
            raise ConfigError(f"additional_config[{SECTION!r}]: {error}") from error
    return config


def served_groups(config: EngineOptions) -> list[str]:
    """The groups of this process that llm_comm serves under ``config`` and the current configuration of vLLM, in the
    order in which they are made."""
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return []
    parallel = vllm_config.parallel_config
    sizes = {
        "tp": parallel.tensor_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "pcp": parallel.prefill_context_parallel_size,
        "dp": parallel.data_parallel_size,
    }
    sizes["ep"] = sizes["tp"] * sizes["pcp"] * sizes["dp"]
    gathers = config.all_gather or config.reduce_scatter
    return [kind for kind, size in sizes.items() if size > 1 and (kind in GROUPS or (gathers and only_gathers(kind)))]


def _section(vllm_config: Any) -> Any:
    # A platform plugin may have put an object of its own there.
    additional = vllm_config.additional_config
    return additional.get(SECTION, {}) if isinstance(additional, dict) else {}


def only_gathers(kind: str) -> bool:
    """Return whether groups of ``kind`` gather and scatter by llm_comm, and sum nothing."""
    return TABLE.why_not(seams.GATHERING) is None and gathering.only_gathers(kind)
