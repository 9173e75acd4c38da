"""Profiles of engine steps: workloads, files, text and plot.

``python -m bench_serving.profile DIR/report.json`` shows the profile of a report. ``--plot FILE`` draws one layer of
each workload, and ``--again`` repeats the analysis of the recorded kernels in DIR.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench_serving import kernels, report
from bench_serving.kernels import Kernel
from bench_serving.settings import Settings, settings_from_dict

NOTE = "times include the overhead of the profiler: compare kernels and shares, and take durations from the measurement"
#: Fewest tokens of a request that contain complete decode steps, and tokens of the profiled requests.
FEWEST_TOKENS, _TOKENS = 8, 16
_PREFILLS = 5
_RANKS = (0, 1)
_CLOCKS_S = 2.0


@dataclass(frozen=True)
class Workload:
    """Requests whose steps are profiled.

    Attributes:
        name: Name in files and reports.
        size: Requests of a batch, or tokens of the prompt of a prefill.
        tokens: Tokens to generate for each request; 1 for a prefill.
        times: Number of generations.
    """

    name: str
    size: int
    tokens: int
    times: int

    @property
    def is_prefill(self) -> bool:
        return self.tokens == 1

    @property
    def passes(self) -> int:
        """Forward passes of the kind to be analyzed: the first token of a decoded request comes from a prefill."""
        return self.times if self.is_prefill else self.tokens - 1

    def prompts(self, settings: Settings) -> list[list[int]]:
        """Return the prompts, which are those of the measurement."""
        return settings.prompts(1, self.size, "prefill") if self.is_prefill else settings.decode_prompts(self.size)


def workloads(settings: Settings) -> list[Workload]:
    """Return the workloads of a profile: all batch sizes and prefills of the measurement."""
    tokens = min(_TOKENS, settings.output_tokens)
    decode = [Workload(f"batch-{size}", size, tokens, 1) for size in settings.batch_sizes]
    return decode + [Workload(f"prefill-{size}", size, 1, _PREFILLS) for size in settings.prefill_tokens]


def run_directory(out: Path, repeat: int, arm: str) -> Path:
    """Return the directory of one start of the engine."""
    return out / "runs" / f"{repeat:02}-{arm}"


def directory(run: Path) -> Path:
    """Return the directory for the recorded kernels of a run."""
    return run / "kernels"


def is_complete(run: Path, settings: Settings) -> bool:
    """Return whether a run has recorded all workloads, or why there are no kernels of them."""
    return all(_file(directory(run) / workload.name, 0).is_file() for workload in workloads(settings))


def summarize(settings: Settings, out: Path, starts: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """Return the profiles of each arm's first start: {"workloads": {name: {arm: {rank: summary}}}, ...}.

    Args:
        settings: Settings of the comparison.
        out: Directory of the comparison.
        starts: Repeat and arm of all runs without failure, in their order.
    """
    first: dict[str, int] = {}
    for repeat, arm in starts:
        first.setdefault(arm, repeat)
    result: dict[str, Any] = {"note": NOTE, "layers": settings.model_layers, "workloads": {}, "clocks": {}}
    for workload in workloads(settings):
        for arm, repeat in first.items():
            path = directory(run_directory(out, repeat, arm)) / workload.name
            ranks = _RANKS[: settings.tensor_parallel_size]
            by_rank = {str(rank): summary_of(path, rank, workload, settings.model_layers) for rank in ranks}
            result["workloads"].setdefault(workload.name, {})[arm] = by_rank
            if (clocks := path.with_suffix(".clocks.json")).is_file():
                content = json.loads(clocks.read_text(encoding="utf-8"))
                result["clocks"].setdefault(workload.name, {})[arm] = content
    return result


def summary_of(path: Path, rank: int, workload: Workload, layers: int) -> dict[str, Any]:
    """Return the summary of the kernels that one rank has recorded, or {"error": why there is none}."""
    try:
        content = json.loads(gzip.decompress(_file(path, rank).read_bytes()))
        if content["error"]:
            return {"error": content["error"]}
        recorded = [Kernel(start, us, content["names"][name], stream) for start, us, name, stream in content["kernels"]]
        return kernels.summarize(recorded, layers, workload.passes)
    except Exception as error:  # whatever is wrong with the kernels, the times are reported
        return {"error": f"{type(error).__name__}: {error}"}


def line(summary: Mapping[str, Any]) -> str:
    """Describe a summary in one line."""
    if "error" in summary:
        return f"none ({summary['error']})"
    return (
        f"{summary['kernels']} kernels in the median of {summary['steps']} steps; {summary['layers_alike']} of "
        f"{summary['layers']} layers alike with {len(summary['layer'])} kernels in {summary['layer_us']:.1f} us"
    )


def sample_clocks(path: Path, run: Callable[[], object]) -> None:
    """Call ``run`` for some seconds while nvidia-smi samples the GPUs, and write medians to ``PATH.clocks.json``."""
    fields = "--query-gpu=index,clocks.sm,power.draw,clocks_event_reasons.active"
    command = ["nvidia-smi", fields, "--format=csv,noheader,nounits", "-lms", "50"]
    try:
        sampler = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return
    try:
        end = time.monotonic() + _CLOCKS_S
        while time.monotonic() < end:
            run()
    finally:
        sampler.terminate()
    samples: dict[str, list[tuple[float, float, str]]] = {}
    for sample in sampler.communicate()[0].splitlines():
        try:
            gpu, clock, power, reasons = (field.strip() for field in sample.split(","))
            values = float(clock), float(power), reasons
        except ValueError:  # a field is "[N/A]", or the last line is not complete
            continue
        samples.setdefault(gpu, []).append(values)
    content = {
        gpu: {
            "sm_mhz": median(clock for clock, _, _ in own),
            "power_w": median(power for _, power, _ in own),
            "clocks_event_reasons": sorted({reasons for _, _, reasons in own}),
        }
        for gpu, own in samples.items()
    }
    path.with_suffix(".clocks.json").write_text(json.dumps(content), encoding="utf-8")


def text(content: Mapping[str, Any]) -> str:
    """Format the profile of a report: for each workload and arm the totals of both ranks, and the layer of rank 0."""
    parts = [f"profile: {content['profile']['note']}"]
    for name, by_arm in content["profile"]["workloads"].items():
        for arm, by_rank in by_arm.items():
            lines = [f"{name}, {arm}{_measured(content, name, arm)}"]
            lines += [f"  rank {rank}: {line(summary)}{_totals(summary)}" for rank, summary in by_rank.items()]
            clocks = content["profile"]["clocks"].get(name, {}).get(arm, {})
            lines += [f"  GPU {gpu}: {own['sm_mhz']:.0f} MHz, {own['power_w']:.0f} W" for gpu, own in clocks.items()]
            if "layer" in by_rank["0"]:
                lines.append(_table(by_rank["0"]["layer"]))
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _measured(content: Mapping[str, Any], name: str, arm: str) -> str:
    kind, size = name.split("-")
    times, key = (content["decode"], "decode_ms") if kind == "batch" else (content["prefill"], "ttft_ms")
    entry = times.get(size, {}).get(arm)
    return f": {entry[key]['median']:.3f} ms measured without profiler" if entry else ""


def _totals(summary: Mapping[str, Any]) -> str:
    if "error" in summary:
        return ""
    shares = ", ".join(f"{name} {entry['share']:.0%}" for name, entry in summary["categories"].items())
    return (
        "\n    step {span_us:.0f} us: head {head_us:.0f}, layers {layers_us:.0f}, tail {tail_us:.0f}; kernels "
        "{kernel_us:.0f}, overlap {overlap_us:.0f}, idle {gap_us:.0f}; next step after {period_us:.0f} us"
    ).format(**summary) + f"\n    {shares}"


def _table(layer: Sequence[Mapping[str, Any]]) -> str:
    rows = [("kernel of a layer", "category", "stream", "us", "gap before", "adds")]
    for number, row in enumerate(layer, 1):
        times = (f"{row[key]:.1f}" for key in ("us", "gap_us", "adds_us"))
        rows.append((f"{number} {row['name'][:70]}", row["category"], str(row["stream"]), *times))
    sums = (f"{sum(row[key] for row in layer):.1f}" for key in ("us", "gap_us", "adds_us"))
    return report.aligned([*rows, ("sum", "", "", *sums)])


def plot(path: Path, content: Mapping[str, Any]) -> None:
    """Draw one layer of rank 0 by workload, its arms one above the other on the same scale. The suffix is the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    profiles = {
        name: {arm: by_rank["0"]["layer"] for arm, by_rank in by_arm.items() if "layer" in by_rank["0"]}
        for name, by_arm in content["profile"]["workloads"].items()
    }
    profiles = {name: layers for name, layers in profiles.items() if layers}
    if not profiles:
        raise ValueError("the profile has no layers")
    heights = [0.8 + 0.6 * len(layers) for layers in profiles.values()]
    figure = Figure(figsize=(12, sum(heights) + 0.8), layout="constrained")
    colors = {name: f"C{index}" for index, name in enumerate(dict(kernels.CATEGORIES))} | {kernels.OTHER: "grey"}
    shown: dict[str, Any] = {}
    all_axes = figure.subplots(len(profiles), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, layers) in zip(all_axes, profiles.items(), strict=True):
        for place, layer in enumerate(layers.values()):
            streams = list(dict.fromkeys(row["stream"] for row in layer))
            height = 0.8 / len(streams)
            for number, row in enumerate(layer, 1):
                low = place - 0.4 + height * streams.index(row["stream"])
                shown[row["category"]] = axes.broken_barh(
                    [(row["start_us"], row["us"])], (low, height), color=colors[row["category"]], edgecolor="white"
                )
                axes.text(
                    row["start_us"] + row["us"] / 2, low + height / 2, str(number), fontsize=6, ha="center", va="center"
                )
        axes.set_yticks(range(len(layers)), list(layers))
        axes.invert_yaxis()
        axes.set_title(f"{name}, one layer, us; numbers are those of the table", fontsize=9)
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path)


def _file(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank{rank}.json.gz")


def main(argv: Sequence[str] | None = None) -> None:
    """Show, draw or repeat the analysis of a report's profile."""
    options = argparse.ArgumentParser(prog="python -m bench_serving.profile", description=__doc__)
    options.add_argument("report", type=Path)
    options.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw one layer of each workload, e.g. to layers.svg"
    )
    options.add_argument("--again", action="store_true", help="analyze the kernels in the report's directory again")
    given = options.parse_args(argv)
    content = json.loads(given.report.read_text(encoding="utf-8"))
    if not content.get("profile"):
        sys.exit(f"{given.report}: has no profile; run bench_serving with --profile")
    if given.again:
        settings = dataclasses.replace(settings_from_dict(content["settings"]), layers=content["profile"]["layers"])
        starts = [(run["repeat"], run["arm"]) for run in content["runs"] if not run["failure"]]
        content["profile"] = summarize(settings, given.report.parent, starts)
        report.write_json(given.report, content)
    print(text(content))
    if given.plot:
        plot(given.plot, content)


if __name__ == "__main__":
    main()
