from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from harness import RankPool

# Whoever runs the tests may have installed tuning tables; those of tests go by what is shipped. There are none in here.
os.environ["LLM_COMM_TABLE_DIR"] = os.devnull


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of minutes first, in which another CPU works beside them; what comes last is short, and not waited for."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Each test finds the environment variables that the run began with: commands set some for their ranks."""
    before = dict(os.environ)
    yield
    before["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"]  # pytest's own: it names the test and its phase
    if before != os.environ:
        os.environ.clear()
        os.environ.update(before)


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


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()
