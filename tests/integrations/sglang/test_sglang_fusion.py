"""All-reduce + add + RMSNorm in published releases of SGLang: see ``fusion_scenarios.py``."""

from __future__ import annotations

from pathlib import Path

from contract import Contract, Runner
from sglang_environment import SGLANG, VERSIONS

# 0.5.20 is the last one in which layers have a communicator (``layer_boundary`` since), 0.5.21 the last one in which
# Llama reduces in its linears.
CONTRACT = Contract(SGLANG, (*VERSIONS, "0.5.20", "0.5.21"), Path(__file__).parent / "fusion_scenarios.py")


@CONTRACT.parametrized()
def test_sglang_fusion(runner: Runner, name: str) -> None:
    errors = runner.run(name)
    assert not errors, "\n".join(errors)
