"""Models over ``layer_boundary`` in published releases of SGLang: see ``boundary_scenarios.py``."""

from __future__ import annotations

from pathlib import Path

from contract import Contract, Runner
from sglang_environment import SGLANG

# Since 0.5.22 Llama declares its stages to the package. One version stands for those since.
CONTRACT = Contract(SGLANG, ("0.5.23",), Path(__file__).parent / "boundary_scenarios.py")


@CONTRACT.parametrized()
def test_sglang_boundary(runner: Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
