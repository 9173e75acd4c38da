"""Qkv layers with their rotary embedding, in graphs that published releases of vLLM compile: see
``rope_scenarios.py``."""

from __future__ import annotations

from contract import Runner
from vllm_environment import vllm_contract

CONTRACT = vllm_contract("rope_scenarios.py")


@CONTRACT.parametrized()
def test_vllm_rope(runner: Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
