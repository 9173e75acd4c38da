"""llm_comm inside published releases of vLLM, the oldest and the newest supported: gloo ranks, emulated GPUs.

What is checked is in ``scenarios.py``. It runs under the Python of an environment of its own, kept in ``.cache/`` and
made in about a minute when a release is first met (``vllm_environment.py``).
"""

from __future__ import annotations

from contract import Runner
from vllm_environment import vllm_contract

CONTRACT = vllm_contract("scenarios.py")


@CONTRACT.parametrized()
def test_vllm_contract(runner: Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
