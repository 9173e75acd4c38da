"""Linear layers that are split by columns, in graphs that published releases of vLLM compile: see
``column_scenarios.py``."""

from __future__ import annotations

from contract import Runner
from vllm_environment import vllm_contract

CONTRACT = vllm_contract("column_scenarios.py")


@CONTRACT.parametrized()
def test_vllm_columns(runner: Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
