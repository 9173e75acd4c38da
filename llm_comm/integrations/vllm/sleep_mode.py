"""vLLM's sleep mode: the worker's ``sleep`` and ``wake_up`` also release and restore the workspaces of llm_comm.

vLLM calls both on every worker of an engine. Only with ``enable_nccl_comm_suspend``, which 0.33 has, does it tell the
communicators; those of llm_comm are told always, as nothing of theirs is lost. Groups with ranks in several engines
(data parallelism) are left alone: each engine sleeps when it is told to.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from vllm.config import get_current_vllm_config_or_none

from llm_comm.integrations import sleeping

logger = logging.getLogger("vllm.llm_comm")

_MODULE = "vllm.v1.worker.gpu_worker"
#: Groups whose ranks are all of one engine, however many engines there are.
_OF_ONE_ENGINE = ("tp", "dcp", "pcp")


def set_up() -> None:
    """Once a group is served: wraps the methods of vLLM's worker, in a process that has one. Never raises."""
    worker = getattr(sys.modules.get(_MODULE), "Worker", None)
    if worker is None or getattr(getattr(worker, "sleep", None), "by_llm_comm", False):
        return
    try:
        theirs_sleep, theirs_wake_up = worker.sleep, worker.wake_up
    except AttributeError as error:
        logger.warning("llm_comm: its workspaces stay while vLLM sleeps: this version of vLLM is unknown (%s)", error)
        return

    vllm_config = get_current_vllm_config_or_none()
    is_alone = vllm_config is None or vllm_config.parallel_config.data_parallel_size == 1

    def falls_asleep(group_name: str) -> bool:
        return is_alone or group_name.split(":", maxsplit=1)[0] in _OF_ONE_ENGINE

    @functools.wraps(theirs_sleep)
    def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Before vLLM: it logs how much memory has become free.
        sleeping.release_all(falls_asleep)
        return theirs_sleep(self, *args, **kwargs)

    @functools.wraps(theirs_wake_up)
    def wake_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        sleeping.restore_all()
        return theirs_wake_up(self, *args, **kwargs)

    sleep.by_llm_comm = True  # type: ignore[attr-defined]
    worker.sleep, worker.wake_up = sleep, wake_up
