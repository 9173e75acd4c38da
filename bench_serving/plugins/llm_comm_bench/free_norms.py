"""Norms that cost nothing, for the arm ``free_norm``."""

from __future__ import annotations

from typing import Any


def install(norm: Any) -> None:
    """Lets the class of an engine's RMSNorm return x and residual as they are, where it is given a residual to add.

    Those are the norms behind all-reduces. Others, such as those of queries and keys, stay.
    """
    original = norm.forward

    def forward(self: Any, x: Any, residual: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(self, x, None, *args, **kwargs) if residual is None else (x, residual)

    norm.forward = forward
