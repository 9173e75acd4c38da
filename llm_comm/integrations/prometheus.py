"""``Communicator.stats`` of an engine's groups as metrics of ``prometheus_client``: in its default registry, on a port
of its own and, where the engine gathers the metrics of its processes in a directory, there."""

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

#: By which prometheus_client, and engines, know the directory.
DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
#: Between two looks at what is written there, in seconds.
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

#: In which this process shows them already.
_ways: set[str] = set()


class Collector:
    """What a registry of ``prometheus_client`` asks.

    Args:
        read: Returns what each group has done so far, by its name.
        rank: Of this process among the engine's.
    """

    def __init__(self, read: Read, rank: int) -> None:
        self._read = read
        self._rank = str(rank)

    def describe(self) -> list[Any]:
        """No metrics: a registry would else ask for all of them when this is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics as they are now."""
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
        errors = Counter(f"{_PREFIX}_errors", "Errors that have ended a communicator", labels=(*_OF_GROUP, "kind"))
        idle = Gauge(f"{_PREFIX}_idle_seconds", "Since the host's last launch; a replay is none", labels=_OF_GROUP)
        for group, stats in groups.items():
            progress = stats.progress
            for each in stats.declined:
                declined.add_metric((*group, each.operation, each.reason), each.count)
            launches.add_metric(group, progress.launches)
            if progress.operations_ended is not None:
                ended.add_metric(group, progress.operations_ended)
            if progress.error:
                errors.add_metric((*group, progress.error), 1)
            if progress.idle_s is not None:
                idle.add_metric(group, progress.idle_s)
        yield from (declined, launches, ended, errors, idle)


class Publisher:
    """Writes what a collector collects to the directory of ``prometheus_client``'s multiprocess mode, which takes no
    collectors. Whoever serves the engine's metrics finds it there."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._metrics: dict[str, Any] = {}
        self._written: dict[tuple[str, ...], float] = {}

    def publish(self) -> None:
        """Writes the metrics as they are now."""
        from prometheus_client import Counter, Gauge

        for family in self._collector.collect():
            is_counter = family.type == "counter"
            for sample in family.samples:
                metric: Any = self._metrics.get(family.name)  # of one of two kinds
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
                    child.inc(max(0, sample.value - self._written.get(key, 0)))
                    self._written[key] = sample.value
                else:
                    child.set(sample.value)

    def run(self) -> None:
        """Writes them again and again, until the process ends."""
        while True:
            time.sleep(_PERIOD_S)
            self.publish()


def serve(read: Read, rank: int, port: int | None, host: str, log: logging.Logger) -> None:
    """Shows the metrics in each way that there is, once a process. What cannot be opened is a warning.

    Args:
        read, rank: As of ``Collector``.
        port: Of rank 0, with the metrics of llm_comm alone; None for none.
        host: Address on which the port is opened.
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
    # Else the values are in this process alone.
    if any(Path(directory).glob(f"*_{os.getpid()}.db")):
        threading.Thread(target=publisher.run, name="llm_comm metrics", daemon=True).start()
    else:
        log.warning("llm_comm: no metrics in the directory of %s: prometheus_client was imported before it", DIRECTORY)
