"""UCX between nodes: port channels whose proxies reach each other over TCP."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPool, error_of_setup, nothing_leaked, unnamed
from nodes_cases import Layout, calls_of, make, run_random_cases_over, sum_over_nodes
from reference import assert_bitwise_equal, contributions
from ucx_here import needs_ucx

from llm_comm import _core
from llm_comm.nodes import ucx
from llm_comm.planning.node_rows import EXCHANGES, NodeRow

pytestmark = needs_ucx

TWO_BY_TWO = Layout(2, 2)
CASES = 8
MOST = 30_000


# Parts of 1 KiB: of most calls there are several, and of many more than a launch has blocks.
@pytest.mark.parametrize("part_bytes", [ucx.PART_BYTES, 1024])
@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(3, 2, alternate=True)], ids=str)
def test_random_calls(ranks: RankPool, layout: Layout, part_bytes: int) -> None:
    first, *others = ranks.run(layout.world, run_random_cases_over, "ucx", part_bytes, layout, 1, CASES, MOST)
    assert all(counts == first for counts in others)
    assert set(first) == {call.__name__ for call in calls_of(layout)}


def sum_large_ones(layout: Layout) -> None:
    """More than one part of the kernel, in both ways of exchange, whole and in chunks."""
    with make(layout, node_transport="ucx", max_message_bytes=4 << 20) as comm:
        for how in EXCHANGES:
            for chunk_bytes in (0, 128 << 10):
                row = NodeRow(layout.nodes, 1 << 40, how, chunk_bytes, is_faster=True)
                comm.use_table(comm.table_of_node._replace(nodes=(row,)))
                for size in (3 * ucx.PART_BYTES, (1 << 19) + 5):
                    inputs = contributions(layout.world, size, torch.bfloat16)
                    found = comm.all_reduce(inputs[comm.rank])
                    assert_bitwise_equal(found, sum_over_nodes(inputs, layout), f"{how} {chunk_bytes} {size}")
                    assert "by UCX" in comm.plan(inputs[0]).reason


@pytest.mark.parametrize("layout", [Layout(3, 1), TWO_BY_TWO], ids=str)
def test_large_sums(ranks: RankPool, layout: Layout) -> None:
    ranks.run(layout.world, sum_large_ones, layout)


# ---- Set-up --------------------------------------------------------------------------------------------------------


def make_several() -> None:
    with make(TWO_BY_TWO, node_transport="ucx"):
        pass  # whatever UCX keeps of the first context
    with nothing_leaked():
        for _ in range(2):
            with make(TWO_BY_TWO, node_transport="ucx") as first, make(TWO_BY_TWO, node_transport="ucx") as second:
                for comm in (first, second, first):
                    assert comm.all_reduce(torch.ones(100)).eq(4).all()
        comm = make(TWO_BY_TWO, node_transport="ucx")
        assert comm.all_reduce(torch.ones(100)).eq(4).all()
        dist.barrier()
        del comm, first, second  # dropped, not closed
        gc.collect()


def test_communicators_leave_nothing_behind(ranks: RankPool) -> None:
    ranks.run(4, make_several)


def close_alone() -> None:
    """A partner that has closed its communicator is no failure of this rank's."""
    comm = make(TWO_BY_TWO, node_transport="ucx")
    comm.all_reduce(torch.ones(100))
    if dist.get_rank() >= 2:
        comm.close()
        dist.barrier()
        return
    dist.barrier()
    comm.check()
    comm.close()


def test_one_node_closes_before_the_other(ranks: RankPool) -> None:
    ranks.run(4, close_alone)


def set_up_with(options: dict[int, dict[str, Any]], missing: tuple[int, ...]) -> str:
    def no_ucx() -> str:
        raise RuntimeError("UCX cannot be loaded (no such luck)")

    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if rank in missing:
            patch.setattr(ucx, "load", no_ucx)
        return error_of_setup(node=f"n{rank}", timeout_s=4.0, **options.get(rank, {}))


@pytest.mark.parametrize(
    ("options", "missing", "words"),
    [
        ({r: {"node_transport": "nccl"} for r in range(2)}, (), "but the ranks have emulated GPUs: leave it 'auto'"),
        (
            {0: {"node_transport": "gloo"}},
            (),
            "RendezvousError: the ranks have different options: node_transport is 'gloo' on rank 0, 'auto' on rank 1",
        ),
        (
            {r: {"node_transport": "ucx"} for r in range(2)},
            (0, 1),
            "connection between the nodes failed on 2 of 2 ranks: rank 0: RuntimeError: UCX cannot be loaded (no such",
        ),
        ({r: {"node_transport": "ucx"} for r in range(2)}, (1,), "rank 1: RuntimeError: UCX cannot be loaded"),
    ],
    ids=["nccl", "different", "no ucx", "no ucx on one rank"],
)
def test_what_cannot_be_set_up_is_told_alike(
    ranks: RankPool, options: dict[int, dict[str, Any]], missing: tuple[int, ...], words: str
) -> None:
    texts = ranks.run(2, set_up_with, options, missing)
    assert len(set(texts)) == 1
    assert words in texts[0]


# ---- The exchange alone --------------------------------------------------------------------------------------------


def test_options_that_make_no_exchange() -> None:
    options = {"rank": 0, "ranks": 2, "part_bytes": 1024, "timeout_s": 1.0, "device": -1}
    for change, words in (
        ({"ranks": 17}, "UCX serves 2 to 16 nodes"),
        ({"rank": 2}, "node 2 of 2"),
        ({"part_bytes": 1000}, "a positive multiple of 16"),
        ({"timeout_s": 0.0}, "timeout_s must be positive"),
    ):
        with pytest.raises(ValueError, match=words):
            _core.NodeExchange(**{**options, **change})
    made = _core.NodeExchange(**options)
    with pytest.raises(RuntimeError, match="not connected"):
        made.run(0, 0, [(0, 0, 0, 0)] * 2, 0)
    with pytest.raises(RuntimeError, match="the address of b is too short"):
        made.connect([made.address(), b"nothing"], ["a", "b"])


def wait_alone() -> str:
    """What a rank is told whose partner makes no call."""
    comm = make(Layout(2, 1), node_transport="ucx", timeout_s=30.0)
    transport = comm._multi_node._transport
    transport.set_limit(0.3)
    said = ""
    if comm.rank == 0:
        x = torch.zeros(8, dtype=torch.uint8)
        with pytest.raises(RuntimeError) as caught:
            transport.all_gather(torch.empty(16, dtype=torch.uint8), x)
        said = str(caught.value)
    dist.barrier()
    comm.close()
    return said


def test_a_partner_that_does_not_come_is_named(ranks: RankPool) -> None:
    said = ranks.run(2, wait_alone)[0]
    assert unnamed(said) == "nothing came from rank 1 in time (LLM_COMM_TIMEOUT_S)"


def environment_after_loading() -> list[str]:
    before = dict(os.environ)
    ucx.load()
    return [name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)]


def test_loading_leaves_the_environment_alone(ranks: RankPool) -> None:
    assert ranks.run(1, environment_after_loading) == [[]]
