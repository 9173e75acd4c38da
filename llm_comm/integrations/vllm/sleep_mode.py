"""vLLM's sleep mode: the worker's ``sleep`` and ``wake_up`` also release and restore the workspaces of llm_comm.

vLLM calls both on every worker of an engine. Only with ``enable_nccl_comm_suspend``, which 0.33 has, does it tell the
communicators; those of llm_comm are told always, as nothing of theirs is lost. Groups with ranks in several engines
(data parallelism) are left alone: each engine sleeps when it is told to.
"""

from __future__ import annotations

import sys
from typing import Any

from vllm.config import get_current_vllm_config_or_none

from llm_comm.integrations import sleeping
from llm_comm.integrations.vllm.seams import SLEEP, TABLE

_MODULE = "vllm.v1.worker.gpu_worker"
#: Groups whose ranks are all of one engine, however many engines there are.
_OF_ONE_ENGINE = ("tp", "dcp", "pcp")


class _State:
    """
    Attributes:
        is_alone: Whether the engine is the only one, so that all groups are of one engine.
    """

    is_alone = True


def set_up() -> str | None:
    """Replace the methods of vLLM's worker, in a process that has one. Return why they cannot be, if so."""
    vllm_config = get_current_vllm_config_or_none()
    _State.is_alone = vllm_config is None or vllm_config.parallel_config.data_parallel_size == 1
    return TABLE.attempt(SLEEP) if _MODULE in sys.modules else None


def sleep(theirs: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    # Before vLLM: it logs how much memory has become free.
    sleeping.release_all(lambda name: _State.is_alone or name.split(":", maxsplit=1)[0] in _OF_ONE_ENGINE)
    return theirs(worker, *args, **kwargs)


def wake_up(theirs: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    sleeping.restore_all()
    return theirs(worker, *args, **kwargs)
