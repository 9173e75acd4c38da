"""What the engine integrations say in logs: which algorithms serve which sizes, and which rank said what."""

from __future__ import annotations

import logging

import pytest
from harness import names_of_world, unnamed
from tables import plain_row

from llm_comm.config import EngineOptions
from llm_comm.integrations import descriptions, engine_config, joining
from llm_comm.planning.tables import TuningTable, by_operation

KIB = 1024
ROWS = [
    plain_row(8 * KIB, "one_shot", 1, 16, 0),
    plain_row(48 * KIB, "one_shot", 2, 16, 0),
    plain_row(512 * KIB, "two_shot", 1, 16, 0),
    plain_row(4096 * KIB, "two_shot", 2, 16, 1),
]
TABLE = TuningTable("table", by_operation(ROWS), 1 << 20)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "one_shot to 48 KiB, two_shot to 1 MiB, then vLLM"),
        ({"max_message_bytes": 48 * KIB}, "one_shot to 48 KiB, then vLLM"),
        ({"max_message_bytes": 20 * KIB}, "one_shot to 20 KiB, then vLLM"),
        ({"max_message_bytes": 48 * KIB + 1}, "one_shot to 48 KiB, two_shot to 48 KiB, then vLLM"),
        ({"max_message_bytes": 8 << 20}, "one_shot to 48 KiB, two_shot to 8 MiB, then vLLM"),
        ({"max_message_bytes": engine_config.EVERY_SIZE}, "one_shot to 48 KiB, two_shot at all other sizes"),
        ({"algorithm": "two_shot"}, "two_shot to 1 MiB, then vLLM"),
        ({"algorithm": "one_shot", "max_message_bytes": engine_config.EVERY_SIZE}, "one_shot at all sizes"),
    ],
)
def test_which_algorithm_serves_which_sizes(options: dict[str, object], words: str) -> None:
    assert descriptions.describe_plans(TABLE, EngineOptions.load({}, **options), "vLLM") == words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "all-gather and reduce-scatter to 1 MiB, then vLLM"),
        ({"max_message_bytes": 20 * KIB}, "all-gather and reduce-scatter to 20 KiB, then vLLM"),
        ({"max_message_bytes": engine_config.EVERY_SIZE}, "all-gather and reduce-scatter at all sizes"),
        ({"reduce_scatter": False}, "all-gather to 1 MiB, then vLLM; reduce_scatter is false (Python)"),
        (
            {"all_gather": False, "reduce_scatter": False},
            "all_gather is false (Python); reduce_scatter is false (Python)",
        ),
    ],
)
def test_up_to_which_size_parts_are_exchanged(options: dict[str, object], words: str) -> None:
    assert descriptions.describe_gather_scatter(TABLE, EngineOptions.load({}, **options), ", then vLLM") == words


def test_an_engine_that_must_not_depend_on_batches_takes_every_size() -> None:
    log = logging.getLogger("an engine")
    usual, bounded = EngineOptions.load({}), EngineOptions.load({}, max_message_bytes=20 * KIB)
    ours = EngineOptions.load({}, batch_invariant_norm="llm_comm", batch_invariant_linear="llm_comm")
    assert engine_config.for_batch_invariance(usual, "MODE", False, log) is usual
    for config in (ours, ours.replace(batch_invariant_norm="engine")):
        elsewhere = engine_config.for_batch_invariance(config, "MODE", False, log)
        assert (elsewhere.batch_invariant_norm, elsewhere.batch_invariant_linear) == ("engine", "engine")
    chosen = engine_config.for_batch_invariance(ours, "MODE", True, log)
    assert (chosen.batch_invariant_norm, chosen.batch_invariant_linear) == ("llm_comm", "llm_comm")
    assert chosen.max_message_bytes == engine_config.EVERY_SIZE
    assert engine_config.why_not_at_every_size(chosen, "vLLM") is None
    kept = engine_config.for_batch_invariance(bounded, "MODE", True, log)
    assert kept.max_message_bytes == 20 * KIB
    said = engine_config.why_not_at_every_size(kept, "vLLM")
    assert said == "max_message_bytes is 20480 (Python), and norms of larger batches would be vLLM's, with other bits"


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1 << 20, "1 MiB"), (3 << 29, "1.5 GiB")],
)
def test_bytes_in_words(count: int, words: str) -> None:
    assert descriptions.format_bytes(count) == words


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({0: "no"}, "rank 0: no"),
        ({1: "no"}, "rank 1: no"),
        ({0: "no", 1: "no"}, "rank 0: no; rank 1: no"),
        ({0: "no", 1: "no", 2: "no"}, "no"),
        ({0: "no", 1: "never", 2: "no"}, "rank 0: no; rank 1: never; rank 2: no"),
    ],
)
def test_who_said_what(said: dict[int, str], words: str) -> None:
    """What all say is said once; what some say is theirs."""
    assert unnamed(joining._together(said, names_of_world(3))) == words
