"""Reports of ``Communicator.stats`` in engines: one log line for each group.

The line is logged when a group is closed. With option ``stats`` it is also logged when the process ends and on SIGUSR2,
and ``prometheus.py`` exports the numbers.
"""

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

#: Groups of this process with option ``stats``, by the engine's names, in the order of their creation.
_groups: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()
#: Logger of each group, by the group's name.
_logs: dict[str, logging.Logger] = {}
#: Exit handler that logs all groups. Empty until the first group is registered.
_at_end: list[Finalize] = []
_SIGNAL = signal.SIGUSR2


def describe(group_name: str, stats: Stats) -> str:
    """Return the log line: "llm_comm in group tp:0: all_reduce 12 calls (98304 bytes) and 64 captured; ..."."""
    words = [
        f"{operation} {sums.calls} calls ({sums.bytes} bytes) and {sums.captured_calls} captured"
        for operation, sums in stats.by_operation().items()
    ] or ["no calls"]
    if stats.bytes_saved:
        words.append(f"{stats.bytes_saved} bytes less sent, as wire quantizes eager calls")
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
    """With option ``stats``: report the group at exit, on SIGUSR2 and to Prometheus. Without it: do nothing.

    Args:
        group_name: The engine's name of the group.
        communicator: Communicator of the group. A weak reference is kept.
        rank: Rank of this process in the engine, from which the port is derived.
        log: Logger whose messages appear in the engine's log.
    """
    config = options_of(communicator)
    if not config.stats:
        return
    if not _at_end:
        # atexit would not work: children of multiprocessing, such as engine workers, end without running its handlers.
        _at_end.append(Finalize(None, _log_statistics, exitpriority=0))
        _take_signal(log)
    _groups[group_name], _logs[group_name] = communicator, log
    prometheus.serve(_stats_of_groups, rank, None if config.stats is True else config.stats, config.stats_host, log)


def leave(group_name: str, communicator: Communicator, log: logging.Logger) -> None:
    """Log the group's statistics before its communicator is closed: at level info with option ``stats``, else debug."""
    level = logging.INFO if options_of(communicator).stats else logging.DEBUG
    if log.isEnabledFor(level):
        log.log(level, "%s", describe(group_name, communicator.stats()))
    if _groups.get(group_name) is communicator:
        del _groups[group_name]


def _stats_of_groups() -> dict[str, Stats]:
    return {name: communicator.stats() for name, communicator in list(_groups.items())}


def _take_signal(log: logging.Logger) -> None:
    """Install the SIGUSR2 handler, unless the engine has one already. Only the main thread can install handlers."""
    if threading.current_thread() is not threading.main_thread():
        log.info("llm_comm: SIGUSR2 shows no statistics, as the engine sets up llm_comm outside the main thread")
        return
    if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        log.info("llm_comm: SIGUSR2 shows no statistics, as another handler has it")
        return
    signal.signal(_SIGNAL, _log_statistics)


def _log_statistics(number: int = 0, frame: FrameType | None = None) -> None:
    """Log the statistics of all groups: signal handler and exit handler. Engines often end without closing groups."""
    for name, stats in _stats_of_groups().items():
        _logs[name].info("%s", describe(name, stats))
