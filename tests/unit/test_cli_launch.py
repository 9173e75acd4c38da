"""Launching ranks: where they are placed, what they are given, and that none survives a failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llm_comm.cli import launch
from llm_comm.cli.launch import Placement
from llm_comm.errors import ConfigError

EMULATED = Placement(world=3, on_gpu=False, reason="test")
SLEEPS_UNLESS_RANK_1 = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
os.symlink(str(os.getpid()), pathlib.Path(sys.argv[1], rank))  # at once, so that nobody reads half of it
while len(os.listdir(sys.argv[1])) < 3:
    time.sleep(0.01)
if rank == "1":
    {ending}
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _outside_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(launch, "usable_gpus", lambda: (count, "" if count > 1 else "not enough GPUs"))


@pytest.mark.parametrize(
    ("gpus", "world", "device", "expected"),
    [
        (0, None, "auto", (4, False)),
        (1, None, "auto", (4, False)),
        (2, None, "auto", (2, True)),
        (8, None, "auto", (8, True)),
        (16, None, "auto", (16, True)),
        (24, None, "auto", (16, True)),
        (8, 3, "auto", (3, True)),
        (2, 4, "auto", (4, False)),
        (8, None, "emulated", (4, False)),
        (8, 8, "cuda", (8, True)),
    ],
)
def test_place(
    gpus: int, world: int | None, device: str, expected: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, gpus)
    placement = launch.place(world, device)
    assert (placement.world, placement.on_gpu) == expected
    assert bool(placement.reason) is not placement.on_gpu


def test_default_world_is_one_that_the_command_prefers(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 7)
    assert launch.place(None, "auto", preferred=[2, 4, 8]).world == 4


@pytest.mark.parametrize(
    ("world", "device", "complaint"),
    [
        (1, "auto", "--world 1: a command runs 2 to 16 ranks"),
        (17, "auto", "--world 17: a command runs 2 to 16 ranks"),
        (4, "cuda", "cannot run 4 ranks on GPUs: not enough GPUs"),
        (None, "cuda", "cannot run 4 ranks on GPUs: not enough GPUs"),
    ],
)
def test_place_rejects(world: int | None, device: str, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match=complaint):
        launch.place(world, device)


def test_a_launched_group_of_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="WORLD_SIZE=1: a command runs 2 to 16 ranks"):
        launch.place(None, "auto")


def test_launched_group_decides_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)
    for name, value in {"RANK": "2", "WORLD_SIZE": "5", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (launch.in_rank(), launch.rank(), launch.local_rank()) == (True, 2, 1)
    assert launch.place(None, "auto").world == 5
    assert launch.place(5, "auto").world == 5
    with pytest.raises(ConfigError, match="contradicts"):
        launch.place(4, "auto")


def test_a_group_of_several_machines_may_have_more_ranks_where_the_command_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_gpus(monkeypatch, 8)
    for name, value in {"RANK": "9", "WORLD_SIZE": "24", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert launch.place(None, "auto", over_nodes=True) == Placement(24, on_gpu=True)
    with pytest.raises(ConfigError, match="WORLD_SIZE=24: a command runs 2 to 16 ranks"):
        launch.place(None, "auto")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "24")
    with pytest.raises(ConfigError, match="WORLD_SIZE=24: a command runs 2 to 16 ranks"):
        launch.place(None, "auto", over_nodes=True)


def test_numbers_of_containers_are_not_those_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    for name, value in {"RANK": "3", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert (launch.in_rank(), launch.rank(), launch.local_rank()) == (False, 0, 0)
    assert launch.place(None, "auto") == Placement(2, on_gpu=True)
    assert launch.place(2, "cuda") == Placement(2, on_gpu=True)


def test_ranks_get_the_environment_of_torchrun(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    # The store listens before a rank starts, so no other program can have taken its port.
    script = (
        "import os, pathlib, socket, sys; pathlib.Path(sys.argv[1], os.environ['RANK'])"
        f".write_text(' '.join(os.environ[n] for n in {names!r}));"
        "socket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])), timeout=30)"
    )
    assert launch.run_ranks(EMULATED, [sys.executable, "-c", script, str(tmp_path)]) == 0
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [values[:5] for values in found] == [[str(r), str(r), "3", "3", "127.0.0.1"] for r in range(3)]
    assert len({values[5] for values in found}) == 1


@pytest.mark.parametrize(("ending", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)])
def test_one_failing_rank_stops_all(ending: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 0.1)
    script = SLEEPS_UNLESS_RANK_1.format(ending=ending)
    assert launch.run_ranks(EMULATED, [sys.executable, "-c", script, str(tmp_path)]) == status
    assert not any(is_running(int(os.readlink(path))) for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_ranks_end_with_their_launcher(sent: signal.Signals, status: int, tmp_path: Path) -> None:
    rank = SLEEPS_UNLESS_RANK_1.format(ending="pass")
    launcher = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from llm_comm.cli import launch\n"
        f"command = [sys.executable, '-c', {rank!r}, {str(tmp_path)!r}]\n"
        "sys.exit(launch.run_ranks(launch.Placement(3, False), command))"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher])
    try:
        while len(list(tmp_path.iterdir())) < 3:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(sent)
        assert process.wait(timeout=60) == status
        deadline = time.monotonic() + 30
        while any(is_running(int(os.readlink(path))) for path in tmp_path.iterdir()):
            assert time.monotonic() < deadline, "a rank outlives its launcher"
            time.sleep(0.02)
    finally:
        process.kill()


def test_a_rank_that_starts_after_its_launcher_has_ended_ends_too() -> None:
    command = [sys.executable, "-c", launch._DIE_WITH_LAUNCHER, str(os.getpid() + 1), "echo", "runs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "llm-comm: the launcher has ended\n")


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"  # an orphan may stay a zombie where nobody waits for it
