"""Report of a comparison as text, JSON and PNG."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_serving.arms import ARMS, DEFAULT, NCCL

_HEAD = (
    "arm", "decode ms/token", "(min-max)", "vs nccl", "(min-max)", "vs default", "(min-max)", "recovered",
    "TTFT mean", "median", "P99", "TPOT mean", "median", "P99", "ITL mean", "median", "P99", "P99.9",
)  # fmt: skip
#: Stands for the prompt length in reports that do not have it.
_UNKNOWN = "?"
_LATENCIES = (
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl") for kind in ("mean", "median", "p99")),
    "p99.9_itl_ms",
)


def text(report: Mapping[str, Any]) -> str:
    """Format tables, checks and failures."""
    parts = [_title(report)]
    for size, by_arm in report["decode"].items():
        rows = [_HEAD, *(_row(arm, entry, "decode_ms") for arm, entry in by_arm.items())]
        parts.append(f"batch {size} (times in ms)\n{aligned(rows)}")
    for tokens, by_arm in _prefills(report).items():
        head = ("arm", "TTFT ms", *_HEAD[2:8])
        rows = [head, *(_row(arm, entry, "ttft_ms")[: len(head)] for arm, entry in by_arm.items())]
        parts.append(f"prefill of {tokens} tokens, batch 1\n{aligned(rows)}")
    if report.get("check"):
        parts.append(_check(report["check"]))
    if report.get("invariance"):
        parts.append(_invariance(report["invariance"]))
    bounds = [arm for arm in report["arms"] if _is_free(arm)]
    parts += [f"{arm} is a bound, not an engine: {_what_is_free(arm)}" for arm in bounds]
    parts += [
        f"FAILED {run['arm']}, repeat {run['repeat']}: {run['failure']}" for run in report["runs"] if run.get("failure")
    ]
    return "\n\n".join(parts)


def _prefills(report: Mapping[str, Any]) -> Mapping[Any, Any]:
    """Return prefills by length. Reports up to 2026-11-22 have one length and only its arms."""
    prefill, tokens = report["prefill"], report["settings"].get("prefill_tokens")
    return {tokens: prefill} if prefill and isinstance(tokens, int) else prefill


def _is_free(arm: str) -> bool:
    """Return whether an arm is a bound. Also for arms that this version does not have."""
    return arm in ARMS and ARMS[arm].free


def _what_is_free(arm: str) -> str:
    norms = ", and the adds and norms behind them do nothing" if ARMS[arm].free_norms else ""
    return f"its all-reduces return uninitialised memory{norms}"


def _title(report: Mapping[str, Any]) -> str:
    settings, versions = report["settings"], report["versions"]
    mode = ", deterministic mode" if settings.get("deterministic") else ""
    layers = "" if settings["layers"] is None else f" cut to {settings['layers']} layers"
    return (
        f"{report['engine']} {versions[report['engine']]}, {Path(settings['model']).name}{layers}, "
        f"{settings['weights']} weights, TP={settings['tensor_parallel_size']} on {report['device']}, "
        f"{settings['prompt_tokens']} + {settings['output_tokens']} tokens, {report['repeats']} repeats, "
        f"{'eager' if settings['enforce_eager'] else 'CUDA graphs'}{mode}, torch {versions['torch']}, "
        f"llm_comm {versions['llm_comm']} ({report['commit'] or 'commit unknown'}), {report['date']}"
    )


def _row(arm: str, entry: Mapping[str, Any], time: str) -> tuple[str, ...]:
    cells = [arm, f"{entry[time]['median']:.3f}", _range(entry[time], 3)]
    for baseline in (NCCL, DEFAULT):
        ratio = entry["speedup_over"].get(baseline)
        cells += ["-", "-"] if ratio is None else [f"{ratio['median']:.3f}x", _range(ratio, 3)]
    share = entry.get("recovered_share")
    cells.append("-" if share is None else f"{share:.0%}")
    cells += [f"{entry[name]:.2f}" if name in entry else "-" for name in _LATENCIES]
    return tuple(cells)


def _range(values: Mapping[str, Any], digits: int) -> str:
    return f"{values['min']:.{digits}f}-{values['max']:.{digits}f}" if len(values["values"]) > 1 else "-"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format a table: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def _by_length(check: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, float]]:
    """Return the logits as {arm: {length: ...}}, and the limits by length.

    Reports up to 2026-11-26 have prompts of one length, which they do not name.
    """
    logits, limit = check["logits"], check.get("limit", {})
    logits = {arm: {_UNKNOWN: entry} if "prompts" in entry else entry for arm, entry in logits.items()}
    return logits, limit if isinstance(limit, Mapping) else {_UNKNOWN: limit}


def _check(check: Mapping[str, Any]) -> str:
    lines = ["check " + ("passed" if check["passed"] else "FAILED")]
    for arm, entry in check["tokens"].items():
        same = "identical" if entry["identical"] else "DIFFERENT"
        lines.append(
            f"  {arm}: {entry['tokens']} greedy tokens of {entry['requests']} requests "
            f"({entry['distinct_tokens']} distinct), {same} in {entry['repeats']} repeats"
            + (f"; {entry['same_as_nccl']} requests as nccl" if "same_as_nccl" in entry else "")
        )
    logits, limits = _by_length(check)
    for arm, by_length in logits.items():
        for length, entry in by_length.items():
            if "distance_to_nccl" in entry:
                prompts, judged = entry["prompts"], entry.get("judged", "worst")
                lines.append(
                    f"  {arm}: first-token logits of prompts of {length} tokens differ from nccl's by "
                    f"{entry['distance_to_nccl']:.2e} (relative L2 norm, {judged} of {prompts}); same most likely "
                    f"token in {entry['same_first_token']} of {prompts}"
                )
    for length, limit in limits.items():
        lines.append(f"  of llm_comm's arms {limit:.2g} is allowed, of prompts of {length} tokens")
    if NCCL not in check["logits"]:
        lines.append(f"  logits were compared with nothing: there is no arm {NCCL}")
    return "\n".join([*lines, *(f"  {failure}" for failure in check["failures"])])


def _invariance(invariance: Mapping[str, Any]) -> str:
    lines = ["tokens over batch sizes and starts: " + ("passed" if invariance["passed"] else "FAILED")]
    for arm, entry in invariance["arms"].items():
        same = "identical" if entry["identical"] else f"{entry['differing']} DIFFERENT"
        batches, starts = ", ".join(map(str, entry["batch_sizes"])), entry["starts"]
        lines.append(
            f"  {arm}: {entry['generations']} generations of {entry['prompts']} prompts ({entry['distinct_tokens']} "
            f"distinct tokens) in batches of {batches} at {starts} start{'s' * (starts > 1)}: {same}"
        )
    return "\n".join([*lines, *(f"  {failure}" for failure in invariance["failures"])])


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def plot(path: Path, report: Mapping[str, Any]) -> None:
    """Draw decode ms per token by batch size and arm as bars, with the spread over the repeats, to a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    sizes = list(report["decode"])
    names = [arm for arm in report["arms"] if any(arm in report["decode"][size] for size in sizes)]
    figure = Figure(figsize=(2.5 + 2.2 * len(sizes), 5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(names))
    for index, arm in enumerate(names):
        drawn = [
            (x, report["decode"][size][arm]["decode_ms"])
            for x, size in enumerate(sizes)
            if arm in report["decode"][size]
        ]
        middle = [time["median"] for _, time in drawn]
        bars = axes.bar(
            [x + (index - (len(names) - 1) / 2) * width for x, _ in drawn],
            middle,
            width,
            yerr=[
                [m - time["min"] for m, (_, time) in zip(middle, drawn, strict=True)],
                [time["max"] - m for m, (_, time) in zip(middle, drawn, strict=True)],
            ],
            capsize=3,
            label=report["arms"][arm],
            color="none" if _is_free(arm) else f"C{index}",
            edgecolor="grey" if _is_free(arm) else None,
            hatch="//" if _is_free(arm) else None,
        )
        axes.bar_label(bars, [f"{m:.2f}" for m in middle], fontsize=7, padding=2)
    axes.set_xticks(range(len(sizes)), [f"batch {size}" for size in sizes])
    axes.set_ylabel("decode, ms a token")
    settings, engine = report["settings"], report["engine"]
    axes.set_title(
        f"{engine} {report['versions'][engine]}, {Path(settings['model']).name}, "
        f"TP={settings['tensor_parallel_size']}, {report['device']}",
        fontsize=10,
    )
    axes.legend(fontsize=8, ncols=2, loc="upper left")
    axes.margins(y=0.25)
    axes.grid(True, axis="y", alpha=0.3)
    figure.savefig(path, format="png", dpi=130)


def show(file: Path) -> None:
    """Print a ``report.json`` and draw the plot next to it, if matplotlib is installed."""
    content = json.loads(file.read_text(encoding="utf-8"))
    print(text(content))
    if not content["decode"]:
        return
    try:
        plot(file.with_suffix(".png"), content)
    except ImportError:
        print(f"no plot: matplotlib is not installed. Where it is: python -m bench_serving.report {file}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m bench_serving.report REPORT.json")
    try:
        show(Path(sys.argv[1]))
    except (OSError, KeyError, ValueError) as error:
        sys.exit(f"{sys.argv[1]}: no report of bench_serving ({type(error).__name__}: {error})")
