"""Whether vLLM's compiler puts all-reduces and the norms after them into one operator, and what it needs for that."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config_or_none

from llm_comm import registry
from llm_comm.communicator import Communicator
from llm_comm.config import EngineOptions
from llm_comm.integrations import engine_config
from llm_comm.integrations.vllm import compiled_graphs, seams
from llm_comm.integrations.vllm.seams import TABLE
from llm_comm.planning.tables import FUSED


def keep_theirs(is_served: bool) -> str:
    """Keep vLLM's fusion of an all-reduce with the norm after it if ``is_served``, else turn it off. Returns what to
    log.

    With FlashInfer installed, vLLM fuses at decode sizes by default. Where llm_comm does not serve the calls of
    FlashInfer, none of these all-reduces would come here, nor to the passes of llm_comm: an operator who switches
    ``fuse`` off wants sums by llm_comm and norms by vLLM, and one who wants vLLM's fusion switches llm_comm off. The
    passes are made when the model is compiled, later than this.
    """
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None or TABLE.why_not(seams.THEIR_FUSION) is not None:
        return ""
    if not vllm_config.compilation_config.pass_config.fuse_allreduce_rms:
        return ""
    if is_served:
        return "; vLLM's fuse_allreduce_rms is on, and llm_comm computes what it serves of it"
    vllm_config.compilation_config.pass_config.fuse_allreduce_rms = False
    return "; vLLM's fuse_allreduce_rms, which sums past llm_comm, is off"


def why_not_flashinfer() -> str | None:
    """Why llm_comm does not compute norms that vLLM fuses by FlashInfer, if so."""
    if envs.VLLM_BATCH_INVARIANT:
        return "a norm must not depend on the size of its batch, and FlashInfer's are of some sizes"
    return None


#: What ``why_not_fused`` says of models for which ``eager_norms.py`` can be of use.
NOT_COMPILED = "vLLM does not compile the model"


def why_not_fused(config: EngineOptions) -> str | None:
    """Makes ready for compiled graphs that hold the fused operator; nothing changes yet. Returns why there are to be
    none, if so."""
    return _switched_off(config) or TABLE.attempt(seams.NORMS, partial(_why_not_compiled, config))


def _switched_off(config: EngineOptions) -> str | None:
    return None if config.fuse else f"fuse is false ({config.origins.get('fuse', 'Python')})"


def _why_not_compiled(config: EngineOptions) -> str | None:
    from vllm.config import CompilationMode

    vllm_config = get_current_vllm_config_or_none()
    if envs.VLLM_BATCH_INVARIANT and config.batch_invariant_norm == "engine":
        return "VLLM_BATCH_INVARIANT is on, and batch_invariant_norm is 'engine'"
    if vllm_config is None or vllm_config.compilation_config.mode != CompilationMode.VLLM_COMPILE:
        return NOT_COMPILED
    if vllm_config.compilation_config.backend != "inductor":
        return (
            f"compilation_config.backend is {vllm_config.compilation_config.backend!r}: vLLM changes inductor's graphs"
        )
    why_not = _why_not_kept_apart(vllm_config)
    if why_not is not None:
        return why_not
    # The operators, which graphs from the cache need as well. The pass too, which is needed later: all ranks are to
    # have it, or none.
    from llm_comm.integrations.vllm import fusion_pass, operators  # noqa: F401

    return _why_not_of_this_model(vllm_config.model_config) or (
        _why_not_in_all_batches(config, vllm_config) if envs.VLLM_BATCH_INVARIANT else None
    )


def why_not_fused_eagerly(config: EngineOptions) -> str | None:
    """Of a model that is not compiled: has vLLM's function for an all-reduce and a norm ask llm_comm. Returns why it
    does not, if so."""
    if envs.VLLM_BATCH_INVARIANT:
        return "a norm must not depend on the size of its batch, and the function takes the sizes that are left to it"
    return _switched_off(config) or TABLE.attempt(seams.EAGER_NORMS, _why_not_eager_norms)


def _why_not_eager_norms() -> str | None:
    vllm_config = get_current_vllm_config_or_none()
    model = None if vllm_config is None else vllm_config.model_config
    return _why_not_of_this_model(model)


def _why_not_of_this_model(model: Any) -> str | None:
    """Why the fused kernel would decline every message of a model, if it would. None is no model."""
    if model is None:
        return None
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"the model is in {model.dtype}"
    return registry.operations()[FUSED].why_not_rows(model.get_hidden_size()) or None


def _why_not_in_all_batches(config: EngineOptions, vllm_config: Any) -> str | None:
    """Why the norms of some batches would be vLLM's, if so: their bits differ from those of llm_comm's, and so would a
    token's result in one batch from that in another."""
    compilation, model = vllm_config.compilation_config, vllm_config.model_config
    if getattr(compilation.pass_config, "enable_sp", False):  # vLLM 0.33 has none
        return "sequence parallelism (enable_sp) scatters large batches before their norms, which are vLLM's"
    if compilation.compile_sizes:
        # Where a size is a number in the graph, a pattern may not match that does where it is a symbol.
        return f"compile_sizes is {compilation.compile_sizes}, and graphs of one size may keep a norm of vLLM's"
    if model is not None and model.is_encoder_decoder:
        return "vLLM runs a model with an encoder past its compiled graphs where the encoder has inputs"
    return engine_config.why_not_at_every_size(config, "vLLM")


def why_not_linear() -> str | None:
    """What of vLLM rules linear layers of llm_comm out, if something does: norms are fused all the same."""
    return TABLE.attempt(seams.LINEAR, _import_linear_passes, _why_not_weights)


def _import_linear_passes() -> None:
    # All ranks are to have them, or none.
    from llm_comm.integrations.vllm import linear_passes  # noqa: F401


def why_not_invariant_linear() -> str | None:
    """Makes ready for layers whose bits must not depend on their batch; nothing changes yet. Returns why they cannot be
    llm_comm's, if so."""
    config = get_current_vllm_config_or_none()
    return TABLE.attempt(seams.INVARIANT_LINEAR, partial(_why_not_kept_apart, config), _why_not_weights)


def _why_not_kept_apart(vllm_config: Any) -> str | None:
    """Why vLLM cannot tell compiled graphs with llm_comm's operators from those without, if so."""
    if not isinstance(vllm_config.additional_config, dict):
        return f"additional_config is of {type(vllm_config.additional_config)}"
    if vllm_config.compilation_config.cache_dir:
        # The graphs in there are taken whatever they hold, also by a vLLM without llm_comm and so without its operator.
        return "vLLM tells graphs with and without it apart by their directory, and compilation_config.cache_dir is set"
    return None


def _why_not_weights() -> str | None:
    """Why weights are not where llm_comm's kernel may read them, if so."""
    offload = get_current_vllm_config_or_none().offload_config
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        # The kernel reads a weight before those ahead have ended, and so maybe before it has come.
        return "weights lie in the host's memory (cpu_offload_gb, offload_group_size)"
    return None


def max_linear_tokens(communicator: Communicator, max_fused_bytes: int) -> int:
    """The largest batch, in tokens, whose linear layers go into operators of llm_comm: its norms must be fused.

    Args:
        communicator: Of the group whose all-reduces are fused.
        max_fused_bytes: Larger messages keep their norms apart.
    """
    fused = compiled_graphs.max_fused_tokens(get_current_vllm_config_or_none(), max_fused_bytes)
    preferred = communicator.max_preferred_tokens
    return preferred if fused is None else min(preferred, fused)


def prepare_compiler(max_fused_bytes: int, max_linear_tokens: int, linear_key: str) -> None:
    """Has vLLM compile graphs for what is fused and for larger batches apart, and keep them apart from those of others.

    A graph for all sizes would have the largest ones take the operators as well, which then do one by one what inductor
    would have generated one kernel for.

    Args:
        max_fused_bytes: Larger messages keep their norms apart.
        max_linear_tokens: The same of linear layers; 0: all of them are vLLM's.
        linear_key: ``compiled_graphs.preferred_layers`` of the group whose all-reduces are fused.
    """
    vllm_config = get_current_vllm_config_or_none()
    # What vLLM keeps compiled graphs under is made of its configuration. additional_config is the part for plugins.
    mark = {compiled_graphs.MARK: compiled_graphs.value(max_fused_bytes, max_linear_tokens, linear_key)}
    vllm_config.additional_config = {**vllm_config.additional_config, **mark}
    endpoints = compiled_graphs.new_endpoints(vllm_config, max_fused_bytes, max_linear_tokens)
    if endpoints:
        compilation = vllm_config.compilation_config
        compilation.compile_ranges_endpoints = sorted({*compilation.compile_ranges_endpoints, *endpoints})
