"""The drill in which a worker dies, on a fake engine that notices, does not notice, or does not say whom it lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_serving import kill_worker

FAKES = Path(__file__).parent / "fakes"


def drill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str = "") -> tuple[int, list[str]]:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50, "max_position_embeddings": 4096}))
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"llm_comm": fault}))
    monkeypatch.setattr(kill_worker, "_INTO_DECODING_S", 0.1)
    out = tmp_path / "out"
    status = kill_worker.main(["--model", str(tmp_path), "--tp", "2", "--timeout-s", "1", "--out", str(out)])
    report = json.loads((out / "report.json").read_text())
    assert report["rank"] == 1
    return status, report["failures"]


def test_an_engine_that_ends_and_names_the_lost_worker_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert drill(monkeypatch, tmp_path) == (0, [])


def test_an_engine_that_goes_on_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, failures = drill(monkeypatch, tmp_path, "ignores the dead")
    assert status == 1
    assert "processes are left" in failures[0]


def test_an_engine_that_does_not_say_whom_it_lost_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, failures = drill(monkeypatch, tmp_path, "nameless")
    assert status == 1
    assert "no error names rank 1" in failures[0]


def test_an_engine_that_ends_as_if_all_were_well_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, failures = drill(monkeypatch, tmp_path, "content")
    assert status == 1
    assert failures == ["the engine ended with status 0, as if all were well"]


def test_what_was_logged_before_the_loss_names_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of an engine that had trouble before, with the same worker."""
    status, failures = drill(monkeypatch, tmp_path, "prophetic")
    assert status == 1
    assert "no error names rank 1" in failures[0]


@pytest.mark.parametrize(
    ("left", "seconds", "status", "failed"),
    [
        (0, 11.9, 1, []),
        (0, 12.0, -9, []),
        (0, 12.1, 1, ["0 processes are left after 12.1 s; the limit is 12 s"]),
        (2, 11.9, None, ["2 processes are left after 11.9 s; the limit is 12 s"]),
        (2, 13.0, None, ["2 processes are left after 13.0 s; the limit is 12 s"]),
        (0, 5.0, 0, ["the engine ended with status 0, as if all were well"]),
        (1, 13.0, 0, ["1 processes are left after 13.0 s; the limit is 12 s", "the engine ended with status 0, as if"]),
    ],
)
def test_how_an_engine_may_end(left: int, seconds: float, status: int | None, failed: list[str]) -> None:
    """All of it, in time, and not as if all were well: late is late, though nothing is left."""
    found = kill_worker.what_failed(left, seconds, 12.0, status)
    assert len(found) == len(failed)
    assert all(text.startswith(start) for text, start in zip(found, failed, strict=True))


@pytest.mark.parametrize(
    "line",
    [
        "CRITICAL llm_comm: rank 0: nothing came from rank 3 for 9 s in an all-reduce",
        "CRITICAL llm_comm: rank 0: the process of rank 3 has exited, and a one-shot all-reduce of 80 bytes",
        "ERROR Worker proc VllmWorker-3 died unexpectedly (exit code: -9), shutting down executor.",
        "Scheduler or DataParallelController 4711 terminated with -9",
        "[TP0] llm_comm: rank 3 (pid 4711) has exited without closing its communicator. What waits for it ends with",
        "[TP0] llm_comm: rank 3 (pid 4711) has died or hangs: no sign of life for 1.0 s. What waits for it ends with",
    ],
)
def test_lines_that_name_the_lost_rank(line: str) -> None:
    assert kill_worker.lines_that_name(f"before\n{line}\nafter", 3, 4711) == [line]
    for other, pid in ((2, 4712), (33, 47110), (13, 471)):
        assert not kill_worker.lines_that_name(line, other, pid)


def test_a_longer_number_names_another() -> None:
    for line in ("rank 0: nothing came from rank 13 for 9 s", "VllmWorker-13 died", "Scheduler 47110 terminated"):
        assert not kill_worker.lines_that_name(f"llm_comm: {line}", 1, 4711)
