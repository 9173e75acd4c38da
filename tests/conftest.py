from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from harness import RankPool

# Whoever runs the tests may have installed tuning tables; those of tests go by what is shipped. There are none in here.
os.environ["LLM_COMM_TABLE_DIR"] = os.devnull


#: The emulated worlds of `make test`: the smallest, one of odd size, the largest. `make nightly` has the others.
WORLDS = {2, 3, 8}


@pytest.hookimpl(tryfirst=True)  # before some are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of minutes first, in which another CPU works beside them; what comes last is short, and not waited for."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    of_test: dict[str, set[int]] = {}
    emulated = [item for item in items if item.path.parent.name == "emulated"]
    for item in emulated:
        of_test.setdefault(item.nodeid.partition("[")[0], set()).add(_world_of(item))
    for item in emulated:
        if _world_of(item) not in {0, 1, *WORLDS} and of_test[item.nodeid.partition("[")[0]] & WORLDS:
            item.add_marker("nightly")


def _world_of(item: pytest.Item) -> int:
    """How many ranks a test has, if it is made for several numbers; else 0."""
    world = getattr(item, "callspec", None) and item.callspec.params.get("world")  # type: ignore[attr-defined]
    return world if isinstance(world, int) else 0


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
    """Up to 16 processes, each a rank with an emulated GPU. A test starts those that it needs first."""
    with RankPool(16) as pool:
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
