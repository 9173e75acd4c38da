"""All-reduce + add + RMSNorm in graphs that published releases of vLLM compile: see ``fusion_scenarios.py``."""

from __future__ import annotations

from contract import Runner
from vllm_environment import vllm_contract

CONTRACT = vllm_contract("fusion_scenarios.py")


@CONTRACT.parametrized()
def test_vllm_fusion(runner: Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
