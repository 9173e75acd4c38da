"""How SGLang is hooked once its groups are made, later than plugins usually do."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def hook(target: str, function: Callable[..., Any], kind: HookType) -> None:
    """Hooks the function that ``target`` names.

    Raises:
        RuntimeError: It cannot be hooked. It works as before then.
    """
    before = pkgutil.resolve_name(target)
    HookRegistry.register(target, function, kind)
    HookRegistry.apply_hooks()  # logs what it cannot do, and goes on
    if pkgutil.resolve_name(target) is before:
        raise RuntimeError(f"{target} cannot be hooked")
