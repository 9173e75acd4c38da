"""Plugin for SGLang: entry point ``llm_comm`` of the group ``sglang.srt.plugins``.

SGLang makes a ``GroupCoordinator`` for each group of ranks. Its ``all_reduce`` asks the group's custom all-reduce
(``ca_comm``) whether it accepts a tensor (``should_custom_ar``), and then calls ``custom_all_reduce``. This happens
inside a custom operator, so eager, compiled and captured calls have one code path. ``register`` hooks the constructor
of ``GroupCoordinator``, which then replaces ``ca_comm`` by llm_comm's object (``communicator.py``). The methods for
all-gather and reduce-scatter are hooked when llm_comm serves the first group (``gathering.py``).

The other candidate, ``dispatch_custom_allreduce``, which names the class of ``ca_comm``, is not hooked for these
reasons:

* SGLang swallows all errors in it, so a wrong option could not end the start.
* The group's name is not known in it.
* SGLang does not call it in deterministic mode, nor for some groups that all-reduce activations.
* A failure of SGLang's own class would take llm_comm with it.

``seams.py`` lists the symbols of SGLang that llm_comm replaces or relies on.

SGLang loads this module in each of its processes, most of which never make a group. So the module imports little, and
all decisions wait until a group is made. By then the scheduler has set up its log as well.

Differences between the supported versions, and how llm_comm handles them:

===================================  =====================  ======================  =================================
                                     0.5.17                 0.5.23                  here
===================================  =====================  ======================  =================================
group ``attention_tp``               no custom all-reduce   custom all-reduce       served in both
group ``shared_experts_tp``          none                   reduce-scatter alone    served
FlashInfer's all-reduces, if on      fused with norms only  all that fit its        the start line says so; 0.5.18 is
                                                            workspace               like 0.5.23
===================================  =====================  ======================  =================================
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from llm_comm.integrations.sglang.seams import ALL_REDUCE, TABLE

#: Logger without handlers: SGLang sets up the root logger, to which its messages propagate.
logger = logging.getLogger("sglang.llm_comm")

THEIR_CLASS = "sglang.srt.distributed.parallel_state.GroupCoordinator"


def register() -> None:
    """Register the hooks of the all-reduce. SGLang calls this in each of its processes. Never raises."""
    try:
        why_not = TABLE.why_not(ALL_REDUCE)
        if why_not is None:
            from sglang.srt.plugins.hook_registry import HookRegistry, HookType

            # SGLang applies registered hooks when it has loaded all plugins.
            for symbol, patch in TABLE.patches(ALL_REDUCE):
                HookRegistry.register(symbol.replace(":", "."), patch, HookType.AROUND)
    except Exception as error:
        why_not = f"it cannot be set up in {TABLE.release} ({type(error).__name__}: {error})"
    if why_not is not None:
        _warn(why_not)


def make_all_groups(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of ``initialize_model_parallel``: predict the groups, then make them as SGLang does."""
    try:
        from llm_comm.integrations.sglang import groups

        groups.served = groups.of_call(theirs, args, kwargs)
    except Exception:  # unknown version: each group then takes as much memory as if it were the only one
        logger.debug("the groups of this version of SGLang are not known in advance", exc_info=True)
    return theirs(*args, **kwargs)


def make_group(theirs: Any, group: Any, *args: Any, **kwargs: Any) -> None:
    """Hook of ``GroupCoordinator.__init__``: make the group as SGLang does, then set llm_comm up for it.

    Raises:
        ConfigError: A rank has a wrong option. The scheduler of every rank ends with the error, so SGLang does not
            start.
        RendezvousError: A rank is lost.
        Exception: llm_comm failed after the ranks had agreed to use it. The error must end the start: otherwise this
            rank alone would run without llm_comm, and the others would wait for it.
    """
    theirs(group, *args, **kwargs)
    try:
        from llm_comm.integrations.sglang import communicator
    except Exception as error:  # a symbol is missing in this release of SGLang, which is so on all ranks
        _warn(f"it cannot be set up in {TABLE.release} ({type(error).__name__}: {error})")
        return
    communicator.step_in(group, kwargs)


def destroy_group(theirs: Any, group: Any) -> None:
    """Hook of ``GroupCoordinator.destroy``: close llm_comm in the group, then destroy it as SGLang does."""
    for ours in (getattr(group, "ca_comm", None), getattr(group, "llm_comm_gather_scatter", None)):
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
