"""What CUDA graphs hold: they may be replayed as long as the process lives, whatever becomes of the communicator."""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import Protocol


class _Partners(Protocol):
    def abort(self) -> None: ...


_kept: list[_Partners] = []


def keep_for_graphs(partners: _Partners) -> None:
    """Keeps it until the end of the process, and ends it then."""
    _kept.append(partners)


@atexit.register
def _end_all() -> None:
    """Before the CUDA context goes, which they would hang in."""
    for partners in _kept:
        with contextlib.suppress(Exception):
            partners.abort()


os.register_at_fork(after_in_child=lambda: atexit.unregister(_end_all))  # the partners are the parent's
