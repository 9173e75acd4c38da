"""One rank of a group that sets NVLink multicast up on emulated GPUs, with the algorithms of switch.cuh.

``python tests/toy/multicast.py MODULE MEETING_POINT RANK WORLD SCENARIO``: as ``communicator.py``. Prints a JSON
object: what the communicator goes by, the steps that this rank was asked for, and what it was warned of.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import ranks
import torch
import torch.distributed as dist

STEPS = ("create_multicast", "join_multicast", "add_multicast_device", "bind_multicast", "drop_multicast")
#: By scenario.
OPTIONS: dict[str, dict[str, object]] = {
    "wrong sums": {"sum": "any"},
    "wrong sums in rank order": {"algorithm": "wrong"},
    "in rank order": {"algorithm": "by_switch"},
    "not wanted": {"multicast": "auto", "algorithm": "by_switch"},
    "test fails on one rank": {"timeout_s": 4.0},
}


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.said.append(record.getMessage())


def main(module: str, meeting_point: str, rank: int, world: int, scenario: str) -> None:
    core = ranks.load(Path(module))  # before anything imports llm_comm
    from llm_comm import registry
    from llm_comm.communicator import Communicator
    from llm_comm.config import Config
    from llm_comm.planning import multicast
    from llm_comm.runtime import self_test

    calls: list[str] = []
    lines = Lines()
    logging.getLogger("llm_comm").addHandler(lines)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    # By the switch go the toys alone: what is tested here is who may use them.
    operations = {
        name: operation._replace(
            algorithms=tuple(a for a in operation.algorithms if not a.uses_multimem or name == "broadcast")
        )
        for name, operation in registry.operations().items()
    }

    def recorded(name: str) -> Any:
        step = getattr(core.Core, name)
        failing = 0 if name == "create_multicast" else world - 1

        def run(self: object, *arguments: object) -> object:
            calls.append(name)
            if scenario == f"fails: {name}" and rank == failing:
                raise RuntimeError("as the test wants it")
            return step(self, *arguments)

        return mock.patch.object(core.Core, name, run)

    options: dict[str, object] = {"multicast": "1", "timeout_s": 30.0, **OPTIONS.get(scenario, {})}
    on_one_rank = scenario.removeprefix("one rank: ")
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(registry, "operations", return_value=operations))
        for name in STEPS:
            patches.enter_context(recorded(name))
        if on_one_rank != scenario and rank == 1:
            name, _, value = on_one_rank.partition("=")
            if name == "multicast":
                options[name] = value
            else:
                patches.enter_context(mock.patch.dict(os.environ, {name: value}))
        if scenario == "core refuses":  # whatever Python believes
            patches.enter_context(mock.patch.dict(os.environ, {"NCCL_NVLS_ENABLE": "0"}))
            patches.enter_context(mock.patch.object(multicast, "multicast_state", return_value=(True, "")))
        if scenario == "test fails on one rank" and rank == 1:
            patches.enter_context(mock.patch.object(self_test, "_test", side_effect=RuntimeError("as the test wants")))
        comm = patches.enter_context(Communicator(group, "cpu", Config.load({}, **options)))
        x = torch.arange(5000, dtype=torch.float32) + rank
        y = torch.full_like(x, -1)
        plan = comm.plan_for("broadcast", x, root=1)
        comm.run("broadcast", {"input": x, "output": y}, root=1)
        assert torch.equal(y, x - rank + 1)
        assert torch.equal(comm.all_reduce(x), world * (x - rank) + sum(range(world)))
        found = {"is_up": comm.multicast.is_up, "why": comm.multicast.why, "ran": plan.algorithm, "reason": plan.reason}
    everyone: list[object] = [None] * world
    dist.all_gather_object(everyone, found)
    dist.destroy_process_group()
    assert all(other == found for other in everyone), everyone
    print(json.dumps({**found, "calls": calls, "warnings": lines.said}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    ranks.leave()
