"""Set-up of llm_comm in SGLang's groups, and the object that replaces a group's custom all-reduce.

``seams.py`` lists the symbols of SGLang that llm_comm relies on. This module imports only those that the all-reduce
needs, so that the all-reduce works in releases where other features are off.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_exec
from sglang.srt.utils import is_cuda

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
    members,
    sleeping,
)
from llm_comm.integrations.engine_config import options_of
from llm_comm.integrations.gather_scatter import EngineGatherScatter
from llm_comm.integrations.linear import (
    FIRST_ACTIVATED,
    FIRST_EXPERTS,
    FIRST_INVARIANT_LINEAR,
    FIRST_LINEAR,
    FIRST_ROPE,
    FIRST_ROUTER,
    LINEAR_AT_EVERY_SIZE,
    Scales,
    about_linear,
    batch_invariant_linear,
    optional_operands,
    why_not_any,
    why_not_preferred,
)
from llm_comm.integrations.seams import FLASHINFER
from llm_comm.integrations.sglang import groups, seams
from llm_comm.integrations.sglang.seams import TABLE
from llm_comm.planning.layers import LINEAR_SILU_AND_MUL
from llm_comm.planning.models import Layer, Model, find, layers_to_measure, of_config, router_of
from llm_comm.runtime.devices import note_on_amd
from llm_comm.runtime.rendezvous import Rendezvous

logger = logging.getLogger("sglang.llm_comm")

_Result = TypeVar("_Result")

#: Kinds of groups whose all-reduces llm_comm serves. SGLang makes the others besides "tp" only if their ranks differ
#: from those of "tp".
GROUPS = ("tp", "pdmux_prefill_tp", "attention_tp", "moe_tp", "moe_ep", "dcp")
#: Kinds of groups that use all-gather and reduce-scatter only. The group of pipeline parallelism uses no collective
#: that llm_comm serves.
GATHERING = ("attn_cp", "moe_dp", "shared_experts_tp")
# Module of the scheduler's methods that release and resume memory.
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
# Group of prefills with --enable-pdmux, where another stream decodes at the same time. SGLang makes it right after
# "tp" and before any model.
_PDMUX = "pdmux_prefill_tp"
# Arguments of GroupCoordinator's constructor for elastic groups, whose ranks come and go while others serve.
_ELASTIC = ("recovered_rank", "rank_offset", "max_world_size")


def step_in(group: Any, arguments: Mapping[str, Any]) -> None:
    """Set llm_comm up for a new group, on all ranks of the group or on none, and log the start line. Collective.

    Args:
        group: GroupCoordinator that has just been made.
        arguments: Keyword arguments of its constructor.

    Raises:
        AbsentRanksError: A rank did not vote or was lost. Raised on the ranks that are left.
        ConfigError: A rank has a wrong option. Raised on all ranks.
        RendezvousError: A rank is lost.
    """
    kind = group.unique_name.split(":")[0]
    sums = kind in GROUPS
    if group.world_size == 1 or not (sums or kind in GATHERING):
        return
    if kind == _PDMUX:
        _leave_norms_to_sglang()
        # FlashInfer's calls are identified by their ranks. "tp" has the same ranks, so calls of both would be mixed up.
        flashinfer_calls.leave_group(group.cpu_group)
    why_not, is_elsewhere, unknown = None, None, None
    try:
        why_not = _why_not(group, arguments)
        is_elsewhere = _flashinfer_sums()
    except Exception as error:  # any error must reach the other ranks, which would wait for this one
        unknown = joining.NotJoinedError(f"it cannot be set up in {TABLE.release} ({type(error).__name__}: {error})")
    if why_not is not None:
        _log_once(why_not)
        return

    def load() -> EngineOptions:
        if unknown is not None:
            raise unknown
        config = load_config() if sums else engine_config.check_gather_scatter_wanted(load_config(), group.unique_name)
        TABLE.untested = config.untested
        gathers = config.all_gather or config.reduce_scatter
        served = [each for each in groups.served if gathers or each not in GATHERING]
        return engine_config.share_memory(config, kind, served)

    member = members.enter(group.unique_name, group.cpu_group, group.device, load, engine="SGLang", log=logger)
    if member is None:
        return
    if sums:
        _sum(group, member)
    about_gather_scatter = _gather_and_scatter(group, member)
    if about_gather_scatter and not sums:  # nothing is left to do
        logger.warning("llm_comm is not active for group %s%s.", group.unique_name, about_gather_scatter)
        member.close()
        return
    about_layers = _set_up_release(group, member.communicator)
    if kind == "tp":
        model = _model()
        about_layers += collective_tuning.tune(member.communicator, group.cpu_group, model, logger)
        about_layers += _set_up_fusion(group, member.communicator, model)
        about_layers += _set_up_invariant_linears(group, member.communicator)
        about_layers += _set_up_experts(group, member.communicator, model)
    if sums:
        about_layers += _serve_flashinfer(group, member, is_elsewhere)
    if dist.get_rank() == 0:
        logger.info("%s%s%s", member.summary("SGLang", sums=sums), about_gather_scatter, about_layers)
        _say_what_is_off()


@functools.cache
def _say_what_is_off() -> None:
    off = TABLE.describe()
    if off is not None:
        logger.warning(off)


def _sum(group: Any, member: members.Member) -> None:
    """Replace the custom all-reduce of ``group`` by an object that tries llm_comm first. Collective."""
    theirs = group.ca_comm
    usable = theirs is not None and not theirs.disabled
    # SGLang's custom all-reduce can be disabled on single ranks. For calls that llm_comm declines, such ranks would use
    # another collective than the others, and all would wait forever. So it is used on all ranks or on none.
    rendezvous = Rendezvous(group.cpu_group, joining.ENGINE_TIMEOUT_S)
    everywhere = rendezvous.gather("SGLang's own all-reduce", usable)
    if usable and not all(everywhere):
        absent = rendezvous.names.several(rank for rank, there in enumerate(everywhere) if not there)
        text = "SGLang's own custom all-reduce is not used in group %s: it is disabled on %s."
        logger.warning(text, group.unique_name, absent)
    group.ca_comm = LlmCommAllReduce(member, theirs, uses_theirs=all(everywhere))


def _gather_and_scatter(group: Any, member: members.Member) -> str:
    """Serve the all-gathers and reduce-scatters of ``group``, on all ranks or on none. Return text for the start line
    if they are not served. Collective."""
    config = options_of(member.communicator)
    if not (config.all_gather or config.reduce_scatter):
        return ""
    why_not = joining.objection_of_any(group.cpu_group, TABLE.attempt(seams.GATHERING), seams.GATHERING)
    if why_not is not None:
        return f"; but SGLang gathers and scatters itself: {why_not}"
    from llm_comm.integrations.sglang import gathering

    setattr(group, gathering.ATTRIBUTE, EngineGatherScatter(member, logger))
    return ""


def _set_up_release(group: Any, communicator: Communicator) -> str:
    """With option ``sleep``: prepare the release of workspaces, on all ranks or on none. Return text for the start
    line. Collective."""
    if not options_of(communicator).sleep:
        return ""
    # Only schedulers get release and resume requests, and only while idle. Workspaces are released with the first
    # release request and restored with the first resume request, with any tags: whatever SGLang resumes, it may run a
    # model next.
    of_this_rank = TABLE.attempt(seams.MEMORY) if _UPDATER in sys.modules else None
    why_not = joining.objection_of_any(group.cpu_group, of_this_rank, seams.MEMORY)
    if why_not is None:
        return ""
    sleeping.leave(communicator)
    return f"; its workspaces stay while SGLang releases memory: {why_not}"


def load_config() -> EngineOptions:
    """Return the options of this rank, with the defaults and changes that SGLang needs.

    Precedence: defaults < LLM_COMM_CONFIG < LLM_COMM_*.

    Raises:
        ConfigError: A value is not allowed, or the file cannot be read.
        SwitchedOffError: SGLang is in deterministic mode, and option ``deterministic`` is off.
    """
    config = engine_config.load(logger)
    if "timeout_s" not in config.origins:
        theirs = parallel_state._MODEL_PARALLEL_GROUP_TIMEOUT if TABLE.has(seams.TIMEOUT) else None
        config = config.replace(timeout_s=joining.ENGINE_TIMEOUT_S if theirs is None else theirs.total_seconds())
    if _is_deterministic() and not config.deterministic:
        raise joining.SwitchedOffError("deterministic inference is on, and LLM_COMM_DETERMINISTIC is not")
    return engine_config.for_batch_invariance(config, "deterministic inference", _is_deterministic(), logger)


def _why_not(group: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return the reason why llm_comm is not set up, or None.

    Every rank must find the same reason, since a rank that finds one does not come to the vote. Conditions that can
    differ between ranks are voted on in ``join``.
    """
    if joining.switched_off():
        return "LLM_COMM_ENABLE is off"
    if not is_cuda():
        return f"the platform is not CUDA{note_on_amd()}"
    if _option(get_disagg, "encoder_only"):
        # Rank 0 is the main process, which has loaded plugins. The processes of the other ranks load none.
        return "--encoder-only loads plugins in the process of rank 0 alone"
    if (
        _server_option("moe", "elastic_ep_backend") is not None
        or dist.get_backend(group.cpu_group) != "gloo"
        or any(arguments.get(name) for name in _ELASTIC)
    ):
        return "elastic expert parallelism replaces ranks while the others serve"
    if not parallel_state._ENABLE_CUSTOM_ALL_REDUCE and not _is_deterministic():
        return "--disable-custom-all-reduce is set"
    return None


def _set_up_fusion(group: Any, communicator: Communicator, model: Model | None) -> str:
    """Fuse norms with the all-reduces before them, on all ranks or on none. Return text for the start line.
    Collective."""
    why_not = members.why_not_fused(communicator) or joining.objection_of_any(
        group.cpu_group, _attempt_norms(group, options_of(communicator))
    )
    if why_not is not None:
        return f"; not fused with RMSNorm: {why_not}{about_linear(communicator, 'SGLang', 'norms are not fused', 0)}"
    from llm_comm.integrations.sglang import fusion

    at_every_size = communicator.config.batch_invariant_norm == "llm_comm"
    fusion.activate(at_every_size)
    sizes = descriptions.AT_EVERY_SIZE if at_every_size else ""
    return f"; fused with RMSNorm{sizes}{_set_up_linears(group, communicator, model)}"


def _set_up_linears(group: Any, communicator: Communicator, model: Model | None) -> str:
    """Compute linear layers of small batches by llm_comm, on all ranks or on none. Return text for the start line.

    Collective. Layers that no table has are measured here. Norms must be fused.
    """
    found = ""
    why_not = why_not_any(communicator)  # the same on all ranks
    if why_not is None:
        why_not = joining.objection_of_any(group.cpu_group, _attempt_linears(), "linear layers")
    if why_not is None:
        # No vote, unlike above: each rank computes its layers without the others.
        activates = TABLE.attempt(seams.SILU_AND_MUL) is None
        TABLE.attempt(seams.ROPE)
        layers: Iterable[Layer] = ()
        if model is not None:
            with_activation = activates and model.is_activated_in_sglang
            layers = layers_to_measure(model, group.world_size, with_activation, False, with_router=True)
        found = layer_tuning.tune(communicator, group.cpu_group, layers, logger)
        why_not = why_not_preferred(communicator)
    if why_not is None:
        from llm_comm.integrations.sglang import linear

        linear.activate(_router_of_all(group, model))
    return about_linear(communicator, "SGLang", why_not, communicator.max_preferred_tokens) + found


def _router_of_all(group: Any, model: Model | None) -> Layer | None:
    """Return the model's router; None if it has none, or if another rank reads another one in its config.json: the two
    might choose different experts. Collective.

    Raises:
        RendezvousError: A rank failed. Raised on all ranks.
    """

    def find_router() -> Layer | None:
        return None if model is None else router_of(model)

    routers = Rendezvous(group.cpu_group, joining.ENGINE_TIMEOUT_S).collect("router of the model", find_router)
    router = routers[0]
    return Layer(*router) if router is not None and all(other == router for other in routers) else None


def _model() -> Model | None:
    """Return the model as its config.json describes it; None if there is no server or no file, or if llm_comm does not
    know the architecture."""
    try:
        from sglang.srt.runtime_context import get_server_args

        server = get_server_args()
        if server.enable_dp_attention:  # layers are split over other groups than "tp"
            return None
        content = json.loads(find(server.model_path).read_text(encoding="utf-8"))
        return of_config(content, quantization=server.quantization)
    except Exception:
        return None


def _set_up_invariant_linears(group: Any, communicator: Communicator) -> str:
    """With ``batch_invariant_linear``: compute linear layers of all batch sizes by llm_comm, on all ranks or on none.
    Return text for the start line. Collective."""
    if options_of(communicator).batch_invariant_linear == "engine":
        return ""
    why_not = joining.objection_of_any(group.cpu_group, TABLE.attempt(seams.INVARIANT_LINEAR), "linear layers")
    if why_not is not None:
        return f"; linear layers are SGLang's: {why_not}"
    from llm_comm.integrations.sglang import invariant_linear

    invariant_linear.activate(group)
    return LINEAR_AT_EVERY_SIZE


def _set_up_experts(group: Any, communicator: Communicator, model: Model | None) -> str:
    """With ``fuse_experts``: compute experts of few tokens by llm_comm, on all ranks or on none. Return text for the
    start line. Collective."""
    config = options_of(communicator)
    if not experts.are_wanted(config, communicator.device):
        return ""
    of_this_rank = experts.why_not_needed(model)
    if of_this_rank is None:
        of_this_rank = "deterministic inference is on" if _is_deterministic() else TABLE.attempt(seams.EXPERTS)
    why_not = joining.objection_of_any(group.cpu_group, of_this_rank, seams.EXPERTS)
    if why_not is not None:
        return experts.about_objection(config, "SGLang", why_not)
    from llm_comm.integrations.sglang.experts import activate

    why_no_fp8 = joining.objection_of_any(group.cpu_group, TABLE.attempt(seams.FP8_EXPERTS), seams.FP8_EXPERTS)
    activate(group, measures=config.fuse_experts == "auto", fp8=why_no_fp8 is None)
    return experts.about(config) + _set_up_router(group, communicator) + experts.about_fp8("SGLang", why_no_fp8)


def _set_up_router(group: Any, communicator: Communicator) -> str:
    """Compute the router of experts by llm_comm, on all ranks or on none. Return text for the start line.
    Collective."""
    from llm_comm.integrations.sglang import routers

    of_this_rank, device = TABLE.attempt(seams.ROUTER, routers.set_up), communicator.device
    is_auto = options_of(communicator).fuse_experts == "auto"
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    if _server_option("moe", "ep_dispatch_algorithm") == "fake":  # SGLang then overwrites logits
        of_this_rank = "--ep-dispatch-algorithm is fake"
    elif _server_option("comm", "enable_symm_mem"):  # SGLang then gathers choices from its own memory
        of_this_rank = "--enable-symm-mem is set"
    elif capability < (9, 0):
        of_this_rank = "the GPU has no clusters"  # one block would read the whole weight
    elif is_auto and capability[0] != 9:
        of_this_rank = "it was measured on Hopper alone"
    why_not = joining.objection_of_any(group.cpu_group, of_this_rank, seams.ROUTER)
    if why_not is not None:
        return f"; their router is SGLang's: {why_not}"
    routers.activate(group, only_measured=is_auto)
    return f"; their router by llm_comm{', where it is faster' if is_auto else ''}"


def _attempt_linears() -> str | None:
    """Hook SGLang's linear layers on this rank, and return the reason why they cannot be hooked, or None.

    The hooks have no effect until ``linear.activate``.
    """
    why_not = TABLE.attempt(seams.LINEAR, _look_up_linears)
    if why_not is None:
        TABLE.attempt(seams.FP8)  # the result is not voted on: each rank computes its layers without the others
    return why_not


def _look_up_linears() -> None:
    from llm_comm.integrations.sglang import linear

    linear.set_up()


def _attempt_norms(group: Any, config: EngineOptions) -> str | None:
    """Hook SGLang's norms on this rank, and return the reason why they cannot be fused, or None.

    The hooks have no effect until ``fusion.activate``.
    """
    if not config.fuse:
        return f"fuse is false ({config.origins.get('fuse', 'Python')})"
    if _is_deterministic() and config.batch_invariant_norm == "engine":
        return "deterministic inference is on, and batch_invariant_norm is 'engine'"
    why_not = engine_config.why_not_at_every_size(config, "SGLang") if _is_deterministic() else None
    if why_not is None and _is_deterministic() and TABLE.has(seams.NEW_LLAMA):
        why_not = "this version of SGLang has no model of which llm_comm knows that all batches take the same norms"
    return why_not or TABLE.attempt(seams.NORMS, functools.partial(_note_group, group))


def _note_group(group: Any) -> None:
    from llm_comm.integrations.sglang import fusion

    fusion.set_up(group)


def _leave_norms_to_sglang() -> None:
    """Switch fused norms off. With --enable-pdmux prefills use a group of their own, but fused norms know only "tp"."""
    fusion = sys.modules.get("llm_comm.integrations.sglang.fusion")
    if fusion is not None and fusion.deactivate() and dist.get_rank() == 0:
        logger.info("llm_comm: fused norms are off: --enable-pdmux runs prefill all-reduces in a separate group.")


def _is_deterministic() -> bool:
    # SGLang's launcher sets this variable for --enable-deterministic-inference, together with
    # --disable-custom-all-reduce.
    return bool(envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.get())


def _server_option(section: str, name: str) -> Any:
    options = _option(get_exec, section)
    return None if options is None else getattr(options, name)


def _option(options: Callable[[], Any], name: str) -> Any:
    """Return an option of the server; None if there is no server."""
    try:
        return getattr(options(), name)
    except ValueError:  # SGLang raises this in a process that makes groups without a server
        return None


def _flashinfer_sums() -> bool | None:
    """Return whether SGLang is set to use FlashInfer's all-reduces, which bypass its custom all-reduce. They serve
    messages that fit FlashInfer's workspace. None: this release does not have the option."""
    if TABLE.why_not(seams.THEIR_FUSION) is not None:
        return None
    return bool(_server_option("comm", "flashinfer_allreduce_fusion_backend"))


def _serve_flashinfer(group: Any, member: members.Member, is_wanted: bool | None) -> str:
    """Serve SGLang's calls of FlashInfer, on all ranks or on none. Return text for the start line. Collective.

    Args:
        group: Group whose all-reduces llm_comm serves.
        member: This rank's membership in the group.
        is_wanted: Result of ``_flashinfer_sums`` on this rank.
    """
    if is_wanted is False:
        why_not: str | None = "SGLang sums nothing by FlashInfer"
    elif group.unique_name.split(":")[0] == _PDMUX:
        why_not = "two groups have the same ranks"
    else:
        why_not = TABLE.attempt(FLASHINFER)
    why_not = joining.objection_of_any(group.cpu_group, why_not, "FlashInfer")
    if why_not is not None:
        return bool(is_wanted) * (
            "; but SGLang's FlashInfer all-reduce fusion comes first where it applies "
            f"(--enforce-disable-flashinfer-allreduce-fusion), past llm_comm: {why_not}"
        )
    flashinfer_calls.serve(
        group.cpu_group,
        member.communicator,
        fuses=options_of(member.communicator).fuse and not _is_deterministic(),
        say=functools.partial(member.say_once, descriptions.FIRST_FUSED),
    )
    return "; and what SGLang sums by FlashInfer, where llm_comm serves it"


@functools.cache
def _log_once(why_not: str) -> None:
    if dist.get_rank() == 0:
        logger.info("llm_comm is not active: %s. SGLang's own collectives are used.", why_not)


class LlmCommAllReduce:
    """Custom all-reduce of a group: uses llm_comm for inputs that it accepts, otherwise SGLang's custom all-reduce.

    The object reports the class of SGLang's own object and forwards unknown attributes to it, since the fusions of some
    models check both.

    Args:
        member: This rank's membership in the group.
        theirs: Custom all-reduce that SGLang made for the group, or None.
        uses_theirs: Whether ``theirs`` may be used. Must be equal on all ranks.
    """

    def __init__(self, member: members.Member, theirs: Any, uses_theirs: bool) -> None:
        #: SGLang's switch: while it is set, by any code, SGLang does not call this object.
        self.disabled = False
        self._member = member
        self._llm_comm: Communicator | None = member.communicator
        # An unused object is kept alive too: when it ends, it waits for the other ranks in a barrier.
        self._unused = None if uses_theirs else theirs
        self._theirs = theirs if uses_theirs else None

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Return whether ``custom_all_reduce`` accepts ``inp``. All ranks decide alike."""
        if self._llm_comm is not None and self._llm_comm.accepts(inp):
            return True
        return self._theirs is not None and bool(self._theirs.should_custom_ar(inp))

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        """Sum over the group. Return a new tensor; None if neither llm_comm nor SGLang's object accepts ``input``."""
        result = self.sum_of(input)
        if result is not None or self._theirs is None:
            return result
        return self._theirs.custom_all_reduce(input)  # type: ignore[no-any-return]

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, weight_bias: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Compute all-reduce of ``x``, residual add and RMSNorm with ``weight + weight_bias`` by llm_comm.

        Returns:
            The normed rows and the new residual; None if llm_comm declines. All ranks decline alike, and a declined
            call has communicated nothing.

        Raises:
            UnsupportedInputError: llm_comm declines the call in deterministic mode, where it must compute the norms of
                all batches.
        """
        if self._llm_comm is None:
            return None
        results = self._member.all_reduce_add_rms_norm(x, residual, weight, epsilon, weight_bias=weight_bias)
        return results  # type: ignore[return-value]

    def sum_of(self, x: torch.Tensor) -> torch.Tensor | None:
        """Sum ``x`` over the group by llm_comm. Return a new tensor; None if llm_comm declines, alike on all ranks."""
        communicator = self._llm_comm
        return None if communicator is None else communicator.try_all_reduce(x)

    @property
    def communicator(self) -> Communicator | None:
        """Communicator of the group; None after ``leave``."""
        return self._llm_comm

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scales: Scales | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor | None:
        """Compute ``x @ weight.T + bias`` on this rank by llm_comm. Return a new tensor; None if llm_comm declines or
        is not preferred for this shape.

        Args:
            x: Input, [..., inputs].
            weight: Weight, [outputs, inputs].
            bias: Bias, [outputs], or None.
            scales: Scales of ``x`` and of the weight for FP8 operands; None for other dtypes.
            out_dtype: Dtype of the result for FP8 operands.
        """
        weight = weight if scales is None else weight.detach()
        options = {**optional_operands(bias, scales), "out_dtype": out_dtype}
        return self._try_linear(Communicator.try_linear, x, weight, FIRST_LINEAR, **options)

    def linear_silu_and_mul(self, x: torch.Tensor, gate_up_weight: torch.Tensor) -> torch.Tensor | None:
        """Compute ``silu(x @ gate.T) * (x @ up.T)`` on this rank by llm_comm. Return a new tensor; None if declined."""
        first = FIRST_ACTIVATED[LINEAR_SILU_AND_MUL]
        return self._try_linear(Communicator.try_linear_silu_and_mul, x, gate_up_weight, first)

    def linear_rope(self, x: torch.Tensor, weight: torch.Tensor, **operands: Any) -> torch.Tensor | None:
        """Compute q, k and v with RoPE, and write k and v to the KV cache, on this rank by llm_comm, as
        ``Communicator.linear_rope``. Return a new tensor; None if declined."""
        return self._try_linear(Communicator.try_linear_rope, x, weight, FIRST_ROPE, **operands)

    def batch_invariant_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """Compute a linear layer of deterministic mode (``invariant_linear.py``); None after ``leave``."""
        return self._try_linear(batch_invariant_linear, x, weight, FIRST_INVARIANT_LINEAR)

    def fused_experts(self, x: torch.Tensor, gate_up_weight: torch.Tensor, **others: Any) -> torch.Tensor | None:
        """Compute experts with silu on this rank by llm_comm, as ``Communicator.fused_experts``; None if declined."""
        return self._try_linear(Communicator.try_fused_experts, x, gate_up_weight, FIRST_EXPERTS, **others)

    def moe_route(
        self, x: torch.Tensor, router_weight: torch.Tensor, top_k: int, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Choose experts by llm_comm, as ``Communicator.moe_route``; None if declined, alike on all ranks.

        Raises:
            UnsupportedInputError: The weight is not aligned. Another kernel on this rank alone might choose other
                experts.
        """

        def route(communicator: Communicator, *operands: Any, **options: Any) -> Any:
            if not communicator.accepts_moe_route(*operands, **options):
                return None
            return communicator.moe_route(*operands, **options)

        return self._try_linear(route, x, router_weight, FIRST_ROUTER, top_k=top_k, **options)

    def _try_linear(self, attempt: Callable[..., _Result | None], *arguments: Any, **options: Any) -> _Result | None:
        return None if self._llm_comm is None else self._member.try_linear(attempt, *arguments, **options)

    def capture(self) -> contextlib.AbstractContextManager[None]:
        """Return SGLang's context for the capture of CUDA graphs. llm_comm itself needs none: it registers no
        tensors."""
        return contextlib.nullcontext() if self._theirs is None else self._theirs.capture()

    def leave(self) -> None:
        """Close llm_comm's communicator. SGLang's own custom all-reduce serves all further calls."""
        if self._llm_comm is not None:
            self._llm_comm = None
            flashinfer_calls.leave(self._member.communicator)
            self._member.close()

    def close(self) -> None:
        self.leave()
        if self._theirs is not None:
            self._theirs.close()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        theirs = self._theirs
        return LlmCommAllReduce if theirs is None else type(theirs)

    def __getattr__(self, name: str) -> Any:
        theirs = self.__dict__.get("_theirs")
        if theirs is None:
            raise AttributeError(f"{name!r}: llm_comm has no such attribute, and stands in front of nothing")
        return getattr(theirs, name)
