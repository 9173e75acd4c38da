"""All-gather and reduce-scatter inside published releases of vLLM: see ``gather_scenarios.py``."""

from __future__ import annotations

from contract import Runner
from vllm_environment import vllm_contract

CONTRACT = vllm_contract("gather_scenarios.py")


@CONTRACT.parametrized()
def test_vllm_gather(runner: Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
