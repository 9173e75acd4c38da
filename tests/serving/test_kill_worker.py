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
    assert not kill_worker.lines_that_name(line, 2, 4712)
