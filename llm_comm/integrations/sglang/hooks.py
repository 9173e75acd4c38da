"""How SGLang is hooked once its groups are made, later than plugins usually do."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def hook(target: str, function: Callable[..., Any]) -> None:
    """Have ``function`` called in place of the one that ``target`` names, which it is given first.

    Raises:
        RuntimeError: It cannot be hooked. It works as before then.
    """
    before = pkgutil.resolve_name(target)
    HookRegistry.register(target, function, HookType.AROUND)
    HookRegistry.apply_hooks()  # logs what it cannot do, and goes on
    if pkgutil.resolve_name(target) is before:
        raise RuntimeError(f"{target} cannot be hooked")
