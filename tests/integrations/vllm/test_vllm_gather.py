"""All-gather and reduce-scatter inside published releases of vLLM: see ``gather_scenarios.py``."""

from __future__ import annotations

from pathlib import Path

from contract import Contract, Runner
from vllm_environment import VERSIONS, VLLM

CONTRACT = Contract(VLLM, VERSIONS, Path(__file__).parent / "gather_scenarios.py")


@CONTRACT.parametrized()
def test_vllm_gather(runner: Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
