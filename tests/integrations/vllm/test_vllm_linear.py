"""Linear layers with their all-reduce and norm in graphs that published releases of vLLM compile: see
``linear_scenarios.py``."""

from __future__ import annotations

from contract import Runner
from vllm_environment import vllm_contract

CONTRACT = vllm_contract("linear_scenarios.py")


@CONTRACT.parametrized()
def test_vllm_linear(runner: Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
