"""llm_comm inside published releases of SGLang, the oldest and the newest supported: gloo ranks, emulated GPUs.

What is checked is in ``scenarios.py``. It runs under the Python of an environment of its own, kept in ``.cache/`` and
made in about a minute when a release is first met (``sglang_environment.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import contract
import pytest
from sglang_environment import SGLANG

VERSIONS = ("0.5.17", "0.5.23")
_SCENARIOS = Path(__file__).parent / "scenarios.py"


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[contract.Runner]:
    with contract.running(SGLANG, request.param, _SCENARIOS, tmp_path_factory.mktemp("sglang")) as runner:
        yield runner


@pytest.mark.parametrize("name", contract.names(_SCENARIOS))
@pytest.mark.parametrize("runner", VERSIONS, indirect=True, scope="module")
def test_sglang_contract(runner: contract.Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
