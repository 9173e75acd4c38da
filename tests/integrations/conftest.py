from __future__ import annotations

from collections.abc import Iterator

import contract
import pytest


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[contract.Runner]:
    """A process with the engine and the version that ``Contract.parametrized`` names."""
    what, version = request.param
    with contract.running(what, version, tmp_path_factory.mktemp(what.engine.name)) as runner:
        yield runner
