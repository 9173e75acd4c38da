"""Whether tests can use UCX on this machine."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

import pytest

from llm_comm.nodes import ucx

# Ranks of one machine would find shared memory, and tests are to go by what machines have between them. UCX reads it
# when a communicator is made.
os.environ.setdefault("UCX_TLS", "tcp")


@functools.cache
def why_not() -> str:
    """Why UCX cannot be loaded; "" where it can."""
    try:
        ucx.load()
    except RuntimeError as error:
        return str(error)
    return ""


def package() -> Path | None:
    """Where the package ``libucx`` lies, which brings libraries and headers; None where it is not installed."""
    found = importlib.util.find_spec("libucx")
    return None if found is None or found.origin is None else Path(found.origin).parent


needs_ucx = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
