"""Analysis of recorded GPU kernels: forward passes, steps, the repeating layer, categories, short names.

A model runs the kernels of a layer once for each layer. Names that occur once a layer thus mark the forward passes of a
recording, without knowledge of the engine. A step is a pass with the kernels around its layers. Consecutive steps are
separated at the longest idle time between their layers.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_low
from typing import Any

#: Categories of kernels with the pattern of their names, in any case. The first pattern that is found decides.
CATEGORIES = (
    ("norm/elementwise", r"^triton_(poi|red|per)_fused"),  # inductor puts all fused operations into the name
    ("all-reduce/llm_comm", r"llm_comm|\bdsl_|nccl|all_?reduce|cross_device_reduce|all_?gather|reduce_?scatter"),
    ("rope/KV write", r"rotary|(?<!p)rope|_and_cache|(store|set|write)\w*kv"),
    (
        "attention",
        r"flash(?!infer)|attention|attn|fmha|_fwd_(grouped_)?kernel|reduce_segments|kv_splits"
        r"|(decode|prefill)with",
    ),
    ("MoE", r"moe|expert|router|topk_?(gating|softmax|sigmoid)"),
    ("sampling", r"argmax|sampl|softmax|gumbel|topk|multinomial"),
    ("linear/GEMM", r"gemm|gemv|nvjet|cutlass|cublas|split_?k|matmul|_mm(?![a-z])"),
    ("norm/elementwise", r"norm|elementwise|silu|gelu|act_and_mul|_quant|quant_|reduce_kernel"),
)
OTHER = "other"

# Names of layers may be this many times further apart in one layer than in another, as in models whose first layers
# have no experts.
_UNEVEN = 3
# Details that tell torch's kernels apart, and templates of CUTLASS that hold the real kernel.
_TORCH_DETAIL = re.compile(r"\w*Functor\w*|\w+Ops\b|\w+_kernel_cuda\b")
_WRAPPERS = ("Kernel", "Kernel2", "device_kernel")


@dataclass(frozen=True)
class Kernel:
    """One execution of a kernel or a copy on the GPU, in microseconds."""

    start: float
    duration: float
    name: str
    stream: int = 0

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Step:
    """Kernels of one step, in the order of their starts.

    Attributes:
        kernels: All kernels.
        layers: Index of the first kernel of each layer, and of the first kernel after the last layer.
        period: Time from its start to the start of the next step.
    """

    kernels: Sequence[Kernel]
    layers: Sequence[int]
    period: float

    @property
    def span(self) -> float:
        return max(kernel.end for kernel in self.kernels) - self.kernels[0].start


def category(name: str) -> str:
    """Return the category of a kernel, by ``CATEGORIES``."""
    return next((label for label, pattern in CATEGORIES if re.search(pattern, name, re.IGNORECASE)), OTHER)


def short_name(name: str) -> str:
    """Return a kernel's name without return type, parameters, inner namespaces and template arguments.

    The telling template argument stays in torch's kernels (``at::reduce_kernel<ArgMaxOps>``) and in wrappers of CUTLASS
    (``cutlass::device_kernel<FlashAttnFwdSm90>``).
    """
    if name.startswith(("Memcpy", "Memset")):
        return name.partition(" (")[0]
    name = name.replace("(anonymous namespace)::", "")
    kept, depth = "", 0
    for character in name:
        if character == "(" and depth == 0:
            break
        depth += {"<": 1, ">": -1}.get(character, 0)
        if depth == 0 and character != ">":
            kept += character
    path = (kept.split() or [name])[-1].split("::")
    ends = path[-2:] if path[0] == "internal" else [path[0], path[-1]][-len(path) :]
    arguments = name.partition("<")[2]
    detail = ""
    if path[0] == "at" and (found := _TORCH_DETAIL.search(arguments)):
        detail = found[0]
    elif path[-1] in _WRAPPERS:
        parts = (part.rpartition("::")[2] for part in re.findall(r"[A-Za-z_][\w:]*", arguments))
        detail = next((part for part in parts if not part.startswith("enable_")), "")
    return "::".join(ends) + (f"<{detail}>" if detail else "")


def steps(kernels: Sequence[Kernel], layers: int, expected: int) -> list[Step]:
    """Return the complete steps of a recording. The first and the last pass have no neighbour and are left out.

    Args:
        kernels: All kernels in the order of their starts.
        layers: Layers of the model.
        expected: Forward passes of the wanted kind. One less is accepted, and up to twice as many: a batch may be
            admitted in parts, and an engine may begin a step whose results are not needed.

    Raises:
        ValueError: No kernel occurs once a layer in such a number of passes, or no step is complete.
    """
    if layers < 2:
        raise ValueError("a profile needs a model of 2 layers or more (num_hidden_layers in its config.json)")
    wanted, passes = _passes(kernels, layers, expected)
    bounds = {passed[0]: _layer_bounds(kernels, passed) for passed in passes}
    latest = _latest_ends(kernels)

    def cut(before: Sequence[int], after: Sequence[int]) -> int:
        """Return the index of the first kernel of the step of ``after``."""
        between = range(bounds[before[0]][-1], bounds[after[0]][0] + 1)
        return max(between, key=lambda at: kernels[at].start - latest[at - 1], default=bounds[after[0]][0])

    found = []
    for before, passed, after in zip(passes, passes[1:], passes[2:], strict=False):
        first, end = cut(before, passed), cut(passed, after)
        if passed in wanted:
            inside = [at - first for at in bounds[passed[0]]]
            found.append(Step(kernels[first:end], inside, kernels[end].start - kernels[first].start))
    if not found:
        raise ValueError(f"{len(passes)} forward passes are recorded, too few for a complete step")
    return found


def summarize(kernels: Sequence[Kernel], layers: int, expected: int) -> dict[str, Any]:
    """Return the median step by span, and its layer by position. For the arguments see ``steps``.

    Times in microseconds. Over all kernels of a step or a layer, what each adds to the end of the work done so far
    (``adds_us``, gaps included) gives the span. Kernels hidden behind others add 0.
    """
    kernels = sorted(kernels, key=lambda kernel: kernel.start)
    found = steps(kernels, layers, expected)
    step = sorted(found, key=lambda one: one.span)[len(found) // 2]
    rows = _rows(step.kernels)
    first, last = step.layers[0], step.layers[-1]
    ends = _latest_ends(step.kernels)
    gaps = sum(max(0.0, row["gap_us"]) for row in rows)
    kernel_us = sum(kernel.duration for kernel in step.kernels)
    by_category: Counter[str] = Counter()
    for row in rows:
        by_category[row["category"]] += row["us"]
    layer = _layer(step.layers, rows)
    for row in rows:
        del row["full_name"]  # up to thousands of characters; the layer keeps them
    return {
        "steps": len(found),
        "span_us": step.span,
        "period_us": median(one.period for one in found),
        "kernels": len(rows),
        "kernel_us": kernel_us,
        "gap_us": gaps,
        "overlap_us": kernel_us + gaps - step.span,
        "head_us": step.kernels[first].start - step.kernels[0].start,
        "layers_us": ends[last - 1] - step.kernels[first].start,
        "tail_us": ends[-1] - ends[last - 1],
        "categories": {name: {"us": us, "share": us / kernel_us} for name, us in by_category.most_common()},
        **layer,
        "head": rows[:first],
        "tail": rows[last:],
    }


def _passes(kernels: Sequence[Kernel], layers: int, expected: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the wanted passes, and all passes in order; each as the indices of one kernel of each layer."""
    positions: dict[str, list[int]] = defaultdict(list)
    for index, kernel in enumerate(kernels):
        positions[kernel.name].append(index)

    def chunks(drops_first: bool) -> dict[str, list[list[int]]]:
        """Return the chunks of as many occurrences as there are layers, by name."""
        split = {
            name: [found[at : at + layers] for at in range(len(found) % layers, len(found), layers)]
            for name, found in positions.items()
            if drops_first or len(found) % layers == 0
        }
        return {name: parts for name, parts in split.items() if all(map(_is_even, parts))}

    def covered(parts: Sequence[Sequence[int]]) -> float:
        return sum(kernels[part[-1]].start - kernels[part[0]].start for part in parts)

    # The second attempt is for recordings that begin within a pass.
    for by_name in (chunks(drops_first=False), chunks(drops_first=True)):
        fitting = [parts for parts in by_name.values() if expected - 1 <= len(parts) < 2 * expected]
        if fitting:
            break
    else:
        often = sorted(positions.items(), key=lambda entry: -len(entry[1]))[:20]
        counts = ", ".join(f"{len(found)} {short_name(name)}" for name, found in often)
        raise ValueError(f"no kernel occurs once in each of {layers} layers of {expected} passes; most often: {counts}")
    most = max(map(covered, fitting))
    busy = Counter(kernel.stream for kernel in kernels)
    longest = (parts for parts in fitting if covered(parts) >= 0.9 * most)
    wanted = max(longest, key=lambda parts: busy[kernels[parts[0][0]].stream])
    passes = list(wanted)
    for part in (part for parts in by_name.values() for part in parts):
        is_apart = all(part[-1] < other[0] or part[0] > other[-1] for other in passes)
        if is_apart and part[1] - part[0] > 2:  # not some copies in a row
            passes.append(part)
    return wanted, sorted(passes)


def _is_even(indices: Sequence[int]) -> bool:
    distances = [after - before for before, after in pairwise(indices)]
    return max(distances) <= _UNEVEN * min(distances)


def _layer_bounds(kernels: Sequence[Kernel], one_of_each: Sequence[int]) -> list[int]:
    """Return the index of the first kernel of each layer, and of the first kernel after the last layer.

    Layers begin as far before the given kernels as the first layer has the kernels of the last. Kernels of other
    streams belong to the layer in which they start.
    """
    streams = {kernels[index].stream for index in one_of_each}
    reach = max(after - before for before, after in pairwise(one_of_each))
    around = range(max(0, one_of_each[0] - reach), min(len(kernels), one_of_each[-1] + reach + 1))
    main = [index for index in around if kernels[index].stream in streams]
    at = [main.index(index) for index in one_of_each]
    length = median_low(after - before for before, after in pairwise(at))
    back = 0
    while (
        back + 1 < length
        and back < at[0]
        and kernels[main[at[0] - back - 1]].name == kernels[main[at[-1] - back - 1]].name
    ):
        back += 1
    end = at[-1] - back + length
    return [*(main[place - back] for place in at), main[end] if end < len(main) else main[-1] + 1]


def _latest_ends(kernels: Sequence[Kernel]) -> list[float]:
    """Return for each kernel when it and all kernels before it have ended."""
    ends: list[float] = []
    for kernel in kernels:
        ends.append(max(kernel.end, ends[-1]) if ends else kernel.end)
    return ends


def _rows(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """Return a row for each kernel. A negative gap is the overlap with an earlier kernel."""
    done = [kernels[0].start, *_latest_ends(kernels)]
    return [
        {
            "name": short_name(kernel.name),
            "category": category(kernel.name),
            "us": kernel.duration,
            "gap_us": kernel.start - before,
            "adds_us": after - before,
            "start_us": kernel.start - kernels[0].start,
            "stream": kernel.stream,
            "full_name": kernel.name,
        }
        for kernel, before, after in zip(kernels, done, done[1:], strict=False)
    ]


def _layer(bounds: Sequence[int], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over all layers that have the kernels of the most frequent layer.

    In each stream the order counts. Kernels of different streams may start in any order.
    """
    layers = [_by_stream(rows[first:end]) for first, end in pairwise(bounds)]
    names = [tuple(row["full_name"] for row in layer) for layer in layers]
    usual, count = Counter(names).most_common(1)[0]
    alike = [layer for layer, own in zip(layers, names, strict=True) if own == usual]
    starts = [min(row["start_us"] for row in layer) for layer in alike]
    table = []
    for of_layers in zip(*alike, strict=True):
        row = {**of_layers[0], **{key: median(one[key] for one in of_layers) for key in ("us", "gap_us", "adds_us")}}
        row["start_us"] = median(one["start_us"] - start for one, start in zip(of_layers, starts, strict=True))
        table.append(row)
    return {
        "layers": len(layers),
        "layers_alike": count,
        "layer_us": median(sum(row["adds_us"] for row in layer) for layer in alike),
        "layer": sorted(table, key=lambda row: row["start_us"]),
    }


def _by_stream(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort the kernels of a layer by stream, those of its busiest stream first."""
    busy = Counter(row["stream"] for row in rows)
    return sorted(rows, key=lambda row: (-busy[row["stream"]], row["stream"]))
