"""SGLang's ``release_memory_occupation`` and ``resume_memory_occupation`` also release and restore the workspaces of
llm_comm.

Each scheduler gets both requests, whatever its tags, while it is idle. Workspaces go with the first release and come
with the first resume: they are small beside weights and cache, and whatever is resumed may be computed with.
"""

from __future__ import annotations

import sys
from typing import Any

from llm_comm.integrations import sleeping
from llm_comm.integrations.sglang.seams import MEMORY, TABLE

_MODULE = "sglang.srt.managers.scheduler_components.weight_updater"


def set_up() -> str | None:
    """Hook the scheduler's methods, in a process that has a scheduler. Return why they cannot be, if so."""
    return TABLE.attempt(MEMORY) if _MODULE in sys.modules else None  # other processes get no such requests


def release_memory_occupation(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    # Behind SGLang: it refuses where requests are under way.
    result = theirs(*args, **kwargs)
    sleeping.release_all()
    return result


def resume_memory_occupation(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    sleeping.restore_all()
    return theirs(*args, **kwargs)
