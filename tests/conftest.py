from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Eight processes, each a rank with an emulated GPU."""
    with RankPool(8) as pool:
        yield pool


@pytest.fixture
def mortal_ranks() -> Iterator[RankPool]:
    """Ranks for one test alone, which may kill or cripple them."""
    with RankPool(8) as pool:
        yield pool
