"""``Communicator.stats`` of an engine's groups as metrics of ``prometheus_client``, read when somebody scrapes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llm_comm.runtime.statistics import Stats

_PREFIX = "llm_comm"
_OF_CALLS = ("group", "operation", "algorithm", "protocol", "up_to_bytes")
_COUNTED = {
    "calls": "Eager calls",
    "bytes": "Bytes of the messages of eager calls",
    "captured_calls": "Calls that CUDA graphs have captured, however often they are replayed",
    "captured_bytes": "Bytes of the messages of captured calls",
}

_served: set[int | None] = set()  # ports of this process; None: the default registry


class Collector:
    """What a registry of ``prometheus_client`` asks.

    Args:
        read: Returns what each group has done so far, by its name.
    """

    def __init__(self, read: Callable[[], Mapping[str, Stats]]) -> None:
        self._read = read

    def describe(self) -> list[Any]:
        """No metrics: a registry would else ask for all of them when this is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics as they are now."""
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge

        groups = self._read()
        for name, text in _COUNTED.items():
            family = Counter(f"{_PREFIX}_{name}", text, labels=_OF_CALLS)
            for group, stats in groups.items():
                for calls in stats.calls:
                    labels = (group, calls.operation, calls.algorithm, calls.protocol, str(calls.up_to_bytes))
                    family.add_metric(labels, getattr(calls, name))
            yield family
        declined = Counter(f"{_PREFIX}_declined", "Inputs not served", labels=("group", "operation", "reason"))
        launches = Counter(f"{_PREFIX}_launches", "Collective kernels enqueued or captured", labels=("group",))
        ended = Counter(
            f"{_PREFIX}_operations_ended", "Collective kernels ended on the device, replays included", labels=("group",)
        )
        errors = Counter(f"{_PREFIX}_errors", "Errors that have ended a communicator", labels=("group", "kind"))
        idle = Gauge(f"{_PREFIX}_idle_seconds", "Since the host's last launch; a replay is none", labels=("group",))
        for group, stats in groups.items():
            progress = stats.progress
            for each in stats.declined:
                declined.add_metric((group, each.operation, each.reason), each.count)
            launches.add_metric((group,), progress.launches)
            if progress.operations_ended is not None:
                ended.add_metric((group,), progress.operations_ended)
            if progress.error:
                errors.add_metric((group, progress.error), 1)
            if progress.idle_s is not None:
                idle.add_metric((group,), progress.idle_s)
        yield from (declined, launches, ended, errors, idle)


def serve(read: Callable[[], Mapping[str, Stats]], port: int | None, log: logging.Logger) -> None:
    """Registers a collector in the default registry, once a process, and opens a port with the metrics of
    llm_comm alone.

    Args:
        read: As of ``Collector``.
        port: On all addresses of the machine; None for none.

    Raises:
        OSError: The port cannot be opened.
    """
    try:
        import prometheus_client
    except ImportError:
        if port is not None:
            log.warning("llm_comm: stats_port is set, but prometheus_client is not installed: no port is opened")
        return
    collector = Collector(read)
    if None not in _served:
        _served.add(None)
        prometheus_client.REGISTRY.register(collector)
    if port is not None and port not in _served:
        registry = prometheus_client.CollectorRegistry()
        registry.register(collector)
        prometheus_client.start_http_server(port, registry=registry)
        _served.add(port)
        log.info("llm_comm: metrics for Prometheus on port %d", port)
