"""Section of ``llm-comm doctor`` about the engines: whether their all-reduces use llm_comm, and if not, why.

The answers are based on variables, options and installed packages; no engine is imported. What depends on a running
engine, such as its command line and groups, is in the engine's log line about llm_comm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from llm_comm.bench.report import installed_version
from llm_comm.cli import launch
from llm_comm.config import EngineOptions, load_with_unknown
from llm_comm.errors import ConfigError
from llm_comm.integrations import joining
from llm_comm.planning.catalogue import check_table_option

_PLUGIN = "llm_comm"


@dataclass(frozen=True)
class Engine:
    """Engine with a plugin of llm_comm.

    Attributes:
        name: Name of the engine.
        package: Name of its distribution.
        entry_points: Entry point group of its plugins.
        allowed: Environment variable with the list of permitted plugins.
        empty_allows_all: An empty variable permits all plugins; otherwise it permits none.
        oldest, newest: Supported versions, both included.
    """

    name: str
    package: str
    entry_points: str
    allowed: str
    empty_allows_all: bool
    oldest: str
    newest: str


ENGINES = (
    Engine("vLLM", "vllm", "vllm.general_plugins", "VLLM_PLUGINS", False, "0.26", "0.33"),
    Engine("SGLang", "sglang", "sglang.srt.plugins", "SGLANG_PLUGINS", True, "0.5.17", "0.5.23"),
)


def verdicts(config: EngineOptions | None) -> dict[str, str]:
    """Return a sentence for each engine. ``config`` is None if the configuration is invalid."""
    config = config or _config_of_engines()
    return {engine.name: verdict(engine, config) for engine in ENGINES}


def verdict(engine: Engine, config: EngineOptions | None) -> str:
    """Return whether the installed version of ``engine`` uses llm_comm for all-reduces, or the first reason why not."""
    version = installed_version(engine.package)
    if version is None:
        return "not installed"
    if joining.switched_off():
        return f"{version}; keeps its own all-reduce: LLM_COMM_ENABLE is off"
    why_not_loaded = _why_not_loaded(engine)
    if why_not_loaded is not None:
        return f"{version}; keeps its own all-reduce: {why_not_loaded}"
    if config is None:
        return f"{version}; does not start with tensor parallelism: the configuration is wrong"
    why_not = _why_not_active(config)
    if why_not is not None:
        return f"{version}; keeps its own all-reduce: {why_not}"
    if not is_supported(engine, version):
        return (
            f"{version}; the line about llm_comm in its log tells whether its all-reduces go through it: tested with "
            f"{engine.name} {engine.oldest} to {engine.newest}"
        )
    return f"{version}; its all-reduces go through llm_comm"


def _config_of_engines() -> EngineOptions | None:
    """Load options as engines do, which ignore unknown ones. Return None if engines would not start either."""
    try:
        config = load_with_unknown(lambda *_: None)
        check_table_option(config)
    except ConfigError:
        return None
    return config


def _why_not_loaded(engine: Engine) -> str | None:
    if not _has_entry_point(engine.entry_points):
        return f"this llm_comm is not installed as a plugin (entry point {_PLUGIN} of {engine.entry_points}): use pip"
    allowed = os.environ.get(engine.allowed)
    if allowed is None or (not allowed and engine.empty_allows_all):
        return None
    # vLLM compares the names exactly, SGLang without surrounding spaces.
    names = allowed.split(",")
    if _PLUGIN in ([name.strip() for name in names] if engine.empty_allows_all else names):
        return None
    return f"{engine.allowed}={allowed} leaves {_PLUGIN} out"


def _why_not_active(config: EngineOptions) -> str | None:
    if not config.enable:
        return f"enable is false ({config.origins.get('enable', 'Python')})"
    return launch.usable_gpus()[1] or None


def is_supported(engine: Engine, version: str) -> bool:
    """Return whether a version is supported. All patch releases of the newest version are."""
    found = _release(version)
    oldest, newest = _release(engine.oldest), _release(engine.newest)
    return oldest <= found and found[: len(newest)] <= newest


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 26, 0) for ``0.26.0rc1+cu129``."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def _has_entry_point(group: str) -> bool:
    found: Iterable[metadata.EntryPoint] = metadata.entry_points(group=group)
    return any(point.name == _PLUGIN for point in found)
