"""Norms without cost, for the arm ``free_norm``."""

from __future__ import annotations

from typing import Any


def install(norm: Any) -> None:
    """Make an engine's RMSNorm return x and residual unchanged if it is called with a residual.

    Such calls are the norms that follow all-reduces. Other norms, such as those of queries and keys, are unchanged.
    """
    original = norm.forward

    def forward(self: Any, x: Any, residual: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(self, x, None, *args, **kwargs) if residual is None else (x, residual)

    norm.forward = forward
