"""What a forked child leaves alone: communicators of its parent, whose threads, connections and locks are not there."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Protocol


class LeftAlone(Protocol):
    """An object that a forked child has a copy of."""

    def leave_to_parent(self) -> None:
        """Refuse all use in this process, which was forked, and end nothing.

        No lock may be waited for: a thread of the parent may have held any when the process forked.
        """


_left: weakref.WeakSet[LeftAlone] = weakref.WeakSet()
_kept: weakref.WeakSet[Any] = weakref.WeakSet()


def leave_in_child(left: LeftAlone) -> None:
    """Call ``left.leave_to_parent`` in every child that this process forks. Does not keep ``left`` alive."""
    _left.add(left)


def keep_in_child(kept: Any) -> None:
    """Never destroy ``kept`` in a forked child: its destructor waits for threads that only the parent has."""
    _kept.add(kept)


def _in_child() -> None:
    for kept in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    for left in list(_left):
        left.leave_to_parent()


os.register_at_fork(after_in_child=_in_child)
