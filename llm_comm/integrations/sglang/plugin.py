"""The plugin of SGLang: entry point ``llm_comm`` of the group ``sglang.srt.plugins``.

SGLang makes a ``GroupCoordinator`` for each group of ranks. Its ``all_reduce`` asks ``ca_comm``, the group's custom
all-reduce, whether it takes a tensor (``should_custom_ar``), and if so calls ``custom_all_reduce``, inside a custom
operator: eager, compiled and captured calls take the same way. ``register`` hooks the constructor of that class, to put
an object of ours (``communicator.py``) in front of what SGLang made. Its methods that gather and scatter are hooked
once a group is served (``gathering.py``).

The constructor, rather than ``dispatch_custom_allreduce``, which names the class that SGLang makes: all that is raised
in there is swallowed, so a wrong option could not end the start; the group's name is not known there; it is not called
at all in deterministic mode nor for some groups that sum activations; and where SGLang's own class fails, llm_comm
would go down with it.

This module is loaded in every process of SGLang, most of which never make a group. So it imports little, and leaves
all decisions to the moment when a group is made. By then the scheduler has set up its log as well.

What differs between the supported versions, and where it is taken care of:

===================================  =====================  ======================  =================================
                                     0.5.17                 0.5.23                  here
===================================  =====================  ======================  =================================
group ``attention_tp``               no custom all-reduce   custom all-reduce       served in both
group ``shared_experts_tp``          none                   reduce-scatter alone    served
FlashInfer's all-reduce, if on       fused with norms only  all that its workspace  a line in the log says so; 0.5.18 is
                                                            has room for            as 0.5.23
===================================  =====================  ======================  =================================
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from llm_comm.errors import LlmCommError

#: SGLang sets up the root logger, which all others pass their messages on to.
logger = logging.getLogger("sglang.llm_comm")

_THEIRS = "sglang.srt.distributed.parallel_state"
THEIR_CLASS = f"{_THEIRS}.GroupCoordinator"


def register() -> None:
    """Called by SGLang in each of its processes. Never raises."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(f"{_THEIRS}.initialize_model_parallel", _around_all_groups, HookType.AROUND)
        HookRegistry.register(f"{THEIR_CLASS}.__init__", _around_init, HookType.AROUND)
        HookRegistry.register(f"{THEIR_CLASS}.destroy", _before_destroy, HookType.BEFORE)
    except Exception as error:
        _warn_of_unknown_version(f"{type(error).__name__}: {error}")


def _around_all_groups(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes the groups as SGLang does, once it is noted which ones there will be."""
    try:
        from llm_comm.integrations.sglang import groups

        groups.served = groups.of_call(theirs, args, kwargs)
    except Exception:  # another version: each group takes as much memory as if it were alone
        logger.debug("the groups of this version of SGLang are not known in advance", exc_info=True)
    return theirs(*args, **kwargs)


def _around_init(theirs: Any, group: Any, *args: Any, **kwargs: Any) -> None:
    """Makes the group as SGLang does, then puts llm_comm in front of its custom all-reduce.

    Raises:
        ConfigError: A rank has a wrong option. The scheduler of every rank ends with it, so SGLang does not start.
        RendezvousError: A rank is gone.
    """
    theirs(group, *args, **kwargs)
    try:
        from llm_comm.integrations.sglang import communicator

        communicator.step_in(group, kwargs)
    except LlmCommError:
        raise
    except Exception as error:  # a name that is not there: the same on all ranks
        _warn_of_unknown_version(f"{type(error).__name__}: {error}")


def _before_destroy(group: Any) -> None:
    for ours in (getattr(group, "ca_comm", None), getattr(group, "llm_comm_parts", None)):
        close = getattr(ours, "leave", None)
        if close is not None:
            close()
    fusion = sys.modules.get("llm_comm.integrations.sglang.fusion")
    if fusion is not None:
        fusion.forget(group)


@functools.cache
def _warn_of_unknown_version(error: str) -> None:
    logger.warning(
        "llm_comm is not active: it does not know this version of SGLang (%s). SGLang's own collectives are used.",
        error,
    )
