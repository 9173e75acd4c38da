"""Which line of the user's program calls."""

from __future__ import annotations

import linecache
import sys
from types import FrameType

from llm_comm.dsl.ir import Location

_PACKAGE = __name__.rpartition(".")[0]
#: Its programs are users of the DSL as others are.
_LIBRARY = f"{_PACKAGE}.library"


def users_frame() -> FrameType:
    """The innermost frame outside of the DSL's own code."""
    frame = sys._getframe(1)
    while _is_own(frame.f_globals.get("__name__", "")):
        assert frame.f_back is not None, "a program is called from somewhere"
        frame = frame.f_back
    return frame


def users_line() -> Location:
    """Where that frame is."""
    frame = users_frame()
    return location(frame.f_code.co_filename, frame.f_lineno)


def location(file: str, line: int) -> Location:
    return Location(file, line, linecache.getline(file, line).strip())


def _is_own(module: str) -> bool:
    in_package = module == _PACKAGE or module.startswith(f"{_PACKAGE}.")
    return module == "contextlib" or (in_package and not module.startswith(_LIBRARY))
