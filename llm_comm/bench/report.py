"""Reports of the commands: environment of a run, and results as text, JSON and plot."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llm_comm import files
from llm_comm.cli.launch import Placement
from llm_comm.errors import ConfigError
from llm_comm.installation import VERSION, run_tool
from llm_comm.registry import is_program

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OURS = "llm_comm"
#: llm_comm with its result in symmetric memory.
OURS_SYMMETRIC = "llm_comm symm"
EMULATED_REMARK = (
    "emulated GPUs: these times compare CPU code and say nothing about GPUs, so that no speedups are shown"
)
BAD_REMARK = "BAD: the result differs from the float64 reference by more than rounding explains"
_RELEVANT_VARIABLES = (
    "LLM_COMM_",
    "NCCL_",
    "TORCH_NCCL_",
    "TORCH_SYMM_MEM_",
    "NVSHMEM_",
    "CUDA_VISIBLE_DEVICES",
)


@dataclass(frozen=True)
class Result:
    """Result of one library at one size in one mode.

    Attributes:
        us: Median microseconds a call on the slowest rank; None if the library did not run.
        min_us: Fastest timed run, on the slowest rank.
        host_us: Host microseconds to issue one call; None if the host issues a whole graph.
        error: Largest difference from the float64 reference, as a fraction of what rounding explains. Above 1, or NaN,
            the result is wrong.
        skipped: Why the library did not run; "" if it ran.
    """

    us: float | None = None
    min_us: float | None = None
    host_us: float | None = None
    error: float | None = None
    skipped: str = ""

    @property
    def wrong(self) -> bool:
        """True if the library ran and its result is wrong."""
        return self.error is not None and not self.error <= 1.0


@dataclass(frozen=True)
class Row:
    """All libraries at one message size in one mode ("eager" or "graph")."""

    message_bytes: int
    mode: str
    plan: Mapping[str, Any]
    results: Mapping[str, Result]

    @property
    def best_other(self) -> str | None:
        """Name of the fastest correct library other than llm_comm. DSL programs count as llm_comm."""
        others = {
            name: result.us
            for name, result in self.results.items()
            if name not in (OURS, OURS_SYMMETRIC) and result.us is not None and not result.wrong
            if not is_program(name)
        }
        return min(others, key=others.__getitem__) if others else None

    @property
    def speedup(self) -> float | None:
        """Time of the best other library divided by ours."""
        ours = self.results[OURS].us
        other = self.results[self.best_other].us if self.best_other else None
        return other / ours if other and ours else None

    @property
    def wrong(self) -> bool:
        """True if any library's result is wrong."""
        return any(result.wrong for result in self.results.values())

    def as_dict(self, compared: bool) -> dict[str, Any]:
        """Return the row for JSON, with the speedup if ``compared``."""
        return {
            **dataclasses.asdict(self),
            "best_other": self.best_other if compared else None,
            "speedup": self.speedup if compared else None,
            "wrong": [name for name, result in self.results.items() if result.wrong],
        }


class Progress:
    """Status line on stderr. It is rewritten in place on a terminal and suppressed otherwise."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled and sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replace the line by ``text``."""
        if self._enabled:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        self.show("")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a supported dtype: bf16, fp16 or fp32."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def format_bytes(count: int) -> str:
    """Format a size as ``512``, ``64K``, ``19.6K`` or ``8M``, with powers of 1024."""
    for unit, size in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if count >= size:
            return f"{count // size}{unit}" if count % size == 0 else f"{count / size:.1f}{unit}"
    return str(count)


def plan_text(plan: Mapping[str, Any]) -> str:
    """Format a plan as ``one_shot LL, 8 blocks x 512 threads``."""
    if plan["blocks"] == 0:
        return str(plan["algorithm"])
    return f"{plan['algorithm']} {plan['protocol']}, {plan['blocks']} blocks x {plan['threads']} threads"


def environment(placement: Placement) -> dict[str, Any]:
    """Return date, ranks, versions and relevant environment variables of this run, for its JSON report."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "ranks": {
            "world": placement.world,
            "on_gpu": placement.on_gpu,
            "device": torch.cuda.get_device_name() if placement.on_gpu else platform.machine(),
            "description": placement.describe(),
        },
        "versions": versions(),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_RELEVANT_VARIABLES)
        },
    }


def versions() -> dict[str, str | None]:
    """Return the versions of everything that affects a measurement; None for what is missing."""
    return {
        "llm_comm": VERSION,
        "commit": _source_commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # torch's subclass of str cannot be written as YAML
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "driver": driver_version(),
    }


def installed_version(package: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Return the version of the NVIDIA kernel driver, or None."""
    output = run_tool("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return output.splitlines()[0].strip() if output else None


def _source_commit() -> str | None:
    """Return the commit of the checkout that this package is imported from; None for an installed copy."""
    source = Path(__file__).parents[1]
    git = ("git", "-C", str(source))
    # An installed copy can be inside another checkout. Only a tracked file proves that the checkout is llm_comm's.
    if run_tool(*git, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return run_tool(*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def table(rows: Sequence[Row], mode: str, compared: bool) -> str:
    """Format the rows of one mode as a text table: microseconds a call by library and, if ``compared``, the speedup
    over the best other library."""
    rows = [row for row in rows if row.mode == mode]
    names = list(rows[0].results)
    host = any(row.results[OURS].host_us is not None for row in rows)
    head = ["bytes", *names, *(["host"] if host else []), *(["speedup", "over"] if compared else []), "plan"]
    body = [
        [
            format_bytes(row.message_bytes),
            *(cell(row.results[name]) for name in names),
            *([_microseconds(row.results[OURS].host_us)] if host else []),
            *(_lead(row) if compared else []),
            plan_text(row.plan),
        ]
        for row in rows
    ]
    return columns([head, *body], str.rjust)


def _lead(row: Row) -> list[str]:
    return ["-" if row.speedup is None else f"{row.speedup:.2f}x", row.best_other or "-"]


def columns(lines: Sequence[Sequence[str]], justify: Callable[[str, int], str]) -> str:
    """Format lines of cells. All columns but the last are aligned by ``justify``: ``str.ljust`` or ``str.rjust``."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    return "\n".join("  ".join([*map(justify, line, widths), line[-1]]) for line in lines)


def cell(result: Result) -> str:
    """Format the time in microseconds, and mark a wrong result."""
    return _microseconds(result.us) + (" BAD" if result.wrong else "")


def _microseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def skipped_notes(rows: Sequence[Row]) -> list[str]:
    """Return one line for each reason why a library did not run somewhere."""
    return left_out(
        (f"{name} ({row.mode})", format_bytes(row.message_bytes), result)
        for row in rows
        for name, result in row.results.items()
    )


def left_out(measured: Iterable[tuple[str, str, Result]]) -> list[str]:
    """Return one line for each reason, from (name, place, result)."""
    places: dict[tuple[str, str], list[str]] = {}
    for name, place, result in measured:
        if result.skipped:
            places.setdefault((name, result.skipped), []).append(place)
    return [f"{name} left out at {', '.join(at)}: {why}" for (name, why), at in places.items()]


def publish(
    title: str,
    args: argparse.Namespace,
    placement: Placement,
    rows: Sequence[Row],
    remarks: Sequence[str],
    content: Mapping[str, Any],
) -> bool:
    """Print the tables of a benchmark and write the requested files. ``content``: further entries of the JSON report.

    Returns:
        True if all files were written.
    """
    written = True
    method = f"{args.method}: median of {args.reps} runs of {args.calls} calls, slowest rank"
    for mode in args.mode:
        print(f"{title}, {mode}; microseconds a call; {method}")
        print(table(rows, mode, compared=placement.on_gpu) + "\n")
    for remark in [*remarks, *skipped_notes(rows)]:
        print(remark)
    if any(row.wrong for row in rows):
        print(BAD_REMARK)
    if args.json:
        settings = {"dtype": args.dtype, "method": args.method, "calls": args.calls, "reps": args.reps}
        found = {"rows": [row.as_dict(compared=placement.on_gpu) for row in rows], "remarks": remarks}
        written = files.write_json("--json", args.json, {**content, **environment(placement), **settings, **found})
    if args.plot:
        written &= could_draw(args.plot, partial(plot, args.plot, rows, f"{title}\n{method}"))
    return written


def could_draw(path: Path, draw: Callable[[], None]) -> bool:
    """Draw the file of ``--plot``. Report a failure on stderr.

    Returns:
        True if it was written.
    """
    try:
        draw()
    except OSError as error:
        files.tell_unwritten("--plot", path, error, "the tables have what it would show")
        return False
    return True


def require_matplotlib() -> None:
    """Raise ConfigError with an installation hint, unless matplotlib can be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'llm_comm[plot]', or leave --plot out") from None


def plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Plot microseconds over message size, one panel for each mode. The file's suffix gives the format."""
    points = ((row.mode, name, row.message_bytes, r.us) for row in rows for name, r in row.results.items())
    plot_points(path, points, title, "message (bytes)", format_bytes)


def plot_points(
    path: Path,
    points: Iterable[tuple[str, str, int, float | None]],
    title: str,
    label: str,
    tick: Callable[[int], str],
) -> None:
    """Plot microseconds of a call. The file's suffix gives the format.

    Args:
        path: File to write.
        points: Panel, line, position on the axis, and time; None if there is none.
        title: Title of the figure.
        label: Label of the axis.
        tick: Returns the text of a position on the axis.
    """
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    places: dict[str, list[int]] = {}
    for panel, name, place, us in points:
        line = panels.setdefault(panel, {}).setdefault(name, [])
        places.setdefault(panel, []).append(place)
        if us is not None:
            line.append((place, us))
    figure = Figure(figsize=(7 * len(panels), 5), layout="constrained")
    figure.suptitle(title)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, line in panels[panel].items():
            if line:
                axes.plot(*zip(*line, strict=True), marker="o", linewidth=2.5 if name == OURS else 1.2, label=name)
        ticks = list(dict.fromkeys(places[panel]))
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="microseconds a call", title=panel)
        axes.set_xticks(ticks, [tick(place) for place in ticks], rotation=45)
        axes.minorticks_off()
        axes.grid(True, alpha=0.3)
        axes.legend()
    figure.savefig(path, format=path.suffix.removeprefix(".").lower())
