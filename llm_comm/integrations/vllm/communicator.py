"""Subclass of vLLM's CUDA communicator that tries llm_comm's collectives before vLLM's own.

``seams.py`` lists the symbols of vLLM that llm_comm relies on. This module imports only those that the all-reduce
needs, so that the all-reduce works in releases where other features are off.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from llm_comm.communicator import Communicator
from llm_comm.config import EngineOptions
from llm_comm.integrations import (
    collective_tuning,
    descriptions,
    engine_config,
    experts,
    flashinfer_calls,
    joining,
    layer_tuning,
    linear,
    members,
    sleeping,
)
from llm_comm.integrations.engine_config import options_of
from llm_comm.integrations.gather_scatter import EngineGatherScatter
from llm_comm.integrations.linear import Scales
from llm_comm.integrations.seams import FLASHINFER
from llm_comm.integrations.vllm import (
    compiled_graphs,
    configuration,
    fusion,
    gathering,
    seams,
)
from llm_comm.integrations.vllm.seams import TABLE
from llm_comm.planning.layers import LINEAR_GELU_TANH_AND_MUL, LINEAR_SILU_AND_MUL
from llm_comm.planning.selection import Sizes, fused_sizes

logger = logging.getLogger("vllm.llm_comm")

#: Module of vLLM's worker class, which has the sleep methods.
_WORKER = "vllm.v1.worker.gpu_worker"
#: Kinds of groups whose ranks all belong to one engine, also with data parallelism.
_OF_ONE_ENGINE = ("tp", "dcp", "pcp")


@functools.cache
def _say_what_is_off(line: str) -> None:
    logger.warning(line)


class LlmCommCommunicator(CudaCommunicator):  # type: ignore[misc]
    """Communicator of one group. All-reduces that llm_comm accepts use llm_comm; all other calls use vLLM's code.

    A group whose all-gathers and reduce-scatters llm_comm serves has a class derived from this one (``gathering.py``).

    The constructor sets llm_comm up: all ranks of a group are in it together, and vLLM measures the free memory later.
    llm_comm registers no tensors, and no CUDA graph depends on host state. So graphs that vLLM captures to measure
    memory can be dropped. The workspace lies outside torch's pool, so expandable segments have no effect on it. Sleep
    mode releases it (``sleeping.py``).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._llm_comm: Communicator | None = None
        self._member: members.Member | None = None
        self._gather_scatter: EngineGatherScatter | None = None
        #: Whether the workspaces are released while vLLM sleeps. Equal on all ranks.
        self._sleeps = False
        self._kind = self.unique_name.split(":")[0]
        #: Whether compiled graphs have llm_comm's fused operator in place of an all-reduce of this group and a norm.
        self.fuses = False
        #: Whether vLLM's function ``fused_allreduce_rms_norm`` tries this communicator (``eager_norms.py``).
        self.fuses_eagerly = False
        #: Sizes of messages, in bytes, whose all-reduces are fused with norms.
        self.fused_sizes: tuple[Sizes, ...] = ()
        #: Largest batch, in tokens, whose compiled graphs have llm_comm's operators for linear layers; 0: none have.
        self.max_linear_tokens = 0
        #: Whether this communicator computes linear layers in batch-invariant mode (``invariant_linear.py``).
        self.computes_all_batches = False
        #: Largest batch, in tokens, whose compiled graphs have llm_comm's operators for qkv layers with their rotary
        #: embedding; 0: none have.
        self.max_rope_tokens = 0
        #: Key of everything that the choice of layers in compiled graphs depends on: the ``prefers_linear*`` methods,
        #: and ``max_rope_tokens``.
        self.linear_key = ""
        self._sums = self._kind in configuration.GROUPS
        if self.world_size > 1 and (self._sums or configuration.only_gathers(self._kind)):
            self._join()

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the group. Return a new tensor."""
        communicator = self._llm_comm if self._sums else None
        result = None if communicator is None else communicator.try_all_reduce(input_)
        if result is not None:
            return result
        return super().all_reduce(input_)  # type: ignore[no-any-return]

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        epsilon: float,
        weight_bias: float,
        **quantization: Any,
    ) -> tuple[torch.Tensor, ...] | None:
        """Compute ``Communicator.all_reduce_add_rms_norm``, or return None if llm_comm declines the call.

        All ranks decline alike, and a declined call has communicated nothing.

        Args:
            x, residual, weight, epsilon, weight_bias: Operands of the norm.
            quantization: ``quantize``, ``scale`` and ``global_scale``, if given.

        Raises:
            UnsupportedInputError: llm_comm declines the call in batch-invariant mode, where it must compute the norms
                of all batches.
        """
        member = self._serving()
        if member is None:
            return None
        return member.all_reduce_add_rms_norm(x, residual, weight, epsilon, weight_bias=weight_bias, **quantization)

    def linear_all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        linear_weight: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        epsilon: float,
        weight_bias: float,
        scale: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        scales: Scales | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Compute a linear layer with the all-reduce, residual add and RMSNorm after it, or return None if declined.

        A declined call has communicated nothing. Unlike an all-reduce, this call may be declined on one rank alone. See
        ``operators.py`` for the arguments, but ``linear_weight`` is [outputs, inputs].
        """
        member = self._serving()
        if member is None:
            return None
        # detach returns a plain tensor. A parameter of vLLM's classes would go through torch's dispatcher once more.
        linear_weight = linear_weight.detach()
        # Declining on this rank alone is safe: the caller then runs the layer, and after it the same fused all-reduce
        # with norm. That launch matches the second launch of the other ranks' calls.
        results = member.communicator.try_linear_all_reduce_add_rms_norm(
            x,
            linear_weight,
            residual,
            weight,
            epsilon,
            weight_bias=weight_bias,
            quantize=None if scale is None else "static",
            scale=scale,
            **linear.optional_operands(bias, scales),
        )
        if results is None:
            return None
        normed, new_residual = results
        member.say_once(linear.FIRST_FUSED_LINEAR, x, linear_weight)
        return normed, new_residual

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scales: Scales | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor | None:
        """Compute a linear layer on this rank, or return None if declined. ``weight`` is [outputs, inputs]."""
        operands = x, weight, bias, scales, out_dtype
        return self._try_layer(Communicator.try_linear, linear.FIRST_COLUMN_LINEAR, *operands)

    def linear_silu_and_mul(self, *operands: Any) -> torch.Tensor | None:
        """Compute gate and up with silu-and-mul on this rank, or return None if declined. Operands as of ``linear``."""
        first = linear.FIRST_ACTIVATED[LINEAR_SILU_AND_MUL]
        return self._try_layer(Communicator.try_linear_silu_and_mul, first, *operands)

    def linear_gelu_tanh_and_mul(self, *operands: Any) -> torch.Tensor | None:
        """Compute gate and up with gelu-tanh-and-mul on this rank, or return None if declined. Operands as of
        ``linear``."""
        first = linear.FIRST_ACTIVATED[LINEAR_GELU_TANH_AND_MUL]
        return self._try_layer(Communicator.try_linear_gelu_tanh_and_mul, first, *operands)

    def linear_rope(
        self, x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, **options: Any
    ) -> torch.Tensor | None:
        """Compute ``Communicator.linear_rope`` on this rank, or return None if declined or not preferred."""
        outputs, inputs = weight.shape
        if self._llm_comm is None or not self._llm_comm.prefers_linear_rope(outputs, inputs, len(x)):
            return None
        operands = {"positions": positions, "cos_sin": cos_sin, **options}
        return self._try_linear(Communicator.try_linear_rope, x, weight, linear.FIRST_ROPE, **operands)

    def _try_layer(
        self,
        attempt: Callable[..., torch.Tensor | None],
        first: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scales: Scales | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor | None:
        options = linear.optional_operands(bias, scales)
        return self._try_linear(attempt, x, weight, first, **options, out_dtype=out_dtype)

    def batch_invariant_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """Compute a linear layer of batch-invariant mode (``invariant_linear.py``); None after ``destroy``."""
        return self._try_linear(linear.batch_invariant_linear, x, weight, linear.FIRST_INVARIANT_LINEAR)

    def fused_experts(self, x: torch.Tensor, gate_up_weight: torch.Tensor, **others: Any) -> torch.Tensor | None:
        """Compute experts with silu on this rank, as ``Communicator.fused_experts``; None if declined."""
        others["down_weight"] = others["down_weight"].detach()
        return self._try_linear(Communicator.try_fused_experts, x, gate_up_weight, linear.FIRST_EXPERTS, **others)

    def prefers_linear(self, outputs: int, inputs: int, fp8: bool = False, block_scales: bool = False) -> bool:
        """Return whether llm_comm is preferred for a linear layer at some batch size up to ``max_linear_tokens``."""
        return self._prefers(outputs, inputs, silu_and_mul=False, fp8=fp8, block_scales=block_scales)

    def prefers_linear_silu_and_mul(
        self, outputs: int, inputs: int, fp8: bool = False, block_scales: bool = False
    ) -> bool:
        """Return whether llm_comm is preferred for gate and up with their activation, at some batch size up to
        ``max_linear_tokens``. ``outputs`` is the number of outputs of gate alone."""
        return self._prefers(outputs, inputs, silu_and_mul=True, fp8=fp8, block_scales=block_scales)

    def prefers_linear_rope(self, outputs: int, inputs: int) -> bool:
        """Return whether llm_comm is preferred for a qkv layer with its rotary embedding, at some batch size up to
        ``max_rope_tokens``."""
        communicator, batches = self._llm_comm, range(1, self.max_rope_tokens + 1)
        if communicator is None:
            return False
        return any(communicator.prefers_linear_rope(outputs, inputs, tokens) for tokens in batches)

    def prefers_blocks(self, outputs: int, inputs: int, tokens: int, silu_and_mul: bool) -> bool:
        """Return whether llm_comm is preferred for an FP8 layer with block scales at this number of tokens."""
        communicator = self._llm_comm
        if communicator is None:
            return False
        prefers = communicator.prefers_linear_silu_and_mul if silu_and_mul else communicator.prefers_linear
        return prefers(outputs, inputs, tokens, fp8=True, block_scales=True)

    # vLLM 0.33 calls these four methods on all groups and all of their ranks. vLLM 0.26 does not have them.

    def suspend(self, *args: Any, **kwargs: Any) -> None:
        """Release memory while vLLM sleeps. Called with ``enable_nccl_comm_suspend``."""
        super().suspend(*args, **kwargs)
        self._release()

    def resume(self, *args: Any, **kwargs: Any) -> None:
        """Restore memory before vLLM wakes up."""
        self._restore()
        super().resume(*args, **kwargs)

    def checkpoint_prepare(self, *args: Any, **kwargs: Any) -> None:
        """Release memory before a checkpoint of the process, so that no workspace of another rank stays mapped."""
        super().checkpoint_prepare(*args, **kwargs)
        self._release()

    def checkpoint_restore(self, *args: Any, **kwargs: Any) -> None:
        """Restore memory after a checkpoint of the process."""
        self._restore()
        super().checkpoint_restore(*args, **kwargs)

    def _release(self) -> None:
        if self._llm_comm is not None and self._sleeps:
            sleeping.release(self.unique_name, self._llm_comm, logger)

    def _restore(self) -> None:
        if self._llm_comm is not None:
            sleeping.restore(self.unique_name, self._llm_comm, logger)

    def destroy(self) -> None:
        """Close llm_comm in this group, then vLLM's communicator."""
        member, self._member, self._llm_comm, self._gather_scatter = self._member, None, None, None
        try:
            if member is not None:
                flashinfer_calls.leave(member.communicator)
                member.close()
        finally:  # close raises if the CUDA context is broken
            super().destroy()

    def _serving(self) -> members.Member | None:
        """Return this rank's membership; None if llm_comm does not serve the group."""
        return None if self._llm_comm is None else self._member

    def _prefers(self, outputs: int, inputs: int, **kind: bool) -> bool:
        communicator = self._llm_comm
        tokens = self.max_linear_tokens
        return communicator is not None and linear.prefers_some(communicator, outputs, inputs, tokens, **kind)

    def _try_linear(
        self, attempt: Any, x: torch.Tensor, weight: torch.Tensor, first: str, **options: Any
    ) -> torch.Tensor | None:
        # detach returns a plain tensor. A parameter of vLLM's classes would go through torch's dispatcher once more.
        member, weight = self._serving(), weight.detach()
        return None if member is None else member.try_linear(attempt, x, weight, first, **options)

    def _join(self) -> None:
        """Set llm_comm up for this group, on all ranks or on none, and log the start line. Collective.

        Raises:
            ConfigError: A rank has a wrong option. Raised on all ranks, so that vLLM does not start.
            AbsentRanksError: A rank did not vote or was lost. Raised on the ranks that are left, so that vLLM does not
                start.
        """
        _show_log()
        member = members.enter(
            self.unique_name, self.cpu_group, self.device, self._load_config, engine="vLLM", log=logger
        )
        if member is None:
            return
        self._member, self._llm_comm = member, member.communicator
        about_gather_scatter = self._set_up_gather_scatter(member)
        if about_gather_scatter and not self._sums:  # nothing is left to do
            logger.warning("llm_comm is not active for group %s%s.", self.unique_name, about_gather_scatter)
            self._member = self._llm_comm = None
            member.close()
            return
        about = about_gather_scatter + self._set_up_sleep(member.communicator)
        if self._kind == "tp":
            about += collective_tuning.tune(member.communicator, self.cpu_group, configuration.model(), logger)
            about += self._set_up_fusion(member.communicator) + self._set_up_invariant_linear(member.communicator)
            about += self._set_up_experts(member.communicator)
        if self.global_rank == 0:
            logger.info("%s%s", member.summary("vLLM", sums=self._sums), about)
            off = TABLE.describe()
            if off is not None:
                _say_what_is_off(off)

    def _objection(self, of_this_rank: str | None, about: str) -> str | None:
        """Return the objections of all ranks to a feature, equal on all ranks, or None. Collective.

        Args:
            of_this_rank: Objection of this rank, or None.
            about: Name of the feature, for errors.
        """
        return joining.objection_of_any(self.cpu_group, of_this_rank, about)

    def _set_up_gather_scatter(self, member: members.Member) -> str:
        """Serve all-gathers and reduce-scatters, on all ranks or on none. Return text for the start line."""
        config = options_of(member.communicator)
        if not (config.all_gather or config.reduce_scatter):
            return ""
        why_not = self._objection(TABLE.attempt(seams.GATHERING), seams.GATHERING)
        if why_not is not None:
            return f"; but vLLM gathers and scatters itself: {why_not}"
        self._gather_scatter = EngineGatherScatter(member, logger)
        self.__class__ = gathering.gathering(type(self))
        return ""

    def _set_up_sleep(self, communicator: Communicator) -> str:
        """With option ``sleep``: prepare the release of workspaces, on all ranks or on none. Return text for the start
        line."""
        if not options_of(communicator).sleep:
            return ""
        # All workers of an engine sleep together, but engines sleep independently. So groups with ranks in several
        # engines keep their workspaces.
        sleeping.only = () if configuration.is_alone() else _OF_ONE_ENGINE
        of_this_rank = TABLE.attempt(seams.SLEEP) if _WORKER in sys.modules else None
        why_not = self._objection(of_this_rank, seams.SLEEP)
        if why_not is not None:
            sleeping.leave(communicator)
            return f"; its workspaces stay while vLLM sleeps: {why_not}"
        self._sleeps = True
        return ""

    def _load_config(self) -> EngineOptions:
        config = configuration.load_config()
        if not self._sums:
            config = engine_config.check_gather_scatter_wanted(config, self.unique_name)
        TABLE.untested = config.untested
        config = configuration.choose_pdl(config, joining.served_device(self.device), self.world_size)
        return engine_config.share_memory(config, self._kind, configuration.served_groups(config))

    def _set_up_fusion(self, communicator: Communicator) -> str:
        """Choose how norms are fused with all-reduces, alike on all ranks. Return text for the start line.

        Compiled graphs get llm_comm's fused operator if all ranks can. If vLLM does not compile the model, or this
        release's passes are unknown, ``fused_allreduce_rms_norm`` is replaced instead.
        """
        serves_theirs = self._serve_flashinfer(communicator)
        unknown = self._objection(TABLE.why_not(seams.NORMS), "norms of this release")
        why_not = members.why_not_fused(communicator) or unknown
        if why_not is None:
            why_not = self._objection(fusion.why_not_fused(options_of(communicator)), "norms")
        self.fused_sizes = fused_sizes(communicator.table, communicator.config)
        if why_not is not None:
            if why_not in (fusion.NOT_COMPILED, unknown):  # equal on all ranks, so all of them enter the vote inside
                why_not += self._set_up_eager_fusion(options_of(communicator))
            wanted = communicator.max_preferred_tokens > 0
            about_linear = linear.about_linear(communicator, "vLLM", "norms are not fused", 0) if wanted else ""
            about_theirs = fusion.keep_theirs(serves_theirs)
            return f"; not fused with RMSNorm: {why_not}{about_linear}{about_theirs}"
        about_linear = self._set_up_linear(communicator)
        fusion.prepare_compiler(self.fused_sizes, self.max_linear_tokens, self.linear_key, self.max_rope_tokens)
        self.fuses = True
        sizes = descriptions.AT_EVERY_SIZE if communicator.config.batch_invariant_norm == "llm_comm" else ""
        return f"; fused with RMSNorm in compiled graphs{sizes}{about_linear}{fusion.keep_theirs(False)}"

    def _serve_flashinfer(self, communicator: Communicator) -> bool:
        """Serve vLLM's calls of FlashInfer's fused all-reduce, on all ranks or on none. Return whether norms are
        served."""
        why_not = self._objection(fusion.why_not_flashinfer() or TABLE.attempt(FLASHINFER), "FlashInfer")
        if why_not is not None:
            logger.debug("llm_comm: norms of FlashInfer are left alone: %s", why_not)
            return False
        assert self._member is not None
        fuses, say = options_of(communicator).fuse, partial(self._member.say_once, descriptions.FIRST_FUSED)
        flashinfer_calls.serve(self.cpu_group, communicator, fuses=fuses, say=say)
        return fuses

    def _set_up_eager_fusion(self, config: EngineOptions) -> str:
        """Fuse norms of models that vLLM does not compile, on all ranks or on none. Return text for the start line."""
        why_not = self._objection(fusion.why_not_fused_eagerly(config), "norms outside compiled graphs")
        functions = f"{seams.FUNCTION} or {seams.GEMMA_FUNCTION}"
        if why_not is not None:
            return f" (nor is it in models that call {functions}: {why_not})"
        self.fuses_eagerly = True
        return f" (it is in models that call {functions})"

    def _set_up_invariant_linear(self, communicator: Communicator) -> str:
        """With ``batch_invariant_linear``: compute linear layers in batch-invariant mode, on all ranks or on none.
        Return text for the start line."""
        if options_of(communicator).batch_invariant_linear == "engine":
            return ""
        why_not = self._objection(fusion.why_not_invariant_linear(), "linear layers")
        if why_not is not None:
            return f"; linear layers are vLLM's: {why_not}"
        from llm_comm.integrations.vllm import invariant_linear

        invariant_linear.mark_configuration()
        self.computes_all_batches = True
        return linear.LINEAR_AT_EVERY_SIZE

    def _set_up_experts(self, communicator: Communicator) -> str:
        """With ``fuse_experts``: compute experts of few tokens, on all ranks or on none. Return text for the start
        line."""
        config = options_of(communicator)
        if not experts.are_wanted(config, communicator.device):
            return ""
        of_this_rank = experts.why_not_needed(configuration.model()) or fusion.why_not_experts()
        why_not = self._objection(of_this_rank, seams.EXPERTS)
        if why_not is not None:
            return experts.about_objection(config, "vLLM", why_not)
        from llm_comm.integrations.vllm.experts import activate

        why_no_fp8 = self._objection(seams.TABLE.attempt(seams.FP8_EXPERTS), seams.FP8_EXPERTS)
        activate(self, measures=config.fuse_experts == "auto", fp8=why_no_fp8 is None)
        return experts.about(config) + experts.about_fp8("vLLM", why_no_fp8)

    def _set_up_linear(self, communicator: Communicator) -> str:
        """Choose whether compiled graphs get operators with linear layers, alike on all ranks, and measure layers that
        no table has. Return text for the start line."""
        tokens, found = 0, ""
        why_not = linear.why_not_any(communicator)  # the same on all ranks
        if why_not is None:
            why_not = self._objection(fusion.why_not_linear(), "linear layers")
        if why_not is None:
            layers = configuration.layers(self.world_size, options_of(communicator))
            found = layer_tuning.tune(communicator, self.cpu_group, layers, logger)
            why_not = linear.why_not_preferred(communicator)
        if why_not is None:
            tokens = fusion.max_linear_tokens(communicator, self.fused_sizes)
            if tokens == 0:
                largest = descriptions.format_bytes(self.fused_sizes[0].last)
                why_not = f"norms are fused up to {largest}, less than a token has"
        self.max_linear_tokens, self.linear_key = tokens, compiled_graphs.preferred_layers(communicator)
        self._set_up_rope(communicator)
        return linear.about_linear(communicator, "vLLM", why_not, self.max_linear_tokens) + found

    def _set_up_rope(self, communicator: Communicator) -> None:
        """Choose which compiled graphs get the operator of qkv layers with their rotary embedding, alike on all
        ranks."""
        self.max_rope_tokens, tokens = 0, min(communicator.max_preferred_rope_tokens, self.max_linear_tokens)
        if tokens == 0:
            return
        why_not = self._objection(fusion.why_not_rope(), seams.ROPE)
        if why_not is not None:
            logger.debug("llm_comm: rotary embeddings are left alone: %s", why_not)
            return
        from llm_comm.integrations.vllm import rope

        self.max_rope_tokens, self.linear_key = tokens, f"{self.linear_key} rope {tokens}"
        why_not = fusion.why_not_cache_writes()  # a rank without them computes the same
        if why_not is None:
            rope.activate_writes()
        else:
            logger.debug("llm_comm: keys and values are written by vLLM: %s", why_not)


def _show_log() -> None:
    """Give the library's own logger the handlers of vLLM, so that its messages appear in vLLM's log."""
    ours = logging.getLogger("llm_comm")
    if not ours.handlers:
        for handler in logging.getLogger("vllm").handlers:
            ours.addHandler(handler)
