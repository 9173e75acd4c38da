"""The plugin of vLLM: entry point ``llm_comm`` of the group ``vllm.general_plugins``.

vLLM asks its platform for the class of the communicator that each group of ranks gets. ``register`` makes the CUDA
platform answer with a subclass of vLLM's own (``communicator.py``). Model code calls
``torch.ops.vllm.all_reduce``, opaque to torch.compile, which ends in the ``all_reduce`` of that class: eager, compiled
and captured calls take the same way, and the V1 and V2 model runners share it. All-gathers and reduce-scatters end in
methods of the same class (``gathering.py``).

The platform also names the class that runs the passes of vLLM's compiler. Where llm_comm is active, that becomes a
subclass with up to three passes more (``pass_manager.py``). vLLM's own pass of the kind, which goes past llm_comm, is
turned off.

This module is loaded in every process of vLLM, most of which never make a communicator. So it imports little, and what
it cannot decide yet it leaves to the moment when the class is asked for.

What differs between the supported versions, and where it is taken care of:

===================================  ==================  ==================  ======================================
                                     0.26                0.33                here
===================================  ==================  ==================  ======================================
constructor of CudaCommunicator      no ``use_all2all``  ``use_all2all``     all arguments are passed on
order in GroupCoordinator.destroy    groups first        communicator first  closing makes no use of the group
groups that a capture enters         TP, PP              TP, PP, DP          the subclass serves all groups
VLLM_BATCH_INVARIANT turns vLLM's
custom all-reduce                    off                 deterministic       all sizes are taken: one order of sums
models that split their sequence     no such question    first of all        llm_comm comes first (``gathering.py``)
ask for ``custom_all_gather``
tokens of experts come back into     no                  yes                 both are served
a given output
sleep tells communicators            no                  with an option      always (``sleep_mode.py``)
``fused_allreduce_rms_norm``         of one model        of all models       both are hooked (``eager_norms.py``)
===================================  ==================  ==================  ======================================
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import sys
from typing import Any

from llm_comm.integrations import joining

#: vLLM sets up the handlers of "vllm" and passes on what is logged below it.
logger = logging.getLogger("vllm.llm_comm")

THEIR_CLASS = "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"
RANK_0_PROCESS = "VllmWorker-0"
OUR_CLASS = "llm_comm.integrations.vllm.communicator.LlmCommCommunicator"
THEIR_PASS_MANAGER = "vllm.compilation.passes.pass_manager.PostGradPassManager"
OUR_PASS_MANAGER = "llm_comm.integrations.vllm.pass_manager.LlmCommPassManager"


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once. Never raises."""
    try:
        why_not = _step_in()
    except Exception as error:
        logger.warning(
            "llm_comm is not active: it does not know this version of vLLM (%s: %s). vLLM's own collectives are used.",
            type(error).__name__,
            error,
        )
        return
    if why_not is not None and _is_rank_0():
        logger.info("llm_comm is not active: %s. vLLM's own collectives are used.", why_not)


def _step_in() -> str | None:
    """Wraps the methods by which the platform names its classes. Returns why it did not, if so."""
    if joining.switched_off():
        return "LLM_COMM_ENABLE is off"
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return f"the platform is {type(current_platform).__name__}, not CUDA"
    platform = type(current_platform)
    theirs = platform.get_device_communicator_cls
    if not getattr(theirs, "by_llm_comm", False):
        platform.get_device_communicator_cls = classmethod(_choosing(theirs))
        platform.get_pass_manager_cls = classmethod(_choosing_pass_manager(platform.get_pass_manager_cls))
    return None


def _choosing(theirs: Any) -> Any:
    @functools.wraps(theirs.__func__)
    def get_device_communicator_cls(cls: type) -> str:
        name: str = theirs()
        why_not = _why_not(name)
        if why_not is None:
            return OUR_CLASS
        _log_once(why_not)
        return name

    get_device_communicator_cls.by_llm_comm = True  # type: ignore[attr-defined]
    return get_device_communicator_cls


def _choosing_pass_manager(theirs: Any) -> Any:
    @functools.wraps(theirs.__func__)
    def get_pass_manager_cls(cls: type) -> str:
        name: str = theirs()
        communicator = sys.modules.get("llm_comm.integrations.vllm.communicator")
        if communicator is None or not communicator.fuses():
            return name
        if name != THEIR_PASS_MANAGER:
            logger.warning("llm_comm does not fuse: the pass manager is %s, which it does not know", name)
            return name
        return OUR_PASS_MANAGER

    return get_pass_manager_cls


def _why_not(name: str) -> str | None:
    """Why the class ``name`` is to be used as it is; the same on all ranks. A rank's own reasons are voted on later."""
    if name != THEIR_CLASS:
        return f"the communicator class is {name}, which llm_comm does not know"
    try:
        from llm_comm.integrations.vllm import communicator
    except Exception as error:
        return f"it does not know this version of vLLM ({type(error).__name__}: {error})"
    return communicator.why_not()


def _is_rank_0() -> bool:
    """Whether this process is to become rank 0, asked before there are ranks: a worker of that name, or torchrun's."""
    return multiprocessing.current_process().name == RANK_0_PROCESS or os.environ.get("RANK") == "0"


@functools.cache
def _log_once(why_not: str) -> None:
    import torch.distributed as dist

    # A class is asked for when groups are made, so the ranks are known.
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("llm_comm is not active: %s. vLLM's own collectives are used.", why_not)
