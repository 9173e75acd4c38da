"""One rank of a group whose communicator runs the broadcast of broadcast.cuh.

``python tests/toy/communicator.py MODULE MEETING_POINT RANK WORLD``: the file of a ``_core`` that was built with
``tests/toy/registry.def``, and a file that does not exist yet, through which the ranks meet.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


def main(module: str, meeting_point: str, rank: int, world: int) -> None:
    ranks.load(Path(module))  # before anything imports llm_comm
    from llm_comm.communicator import Communicator
    from llm_comm.config import Config
    from llm_comm.errors import MismatchError, UnsupportedInputError

    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    with Communicator(group, "cpu", Config.load({})) as comm:
        for root in range(world):
            for count, dtype in ((1, torch.float32), (5000, torch.bfloat16), (70_001, torch.float16)):
                x = torch.arange(count).remainder(61).to(dtype) + rank
                y = torch.full_like(x, -1)
                plan = comm.plan_for("broadcast", x, root=root)
                assert (plan.operation, plan.algorithm, plan.protocol) == ("broadcast", "direct", "LL"), plan
                comm.run("broadcast", {"input": x, "output": y}, root=root)
                assert torch.equal(y, x - rank + root), f"rank {rank}: {count} {dtype} of rank {root}"
                # Slots are reset to the sentinel.
                assert torch.equal(comm.all_reduce(x), world * (x - rank) + sum(range(world)))
        written = y._version
        comm.run("broadcast", {"input": x, "output": y}, root=0)
        assert y._version > written  # autograd is told
        for name in ("input", "output"):
            buffers = {"input": x, "output": y, name: x.clone().requires_grad_()}
            with pytest.raises(UnsupportedInputError, match=f"{name}: the tensor requires grad"):
                comm.run("broadcast", buffers, root=0)
        with TorchDispatchMode(), pytest.raises(UnsupportedInputError, match="TorchDispatchMode"):
            comm.run("broadcast", {"input": x, "output": y}, root=0)
        with pytest.raises(UnsupportedInputError, match="root"):
            comm.run("broadcast", {"input": x, "output": y}, root=world)
        with pytest.raises(MismatchError, match=rf"root 0 \(call .*rank {world - 1} .*: direct .* root {world - 1} \("):
            comm.run("broadcast", {"input": x, "output": y}, root=rank)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    ranks.leave()
