"""Draw the result files that docs/reference/performance.md shows, and write a page of the plots.

    .venv/bin/python tools/plots.py [FOLDER]

FOLDER is build/plots by default. Needs matplotlib. `make docs` puts page and plots into the site.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

ROOT = Path(__file__).resolve().parents[1]
PERFORMANCE = ROOT / "docs" / "reference" / "performance.md"
#: Lines of a plot: prefix of the kernels of a library, of which the fastest at a size is drawn.
LIBRARIES = {"llm_comm": "llm_comm", "SGLang": "sgl_", "FlashInfer": "fi_", "vLLM": "vllm_reg", "NCCL": "nccl"}
OLD = "Older than the current kernels"
_HEAD = """\
# Plots

`tools/plots.py` draws this page from the result files of [performance](performance.md), which has method and
conditions. Not measured: TP=8 in an engine, NVLink multicast on, PCIe, real weights.

## All-reduce by message size

A library's line is its fastest kernel at each size.
"""
_ENGINES = """\
## In the engines

Bars: speed-up of decode by batch size and, where measured, of the time to the first token (TTFT) by tokens of the
prompts. A bar is the median of the starts; its black line reaches from the slowest to the fastest start. Left:
milliseconds of the engine's own path → with llm_comm.
"""


def load(file: str) -> dict[str, Any]:
    """Return the result file ``file`` of docs/results."""
    report: dict[str, Any] = json.loads((ROOT / "docs" / "results" / file).read_text(encoding="utf-8"))
    return report


def section(heading: str) -> str:
    """Return the text of the performance page below ``heading``, up to the next heading."""
    return PERFORMANCE.read_text(encoding="utf-8").partition(f"# {heading}\n")[2].partition("\n#")[0]


def engine_runs() -> list[tuple[str, str]]:
    """Return name and result file of each run in the first table of engines: the newest runs, with default options."""
    runs: list[tuple[str, str]] = []
    first_name = ""
    table = re.split(r"(?<=\|)\n(?!\|)", section("In the engines"))[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (yes|no) \|.*results/([\w.-]+)", table, re.MULTILINE)
    for name, gpus, flashinfer, file in rows:
        first_name = first_name if name.startswith("the same") else name
        setup = f"{gpus}, {'with' if flashinfer == 'yes' else 'no'} FlashInfer"
        runs.append((f"{name.replace('the same', first_name)}, {setup}", file))
    return runs


def fastest(rows: Sequence[Mapping[str, Any]], prefix: str) -> dict[int, float]:
    """Return microseconds of the fastest kernel of a library by message bytes; fused kernels do not count."""
    times: dict[int, float] = {}
    for row in rows:
        if row["peer"].startswith(prefix) and "fused" not in row["peer"]:
            times[row["bytes"]] = min(row["us"], times.get(row["bytes"], row["us"]))
    return dict(sorted(times.items()))


def draw_kernels(report: Mapping[str, Any]) -> Figure:
    """Draw microseconds of an all-reduce by message size and library, both axes logarithmic."""
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    for library, prefix in LIBRARIES.items():
        times = fastest(report["rows"], prefix)
        width = 2.5 if library == "llm_comm" else 1.2
        axes.plot(list(times), list(times.values()), marker=".", linewidth=width, label=library)
    axes.set(xscale="log", yscale="log", xlabel="bytes of the message", ylabel="us a call")
    ticks = list(fastest(report["rows"], LIBRARIES["llm_comm"]))[::2]
    axes.set_xticks(ticks, [f"{tick >> 20}M" if tick >= 1 << 20 else f"{tick >> 10}K" for tick in ticks])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(True, alpha=0.3)
    axes.legend()
    return figure


def draw_speedups(report: Mapping[str, Any]) -> Figure:
    """Draw the speed-up of the arm llm_comm over the engine's own as bars: decode, and prefill where measured."""
    bars = [(f"batch {batch}", "decode_ms", arms) for batch, arms in report["decode"].items()]
    bars += [(f"TTFT, {tokens}", "ttft_ms", arms) for tokens, arms in report["prefill"].items()]
    figure = Figure(figsize=(6, 0.8 + 0.42 * len(bars)), layout="constrained")
    axes = figure.subplots()
    labels = []
    for place, (label, time, arms) in enumerate(bars):
        own, ours = (arms[arm][time]["median"] for arm in ("default", "llm_comm"))
        labels.append(f"{label}\n{own:.2f} → {ours:.2f} ms")
        middle, low, high = (arms["llm_comm"]["speedup_over"]["default"][key] for key in ("median", "min", "max"))
        color = "C0" if time == "decode_ms" else "C1"
        axes.barh(place, middle, 0.6, xerr=[[middle - low], [high - middle]], capsize=4, color=color)
        axes.annotate(f"{middle:.2f}x", (high, place), (7, 0), textcoords="offset points", va="center")
        axes.set_xlim(0, max(axes.get_xlim()[1], high + 0.25))
    axes.set_yticks(range(len(bars)), labels)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("engine's own time / time with llm_comm")
    return figure


def write(folder: Path) -> list[Path]:
    """Draw all plots as SVG into ``folder``, with a page plots.md that shows them, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    page, files = [_HEAD], []

    def show(heading: str, file: str, figure: Figure, note: str) -> None:
        files.append(folder / file.replace(".json", ".svg"))
        # Text stays text, and equal figures give equal bytes.
        with matplotlib.rc_context({"svg.hashsalt": "llm_comm", "svg.fonttype": "none"}):
            figure.savefig(files[-1], metadata={"Date": None})
        data = f"Data: [{file}](../results/{file})."
        page.append(f"### {heading}\n\n![{heading}]({files[-1].name})\n\n{note} {data}\n")

    for world in (8, 4, 2):
        text = section(f"{world} GPUs")
        (file, *_) = re.findall(r"results/([\w.-]+_peers\.json)", text)
        report = load(file)
        note = f"Commit {report['commit'][:7]}{', **' + OLD.lower() + '**' if OLD in text else ''}"
        show(report["device"], file, draw_kernels(report), f"{note} ([table](performance.md#{world}-gpus)).")
    page.append(_ENGINES)
    for name, file in engine_runs():
        report = load(file)
        version, starts = report["versions"][report["engine"]], report["repeats"]
        note = f"Version {version}, commit {report['commit']}, starts a side: {starts}."
        show(name, file, draw_speedups(report), note)
    (folder / "plots.md").write_text("\n".join(page), encoding="utf-8")
    return [*files, folder / "plots.md"]


if __name__ == "__main__":
    print(*write(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build" / "plots"), sep="\n")
