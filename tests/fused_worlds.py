"""Worlds, types and communicators that tests of the fused kernels go through."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fused_reference import FUSED_DTYPES, TYPES_AND_WORLDS
from harness import make_communicator
from reference import ALGORITHMS

from llm_comm import Communicator

types_and_worlds = pytest.mark.parametrize(
    ("dtype", "world"), TYPES_AND_WORLDS, ids=lambda value: str(value).removeprefix("torch.")
)
every_dtype = pytest.mark.parametrize("dtype", FUSED_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def communicators(**options: object) -> Iterator[tuple[Communicator, str]]:
    """On a rank: (communicator, algorithm) for every algorithm."""
    for algorithm in ALGORITHMS:
        with make_communicator(algorithm=algorithm, **options) as comm:
            yield comm, algorithm
