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

Names of SGLang that llm_comm replaces or relies on are rows of ``seams.py``.

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

from llm_comm.integrations.sglang.seams import ALL_REDUCE, TABLE

#: SGLang sets up the root logger, which all others pass their messages on to.
logger = logging.getLogger("sglang.llm_comm")

THEIR_CLASS = "sglang.srt.distributed.parallel_state.GroupCoordinator"


def register() -> None:
    """Register the hooks of the all-reduce. Called by SGLang in each of its processes. Never raises."""
    try:
        why_not = TABLE.why_not(ALL_REDUCE)
        if why_not is None:
            from sglang.srt.plugins.hook_registry import HookRegistry, HookType

            for symbol, patch in TABLE.patches(ALL_REDUCE):  # which SGLang puts in place, after those of all plugins
                HookRegistry.register(symbol.replace(":", "."), patch, HookType.AROUND)
    except Exception as error:
        why_not = f"it cannot be set up in {TABLE.release} ({type(error).__name__}: {error})"
    if why_not is not None:
        _warn(why_not)


def make_all_groups(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the groups as SGLang does, once it is noted which ones there will be."""
    try:
        from llm_comm.integrations.sglang import groups

        groups.served = groups.of_call(theirs, args, kwargs)
    except Exception:  # another version: each group takes as much memory as if it were alone
        logger.debug("the groups of this version of SGLang are not known in advance", exc_info=True)
    return theirs(*args, **kwargs)


def make_group(theirs: Any, group: Any, *args: Any, **kwargs: Any) -> None:
    """Make the group as SGLang does, then put llm_comm in front of its custom all-reduce.

    Raises:
        ConfigError: A rank has a wrong option. The scheduler of every rank ends with it, so SGLang does not start.
        RendezvousError: A rank is gone.
        Exception: An error of llm_comm itself, after ranks have agreed to use it: SGLang does not start. Without the
            error, this rank would do without llm_comm alone, and the others would wait for it.
    """
    theirs(group, *args, **kwargs)
    try:
        from llm_comm.integrations.sglang import communicator
    except Exception as error:  # a name that is not there: the same on all ranks
        _warn(f"it cannot be set up in {TABLE.release} ({type(error).__name__}: {error})")
        return
    communicator.step_in(group, kwargs)


def destroy_group(theirs: Any, group: Any) -> None:
    for ours in (getattr(group, "ca_comm", None), getattr(group, "llm_comm_parts", None)):
        close = getattr(ours, "leave", None)
        if close is not None:
            close()
    fusion = sys.modules.get("llm_comm.integrations.sglang.fusion")
    if fusion is not None:
        fusion.forget(group)
    theirs(group)


@functools.cache
def _warn(why_not: str) -> None:
    logger.warning("llm_comm is not active: %s. SGLang's own collectives are used.", why_not)
