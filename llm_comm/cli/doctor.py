"""Command ``llm-comm doctor``: what this machine offers, and what llm_comm and the engines would do with it.

Sections are independent: if one fails, the report says why and continues. An invalid configuration is reported once, at
the top, and sections that depend on it are not judged. No communicator is created, and the driver's multicast interface
is not called.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from llm_comm import _core
from llm_comm.bench.report import format_bytes, versions
from llm_comm.bench.tune_tables import tables_here
from llm_comm.cli import engine_verdicts, launch, model_verdicts
from llm_comm.config import MULTICAST_OFF_VARIABLES, Config, EngineOptions, multicast_state
from llm_comm.errors import ConfigError
from llm_comm.installation import code_for, get_include, oldest_driver
from llm_comm.integrations.descriptions import describe_wire
from llm_comm.options import OPTIONS
from llm_comm.planning.catalogue import check_table_option
from llm_comm.planning.multicast import wish
from llm_comm.planning.selection import exact_limit, message_limit
from llm_comm.planning.tables import ALL_REDUCE, TuningTable
from llm_comm.runtime.links import is_unmeasured, link_matrix, why_too_slow
from llm_comm.runtime.multicast import driver_of, name_of

_MULTICAST_VARIABLES = ("LLM_COMM_MULTICAST", *MULTICAST_OFF_VARIABLES)


#: Content of sections that depend on the configuration, if that is invalid.
NOT_JUDGED = "not judged: the configuration is wrong; the error at the top says how"


def run(args: argparse.Namespace) -> int:
    """Run ``llm-comm doctor`` and print the report. Return 2 if the configuration is invalid, else 0.

    Faults of the machine do not change the exit status: finding them is the purpose of the report.

    Raises:
        ConfigError: With ``--model``: the model does not exist, or the configuration is invalid.
    """
    if args.model is not None:
        verdicts = model_verdicts.report(args.model, args.tp, EngineOptions.load())
        print(json.dumps(verdicts, indent=2) if args.json else "\n".join(_lines(verdicts, "")))
        return 0
    report = collect()
    print(json.dumps(report, indent=2, default=str) if args.json else render(report))
    return 2 if "error" in report else 0


def collect() -> dict[str, Any]:
    """Return the report by section. A failed section is ``{"error": why}``.

    If the configuration is invalid, the first entry is ``"error"``, and sections that depend on it are ``NOT_JUDGED``.
    """
    config: EngineOptions | None = None
    report: dict[str, Any] = {}
    try:
        config = EngineOptions.load()
        check_table_option(config)
    except ConfigError as error:
        config, report["error"] = None, f"{type(error).__name__}: {error}"
    for title, section in _SECTIONS.items():
        report[title] = _attempt(partial(section, config))
    return report


#: Collects a section of the report. The argument is the configuration, None if it is invalid.
Section = Callable[[EngineOptions | None], Any]


def fact(gather: Callable[[], Any]) -> Section:
    """Return a section that does not depend on the configuration."""
    return lambda _: gather()


def judgement(gather: Callable[[EngineOptions], Any]) -> Section:
    """Return a section that depends on the configuration."""
    return lambda config: NOT_JUDGED if config is None else gather(config)


def _attempt(gather: Callable[[], Any]) -> Any:
    # The only place that may catch every exception: a report on a broken machine must not fail.
    try:
        return gather()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _verdict(_config: Config) -> dict[str, Any]:
    return {"demo_would_run_on": launch.place(None, "auto").describe()}


def _build() -> dict[str, Any]:
    return {
        "cuda_kernels": describe_kernels(_core.cuda_archs, _core.cuda_ptx_archs),
        "nvcc": _core.nvcc_version or None,
        "oldest_driver": oldest_driver(),
        "emulated_gpus": "available",
        "device_headers": get_include(),
    }


def describe_kernels(machine_code: str, ptx: str) -> str:
    """Return in words what a build has kernels for, from lists such as ``"80,90"`` and ``"90"``."""
    if not machine_code and not ptx:
        return "none: built without nvcc"
    kinds = {"machine code": machine_code, "PTX": ptx}
    return ", and ".join(
        f"{kind} for compute capability {', '.join(_dotted(name) for name in names.split(','))}"
        for kind, names in kinds.items()
        if names
    )


def _dotted(name: str) -> str:
    """Convert ``"90"`` to ``"9.0"``, and ``"90a"`` to ``"9.0a"``."""
    digits = name.rstrip("af")
    return f"{digits[:-1]}.{digits[-1]}{name[len(digits) :]}"


def _gpus() -> Any:
    if not torch.cuda.is_available():
        return {"found": 0, "why": launch.usable_gpus()[1]}
    return {f"GPU {index}": _attempt(partial(_gpu, index)) for index in range(torch.cuda.device_count())}


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    facts = {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory": format_bytes(properties.total_memory),
        "kernels": code_for(10 * properties.major + properties.minor),
    }
    return {**facts, **_attempt(partial(_core_facts, index))}


def _core_facts(index: int) -> dict[str, Any]:
    """Return the facts for which the compiled core must ask the driver."""
    found = _core.device_report(index)
    return {
        "vmm": found["vmm"],
        "posix_fd_handles": found["posix_fd"],
        "multicast_supported": found["multicast_supported"],
        "driver_version": found["driver_version"],
    }


def _links() -> Any:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return {"pairs": "none: fewer than two GPUs"}
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    blocked = [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    return {
        "peer_access": f"missing: {', '.join(blocked)}" if blocked else "between all GPUs",
        "links": _attempt(lambda: link_matrix([_uuid(index) for index in range(count)])),
    }


def _uuid(index: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _multicast(config: Config) -> dict[str, Any]:
    may, why = multicast_state(config)
    variables = {name: os.environ[name] for name in _MULTICAST_VARIABLES if name in os.environ}
    found: dict[str, Any] = {
        "state": "off",
        "why": why,
        "sum": "any order" if config.sums_in_any_order else "rank order",
    }
    if may:
        # Report what a communicator would try. Multicast itself is not tried here.
        device = torch.device("cpu") if launch.usable_gpus()[0] < launch.WORLDS[0] else torch.device("cuda", 0)
        wishes = {
            world: wish(config, table, name_of(device), driver_of(device), world)
            for world, table in tables_here(config).items()
        }
        found["state"] = "would be set up and tested" if any(wanted.is_up for wanted in wishes.values()) else "off"
        found["why"] = {f"{world} ranks": wanted.why for world, wanted in wishes.items()}
    return {**found, "variables": variables or "none set"}


def _workspace(config: Config) -> dict[str, Any]:
    return {
        "bytes_per_gpu": config.workspace_bytes,
        "bound": f"{format_bytes(config.workspace_bytes)} for each communicator, and up to 4M that the driver takes to "
        "share it; allocated once, outside of torch's pool",
    }


def _tuning(config: Config) -> dict[str, str]:
    found = {}
    for world, table in tables_here(config).items():
        why_not = why_too_slow({rank: _uuid(rank) for rank in range(world)}) if is_unmeasured(table, config) else ""
        of_engines = f"; engines use NCCL: {why_not}" if why_not else ""
        found[f"{world} ranks"] = _describe_table(table, config) + of_engines
    return found


def _describe_table(table: TuningTable, config: Config) -> str:
    limit = format_bytes(exact_limit(table, config))
    wire = describe_wire(config, message_limit(ALL_REDUCE, table, config))
    return f"{table.describe()}; {'exact ' if wire else ''}messages above {limit} are left to the engine{wire}"


def _configuration(config: Config) -> dict[str, str]:
    return {name: f"{getattr(config, name)} ({config.origins.get(name, 'default')})" for name in OPTIONS}


_SECTIONS: Mapping[str, Section] = {
    "verdict": judgement(_verdict),
    "versions": fact(versions),
    "build": fact(_build),
    "gpus": fact(_gpus),
    "links": fact(_links),
    "multicast": judgement(_multicast),
    "workspace": judgement(_workspace),
    "tuning": judgement(_tuning),
    "engines": engine_verdicts.verdicts,
    "configuration": judgement(_configuration),
}


def render(report: Mapping[str, Any]) -> str:
    """Format the report as indented text."""
    error = [f"error: {report['error']}", ""] if "error" in report else []
    sections = [(title, section) for title, section in report.items() if title != "error"]
    return "\n".join([*error, *(line for title, section in sections for line in [title, *_lines(section, "  ")])])


def _lines(value: Any, indent: str) -> list[str]:
    if isinstance(value, Mapping):
        lines = []
        for key, item in value.items():
            if isinstance(item, (Mapping, list)):
                lines += [f"{indent}{key}:", *_lines(item, indent + "  ")]
            else:
                lines.append(f"{indent}{key}: {_plain(item)}")
        return lines
    if isinstance(value, list):
        # rows of a matrix
        return [indent + "  ".join(str(cell).rjust(4) for cell in row) for row in value]
    return [f"{indent}{_plain(value)}"]


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
