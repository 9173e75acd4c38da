"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

MIB = 1 << 20

_UNITS = {"": 1, "K": 1 << 10, "M": MIB, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Reads a size such as ``512``, ``64K``, ``64KB`` or ``64 KiB``: powers of 1024, in capitals or not.

    Raises:
        ValueError: It is none.
    """
    match = re.fullmatch(r"([0-9]+)\s*(?:([KMG])I?)?B?", text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write 512, 64K or 8M")
    return int(match[1]) * _UNITS[match[2] or ""]
