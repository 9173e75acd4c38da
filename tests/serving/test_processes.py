"""The processes of an engine as the harness sees them: who lives, and whose result counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench_serving import processes

LIMIT_S = 30.0


def state_of(pid: int) -> str:
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path("/proc", str(pid), "task", str(pid), "children").read_text().split()]


def test_who_has_ended_and_is_not_waited_for_does_not_live() -> None:
    """A shell starts a child, and becomes a program that waits for nobody."""
    with subprocess.Popen(["sh", "-c", "true & exec sleep 600"], start_new_session=True) as parent:
        try:
            deadline = time.monotonic() + LIMIT_S
            while [state_of(child) for child in children_of(parent.pid)] != ["Z"]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert processes.members(parent.pid) == [parent.pid]
        finally:
            parent.kill()


WITHOUT_ITS_FIRST_THREAD = """
import ctypes, os, threading, time
if os.fork() == 0:
    threading.Thread(target=time.sleep, args=(600,)).start()
    ctypes.CDLL(None).pthread_exit(None)
time.sleep(600)
"""


def test_a_process_lives_as_long_as_one_of_its_threads() -> None:
    """A child's first thread exits, another sleeps: the child is a zombie that may hold a GPU's memory."""
    command = [sys.executable, "-c", WITHOUT_ITS_FIRST_THREAD]
    with subprocess.Popen(command, start_new_session=True) as parent:
        try:
            deadline = time.monotonic() + LIMIT_S
            while [state_of(child) for child in children_of(parent.pid)] != ["Z"]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            (child,) = children_of(parent.pid)
            assert sorted(processes.members(parent.pid)) == sorted([parent.pid, child])
            os.kill(child, signal.SIGKILL)
            while processes.members(parent.pid) != [parent.pid]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def run(command: list[str], directory: Path) -> processes.Outcome:
    log, result = directory / "log.txt", directory / "result.json"
    return processes.run(command, dict(os.environ), log, result, LIMIT_S, lambda _: None)


def test_a_result_of_before_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    assert run(["sh", "-c", "echo said; exit 3"], tmp_path).failure == "ended with status 3, no result"
    assert not (tmp_path / "result.json").exists()
    outcome = run(["sh", "-c", "echo said; echo {} > result.json"], tmp_path)
    assert (outcome.failure, outcome.log) == ("", "said\n")


PROGRAM = """
import signal, sys
from pathlib import Path
from bench_serving import processes
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
engine = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '600'])"]
with processes.Session(engine, {}, Path(sys.argv[1]), Path()) as session:
    session.wait_for(lambda: len(session.processes) == 2, 30, print)
    print(session.process.pid, flush=True)
    session.wait_for(lambda: False, 600, print)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_whoever_ends_the_harness_ends_its_engines(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=processes.ROOT, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        session = int(harness.stdout.readline())
        assert len(processes.members(session)) == 2
        harness.send_signal(number)
        assert harness.wait(LIMIT_S) == 128 + number
    assert processes.members(session) == []


def test_what_is_ignored_stays_ignored_and_handlers_come_back() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        term = signal.getsignal(signal.SIGTERM)
        with processes.ended_by_signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != term
        assert signal.getsignal(signal.SIGTERM) == term
    finally:
        signal.signal(signal.SIGHUP, before)
