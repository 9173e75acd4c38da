"""Linear layers with their all-reduce and norm in graphs that published releases of vLLM compile: see
``linear_scenarios.py``."""

from __future__ import annotations

from pathlib import Path

from contract import Contract, Runner
from vllm_environment import VERSIONS, VLLM

HERE = Path(__file__).parent
CONTRACT = Contract(VLLM, VERSIONS, HERE / "linear_scenarios.py", served_by=HERE / "all_scenarios.py")


@CONTRACT.parametrized()
def test_vllm_linear(runner: Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
