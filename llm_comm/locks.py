"""Files that one process at a time has locked."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """The lock ends with the process at the latest. The file stays: who waits for it has it open.

    Raises:
        OSError: The file cannot be made.
    """
    with path.open("w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
