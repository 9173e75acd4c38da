"""Processes of an engine: a Unix session for each run, with a log and a time limit. No process outlives its run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

#: Turns NVLink multicast off in all arms, so that they use the same hardware.
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    # "auto" prefers mnnvl, which uses multicast.
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}
# The arms decide which plugins run, and the harness reads the logs.
_FORCED = {"VLLM_LOGGING_LEVEL": "INFO", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
_REMOVED = ("VLLM_PLUGINS", "SGLANG_PLUGINS", "LLM_COMM_ENABLE", "LLM_COMM_FUSE")
_DEFAULTS = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = Path(__file__).resolve().parent / "plugins"
#: Name of the harness's entry points, for both engines.
PLUGIN_NAME = "llm_comm_bench"
# The working tree is appended to the path, so that its sources do not hide an installed llm_comm.
_BOOT = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), run_name='__main__')"

_POLL_S = 0.1
#: Seconds in which a process ends after its result.
END_S = 6.0
_PROGRESS = re.compile(r"^\[bench\] (.*)$", re.MULTILINE)


def environment(extra: Mapping[str, str], inherited: Mapping[str, str], as_deployed: bool = False) -> dict[str, str]:
    """Return the environment variables of an engine's processes.

    Args:
        extra: Variables of the arm.
        inherited: Variables of the harness, passed on except for those that the harness controls.
        as_deployed: Leave NVLink multicast as it is.
    """
    result = {name: value for name, value in inherited.items() if name not in _REMOVED}
    # Made absolute, since the processes run in another directory.
    path = [os.path.abspath(entry) for entry in result.get("PYTHONPATH", "").split(os.pathsep) if entry]
    result["PYTHONPATH"] = os.pathsep.join([*path, str(PLUGINS)])
    return {**_DEFAULTS, **result, **({} if as_deployed else MULTICAST_OFF), **_FORCED, **extra}


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package in the engine's environment."""
    return [sys.executable, "-c", _BOOT, str(ROOT), module, *arguments]


def members(session: int) -> list[int]:
    """Return the processes of a session that have not ended.

    A process whose main thread has exited looks like a zombie while its other threads run, and can hold GPU memory.
    """
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                # Fields after the name, which can contain anything: state, parent, group, session; the 18th is the
                # number of threads.
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                has_ended = fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) < 2)
                if int(fields[3]) == session and not has_ended:
                    found.append(int(entry))
    return found


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit within the block, as Ctrl-C raises KeyboardInterrupt.

    By default they end only this process: ``timeout``, a batch system or a closed terminal would leave engines running
    that hold GPU memory. A signal that is ignored (``nohup``) stays ignored.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    taken = [number for number, handler in before.items() if handler != signal.SIG_IGN]

    def end(number: int, _: object) -> None:
        # a second signal must not interrupt the cleanup
        for each in taken:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    try:
        for number in taken:
            signal.signal(number, end)
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


class Session:
    """Command in a Unix session of its own, with all processes that it starts.

    None of them outlives the ``with`` block, even if a signal ends this process (``ended_by_signals``). The block must
    therefore be in the main thread, which alone receives signals.

    Args:
        command: Command to run.
        environment: Its environment variables.
        log: File for stdout and stderr.
        directory: Working directory.
    """

    process: subprocess.Popen[bytes]

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, directory: Path) -> None:
        self.log = log
        self._command = command
        self._environment = dict(environment)
        self._directory = directory
        self._read_to = 0
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Session:
        with contextlib.ExitStack() as exits, self.log.open("wb") as output:
            exits.enter_context(ended_by_signals())
            self.process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            exits.callback(self.kill)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    @property
    def processes(self) -> list[int]:
        """Living processes of the session."""
        return members(self.process.pid)

    def text(self) -> str:
        """Return the log so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def progress(self) -> list[str]:
        """Return the progress lines of the process since the last call: those that begin with ``[bench]``."""
        with self.log.open("rb") as file:
            file.seek(self._read_to)
            new = file.read()
        complete = new.rfind(b"\n") + 1
        self._read_to += complete
        return _PROGRESS.findall(new[:complete].decode(errors="replace"))

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, show: Callable[[str], None]) -> bool:
        """Wait until ``condition`` is true, the process ends, or the time is up. Return whether the condition became
        true."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll() is not None
            for line in self.progress():
                show(line)
            if condition():
                return True
            if ended or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Kill all processes of the session and return when they are gone."""
        deadline = time.monotonic() + 30
        while left := self.processes:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {left} do not end after SIGKILL: a GPU driver may hold them")
            time.sleep(_POLL_S)
        self.process.wait()


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        seconds: Duration.
        failure: Why there is no result; "" if there is one.
        log: Output of its processes.
    """

    seconds: float
    failure: str
    log: str


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    result: Path,
    timeout_s: float,
    show: Callable[[str], None],
    grace_s: float = END_S,
) -> Outcome:
    """Run a command until it has written ``result`` and has ended.

    If it does not end within ``grace_s`` seconds after its result, it is killed; the result counts.
    """
    begin = time.monotonic()
    result.unlink(missing_ok=True)
    with Session(command, environment, log, log.parent) as session:
        there = session.wait_for(result.exists, timeout_s, show)
        if there and not session.wait_for(lambda: session.process.poll() is not None, grace_s, show):
            show(f"killed: it did not end within {grace_s:g} s after its result")
        status = session.process.poll()
    failure = ""
    if not there:
        failure = f"no result within {timeout_s:g} s" if status is None else f"ended with status {status}, no result"
    return Outcome(time.monotonic() - begin, failure, session.text())
