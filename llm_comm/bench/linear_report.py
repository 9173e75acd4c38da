"""Report of ``llm-comm bench linear``: rows of results as text, JSON and a plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llm_comm.bench import report
from llm_comm.bench.linear_arms import FUSED, Names
from llm_comm.bench.report import OURS, Result


class MeasuredTuning(NamedTuple):
    """Tiling of llm_comm's kernel, and its result."""

    block_outputs: int
    stages: int
    stage_boxes: int
    result: Result

    def as_dict(self) -> dict[str, Any]:
        """Return the tiling and its result for JSON."""
        return {**self._asdict(), "result": dataclasses.asdict(self.result)}


@dataclass(frozen=True)
class LayerRow:
    """Results of all arms at one shape and batch size.

    Attributes:
        outputs, inputs: Shape of the layer.
        tokens: Batch size.
        pdl: Whether llm_comm's kernels are dependent launches.
        layers: Number of layers in the timed chain.
        results: Results by arm. Arms without kernels of llm_comm have equal results with and without ``pdl``.
        choices: Tilings of the kernel, if they were timed.
        best: Fastest of ``choices``, timed again.
        silu: Whether the layer is gate and up with silu-and-mul. ``outputs`` are then those of gate alone.
        fp8: Whether x and the weight are FP8.
    """

    outputs: int
    inputs: int
    tokens: int
    pdl: bool
    layers: int
    results: Mapping[str, Result]
    choices: Sequence[MeasuredTuning] = ()
    best: MeasuredTuning | None = None
    silu: bool = False
    fp8: bool = False

    @property
    def place(self) -> str:
        """Short name of the row for remarks."""
        return f"{self.outputs}x{self.inputs} {self.tokens} PDL {_on(self.pdl)}"

    def wrong_ones(self) -> list[str]:
        """Return the names of arms and tilings with wrong results."""
        of_choices = [
            f"{choice.block_outputs} outputs, {choice.stages} of {choice.stage_boxes}"
            for choice in [*self.choices, *([self.best] if self.best else [])]
            if choice.result.wrong
        ]
        return [*(name for name, result in self.results.items() if result.wrong), *dict.fromkeys(of_choices)]

    @property
    def wrong(self) -> bool:
        """True if any result is wrong."""
        return bool(self.wrong_ones())

    def ratio(self, other: str, ours: str) -> float | None:
        """Return the time of arm ``other`` divided by that of arm ``ours``; None unless both ran and were right."""
        us, our_us = (self.results[name].us if name in self.results else None for name in (other, ours))
        return us / our_us if us and our_us else None

    def best_other(self, names: Names) -> str | None:
        """Return the name of the faster arm that computes the whole chain in several calls; None if none ran."""
        times = {
            name: us
            for name in (names.layer_and_ours, names.layer_and_other)
            if name in self.results and (us := self.results[name].us)
        }
        return min(times, key=times.__getitem__) if times else None

    def as_dict(self, compared: bool) -> dict[str, Any]:
        """Return the row for JSON. Speed-ups over other arms are None unless ``compared``."""
        names = Names.of(compared, self.silu, self.fp8)
        other = self.best_other(names)
        lead = {
            "over_cublas": self.ratio(names.layer, OURS),
            "best_other": other,
            "speedup": self.ratio(other, FUSED) if other else None,
            "over_free_communication": self.ratio(names.layer_and_norm, FUSED),
        }
        return {
            "outputs": self.outputs,
            "inputs": self.inputs,
            "silu": self.silu,
            "fp8": self.fp8,
            "tokens": self.tokens,
            "pdl": self.pdl,
            "layers": self.layers,
            "results": {name: dataclasses.asdict(result) for name, result in self.results.items()},
            **(lead if compared else dict.fromkeys(lead)),
            "wrong": self.wrong_ones(),
            "choices": [choice.as_dict() for choice in self.choices],
            "best_choice": self.best.as_dict() if self.best else None,
        }


def tables(rows: Sequence[LayerRow], compared: bool) -> str:
    """Return text tables of layers alone, and of chains if there are any: microseconds a layer, by arm.

    Args:
        rows: Rows of all shapes.
        compared: Whether to add columns with speed-ups.
    """
    names = Names.of(compared, any(row.silu for row in rows), any(row.fp8 for row in rows))
    texts = [_layers(rows, names, compared)]
    if any(FUSED in row.results for row in rows):
        texts.append(_chains(rows, names, compared))
    return "".join(f"{text}\n\n" for text in texts)[:-1]


def _layers(rows: Sequence[LayerRow], names: Names, compared: bool) -> str:
    with_choices = any(row.choices for row in rows)
    ratio = f"{names.layer} / {OURS}"
    # Arms that run on some machines only, such as vLLM's kernel.
    known = {OURS, FUSED, *names}
    more = list(dict.fromkeys(name for row in rows for name in row.results if name not in known))
    head = ["layer", "tokens", "PDL", OURS, names.layer, *([ratio] if compared else []), *more]
    body = [
        [
            *_begin(row),
            *_cells(row, OURS, names.layer),
            *([_times(row.ratio(names.layer, OURS))] if compared else []),
            *_cells(row, *more),
            *(_choice_cells(row, names, compared) if with_choices else []),
        ]
        for row in rows
    ]
    of_choices = ["best choice", *([f"{names.layer} / it"] if compared else []), "outputs, stages"]
    return report.columns([[*head, *(of_choices if with_choices else [])], *body], str.rjust)


def _choice_cells(row: LayerRow, names: Names, compared: bool) -> list[str]:
    best = row.best
    if best is None:
        return ["-", *(["-"] if compared else []), "-"]
    other, us = row.results[names.layer].us, best.result.us
    lead = [_times(other / us if other and us else None)] if compared else []
    return [report.cell(best.result), *lead, f"{best.block_outputs}, {best.stages} of {best.stage_boxes}"]


def _chains(rows: Sequence[LayerRow], names: Names, compared: bool) -> str:
    arms = (FUSED, names.layer_and_ours, names.layer_and_other, names.layer_and_norm)
    lead = ["speedup", "over", f"{names.layer_and_norm} / fused"] if compared else []
    body = []
    for row in rows:
        other = row.best_other(names)
        leads = [_times(row.ratio(other, FUSED) if other else None), other or "-"]
        free = _times(row.ratio(names.layer_and_norm, FUSED))
        body.append([*_begin(row), *_cells(row, *arms), *([*leads, free] if compared else [])])
    return report.columns([["chain", "tokens", "PDL", *arms, *lead], *body], str.rjust)


def _begin(row: LayerRow) -> list[str]:
    return [f"{row.outputs}x{row.inputs}", str(row.tokens), _on(row.pdl)]


def _cells(row: LayerRow, *names: str) -> list[str]:
    return [report.cell(row.results[name]) if name in row.results else "-" for name in names]


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _on(pdl: bool) -> str:
    return "on" if pdl else "off"


def remarks_on(rows: Sequence[LayerRow]) -> list[str]:
    """Return remarks about arms that did not run and about wrong results."""
    found = report.left_out(
        (name, place, result) for row in rows for name, place, result in _all_results(row, row.place)
    )
    wrong = [f"BAD at {row.place}: {', '.join(row.wrong_ones())}" for row in rows if row.wrong]
    return [*found, *wrong, *([report.BAD_REMARK] if wrong else [])]


def _all_results(row: LayerRow, place: str) -> Iterator[tuple[str, str, Result]]:
    for name, result in row.results.items():
        yield name, place, result
    for choice in row.choices:
        yield f"{choice.block_outputs} outputs, {choice.stages} of {choice.stage_boxes}", place, choice.result


def plot(path: Path, rows: Sequence[LayerRow], title: str) -> None:
    """Draw microseconds over tokens, with one panel a shape. The file's suffix selects the format."""
    points = [
        (f"{row.outputs}x{row.inputs}, PDL {_on(row.pdl)}", name, row.tokens, result.us)
        for row in rows
        for name, result in row.results.items()
    ]
    report.plot_points(path, points, title, "tokens", str)
