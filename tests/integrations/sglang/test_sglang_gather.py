"""All-gather and reduce-scatter inside published releases of SGLang: see ``gather_scenarios.py``."""

from __future__ import annotations

from pathlib import Path

from contract import Contract, Runner
from sglang_environment import SGLANG, VERSIONS

CONTRACT = Contract(SGLANG, VERSIONS, Path(__file__).parent / "gather_scenarios.py")


@CONTRACT.parametrized()
def test_sglang_gather(runner: Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
