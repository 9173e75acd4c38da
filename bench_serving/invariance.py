"""Check of deterministic modes: a prompt must have equal tokens in every batch and at every start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench_serving import arms
from bench_serving.summary import Run

_MAX_SHOWN = 5


class _Generation(NamedTuple):
    """Tokens generated for one prompt of one batch."""

    repeat: int
    batch: int
    prompt: int
    tokens: Sequence[int]


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """Return {"arms": {arm: ...}, "passed": bool, "failures": [...]}; empty if no run was in deterministic mode.

    The prompts of a batch are the first ones of the largest batch. All generations of a prompt by an arm, in any batch,
    iteration and start, must be equal. Arms are not compared with each other, since their all-reduces and norms differ.
    The bound ``free`` is not checked, since its results are meaningless.
    """
    by_arm: dict[str, list[_Generation]] = {}
    for run in runs:
        if not run.failure and run.result and "invariance" in run.result and not arms.ARMS[run.arm].free:
            by_arm.setdefault(run.arm, []).extend(_generations(run.repeat, run.result["invariance"]))
    if not by_arm:
        return {}
    failures: list[str] = []
    compared = {arm: _compare(arm, generations, failures) for arm, generations in by_arm.items()}
    return {"arms": compared, "passed": not failures, "failures": failures}


def _generations(repeat: int, iterations_by_batch: Mapping[str, Any]) -> Iterator[_Generation]:
    for batch, iterations in iterations_by_batch.items():
        for requests in iterations:
            for prompt, tokens in enumerate(requests):
                yield _Generation(repeat, int(batch), prompt, tokens)


def _compare(arm: str, generations: Sequence[_Generation], failures: list[str]) -> dict[str, Any]:
    first: dict[int, _Generation] = {}
    differing = []
    for each in generations:
        reference = first.setdefault(each.prompt, each)
        if each.tokens != reference.tokens:
            differing.append(_told(each, reference))
    if differing:
        rest = "" if len(differing) <= _MAX_SHOWN else "; ..."
        failures.append(
            f"{arm}: {len(differing)} of {len(generations)} generations differ from the first of their prompt: "
            f"{'; '.join(differing[:_MAX_SHOWN])}{rest}"
        )
    return {
        "starts": len({each.repeat for each in generations}),
        "batch_sizes": sorted({each.batch for each in generations}),
        "prompts": len(first),
        "generations": len(generations),
        "differing": len(differing),
        "distinct_tokens": len({token for each in generations for token in each.tokens}),
        "identical": not differing,
    }


def _told(one: _Generation, first: _Generation) -> str:
    pairs = zip(one.tokens, first.tokens, strict=False)
    place = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(first.tokens)))
    return (
        f"prompt {one.prompt} from token {place} on (start {one.repeat}, batch {one.batch}; "
        f"first: start {first.repeat}, batch {first.batch})"
    )
