"""Files that one process at a time has locked."""

from __future__ import annotations

import fcntl
import math
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
        patience_s: Go on without the lock after so many seconds.

    Raises:
        OSError: The file cannot be made or locked.
    """
    deadline = time.monotonic() + patience_s
    with path.open("w", encoding="ascii") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
        yield
