"""Files that one process at a time has locked."""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.05


@contextmanager
def locked(path: Path, patience_s: float = math.inf) -> Iterator[None]:
    """The lock ends with the process at the latest. The file stays: who waits for it has it open.

    Args:
        path: The file.
        patience_s: Longest wait in seconds; then the block runs without the lock.

    Raises:
        OSError: The file cannot be made or locked.
    """
    deadline = time.monotonic() + patience_s
    # With these flags opening does not block, not even where a pipe lies there.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)
