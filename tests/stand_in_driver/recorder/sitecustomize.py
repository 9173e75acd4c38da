"""For whoever has this directory in PYTHONPATH: a line in the file LLM_COMM_TEST_RECORD for each start of Python, and
for each step of NVLink multicast that a core is asked for. Every process of a program, its ranks too."""

from __future__ import annotations

import os
from typing import Any

STEPS = ("create_multicast", "join_multicast", "add_multicast_device", "bind_multicast")


def _record(what: str) -> None:
    with open(os.environ["LLM_COMM_TEST_RECORD"], "a", encoding="utf-8") as file:
        file.write(f"{what}\n")


def _recorded(name: str, step: Any) -> Any:
    def run(self: object, *arguments: object) -> object:
        _record(name)
        return step(self, *arguments)

    return run


if "LLM_COMM_TEST_RECORD" in os.environ:
    from llm_comm import _core

    _record("start")
    for _name in STEPS:
        setattr(_core.Core, _name, _recorded(_name, getattr(_core.Core, _name)))
