"""How NCCL is called between nodes, with gloo in its place: which calls, on which bytes, and when its group ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, store

from llm_comm.nodes import transport

NODES = 3


class StandIn:
    """In place of torch's ProcessGroupNCCL."""

    class Options:
        _timeout: Any = None

    def __init__(self, group_store: Any, rank: int, size: int, options: Options) -> None:
        self._gloo = dist.ProcessGroupGloo(group_store, rank, size, options._timeout)
        self.limit: Any = options._timeout
        self.ended: list[str] = []

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> None:
        assert not options.asyncOp
        self._gloo._allgather_base(out, x).wait()  # as torch does for calls that are in the stream already: no work

    def alltoall_base(self, out: torch.Tensor, x: torch.Tensor, out_sizes: Any, in_sizes: Any, options: Any) -> Any:
        assert not options.asyncOp
        return self._gloo.alltoall_base(out, x, out_sizes, in_sizes)  # as other versions do

    def _set_default_timeout(self, limit: Any) -> None:
        self.limit = limit

    def shutdown(self) -> None:
        self.ended.append("shutdown")

    def abort(self) -> None:
        self.ended.append("abort")


def call_it(is_capturing: bool) -> list[str]:
    """How the group ends, by ``close`` or at the end of the process."""
    node = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "ProcessGroupNCCL", StandIn, raising=False)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
        patch.setattr(transport, "_kept", [])
        made = transport.StreamTransport(dist.PrefixStore("nodes", store()), node, NODES, 20.0)
        made.set_limit(30.0)
        stand_in: StandIn = made._partners
        assert stand_in.limit.total_seconds() == 30.0
        own = torch.arange(5, dtype=torch.uint8) + 10 * node
        gathered = torch.empty(5 * NODES, dtype=torch.uint8)
        made.all_gather(gathered, own)
        assert gathered.tolist() == [10 * of + i for of in range(NODES) for i in range(5)]
        # Each node has pieces of 1, 0 and 4 bytes for the nodes; so node 1 gets nothing.
        in_sizes = [1, 0, 4]
        mine = in_sizes[node]
        received = torch.empty(mine * NODES, dtype=torch.uint8)
        made.all_to_all(received, own, [mine] * NODES, in_sizes)
        first = sum(in_sizes[:node])
        assert received.tolist() == [10 * of + first + i for of in range(NODES) for i in range(mine)]
        made.close()
        transport._end_all()  # as at the end of the process
        return stand_in.ended


@pytest.mark.parametrize(("is_capturing", "ended"), [(False, ["shutdown"]), (True, ["abort"])])
def test_nccl_ends_with_its_communicator_unless_graphs_hold_it(
    ranks: RankPool, is_capturing: bool, ended: list[str]
) -> None:
    assert ranks.run(NODES, call_it, is_capturing) == [ended] * NODES
