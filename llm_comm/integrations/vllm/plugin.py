"""Plugin for vLLM: entry point ``llm_comm`` of the group ``vllm.general_plugins``.

vLLM's platform names the communicator class of each group of ranks. ``register`` makes the CUDA platform name a
subclass of vLLM's class (``communicator.py``). Models call ``torch.ops.vllm.all_reduce``, which is opaque to
torch.compile and ends in ``all_reduce`` of that subclass. So eager, compiled and captured calls have one code path,
with the V1 and the V2 model runner. All-gathers and reduce-scatters end in methods of the same class
(``gathering.py``).

The platform also names the pass manager of vLLM's compiler. If norms are fused, ``choose_pass_manager`` names a
subclass with up to four more passes (``fusion_pass.py``), and vLLM's own fusion of all-reduces with norms is off.

``seams.py`` lists the symbols of vLLM that llm_comm replaces or relies on.

vLLM loads this module in each of its processes, most of which never make a communicator. So the module imports little,
and decisions wait until vLLM asks for the class.

Differences between the supported versions, and how llm_comm handles them:

===================================  ==================  ==================  ======================================
                                     0.26                0.33                here
===================================  ==================  ==================  ======================================
constructor of CudaCommunicator      no ``use_all2all``  ``use_all2all``     all arguments are passed on
order in GroupCoordinator.destroy    groups first        communicator first  closing makes no use of the group
groups that a capture enters         TP, PP              TP, PP, DP          the subclass serves all groups
VLLM_BATCH_INVARIANT turns vLLM's
custom all-reduce                    off                 deterministic       llm_comm serves all message sizes
``custom_all_gather`` in models      does not exist      called first        llm_comm overrides it (``gathering.py``)
that split their sequence
reduce-scatter of experts' tokens    no                  yes                 both are served
into a given output
sleep mode calls communicators       no                  with an option      workers are hooked (``sleeping.py``)
``fused_allreduce_rms_norm``         of one model        of all models       both are replaced (``eager_norms.py``)
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
from llm_comm.runtime.devices import note_on_amd

#: Child of vLLM's logger "vllm", so that vLLM's handlers print its messages.
logger = logging.getLogger("vllm.llm_comm")

THEIR_CLASS = "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"
RANK_0_PROCESS = "VllmWorker-0"
OUR_CLASS = "llm_comm.integrations.vllm.communicator.LlmCommCommunicator"
THEIR_PASS_MANAGER = "vllm.compilation.passes.pass_manager.PostGradPassManager"
OUR_PASS_MANAGER = "llm_comm.integrations.vllm.fusion_pass.LlmCommPassManager"


def register() -> None:
    """Replace the platform's method that names the communicator class. Never raises.

    vLLM calls this function in each of its processes, possibly more than once.
    """
    try:
        if joining.switched_off():
            _say_why_not("LLM_COMM_ENABLE is off")
            return
        from vllm.platforms import current_platform

        if not current_platform.is_cuda():
            _say_why_not(f"the platform is {type(current_platform).__name__}, not CUDA{note_on_amd()}")
            return
        why_not = TABLE.attempt(seams.ALL_REDUCE)
    except Exception as error:
        why_not = f"it cannot be set up in {TABLE.release} ({type(error).__name__}: {error})"
    if why_not is not None:
        logger.warning("llm_comm is not active: %s. vLLM's own collectives are used.", why_not)


def choose_communicator(theirs: Any, cls: type) -> str:
    """Replacement of ``get_device_communicator_cls``: name llm_comm's class instead of vLLM's CudaCommunicator.

    Another class, which another plugin has named, is kept.
    """
    name: str = theirs(cls)
    why_not = _why_not(name)
    if why_not is None:
        return OUR_CLASS
    _log_once(why_not)
    return name


def choose_pass_manager(theirs: Any, cls: type) -> str:
    """Replacement of ``get_pass_manager_cls``: name llm_comm's class if norms of the tensor-parallel group are fused.

    Another class, which another plugin has named, is kept.
    """
    from vllm.distributed import get_tp_group

    name: str = theirs(cls)
    if not getattr(get_tp_group().device_communicator, "fuses", False):
        return name
    if name != THEIR_PASS_MANAGER:
        logger.warning("llm_comm does not fuse: the pass manager is %s, which it does not know", name)
        return name
    return OUR_PASS_MANAGER


def _why_not(name: str) -> str | None:
    """Return the reason why vLLM's class ``name`` is kept, or None.

    Only reasons that are equal on all ranks count here. Reasons of one rank are voted on when the communicator is made.
    """
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
    """Return whether this process will become rank 0. Ranks do not exist yet, so the name of vLLM's worker process or
    torchrun's variable tells."""
    return multiprocessing.current_process().name == RANK_0_PROCESS or os.environ.get("RANK") == "0"


@functools.cache
def _log_once(why_not: str) -> None:
    import torch.distributed as dist

    # vLLM asks for the class when it makes groups, so torch.distributed is normally initialized.
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("llm_comm is not active: %s. vLLM's own collectives are used.", why_not)
