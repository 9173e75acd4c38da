"""What engines tell of ``Communicator.stats``: a line in the log for each group when it is closed or the process ends
and, with option ``stats``, on SIGUSR2, and what ``prometheus.py`` hands on."""

from __future__ import annotations

import logging
import signal
import threading
import weakref
from multiprocessing.util import Finalize
from types import FrameType

from llm_comm.communicator import Communicator
from llm_comm.integrations import prometheus
from llm_comm.integrations.engine_config import options_of
from llm_comm.runtime.statistics import Stats

#: Of this process: groups that are followed, by the engine's names, in the order in which they were made.
_groups: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()
#: Where each of them logs, by its name.
_logs: dict[str, logging.Logger] = {}
#: What tells the last words of all, once there was a group.
_at_end: list[Finalize] = []
_SIGNAL = signal.SIGUSR2


def describe(group_name: str, stats: Stats) -> str:
    """The line: "llm_comm in group tp:0: all_reduce 12 calls (98304 bytes) and 64 captured; ..."."""
    words = [
        f"{operation} {sums.calls} calls ({sums.bytes} bytes) and {sums.captured_calls} captured"
        for operation, sums in stats.by_operation().items()
    ] or ["no calls"]
    words += [f"declined {each.operation}: {each.count} ({each.reason})" for each in stats.declined]
    progress = stats.progress
    ended = "an unknown number" if progress.operations_ended is None else progress.operations_ended
    words.append(f"{progress.launches} launches by the host, {ended} ended on the device, replays of graphs included")
    if progress.idle_s is not None:
        words.append(f"the host's last launch {progress.idle_s:.1f} s ago")
    if progress.error:
        words.append(f"ended by {progress.error}")
    return f"llm_comm in group {group_name}: {'; '.join(words)}"


def follow(group_name: str, communicator: Communicator, rank: int, log: logging.Logger) -> None:
    """Where options ask for it: tells what the group does on SIGUSR2, and to Prometheus.

    Args:
        group_name: The engine's name of the group.
        rank: Of this process among all of the engine's, for its port.
        log: Comes out where the engine's messages do.
    """
    config = options_of(communicator)
    if not config.stats:
        return
    if not _at_end:
        # Not atexit, which the worker processes of engines, children of multiprocessing, pass over.
        _at_end.append(Finalize(None, _tell, exitpriority=0))
        _take_signal(log)
    _groups[group_name], _logs[group_name] = communicator, log
    prometheus.serve(_stats_of_groups, rank, None if config.stats is True else config.stats, config.stats_host, log)


def leave(group_name: str, communicator: Communicator, log: logging.Logger) -> None:
    """Logs what the group has done, before it is closed: at level info where options ask for it, else debug."""
    level = logging.INFO if options_of(communicator).stats else logging.DEBUG
    if log.isEnabledFor(level):
        log.log(level, "%s", describe(group_name, communicator.stats()))
    if _groups.get(group_name) is communicator:
        del _groups[group_name]


def _stats_of_groups() -> dict[str, Stats]:
    return {name: communicator.stats() for name, communicator in list(_groups.items())}


def _take_signal(log: logging.Logger) -> None:
    """If nobody else has the signal: an engine's own handler stays."""
    if threading.current_thread() is not threading.main_thread():
        log.info("llm_comm: SIGUSR2 shows no statistics, as the engine sets up llm_comm outside the main thread")
        return
    if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        log.info("llm_comm: SIGUSR2 shows no statistics, as another handler has it")
        return
    signal.signal(_SIGNAL, _tell)


def _tell(number: int = 0, frame: FrameType | None = None) -> None:
    """The lines of all groups. Engines often end without closing theirs."""
    for name, stats in _stats_of_groups().items():
        _logs[name].info("%s", describe(name, stats))
