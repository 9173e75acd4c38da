"""Runs pytest again and again, each time in a child that has torch already: importing it takes longer than most tests.

A line of the standard input is a request in JSON: ``arguments`` of pytest, ``environment`` to add, the ``output`` file
and ``limit_s``. A line of the standard output is the exit status, or -1 where the limit was reached.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import numpy  # noqa: F401
import pytest
import torch
import torch.distributed  # noqa: F401
import yaml  # noqa: F401


def child(request: dict[str, object]) -> None:
    """Never returns."""
    os.setpgid(0, 0)
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    output = os.open(str(request["output"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    status = pytest.main(request["arguments"])  # type: ignore[arg-type]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(status))


def wait(process: int, limit_s: float) -> int:
    """The exit status. What hangs is killed, and what it has started with it."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return -1


def main() -> None:
    sys.path.pop(0)  # where this file lies
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            child(request)
        print(wait(process, request["limit_s"]), flush=True)


if __name__ == "__main__":
    main()
