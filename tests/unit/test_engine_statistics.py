"""What engines tell of a communicator's statistics: without an engine."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from llm_comm.config import EngineOptions
from llm_comm.integrations import prometheus, statistics
from llm_comm.runtime.statistics import Calls, Declined, Progress, Stats

LOG = logging.getLogger("test_engine_statistics")

STATS = Stats(
    (
        Calls("all_reduce", "one_shot", "LL", 1024, 3, 3000, 2, 2000),
        Calls("all_reduce", "two_shot", "LL", 4096, 1, 4096, 0, 0),
    ),
    (Declined("all_reduce", "N bytes, too many", 7),),
    Progress(9, 20, 1.5, "PeerTimeout"),
)
LINE = (
    "llm_comm in group tp: all_reduce 4 calls (7096 bytes) and 2 captured; declined all_reduce: 7 (N bytes, too "
    "many); 9 launches by the host, 20 ended on the device, replays of graphs included; the host's last launch 1.5 s "
    "ago; ended by PeerTimeout"
)


class Engine:
    """A communicator as statistics see it."""

    def __init__(self, **options: Any) -> None:
        self.config = EngineOptions.load({}, **options)

    def stats(self) -> Stats:
        return STATS


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Leaves the signal, the end of the process and the default registry as they were."""
    before = signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    caplog.set_level(logging.DEBUG, LOG.name)
    monkeypatch.setattr(prometheus, "_ways", {"registry", "directory"})
    yield
    signal.signal(signal.SIGUSR2, before)
    while statistics._at_end:
        statistics._at_end.pop().cancel()


def test_the_line() -> None:
    assert statistics.describe("tp", STATS) == LINE


def test_the_line_says_what_quantization_saves() -> None:
    saved = "; 1234 bytes less sent, as wire quantizes eager calls"
    line = statistics.describe("tp", replace(STATS, bytes_saved=1234))
    assert line == LINE.replace("; declined", f"{saved}; declined")


def test_the_line_of_a_group_that_has_done_nothing() -> None:
    words = "no calls; 0 launches by the host, an unknown number ended on the device, replays of graphs included"
    assert statistics.describe("dp", Stats()) == f"llm_comm in group dp: {words}"


@pytest.mark.parametrize(("is_on", "level"), [(True, logging.INFO), (False, logging.DEBUG)])
def test_a_group_that_leaves_is_told(is_on: bool, level: int, caplog: pytest.LogCaptureFixture) -> None:
    statistics.leave("tp", Engine(stats=is_on), LOG)  # type: ignore[arg-type]
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(level, LINE)]


def test_a_signal_shows_the_groups_that_are_there(caplog: pytest.LogCaptureFixture) -> None:
    first, second, silent = Engine(stats=True), Engine(stats=True), Engine()
    for name, engine in (("tp", first), ("dp", second), ("ep", silent)):
        statistics.follow(name, engine, 0, LOG)  # type: ignore[arg-type]
    statistics.leave("dp", second, LOG)  # type: ignore[arg-type]
    caplog.clear()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert caplog.messages == [LINE]
    caplog.clear()
    del first, engine  # dropped without having left
    os.kill(os.getpid(), signal.SIGUSR2)
    assert caplog.messages == []


def test_without_the_option_the_signal_is_left_alone() -> None:
    statistics.follow("tp", Engine(), 0, LOG)  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_handler_of_the_engine_stays(caplog: pytest.LogCaptureFixture) -> None:
    def theirs(*_: object) -> None: ...

    signal.signal(signal.SIGUSR2, theirs)
    statistics.follow("tp", engine := Engine(stats=True), 0, LOG)  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGUSR2) is theirs
    assert caplog.messages == ["llm_comm: SIGUSR2 shows no statistics, as another handler has it"]
    assert engine.config.stats


def test_metrics() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    registry.register(prometheus.Collector(lambda: {"tp": STATS, "dp": Stats()}, 3))
    one_shot = {
        "group": "tp",
        "rank": "3",
        "operation": "all_reduce",
        "algorithm": "one_shot",
        "protocol": "LL",
        "up_to_bytes": "1024",
    }
    for name, value in {"calls": 3, "bytes": 3000, "captured_calls": 2, "captured_bytes": 2000}.items():
        assert registry.get_sample_value(f"llm_comm_{name}_total", one_shot) == value
    two_shot = one_shot | {"algorithm": "two_shot", "up_to_bytes": "4096"}
    assert registry.get_sample_value("llm_comm_bytes_total", two_shot) == 4096
    reason = {"group": "tp", "rank": "3", "operation": "all_reduce", "reason": "N bytes, too many"}
    assert registry.get_sample_value("llm_comm_declined_total", reason) == 7
    tp, dp = {"group": "tp", "rank": "3"}, {"group": "dp", "rank": "3"}
    assert registry.get_sample_value("llm_comm_launches_total", tp) == 9
    assert registry.get_sample_value("llm_comm_launches_total", dp) == 0
    assert registry.get_sample_value("llm_comm_operations_ended_total", tp) == 20
    assert registry.get_sample_value("llm_comm_operations_ended_total", dp) is None
    assert registry.get_sample_value("llm_comm_errors_total", tp | {"kind": "PeerTimeout"}) == 1
    assert registry.get_sample_value("llm_comm_idle_seconds", tp) == 1.5


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("host", [None, "0.0.0.0"])
def test_a_port_of_the_rank_answers(caplog: pytest.LogCaptureFixture, host: str | None) -> None:
    """To this machine's 127.0.0.1 alone, unless an option says otherwise."""
    pytest.importorskip("prometheus_client")
    port = free_port()
    engine = Engine(stats=port - 1, **({} if host is None else {"stats_host": host}))
    statistics.follow("tp", engine, 1, LOG)  # type: ignore[arg-type]
    statistics.follow("dp", engine, 1, LOG)  # type: ignore[arg-type]
    (message,) = caplog.messages  # one for all groups
    assert message.startswith(f"llm_comm: metrics for Prometheus at {host or '127.0.0.1'}:{port} ")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert 'llm_comm_launches_total{group="tp",rank="1"} 9.0' in text
    assert 'llm_comm_launches_total{group="dp",rank="1"} 9.0' in text
    with socket.socket() as other:
        assert (other.connect_ex(("127.0.0.2", port)) == 0) == (host is not None)


def test_a_port_that_is_taken_or_none_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        engine = Engine(stats=other.getsockname()[1])
        statistics.follow("tp", engine, 0, LOG)  # type: ignore[arg-type]
    engine = Engine(stats=65535)
    statistics.follow("tp", engine, 1, LOG)  # type: ignore[arg-type]
    assert len(caplog.messages) == 2
    assert all(text.startswith("llm_comm: no port for Prometheus at 127.0.0.1:") for text in caplog.messages)


# A process of an engine that gathers the metrics of all of them, and what its server then shows of a worker that ended.
WORKER = """
import logging, sys
from llm_comm.integrations import prometheus
from llm_comm.runtime.statistics import Calls, Progress, Stats
numbers = iter([(1, 10), (4, 40)])
def read():
    calls, nbytes = next(numbers)
    of_kind = Calls("all_reduce", "one_shot", "LL", 16, calls, nbytes, 0, 0)
    return {"tp": Stats((of_kind,), (), Progress(calls, None, 2.5))}
prometheus.serve(read, 3, None, "127.0.0.1", logging.getLogger())
prometheus.Publisher(prometheus.Collector(read, 2)).publish()
"""
SERVER = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def run_python(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, prometheus.DIRECTORY: str(directory)}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)


def test_metrics_in_the_directory_of_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    assert run_python(WORKER, tmp_path).stderr == ""
    text = run_python(SERVER, tmp_path).stdout
    kind = 'algorithm="one_shot",group="tp",operation="all_reduce",protocol="LL"'
    assert f'llm_comm_bytes_total{{{kind},rank="3",up_to_bytes="16"}} 10.0' in text
    assert f'llm_comm_calls_total{{{kind},rank="2",up_to_bytes="16"}} 4.0' in text
    assert 'llm_comm_idle_seconds{group="tp",rank="3"} 2.5' in text


def test_a_counter_in_the_directory_grows_by_what_came_since() -> None:
    pytest.importorskip("prometheus_client")
    stats = {"tp": replace(STATS, progress=Progress(5, 3))}
    publisher = prometheus.Publisher(prometheus.Collector(lambda: stats, 0))
    for ended in (3, 7, 2, 6, None, 8):  # at 2 and at 8 the group is another one of its name
        stats.clear()
        if ended is not None:
            stats["tp"] = replace(STATS, progress=Progress(5, ended))
        publisher.publish()
    of_group = {"group": "tp", "rank": "0"}
    ended_in_all = publisher._metrics["llm_comm_operations_ended"].labels(**of_group)
    assert ended_in_all._value.get() == 3 + 4 + 2 + 4 + 8
    assert publisher._metrics["llm_comm_launches"].labels(**of_group)._value.get() == 5 + 5


def test_a_full_disk_stops_no_later_update(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    publish = mock.Mock(side_effect=[OSError("no space"), OSError("no space"), None, KeyboardInterrupt])
    publisher = prometheus.Publisher(prometheus.Collector(dict, 0))
    monkeypatch.setattr(publisher, "publish", publish)
    monkeypatch.setattr(prometheus, "_PERIOD_S", 0)
    with pytest.raises(KeyboardInterrupt):
        publisher.run(LOG)
    assert publish.call_count == 4
    said = "llm_comm: metrics in the directory of PROMETHEUS_MULTIPROC_DIR are not updated: no space"
    assert caplog.messages == [said]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_directory_that_cannot_be_used_is_a_warning(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This process has imported prometheus_client without one."""
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(prometheus, "_ways", set())
    monkeypatch.setenv(prometheus.DIRECTORY, str(tmp_path))
    if not is_there:
        monkeypatch.setattr(prometheus.Publisher, "publish", mock.Mock(side_effect=FileNotFoundError("no directory")))
    for name in ("tp", "dp"):
        statistics.follow(name, Engine(stats=True), 0, LOG)  # type: ignore[arg-type]
    why = "prometheus_client was imported before it" if is_there else "no directory"
    assert caplog.messages == [f"llm_comm: no metrics in the directory of PROMETHEUS_MULTIPROC_DIR: {why}"]


def test_the_default_registry_gets_one_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("prometheus_client")
    registered: list[object] = []
    monkeypatch.setattr(client, "REGISTRY", SimpleNamespace(register=registered.append))
    monkeypatch.setattr(prometheus, "_ways", set())
    monkeypatch.delenv(prometheus.DIRECTORY, raising=False)
    for name in ("tp", "dp"):
        statistics.follow(name, Engine(stats=True), 0, LOG)  # type: ignore[arg-type]
    assert [type(each) for each in registered] == [prometheus.Collector]


def worker(log_file: Path) -> None:
    """A process of an engine, which ends without closing its group."""
    LOG.addHandler(logging.FileHandler(log_file))
    LOG.setLevel(logging.INFO)
    kept.append(Engine(stats=True))
    for name in ("dp", "tp"):
        statistics.follow(name, kept[0], 0, LOG)  # type: ignore[arg-type]


#: Of a worker: what lives until it ends.
kept: list[Engine] = []


def test_a_worker_process_that_ends_says_so_once(tmp_path: Path) -> None:
    """Also where ``atexit`` is passed over."""
    process = multiprocessing.get_context("spawn").Process(target=worker, args=(tmp_path / "log",))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert lines == [LINE.replace("group tp", "group dp"), LINE]
