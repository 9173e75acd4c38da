"""Conversion of an engine's Python arguments to its command line."""

from __future__ import annotations

import json
from typing import Any


def arguments(options: dict[str, Any]) -> list[str]:
    """Return command line flags for ``options``. False omits an option, except for vLLM's prefix caching, which is on
    by default."""
    result: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            result.append(flag)
        elif name == "enable_prefix_caching":
            result.append("--no-enable-prefix-caching")
        elif isinstance(value, list):
            result += [flag, *map(str, value)]
        elif value is not False and value != {}:
            result += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return result
