"""Commands that need no GPU and no ranks: ``algorithms``, ``check`` and ``nccl-path``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from llm_comm import registry
from llm_comm.bench.report import columns
from llm_comm.cli import launch
from llm_comm.dsl.programs import of_option
from llm_comm.dsl.schedules import explore
from llm_comm.dsl.selected import Listed, examine, listed
from llm_comm.installation import nccl_library


def algorithms(args: argparse.Namespace) -> int:
    """Run ``llm-comm algorithms``. Return 0.

    Raises:
        ConfigError: The configuration is invalid, or a program that it names cannot be imported.
    """
    config = launch.configuration(dsl=args.dsl)
    operations = registry.operations().values()
    found = [_algorithm(algorithm) for operation in operations for algorithm in operation.algorithms]
    programs = [_program(program) for program in listed(config, args.world, args.library)]
    of_operations = [_operation(operation) for operation in operations]
    if args.json:
        report = {"operations": of_operations, "algorithms": found, "world": args.world, "programs": programs}
        print(json.dumps(report, indent=2))
        return 0
    heads = ["operation", "algorithm", "protocol", "data types", "tunables", "needs", "how"]
    print(_table(heads, (entry.values() for entry in found)))
    if programs:
        print(f"\nprograms of llm_comm.dsl for {args.world} ranks")
        heads = ["operation", "program", "lines", "option dsl", "selectable"]
        print(_table(heads, (_program_cells(entry) for entry in programs)))
    print()
    print(_table(["operation", "what", "buffers", "parameters"], (entry.values() for entry in of_operations)))
    return 0


def check(args: argparse.Namespace) -> int:
    """Run ``llm-comm check``. Return 0, or 1 if a program is not correct or fails under a schedule.

    Raises:
        ConfigError: The configuration is invalid, or a program cannot be imported.
    """
    config = launch.configuration(dsl=args.programs)
    failed = 0
    for name, text in of_option(config).items():
        try:
            program, why_not = examine(text, args.world, config)
            explored = explore(program, args.schedules)
        except RuntimeError as error:  # an error of the program, or no C++ compiler
            print(f"llm-comm: {name}: {error}", file=sys.stderr)
            failed = 1
            continue
        selectable = f"; it cannot be selected: {why_not}" if why_not else ""
        print(f"{name} for {args.world} ranks: correct, passed {explored.schedules} schedules{selectable}")
    return failed


def _algorithm(algorithm: registry.Algorithm) -> dict[str, Any]:
    return {
        "operation": algorithm.operation,
        "name": algorithm.name,
        "protocol": algorithm.protocol,
        "data_types": list(algorithm.data_types),
        "tunables": list(algorithm.ranges),
        "needs": list(algorithm.needs),
        "title": algorithm.title,
    }


def _operation(operation: registry.Operation) -> dict[str, Any]:
    return {
        "name": operation.name,
        "title": operation.title,
        "buffers": list(operation.buffers),
        "parameters": list(operation.parameters),
    }


def _program(found: Listed) -> dict[str, Any]:
    return {
        "operation": found.operation,
        "name": found.name,
        "lines": found.lines or None,
        "dsl": found.option,
        "selectable": not found.why_not,
        "why_not": found.why_not,
    }


def _program_cells(entry: dict[str, Any]) -> list[Any]:
    lines = "" if entry["lines"] is None else str(entry["lines"])
    selectable = "yes" if entry["selectable"] else f"no: {entry['why_not']}"
    return [entry["operation"], entry["name"], lines, entry["dsl"], selectable]


def _table(head: Sequence[str], rows: Iterable[Iterable[str | list[str]]]) -> str:
    return columns([head, *([_cell(value) for value in row] for row in rows)], str.ljust)


def _cell(value: str | list[str]) -> str:
    return (value if isinstance(value, str) else ", ".join(value)) or "-"


def nccl_path(args: argparse.Namespace) -> int:
    """Run ``llm-comm nccl-path``. Return 0, or 1 if this build has no such library."""
    try:
        print(nccl_library(emulated=args.emulated))
    except FileNotFoundError as error:
        print(f"llm-comm: {error}", file=sys.stderr)
        return 1
    return 0
