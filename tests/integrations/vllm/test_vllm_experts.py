"""Experts of published releases of vLLM by llm_comm: see ``experts_scenarios.py``."""

from __future__ import annotations

from contract import Runner
from vllm_environment import vllm_contract

CONTRACT = vllm_contract("experts_scenarios.py")


@CONTRACT.parametrized()
def test_vllm_experts(runner: Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
