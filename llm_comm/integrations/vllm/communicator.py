"""vLLM's CUDA communicator with the all-reduce of llm_comm in front of its own, and who gets one.

Names of vLLM that llm_comm relies on stand in ``seams.py``. This module imports those of the all-reduce alone.
"""

from __future__ import annotations

import functools
import logging
import sys
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
    flashinfer_calls,
    joining,
    layer_tuning,
    linear,
    members,
    sleeping,
)
from llm_comm.integrations.engine_config import options_of
from llm_comm.integrations.linear import Scales
from llm_comm.integrations.parts import Parts
from llm_comm.integrations.seams import FLASHINFER
from llm_comm.integrations.vllm import (
    compiled_graphs,
    configuration,
    fusion,
    gathering,
    seams,
)
from llm_comm.integrations.vllm.seams import TABLE
from llm_comm.planning.selection import message_limit
from llm_comm.planning.tables import FUSED

logger = logging.getLogger("vllm.llm_comm")

#: The module of the worker that sleeps.
_WORKER = "vllm.v1.worker.gpu_worker"
#: Groups whose ranks are all of one engine, however many engines there are.
_OF_ONE_ENGINE = ("tp", "dcp", "pcp")


@functools.cache
def _say_what_is_off(line: str) -> None:
    logger.warning(line)


class LlmCommCommunicator(CudaCommunicator):  # type: ignore[misc]
    """Sums with llm_comm what it accepts, and takes vLLM's way for the rest and for all other collectives.

    A group that also gathers and scatters gets a class derived from this one (``gathering.py``).

    llm_comm is set up in the constructor, where all ranks of a group come together and before vLLM measures what memory
    is left. It registers no tensors and bakes nothing into graphs that their replay depends on, so graphs that are
    captured to measure their memory and thrown away leave nothing behind, and expandable segments do not concern it:
    its workspace lies outside torch's pool. While vLLM sleeps its memory is given back (``sleeping.py``).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._llm_comm: Communicator | None = None
        self._member: members.Member | None = None
        self._parts: Parts | None = None
        #: Whether all ranks release the workspaces while vLLM sleeps.
        self._sleeps = False
        self._kind = self.unique_name.split(":")[0]
        #: Whether compiled graphs hold llm_comm's operator where an all-reduce of this group and a norm were.
        self.fuses = False
        #: Whether vLLM's function for an all-reduce and a norm asks this: ``eager_norms.py``.
        self.fuses_eagerly = False
        self.max_fused_bytes = 0
        #: The largest batch, in tokens, whose linear layers go into operators of llm_comm; 0: none do.
        self.max_linear_tokens = 0
        #: Whether layers whose bits must not depend on their batch are computed here: ``invariant_linear.py``.
        self.computes_all_batches = False
        #: Differs where ``prefers_linear`` and its kin could.
        self.linear_key = ""
        self._sums = self._kind in configuration.GROUPS
        if self.world_size > 1 and (self._sums or configuration.only_gathers(self._kind)):
            self._join()

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over the group, a new tensor."""
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
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See ``operators.py``; None, the same on all ranks, if it is not served: nothing has been summed then.

        Raises:
            UnsupportedInputError: It is not served, and must be: in batch-invariant mode a norm is llm_comm's in all
                batches.
        """
        member, quantize = self._serving(), None if scale is None else "static"
        if member is None:
            return None
        results = member.all_reduce_add_rms_norm(
            x, residual, weight, epsilon, weight_bias=weight_bias, quantize=quantize, scale=scale
        )
        return results  # type: ignore[return-value]

    def all_reduce_add_rms_norm_group_fp8(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        epsilon: float,
        weight_bias: float,
        quantize: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """See ``operators.py``; None as of ``all_reduce_add_rms_norm``."""
        member = self._serving()
        if member is None:
            return None
        results = member.all_reduce_add_rms_norm(
            x, residual, weight, epsilon, weight_bias=weight_bias, quantize=quantize
        )
        return results  # type: ignore[return-value]

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
        """See ``operators.py``; None, if it is not served: nothing has been summed then. ``linear_weight`` is
        [outputs, inputs]."""
        member = self._serving()
        if member is None:
            return None
        # A parameter of a class of vLLM's would take the way by torch's dispatcher again.
        linear_weight = linear_weight.detach()
        # It may decline on this rank alone, which is no harm: the others make the same sum behind their layer.
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
        """See ``operators.py``; None, if it is not served. ``weight`` is [outputs, inputs]."""
        attempt, first = Communicator.try_linear, linear.FIRST_COLUMN_LINEAR
        options = linear.optional_operands(bias, scales)
        return self._try_linear(attempt, x, weight, first, **options, out_dtype=out_dtype)

    def linear_silu_and_mul(
        self,
        x: torch.Tensor,
        gate_up_weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scales: Scales | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor | None:
        """The same with silu-and-mul."""
        attempt, first = Communicator.try_linear_silu_and_mul, linear.FIRST_LINEAR_SILU_AND_MUL
        options = linear.optional_operands(bias, scales)
        return self._try_linear(attempt, x, gate_up_weight, first, **options, out_dtype=out_dtype)

    def linear_of_any_batch(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """See ``invariant_linear.py``; None once llm_comm has left the group."""
        return self._try_linear(linear.linear_of_any_batch, x, weight, linear.FIRST_INVARIANT_LINEAR)

    def prefers_linear(self, outputs: int, inputs: int, fp8: bool = False, block_scales: bool = False) -> bool:
        """Whether any batch of a linear layer is to be computed by llm_comm, of those that are small enough."""
        return self._prefers(outputs, inputs, silu_and_mul=False, fp8=fp8, block_scales=block_scales)

    def prefers_linear_silu_and_mul(
        self, outputs: int, inputs: int, fp8: bool = False, block_scales: bool = False
    ) -> bool:
        """The same of gate and up with silu-and-mul, with so many outputs each."""
        return self._prefers(outputs, inputs, silu_and_mul=True, fp8=fp8, block_scales=block_scales)

    def prefers_blocks(self, outputs: int, inputs: int, tokens: int, silu_and_mul: bool) -> bool:
        """Whether a batch of so many tokens of a layer of FP8 with scales of blocks is to be computed by llm_comm."""
        communicator = self._llm_comm
        if communicator is None:
            return False
        prefers = communicator.prefers_linear_silu_and_mul if silu_and_mul else communicator.prefers_linear
        return prefers(outputs, inputs, tokens, fp8=True, block_scales=True)

    # Of vLLM 0.33, which calls them for all groups, on all of their ranks.

    def suspend(self, *args: Any, **kwargs: Any) -> None:
        """Gives memory back while vLLM sleeps, with ``enable_nccl_comm_suspend``."""
        super().suspend(*args, **kwargs)
        self._release()

    def resume(self, *args: Any, **kwargs: Any) -> None:
        self._restore()
        super().resume(*args, **kwargs)

    def checkpoint_prepare(self, *args: Any, **kwargs: Any) -> None:
        """Before a checkpoint of the process: nothing of another rank's workspace stays mapped."""
        super().checkpoint_prepare(*args, **kwargs)
        self._release()

    def checkpoint_restore(self, *args: Any, **kwargs: Any) -> None:
        self._restore()
        super().checkpoint_restore(*args, **kwargs)

    def _release(self) -> None:
        if self._llm_comm is not None and self._sleeps:
            sleeping.release(self.unique_name, self._llm_comm, logger)

    def _restore(self) -> None:
        if self._llm_comm is not None:
            sleeping.restore(self.unique_name, self._llm_comm, logger)

    def destroy(self) -> None:
        member, self._member, self._llm_comm, self._parts = self._member, None, None, None
        try:
            if member is not None:
                flashinfer_calls.leave(member.communicator)
                member.close()
        finally:  # also where the CUDA context is broken
            super().destroy()

    def _serving(self) -> members.Member | None:
        return None if self._llm_comm is None else self._member

    def _prefers(self, outputs: int, inputs: int, **kind: bool) -> bool:
        communicator = self._llm_comm
        tokens = self.max_linear_tokens
        return communicator is not None and linear.prefers_some(communicator, outputs, inputs, tokens, **kind)

    def _try_linear(
        self, attempt: Any, x: torch.Tensor, weight: torch.Tensor, first: str, **options: Any
    ) -> torch.Tensor | None:
        member, weight = self._serving(), weight.detach()  # as of ``linear_all_reduce_add_rms_norm``
        return None if member is None else member.try_linear(attempt, x, weight, first, **options)

    def _join(self) -> None:
        """Makes the communicator on all ranks of the group or on none.

        Raises:
            ConfigError: A rank has a wrong option: raised on all ranks, so that vLLM does not start.
            AbsentRanksError: A rank did not come: raised on those that did, so that vLLM does not start.
        """
        _show_log()
        member = members.enter(
            self.unique_name, self.cpu_group, self.device, self._load_config, engine="vLLM", log=logger
        )
        if member is None:
            return
        self._member, self._llm_comm = member, member.communicator
        about_parts = self._set_up_parts(member)
        if about_parts and not self._sums:  # nothing is left to do
            logger.warning("llm_comm is not active for group %s%s.", self.unique_name, about_parts)
            self._member = self._llm_comm = None
            member.close()
            return
        about = about_parts + self._set_up_sleep(member.communicator)
        if self._kind == "tp":
            about += collective_tuning.tune(member.communicator, self.cpu_group, configuration.model(), logger)
            about += self._set_up_fusion(member.communicator) + self._set_up_invariant_linear(member.communicator)
        if self.global_rank == 0:
            logger.info("%s%s", member.summary("vLLM", sums=self._sums), about)
            off = TABLE.describe()
            if off is not None:
                _say_what_is_off(off)

    def _objection(self, of_this_rank: str | None, about: str) -> str | None:
        """Return why a rank of the group does without a feature, if so: the same on all ranks. Collective."""
        return joining.objection_of_any(self.cpu_group, of_this_rank, about)

    def _set_up_parts(self, member: members.Member) -> str:
        """Puts llm_comm in front of all-gathers and reduce-scatters, on all ranks or on none. Returns what to log."""
        config = options_of(member.communicator)
        if not (config.all_gather or config.reduce_scatter):
            return ""
        why_not = self._objection(TABLE.attempt(seams.GATHERING), seams.GATHERING)
        if why_not is not None:
            return f"; but vLLM gathers and scatters itself: {why_not}"
        self._parts = Parts(member, logger)
        self.__class__ = gathering.gathering(type(self))
        return ""

    def _set_up_sleep(self, communicator: Communicator) -> str:
        """Has workspaces released while vLLM sleeps, on all ranks or on none. Returns what to log."""
        if not options_of(communicator).sleep:
            return ""
        # vLLM has every worker of an engine sleep. Groups with ranks in several engines are left alone: each engine
        # sleeps when it is told to.
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
            config = engine_config.check_parts_wanted(config, self.unique_name)
        TABLE.untested = config.untested
        config = configuration.choose_pdl(config, joining.served_device(self.device), self.world_size)
        return engine_config.share_memory(config, self._kind, configuration.served_groups(config))

    def _set_up_fusion(self, communicator: Communicator) -> str:
        """Decides whether compiled graphs are to hold the fused operator, alike on all ranks. Returns what to log."""
        serves_theirs = self._serve_flashinfer(communicator)
        unknown = self._objection(TABLE.why_not(seams.NORMS), "norms of this release")
        why_not = members.why_not_fused(communicator) or unknown
        if why_not is None:
            why_not = self._objection(fusion.why_not_fused(options_of(communicator)), "norms")
        self.max_fused_bytes = message_limit(FUSED, communicator.table, communicator.config)
        if why_not is not None:
            if why_not in (fusion.NOT_COMPILED, unknown):  # of all ranks
                why_not += self._set_up_eager_fusion(options_of(communicator))
            wanted = communicator.max_preferred_tokens > 0
            about_linear = linear.about_linear(communicator, "vLLM", "norms are not fused", 0) if wanted else ""
            about_theirs = fusion.keep_theirs(serves_theirs)
            return f"; not fused with RMSNorm: {why_not}{about_linear}{about_theirs}"
        about_linear = self._set_up_linear(communicator)
        fusion.prepare_compiler(self.max_fused_bytes, self.max_linear_tokens, self.linear_key)
        self.fuses = True
        sizes = descriptions.AT_EVERY_SIZE if communicator.config.batch_invariant_norm == "llm_comm" else ""
        return f"; fused with RMSNorm in compiled graphs{sizes}{about_linear}{fusion.keep_theirs(False)}"

    def _serve_flashinfer(self, communicator: Communicator) -> bool:
        """Has llm_comm compute norms that vLLM fuses by FlashInfer, on all ranks or on none; whether it does."""
        why_not = self._objection(fusion.why_not_flashinfer() or TABLE.attempt(FLASHINFER), "FlashInfer")
        if why_not is not None:
            logger.debug("llm_comm: norms of FlashInfer are left alone: %s", why_not)
            return False
        assert self._member is not None
        fuses, say = options_of(communicator).fuse, partial(self._member.say_once, descriptions.FIRST_FUSED)
        flashinfer_calls.serve(self.cpu_group, communicator, fuses=fuses, say=say)
        return fuses

    def _set_up_eager_fusion(self, config: EngineOptions) -> str:
        """The same for models that are not compiled, on all ranks or on none."""
        why_not = self._objection(fusion.why_not_fused_eagerly(config), "norms outside compiled graphs")
        functions = f"{seams.FUNCTION} or {seams.GEMMA_FUNCTION}"
        if why_not is not None:
            return f" (nor is it in models that call {functions}: {why_not})"
        self.fuses_eagerly = True
        return f" (it is in models that call {functions})"

    def _set_up_invariant_linear(self, communicator: Communicator) -> str:
        """The same for layers whose bits must not depend on their batch, compiled or not."""
        if options_of(communicator).batch_invariant_linear == "engine":
            return ""
        why_not = self._objection(fusion.why_not_invariant_linear(), "linear layers")
        if why_not is not None:
            return f"; linear layers are vLLM's: {why_not}"
        from llm_comm.integrations.vllm import invariant_linear

        invariant_linear.mark_configuration()
        self.computes_all_batches = True
        return linear.LINEAR_AT_EVERY_SIZE

    def _set_up_linear(self, communicator: Communicator) -> str:
        """The same for operators with linear layers."""
        tokens, found = 0, ""
        why_not = linear.why_not_any(communicator)  # the same on all ranks
        if why_not is None:
            why_not = self._objection(fusion.why_not_linear(), "linear layers")
        if why_not is None:
            layers = configuration.layers(self.world_size)
            found = layer_tuning.tune(communicator, self.cpu_group, layers, logger)
            why_not = linear.why_not_preferred(communicator)
        if why_not is None:
            tokens = fusion.max_linear_tokens(communicator, self.max_fused_bytes)
            if tokens == 0:
                why_not = (
                    f"norms are fused up to {descriptions.format_bytes(self.max_fused_bytes)}, less than a token has"
                )
        self.max_linear_tokens, self.linear_key = tokens, compiled_graphs.preferred_layers(communicator)
        return linear.about_linear(communicator, "vLLM", why_not, self.max_linear_tokens) + found


def _show_log() -> None:
    """Lets what llm_comm itself logs come out as vLLM's messages do."""
    ours = logging.getLogger("llm_comm")
    if not ours.handlers:
        for handler in logging.getLogger("vllm").handlers:
            ours.addHandler(handler)
