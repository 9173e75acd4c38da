from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import contract
import pytest


@pytest.hookimpl(tryfirst=True)  # before some are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = getattr(item, "callspec", None)
        if given is not None and "runner" in given.params:
            what, version = given.params["runner"]
            if what.is_nightly(version, given.params["name"]):
                item.add_marker("nightly")


@pytest.fixture(scope="session")
def shared_runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[contract.SharedRunners]:
    with ExitStack() as stack:
        yield contract.SharedRunners(stack, tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared_runners: contract.SharedRunners
) -> Iterator[contract.Runner]:
    """A process with the engine and the version that ``Contract.parametrized`` names."""
    what, version = request.param
    if what.served_by is not None:
        yield shared_runners.get(what, version)
        return
    with contract.running(what, version, tmp_path_factory.mktemp(what.engine.name)) as runner:
        yield runner
