"""The plugin of vLLM: entry point ``llm_comm`` of the group ``vllm.general_plugins``.

vLLM asks its platform for the class of the communicator that each group of ranks gets. ``register`` makes the CUDA
platform answer with a subclass of vLLM's own (``communicator.py``). Model code calls
``torch.ops.vllm.all_reduce``, opaque to torch.compile, which ends in the ``all_reduce`` of that class: eager, compiled
and captured calls take the same way, and the V1 and V2 model runners share it. All-gathers and reduce-scatters end in
methods of the same class (``gathering.py``).

The platform also names the class that runs the passes of vLLM's compiler. Where llm_comm is active, that becomes a
subclass with up to three passes more (``fusion_pass.py``). vLLM's own pass of the kind, which goes past llm_comm, is
turned off.

Names of vLLM that llm_comm replaces or relies on are rows of ``seams.py``.

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
sleep tells communicators            no                  with an option      always (``sleeping.py``)
``fused_allreduce_rms_norm``         of one model        of all models       both are hooked (``eager_norms.py``)
===================================  ==================  ==================  ======================================
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
from typing import Any

from llm_comm.integrations import joining
from llm_comm.integrations.vllm import seams
from llm_comm.integrations.vllm.seams import TABLE

#: vLLM sets up the handlers of "vllm" and passes on what is logged below it.
logger = logging.getLogger("vllm.llm_comm")

THEIR_CLASS = "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"
RANK_0_PROCESS = "VllmWorker-0"
OUR_CLASS = "llm_comm.integrations.vllm.communicator.LlmCommCommunicator"
THEIR_PASS_MANAGER = "vllm.compilation.passes.pass_manager.PostGradPassManager"
OUR_PASS_MANAGER = "llm_comm.integrations.vllm.fusion_pass.LlmCommPassManager"


def register() -> None:
    """Replace the methods by which the platform names its classes. Never raises.

    vLLM calls this in each of its processes, possibly more than once.
    """
    try:
        if joining.switched_off():
            _say_why_not("LLM_COMM_ENABLE is off")
            return
        from vllm.platforms import current_platform

        if not current_platform.is_cuda():
            _say_why_not(f"the platform is {type(current_platform).__name__}, not CUDA")
            return
        why_not = TABLE.attempt(seams.ALL_REDUCE)
    except Exception as error:
        why_not = f"it cannot be set up in {TABLE.release} ({type(error).__name__}: {error})"
    if why_not is not None:
        logger.warning("llm_comm is not active: %s. vLLM's own collectives are used.", why_not)


def choose_communicator(theirs: Any, cls: type) -> str:
    """Return the name of the communicator class: llm_comm's in place of the one that it knows."""
    name: str = theirs(cls)
    why_not = _why_not(name)
    if why_not is None:
        return OUR_CLASS
    _log_once(why_not)
    return name


def choose_pass_manager(theirs: Any, cls: type) -> str:
    """Return the name of the class that runs the compiler's passes: llm_comm's where norms of the group are fused."""
    from vllm.distributed import get_tp_group

    name: str = theirs(cls)
    if not getattr(get_tp_group().device_communicator, "fuses", False):
        return name
    if name != THEIR_PASS_MANAGER:
        logger.warning("llm_comm does not fuse: the pass manager is %s, which it does not know", name)
        return name
    return OUR_PASS_MANAGER


def _why_not(name: str) -> str | None:
    """Why the class ``name`` is to be used as it is; the same on all ranks. A rank's own reasons are voted on later."""
    if name != THEIR_CLASS:
        return f"the communicator class is {name}, which llm_comm does not know"
    try:
        from llm_comm.integrations.vllm import communicator, configuration  # noqa: F401
    except Exception as error:
        return f"it cannot be set up in {TABLE.release} ({type(error).__name__}: {error})"
    return configuration.why_not()


def _say_why_not(why_not: str) -> None:
    if _is_rank_0():
        logger.info("llm_comm is not active: %s. vLLM's own collectives are used.", why_not)


def _is_rank_0() -> bool:
    """Whether this process is to become rank 0, asked before there are ranks: a worker of that name, or torchrun's."""
    return multiprocessing.current_process().name == RANK_0_PROCESS or os.environ.get("RANK") == "0"


@functools.cache
def _log_once(why_not: str) -> None:
    import torch.distributed as dist

    # A class is asked for when groups are made, so the ranks are known.
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("llm_comm is not active: %s. vLLM's own collectives are used.", why_not)
