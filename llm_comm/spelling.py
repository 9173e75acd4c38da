"""What somebody may have meant who wrote a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Nobody means a name of ours by a longer one.
_LONGEST = 80


def guess(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """`` (did you mean ...?)`` with ``prefix`` and the name that is closest, for an error; empty if none is close."""
    close = difflib.get_close_matches(name, list(valid), n=1) if len(name) <= _LONGEST else []
    return f" (did you mean {prefix}{close[0]}?)" if close else ""
