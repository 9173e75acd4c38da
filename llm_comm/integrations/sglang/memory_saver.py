"""SGLang's ``release_memory_occupation`` and ``resume_memory_occupation`` also release and restore the workspaces of
llm_comm.

Each scheduler gets both requests, whatever its tags, while it is idle. Workspaces go with the first release and come
with the first resume: they are small beside weights and cache, and whatever is resumed may be computed with.
"""

from __future__ import annotations

import sys
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from llm_comm.integrations import sleeping
from llm_comm.integrations.sglang.hooks import hook

_MODULE = "sglang.srt.managers.scheduler_components.weight_updater"
_CLASS = "SchedulerWeightUpdaterManager"
_hooked: set[str] = set()


def set_up() -> None:
    """Hooks the scheduler's methods, in a process that has a scheduler. More than once is no error.

    Raises:
        AttributeError, RuntimeError: They cannot be hooked: another version of SGLang.
    """
    if _MODULE not in sys.modules:  # a process without a scheduler, which gets no such requests
        return
    for name, around in (
        ("release_memory_occupation", _around_release),
        ("resume_memory_occupation", _around_resume),
    ):
        if name not in _hooked:
            hook(f"{_MODULE}.{_CLASS}.{name}", around, HookType.AROUND)
            _hooked.add(name)


def _around_release(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    # Behind SGLang: it refuses where requests are under way.
    result = theirs(*args, **kwargs)
    sleeping.release_all()
    return result


def _around_resume(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    sleeping.restore_all()
    return theirs(*args, **kwargs)
