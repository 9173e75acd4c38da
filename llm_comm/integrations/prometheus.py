"""Prometheus metrics made of ``Communicator.stats`` of an engine's groups.

Metrics are exported in up to two ways. With PROMETHEUS_MULTIPROC_DIR set, where the engine collects the metrics of its
processes, they are written to that directory; otherwise the default registry of ``prometheus_client`` has them. If
option ``stats`` is a port, an HTTP server of this process serves them as well.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llm_comm.runtime.statistics import Stats

Read = Callable[[], Mapping[str, Stats]]

#: Environment variable by which prometheus_client and engines find the directory of the multiprocess mode.
DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
#: Seconds between two updates of the metrics in the directory.
_PERIOD_S = 5.0
_PREFIX = "llm_comm"
_OF_GROUP = ("group", "rank")
_OF_CALLS = (*_OF_GROUP, "operation", "algorithm", "protocol", "up_to_bytes")
_COUNTED = {
    "calls": "Eager calls",
    "bytes": "Bytes of the messages of eager calls",
    "captured_calls": "Calls that CUDA graphs have captured, however often they are replayed",
    "captured_bytes": "Bytes of the messages of captured calls",
}

#: Exports that this process has opened: "directory", "registry" and "port N".
_ways: set[str] = set()


class Collector:
    """Collector for a registry of ``prometheus_client``.

    Args:
        read: Function that returns the statistics of each group, by group name.
        rank: Rank of this process in the engine.
    """

    def __init__(self, read: Read, rank: int) -> None:
        self._read = read
        self._rank = str(rank)

    def describe(self) -> list[Any]:
        """Return no metrics. Without this method a registry would call ``collect`` at registration."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metrics with their present values."""
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge

        groups = {(group, self._rank): stats for group, stats in self._read().items()}
        for name, text in _COUNTED.items():
            family = Counter(f"{_PREFIX}_{name}", text, labels=_OF_CALLS)
            for group, stats in groups.items():
                for calls in stats.calls:
                    kind = (calls.operation, calls.algorithm, calls.protocol, str(calls.up_to_bytes))
                    family.add_metric((*group, *kind), getattr(calls, name))
            yield family
        declined = Counter(f"{_PREFIX}_declined", "Inputs not served", labels=(*_OF_GROUP, "operation", "reason"))
        launches = Counter(f"{_PREFIX}_launches", "Collective kernels enqueued or captured", labels=_OF_GROUP)
        ended = Counter(
            f"{_PREFIX}_operations_ended", "Collective kernels ended on the device, replays included", labels=_OF_GROUP
        )
        saved = Counter(f"{_PREFIX}_saved_bytes", "Bytes saved by option wire, eager calls only", labels=_OF_GROUP)
        errors = Counter(f"{_PREFIX}_errors", "Errors that have ended a communicator", labels=(*_OF_GROUP, "kind"))
        idle = Gauge(f"{_PREFIX}_idle_seconds", "Since the host's last launch; a replay is none", labels=_OF_GROUP)
        for group, stats in groups.items():
            progress = stats.progress
            for each in stats.declined:
                declined.add_metric((*group, each.operation, each.reason), each.count)
            launches.add_metric(group, progress.launches)
            saved.add_metric(group, stats.bytes_saved)
            if progress.operations_ended is not None:
                ended.add_metric(group, progress.operations_ended)
            if progress.error:
                errors.add_metric((*group, progress.error), 1)
            if progress.idle_s is not None:
                idle.add_metric(group, progress.idle_s)
        yield from (declined, launches, ended, saved, errors, idle)


class Publisher:
    """Copy the metrics of a collector to the directory of ``prometheus_client``'s multiprocess mode.

    That mode ignores collectors: it reads only metric objects of the library. The engine's metrics server reads the
    directory.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._metrics: dict[str, Any] = {}
        self._written: dict[tuple[str, ...], float] = {}

    def publish(self) -> None:
        """Write the present values once.

        The counter of a group continues when a group of the same name replaces it: its counts are added.
        """
        from prometheus_client import Counter, Gauge

        written: dict[tuple[str, ...], float] = {}
        for family in self._collector.collect():
            is_counter = family.type == "counter"
            for sample in family.samples:
                metric: Any = self._metrics.get(family.name)  # a Counter or a Gauge
                if metric is None:
                    about = family.name, family.documentation, tuple(sample.labels)
                    metric = (
                        Counter(*about, registry=None)
                        if is_counter
                        else Gauge(*about, registry=None, multiprocess_mode="livemax")
                    )
                    self._metrics[family.name] = metric
                child = metric.labels(**sample.labels)
                if is_counter:
                    key = (family.name, *sample.labels.values())
                    before = self._written.get(key, 0)
                    child.inc(sample.value - before if sample.value >= before else sample.value)
                    written[key] = sample.value
                else:
                    child.set(sample.value)
        self._written = written

    def run(self, log: logging.Logger) -> None:
        """Write the values periodically until the process ends. The first failure is logged; later updates go on."""
        has_failed = False
        while True:
            time.sleep(_PERIOD_S)
            try:
                self.publish()
            except Exception as error:  # a full disk, a directory that was removed
                if not has_failed:
                    log.warning("llm_comm: metrics in the directory of %s are not updated: %s", DIRECTORY, error)
                has_failed = True


def serve(read: Read, rank: int, port: int | None, host: str, log: logging.Logger) -> None:
    """Export the metrics. Each export is opened once a process. One that cannot be opened gives a warning.

    Args:
        read: Function that returns the statistics of each group, by group name.
        rank: Rank of this process in the engine.
        port: Port of rank 0 for the metrics of llm_comm alone; rank N uses ``port + N``. None: no port.
        host: Address on which the port is opened.
        log: Logger for the address and for warnings.
    """
    try:
        import prometheus_client
    except ImportError:
        if port is not None:
            log.warning("llm_comm: option stats is a port, but prometheus_client is not installed: no port is opened")
        return
    collector = Collector(read, rank)
    directory = os.environ.get(DIRECTORY)
    if directory is not None:
        if _is_first("directory"):
            _write_to(directory, collector, log)
    elif _is_first("registry"):
        prometheus_client.REGISTRY.register(collector)
    if port is not None and _is_first(f"port {port}"):
        registry = prometheus_client.CollectorRegistry()
        registry.register(collector)
        where = f"{host}:{port + rank} (stats_host, stats)"
        try:
            prometheus_client.start_http_server(port + rank, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            log.warning("llm_comm: no port for Prometheus at %s: %s", where, error)
        else:
            log.info("llm_comm: metrics for Prometheus at %s", where)


def _is_first(way: str) -> bool:
    is_first = way not in _ways
    _ways.add(way)
    return is_first


def _write_to(directory: str, collector: Collector, log: logging.Logger) -> None:
    publisher = Publisher(collector)
    try:
        publisher.publish()
    except OSError as error:
        log.warning("llm_comm: no metrics in the directory of %s: %s", DIRECTORY, error)
        return
    # prometheus_client reads the variable when it is imported. Without a file of this process, it was imported before
    # the variable was set, and the values never leave this process.
    if any(Path(directory).glob(f"*_{os.getpid()}.db")):
        threading.Thread(target=publisher.run, args=(log,), name="llm_comm metrics", daemon=True).start()
    else:
        log.warning("llm_comm: no metrics in the directory of %s: prometheus_client was imported before it", DIRECTORY)
