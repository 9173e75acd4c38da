"""Decisions about fusion in vLLM: conditions for fused norms and linear layers, and the set-up of vLLM's compiler.

Functions named ``why_not_*`` return the reason against a feature as text for the start line, or None.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from llm_comm.planning.selection import Sizes
from llm_comm.planning.tables import FUSED


def keep_theirs(is_served: bool) -> str:
    """Keep vLLM's own fusion pass (``fuse_allreduce_rms``) if ``is_served``, else switch it off. Return text for the
    start line.

    With FlashInfer installed, vLLM fuses all-reduces of decode sizes with norms by default. Unless llm_comm serves
    FlashInfer's calls, those all-reduces would bypass llm_comm and its passes. The pass is switched off even with
    ``fuse`` off: then all-reduces use llm_comm and norms are vLLM's. vLLM makes its passes later, when it compiles the
    model, so the change takes effect.
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
    """Return the reason why llm_comm does not serve vLLM's calls of FlashInfer, or None."""
    if envs.VLLM_BATCH_INVARIANT:
        return "a norm must not depend on the size of its batch, and FlashInfer's are of some sizes"
    return None


#: Result of ``why_not_fused`` for models that are not compiled. ``eager_norms.py`` may fuse their norms.
NOT_COMPILED = "vLLM does not compile the model"


def why_not_fused(config: EngineOptions) -> str | None:
    """Prepare fused norms in compiled graphs, and return the reason why they are off, or None.

    vLLM's pass manager is replaced, but the replacement changes no graph until ``fuses`` of the communicator is set.
    """
    return _switched_off(config) or TABLE.attempt(seams.NORMS, partial(_why_not_compiled, config))


def _switched_off(config: EngineOptions) -> str | None:
    return None if config.fuse else f"fuse is false ({config.origins.get('fuse', 'Python')})"


def _why_not_compiled(config: EngineOptions) -> str | None:
    """Return the reason why options or model rule fused norms in compiled graphs out, or None. Import the passes."""
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
    # Import the operators here, because graphs from vLLM's cache call them without running a pass. Import the pass too:
    # an import that fails later would fail after the vote, on this rank alone.
    from llm_comm.integrations.vllm import fusion_pass, operators  # noqa: F401

    return _why_not_of_this_model(vllm_config.model_config) or (
        _why_not_in_all_batches(config, vllm_config) if envs.VLLM_BATCH_INVARIANT else None
    )


def why_not_fused_eagerly(config: EngineOptions) -> str | None:
    """Replace ``fused_allreduce_rms_norm`` for models that are not compiled. Return the reason why it is not replaced,
    or None."""
    if envs.VLLM_BATCH_INVARIANT:
        return "a norm must not depend on the size of its batch, and the function takes the sizes that are left to it"
    return _switched_off(config) or TABLE.attempt(seams.EAGER_NORMS, _why_not_eager_norms)


def _why_not_eager_norms() -> str | None:
    vllm_config = get_current_vllm_config_or_none()
    model = None if vllm_config is None else vllm_config.model_config
    return _why_not_of_this_model(model)


def _why_not_of_this_model(model: Any) -> str | None:
    """Return the reason why the fused kernel would decline every message of ``model``, or None."""
    if model is None:
        return None
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"the model is in {model.dtype}"
    return registry.operations()[FUSED].why_not_rows(model.get_hidden_size()) or None


def _why_not_in_all_batches(config: EngineOptions, vllm_config: Any) -> str | None:
    """Return the reason why vLLM would compute the norms of some batches, or None.

    vLLM's norms round differently, so a token's result would depend on its batch.
    """
    compilation, model = vllm_config.compilation_config, vllm_config.model_config
    if getattr(compilation.pass_config, "enable_sp", False):  # vLLM 0.33 does not have this option
        return "sequence parallelism (enable_sp) scatters large batches before their norms, which are vLLM's"
    if compilation.compile_sizes:
        # A pattern may match a graph with symbolic sizes, and not the graph of one size, where sizes are numbers.
        return f"compile_sizes is {compilation.compile_sizes}, and graphs of one size may keep a norm of vLLM's"
    if model is not None and model.is_encoder_decoder:
        return "vLLM runs a model with an encoder past its compiled graphs where the encoder has inputs"
    return engine_config.why_not_at_every_size(config, "vLLM")


def why_not_linear() -> str | None:
    """Return the reason why llm_comm cannot compute linear layers in compiled graphs, or None. Norms stay fused."""
    return TABLE.attempt(seams.LINEAR, _import_linear_passes, _why_not_weights)


def _import_linear_passes() -> None:
    # Import before the vote: an import that fails later would fail on this rank alone.
    from llm_comm.integrations.vllm import linear_passes  # noqa: F401


def why_not_rope() -> str | None:
    """Return the reason why llm_comm cannot compute qkv layers with their rotary embedding, or None."""
    return TABLE.attempt(seams.ROPE, _import_rope_pass)


def _import_rope_pass() -> None:
    # Import before the vote, as for linear layers. It also defines the operator for graphs from vLLM's cache.
    from llm_comm.integrations.vllm import rope_pass  # noqa: F401


def why_not_cache_writes() -> str | None:
    """Replace vLLM's cache write of FlashAttention, and return the reason why not, or None.

    The replacement calls vLLM's write until ``rope.activate_writes``, and where llm_comm has not written.
    """
    return TABLE.attempt(seams.CACHE_WRITES)


def why_not_invariant_linear() -> str | None:
    """Replace vLLM's method for unquantized layers in batch-invariant mode, and return the reason why not, or None.

    The replacement calls vLLM's method until ``computes_all_batches`` of the communicator is set.
    """
    config = get_current_vllm_config_or_none()
    return TABLE.attempt(seams.INVARIANT_LINEAR, partial(_why_not_kept_apart, config), _why_not_weights)


def why_not_experts() -> str | None:
    """Replace vLLM's method for experts without quantization, and return the reason why not, or None.

    The replacement calls vLLM's method until ``experts.activate``.
    """
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is on"
    return TABLE.attempt(seams.EXPERTS, _why_not_weights)


def _why_not_kept_apart(vllm_config: Any) -> str | None:
    """Return the reason why vLLM's cache cannot separate compiled graphs with llm_comm's operators from others, or
    None."""
    if not isinstance(vllm_config.additional_config, dict):
        return f"additional_config is of {type(vllm_config.additional_config)}"
    if vllm_config.compilation_config.cache_dir:
        # vLLM loads graphs from a given directory without comparing keys. So a vLLM without llm_comm would load graphs
        # that call operators that it does not have.
        return "vLLM tells graphs with and without it apart by their directory, and compilation_config.cache_dir is set"
    return None


def _why_not_weights() -> str | None:
    """Return the reason why llm_comm's kernel may not read the weights, or None."""
    offload = get_current_vllm_config_or_none().offload_config
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        # The kernel reads a weight while earlier kernels still run, so possibly before the weight has been copied in.
        return "weights lie in the host's memory (cpu_offload_gb, offload_group_size)"
    return None


def max_linear_tokens(communicator: Communicator, fused_sizes: Sequence[Sizes]) -> int:
    """Return the largest batch, in tokens, whose linear layers go into operators of llm_comm; 0: none.

    The norms of such a batch must be fused as well.

    Args:
        communicator: Communicator of the group whose all-reduces are fused.
        fused_sizes: Sizes of messages, in bytes, whose all-reduces are fused with norms.
    """
    fused = compiled_graphs.fused_tokens(get_current_vllm_config_or_none(), fused_sizes)
    preferred = communicator.max_preferred_tokens
    return preferred if fused is None else min(preferred, fused[0].last)


def prepare_compiler(
    fused_sizes: Sequence[Sizes], max_linear_tokens: int, linear_key: str, max_rope_tokens: int
) -> None:
    """Have vLLM compile separate graphs for batches that are fused and for others, with a cache key of their own.

    In one graph for all batches, those that are not fused would call the operators too. An operator that declines runs
    unfused, where inductor would have generated one kernel for the norm.

    Args:
        fused_sizes: Sizes of messages, in bytes, whose all-reduces are fused with norms.
        max_linear_tokens: Largest batch of linear layers by llm_comm, in tokens; 0: vLLM computes all of them.
        linear_key: Key of everything that the choice of layers depends on, ``linear_key`` of the group's communicator.
        max_rope_tokens: Largest batch of qkv layers with rotary embedding by llm_comm, in tokens; 0: none.
    """
    vllm_config = get_current_vllm_config_or_none()
    # vLLM's cache key is a hash of its configuration. additional_config is the part of it that plugins may change.
    mark = {compiled_graphs.MARK: compiled_graphs.value(fused_sizes, max_linear_tokens, linear_key)}
    vllm_config.additional_config = {**vllm_config.additional_config, **mark}
    endpoints = compiled_graphs.new_endpoints(vllm_config, fused_sizes, max_linear_tokens, max_rope_tokens)
    if endpoints:
        compilation = vllm_config.compilation_config
        compilation.compile_ranges_endpoints = sorted({*compilation.compile_ranges_endpoints, *endpoints})
