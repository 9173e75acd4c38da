"""llm_comm inside published releases of SGLang, the oldest and the newest supported: gloo ranks, emulated GPUs.

What is checked is in ``scenarios.py``. It runs under the Python of an environment of its own, kept in ``.cache/`` and
made in about a minute when a release is first met (``sglang_environment.py``).
"""

from __future__ import annotations

from pathlib import Path

from contract import Contract, Runner
from sglang_environment import SGLANG, VERSIONS

CONTRACT = Contract(SGLANG, VERSIONS, Path(__file__).parent / "scenarios.py")


@CONTRACT.parametrized()
def test_sglang_contract(runner: Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
