"""Attention layers of published releases of SGLang by llm_comm: see ``attention_scenarios.py``."""

from __future__ import annotations

from pathlib import Path

from contract import Contract, Runner
from sglang_environment import SGLANG, VERSIONS

CONTRACT = Contract(SGLANG, VERSIONS, Path(__file__).parent / "attention_scenarios.py")


@CONTRACT.parametrized()
def test_sglang_attention(runner: Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
