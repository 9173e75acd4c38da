"""Options of llm_comm in vLLM, the groups that llm_comm serves under them, and the model that is to be loaded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import CompilationMode, get_current_vllm_config_or_none

from llm_comm.config import EngineOptions
from llm_comm.errors import ConfigError, quoted
from llm_comm.integrations import engine_config, joining, layer_tuning
from llm_comm.integrations.vllm import gathering, seams
from llm_comm.integrations.vllm.seams import TABLE
from llm_comm.options import OPTIONS
from llm_comm.planning.catalogue import check_table_option
from llm_comm.planning.layers import LayerRow, is_preferred
from llm_comm.planning.models import Layer, Model, layers_to_measure, of_config
from llm_comm.runtime.devices import find_table, limits_of

logger = logging.getLogger("vllm.llm_comm")

SECTION = "llm_comm"
#: Kinds of groups whose all-reduces llm_comm serves. Other kinds use all-gather and reduce-scatter only
#: (``only_gathers``), or are not served.
GROUPS = ("tp", "dcp")
#: First compute capability with programmatic dependent launch (PDL).
_FIRST_WITH_PDL = 90


def why_not() -> str | None:
    """Return the reason why vLLM's configuration rules llm_comm out on all ranks, or None.

    Option ``untested`` is passed on to the table of seams here, before features are checked.
    """
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return None
    if vllm_config.parallel_config.enable_elastic_ep:
        return "elastic expert parallelism insists on vLLM's own communicator"
    section = _section(vllm_config)
    with contextlib.suppress(ConfigError):  # ``join`` reports a wrong option on all ranks
        TABLE.untested = _options(vllm_config).untested
    if isinstance(section, dict) and section.get("enable") is False:
        return f"enable is false in additional_config[{SECTION!r}]"
    return None


def load_config() -> EngineOptions:
    """Return the options of this rank, with the defaults and changes that vLLM needs.

    Precedence: defaults < LLM_COMM_CONFIG < LLM_COMM_* < ``additional_config["llm_comm"]`` of vLLM.

    Raises:
        ConfigError: A value is not allowed, or the file cannot be read.
    """
    vllm_config = get_current_vllm_config_or_none()
    config = _options(vllm_config)
    if "timeout_s" not in config.origins:
        is_told = vllm_config is not None and TABLE.has(seams.TIMEOUT)
        theirs = vllm_config.parallel_config.distributed_timeout_seconds if is_told else None
        config = config.replace(timeout_s=float(theirs or joining.ENGINE_TIMEOUT_S))
    return engine_config.for_batch_invariance(config, "VLLM_BATCH_INVARIANT", envs.VLLM_BATCH_INVARIANT, logger)


def _options(vllm_config: Any) -> EngineOptions:
    """Return the options that the operator has set, without the changes of ``load_config``.

    Raises:
        ConfigError: A value is not allowed, the file cannot be read, or the section of additional_config is no mapping.
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
    """Return the kinds of this process's groups that llm_comm serves, in the order of their creation."""
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


def is_alone() -> bool:
    """Return whether there is one engine (no data parallelism), so that no group has ranks of several engines."""
    vllm_config = get_current_vllm_config_or_none()
    return vllm_config is None or vllm_config.parallel_config.data_parallel_size == 1


def _section(vllm_config: Any) -> Any:
    # A platform plugin may have replaced the dictionary by an object of its own.
    additional = vllm_config.additional_config
    return additional.get(SECTION, {}) if isinstance(additional, dict) else {}


def only_gathers(kind: str) -> bool:
    """Return whether llm_comm serves all-gathers and reduce-scatters of groups of ``kind``, and no all-reduces."""
    return TABLE.why_not(seams.GATHERING) is None and gathering.only_gathers(kind)


def choose_pdl(config: EngineOptions, device: torch.device, world_size: int) -> EngineOptions:
    """Return ``config`` with ``pdl`` off, unless the operator has set it or llm_comm will compute linear layers.

    Dependent launches between the kernels of a model cost 0.7 to 1 % of a decode step (docs/experiments/engines.md).
    Linear layers of llm_comm gain more than that (docs/experiments/linear.md). Ranks with equal options and devices
    decide alike.

    Raises:
        ConfigError: The tuning table cannot be used.
    """
    if "pdl" in config.origins:
        return config
    if envs.VLLM_BATCH_INVARIANT:
        return config.replace(pdl=config.batch_invariant_linear == "llm_comm")
    gains = config.fuse_linear
    if gains == "auto":
        check_table_option(config)
        outputs = _outputs_before_norms()
        table = find_table(device, world_size, config).layers
        gains = any(row.is_faster and row.pdl and row.outputs == outputs for row in table)
        gains = gains or _is_known_to_gain(config.replace(pdl=True), device, table, world_size)
    return config.replace(pdl=gains)


def _is_known_to_gain(config: EngineOptions, device: torch.device, rows: Sequence[LayerRow], world_size: int) -> bool:
    """Return whether some layer of the model is preferred with dependent launches, or will be measured with them.

    llm_comm computes layers only in compiled graphs with fused norms, so other modes never gain.
    """
    mode = get_current_vllm_config_or_none().compilation_config.mode
    if not config.fuse or mode != CompilationMode.VLLM_COMPILE:
        return False
    limits = limits_of(device, config.workspace_bytes)
    measures = layer_tuning.budget_s(config, device) > 0 and limits.compute_capability >= _FIRST_WITH_PDL
    return any(
        measures or is_preferred(rows, config, limits, layer.operation, layer.outputs, layer.inputs, tokens=1)
        for layer in layers(world_size, config)
    )


def _outputs_before_norms() -> int | None:
    """Return the hidden size: the outputs of the layers before all-reduces. It identifies a model in a tuning table
    before the model's layers exist. None if there is no model, or if vLLM cannot tell its hidden size."""
    try:
        model = get_current_vllm_config_or_none().model_config
        return None if model is None else int(model.get_hidden_size())
    except Exception:
        return None


def layers(world_size: int, config: EngineOptions) -> tuple[Layer, ...]:
    """Return the linear layers of the current model that llm_comm can compute on one rank, according to the model's
    config.json. The layers themselves need not exist yet.

    FP8 layers with block scales count only if the operator sets ``fuse_linear``: no engine was timed with them.
    """
    found = model()
    blocks = config.fuse_linear is True
    layers = () if found is None else layers_to_measure(found, world_size, with_block_scales=blocks)
    return tuple(layer for layer in layers if not layer.why_not)


def model() -> Model | None:
    """Return the current model as its config.json describes it; None if there is none, or if llm_comm does not know
    the architecture."""
    try:
        theirs = get_current_vllm_config_or_none().model_config
        return of_config(theirs.hf_config.to_dict(), quantization=theirs.quantization)
    except Exception:
        return None
