"""What ``llm-comm algorithms`` makes of the registry."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from llm_comm import _core, cli, launch

OPERATIONS = [
    {"name": "all_reduce", "title": "sum of all ranks", "buffers": ["x", "out"], "parameters": []},
    {"name": "all_reduce_norm", "title": "sum and norm", "buffers": ["x", "weight"], "parameters": ["epsilon"]},
]
ALGORITHMS = [
    {
        "operation": "all_reduce",
        "name": "one_shot",
        "protocol": "LL",
        "title": "every rank sends all",
        "data_types": ["bf16", "fp32"],
        "tunables": ["blocks", "depth"],
    },
    {
        "operation": "all_reduce_norm",
        "name": "two_shot",
        "protocol": "HB",
        "title": "every rank sums a part",
        "data_types": ["bf16"],
        "tunables": [],
    },
]


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "operations", lambda: [SimpleNamespace(**o) for o in OPERATIONS], raising=False)
    monkeypatch.setattr(_core, "algorithms", lambda: [SimpleNamespace(**a) for a in ALGORITHMS], raising=False)
    monkeypatch.setattr(launch, "spawn", lambda *_: pytest.fail("started ranks"))
    monkeypatch.setattr(launch, "usable_gpus", lambda: pytest.fail("looked for GPUs"))


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["algorithms"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "operation        algorithm  protocol  data types  tunables      how",
        "all_reduce       one_shot   LL        bf16 fp32   blocks depth  every rank sends all",
        "all_reduce_norm  two_shot   HB        bf16        -             every rank sums a part",
        "",
        "operation        what              buffers   parameters",
        "all_reduce       sum of all ranks  x out     -",
        "all_reduce_norm  sum and norm      x weight  epsilon",
    ]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["algorithms", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"operations": OPERATIONS, "algorithms": ALGORITHMS}
