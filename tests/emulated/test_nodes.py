"""Collectives over several nodes: ranks of one machine that are told on which node they are, with gloo between them."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fused_reference import EPS, FUSED_DTYPES, GROUPS, canonical, operands_of, rows_of
from harness import RankPool, error_of_setup, make_communicator, nothing_leaked, unnamed
from nodes_cases import LAYOUTS, Layout, calls_of, make, run_random_cases, sum_over_nodes
from reference import assert_bitwise_equal, contributions, rank_order_sum

import llm_comm
from llm_comm import UnsupportedInputError
from llm_comm.dsl.compiled import compile as compile_program
from llm_comm.dsl.library import two_shot_ll
from llm_comm.planning.node_rows import EXCHANGES, PIECES, WHOLE, NodeRow

TWO_BY_TWO = Layout(2, 2)
CASES = 24
MOST = 30_000


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_random_calls(ranks: RankPool, layout: Layout) -> None:
    first, *others = ranks.run(layout.world, run_random_cases, layout, 1, CASES, MOST)
    assert all(counts == first for counts in others)
    assert set(first) == {call.__name__ for call in calls_of(layout)}


# ---- One sum -------------------------------------------------------------------------------------------------------


def sum_at_sizes(layout: Layout, sizes: list[int], algorithm: str) -> list[str]:
    """Compares the sums of the same elements in messages of several sizes; returns how they were exchanged."""
    reasons = []
    with make(layout, algorithm=algorithm) as comm:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            inputs = contributions(layout.world, max(sizes), dtype)
            expected = sum_over_nodes(inputs, layout)
            for size in sizes:
                x = inputs[comm.rank][:size].contiguous()
                assert_bitwise_equal(comm.all_reduce(x), expected[:size], f"{layout} {dtype} {size}")
                if size % layout.world == 0:
                    mine = size // layout.world
                    part = expected[comm.rank * mine : (comm.rank + 1) * mine]
                    assert_bitwise_equal(comm.reduce_scatter(x), part, f"reduce-scatter {layout} {dtype} {size}")
                reasons.append(comm.plan(x).reason)
    return reasons


@pytest.mark.parametrize(
    ("layout", "algorithm"), [(TWO_BY_TWO, "auto"), (Layout(4, 2), "auto"), (Layout(3, 1), "one_shot")]
)
def test_a_sum_does_not_depend_on_the_size_of_its_message(ranks: RankPool, layout: Layout, algorithm: str) -> None:
    # One element, less than a line for each rank, about the sizes from which pieces are exchanged, and in chunks.
    sizes = [1, 7, 8, 1000, 8192, 8200, 16384, 24581, 40_001]
    for reasons in ranks.run(layout.world, sum_at_sizes, layout, sizes, algorithm):
        assert any("all-to-all" in reason for reason in reasons) == (layout.nodes > 2)
        assert any(" in 5 chunks" in reason for reason in reasons) == (layout.places > 1)


def sum_by_each_row(layout: Layout) -> None:
    """The bits of a sum are the same in chunks of any size and by either exchange, in place too."""
    with make(layout) as comm:
        inputs = contributions(layout.world, 50_003, torch.bfloat16)
        expected = sum_over_nodes(inputs, layout)
        for how in EXCHANGES:
            for chunk_bytes in (0, 16 << 10, 40_000, 1 << 20):
                row = NodeRow(layout.nodes, 1 << 20, how, chunk_bytes, is_faster=True)
                comm.use_table(comm.table_of_node._replace(nodes=(row,)))
                x = inputs[comm.rank].clone()
                what = f"{layout}, {row.describe()}"
                reason = comm.plan(x).reason
                assert ("all-to-all" in reason) == (how == PIECES)
                # Chunks of whole lines for each rank of the node.
                step = 8 * layout.places
                count = -(-len(x) // (chunk_bytes // 2 // step * step)) if chunk_bytes else 1
                assert (f" in {count} chunks" in reason) == (count > 1), (reason, count)
                assert_bitwise_equal(comm.all_reduce(x), expected, what)
                assert comm.all_reduce(x, out=x) is x
                assert_bitwise_equal(x, expected, f"{what}, in place")
        calls = comm.stats().by_operation()["all_reduce"]
        assert (calls.calls, calls.bytes) == (16, 16 * 100_006)


@pytest.mark.parametrize("layout", [TWO_BY_TWO, Layout(3, 2)], ids=str)
def test_a_sum_does_not_depend_on_chunks_and_exchanges(ranks: RankPool, layout: Layout) -> None:
    ranks.run(layout.world, sum_by_each_row, layout)


def ask_for_more_than_the_table_serves() -> None:
    with make(TWO_BY_TWO) as comm:
        x, weight = torch.ones(1024, 32, dtype=torch.bfloat16), torch.ones(32, dtype=torch.bfloat16)
        faster = NodeRow(2, 16 << 10, WHOLE, 0, is_faster=True)
        slower = NodeRow(2, 1 << 20, WHOLE, 0, is_faster=False)
        of_node = comm.table_of_node
        for rows, limit in (((faster, slower), 16 << 10), ((slower,), 0), ((faster._replace(nodes=3),), 2 << 20)):
            comm.use_table(of_node._replace(nodes=rows))
            assert (comm.table.max_message_bytes, comm.table_of_node.max_message_bytes) == (limit, 64 << 20)
            serves = limit >= x.nbytes
            assert comm.accepts(x) == comm.accepts_all_reduce_add_rms_norm(x, weight) == serves
            assert comm.accepts(x[:256]) == (limit > 0)
            assert (comm.plan(x).algorithm == "declined") == (not serves)
            assert comm.accepts(x[:0])
    # An option goes before it.
    with make(TWO_BY_TWO, max_message_bytes=1 << 20) as comm:
        comm.use_table(comm.table_of_node._replace(nodes=(slower,)))
        assert comm.all_reduce(x).eq(4).all()


def test_larger_messages_than_the_table_serves_are_declined(ranks: RankPool) -> None:
    ranks.run(4, ask_for_more_than_the_table_serves)


def test_the_reference_is_another_sum_than_that_of_one_node() -> None:
    inputs = contributions(4, 4000, torch.bfloat16)
    assert not torch.equal(sum_over_nodes(inputs, TWO_BY_TWO), rank_order_sum(inputs))


# ---- Norms ---------------------------------------------------------------------------------------------------------


def norm_over_nodes(layout: Layout) -> None:
    """Compares fused calls with those of one node that is given the sum over the nodes, bit by bit."""
    with make(layout) as comm, make_communicator() as of_one:
        for dtype in FUSED_DTYPES:
            # Fewer lines than ranks, a row of several blocks, more than a slice of whole rows.
            for rows, hidden in ((1, 8), (1, 5120), (3, 1152), (7, 712)):
                shape = (rows, hidden)
                inputs = rows_of(layout.world, rows, hidden, dtype)
                residual, weight = operands_of(rows, hidden, dtype)
                total = sum_over_nodes([x.flatten() for x in inputs], layout).view(shape)
                # That node's sum is this very one.
                share = total if comm.rank == 0 else torch.full(shape, -0.0, dtype=dtype)
                for quantize in (None, "static", "dynamic", *(GROUPS if hidden % 128 == 0 else ())):
                    scale = torch.tensor([0.07]) if quantize == "static" else None
                    for added in (residual, None) if quantize is None else (residual,):
                        what = f"{layout} {dtype} {shape} {quantize}{'' if added is None else ' with residual'}"
                        how = {"quantize": quantize, "scale": scale, "weight_bias": 1.0 if rows == 3 else 0.0}
                        found = comm.all_reduce_add_rms_norm(inputs[comm.rank], added, weight, EPS, **how)
                        wanted = of_one.all_reduce_add_rms_norm(share, added, weight, EPS, **how)
                        new_residual = total if added is None else canonical(total + added)
                        assert_bitwise_equal(found[1], new_residual, f"new residual of {what}")
                        for one, other in zip(found, wanted, strict=True):
                            assert one.stride() == other.stride()
                            assert_bitwise_equal(one.float(), other.float(), what)


@pytest.mark.parametrize("layout", [TWO_BY_TWO, Layout(3, 2, alternate=True)], ids=str)
def test_norms_have_the_bits_that_one_node_makes_of_the_sum(ranks: RankPool, layout: Layout) -> None:
    ranks.run(layout.world, norm_over_nodes, layout)


def norm_behind_a_layer() -> None:
    dtype = torch.bfloat16
    with make(TWO_BY_TWO) as comm:
        x, norm_weight = operands_of(3, 64, dtype, comm.rank)[0], operands_of(1, 256, dtype)[1]
        weight = operands_of(256, 64, dtype, comm.rank)[0]
        residual = operands_of(3, 256, dtype)[0]
        assert comm.accepts_linear_all_reduce_add_rms_norm(x, weight, norm_weight)
        y = comm.linear(x, weight)
        for quantize in (None, "dynamic", "group"):
            found = comm.linear_all_reduce_add_rms_norm(x, weight, residual, norm_weight, EPS, quantize=quantize)
            wanted = comm.all_reduce_add_rms_norm(y, residual, norm_weight, EPS, quantize=quantize)
            for one, other in zip(found, wanted, strict=True):
                assert_bitwise_equal(one.float(), other.float(), f"layer and norm, {quantize}")
        plan = comm.plan_all_reduce_add_rms_norm(y, norm_weight)
        assert (plan.operation, plan.algorithm, plan.row) == ("all_reduce_add_rms_norm", "2PH", 256)
        assert "all_reduce_add_rms_norm by one_shot (LL) in the node" in plan.reason
        assert comm.all_reduce_add_rms_norm(y[:0], None, norm_weight, EPS)[0].shape == (0, 256)


def test_a_layer_and_the_norm_behind_it(ranks: RankPool) -> None:
    ranks.run(4, norm_behind_a_layer)


# ---- What else a communicator does ---------------------------------------------------------------------------------


def use_all_of_it() -> None:
    with make(TWO_BY_TWO) as comm:
        assert (comm.rank, comm.world_size) == (dist.get_rank(), 4)
        inputs = contributions(4, 4096, torch.bfloat16)
        x, expected = inputs[comm.rank], sum_over_nodes(inputs, TWO_BY_TWO)
        plan = comm.plan(x)
        assert (plan.operation, plan.algorithm, plan.message_bytes) == ("all_reduce", "2PH", 8192)
        assert plan.reason.startswith("2 nodes of 2: reduce_scatter by ")
        assert "all-gather between the nodes by gloo (emulated), all_gather by " in plan.reason
        result = comm.try_all_reduce(x)
        assert result is not None
        assert_bitwise_equal(result, expected, "try_all_reduce")
        as_array = comm.all_reduce(inputs[comm.rank].float().numpy())
        assert isinstance(as_array, np.ndarray)
        # As compiled graphs call it.
        assert_bitwise_equal(torch.ops.llm_comm.all_reduce(x, comm.name), expected, "operator")
        gathered = torch.ops.llm_comm.all_gather(x, 0, None, comm.rank, 4, comm.name)
        assert torch.equal(gathered, torch.cat(inputs))
        weight = torch.randn(64, 64).to(torch.bfloat16)
        y = torch.nn.functional.linear(x[:64].view(1, 64), weight)
        assert comm.accepts_linear_all_reduce(x[:64].view(1, 64), weight)
        with_layer = comm.linear_all_reduce(x[:64].view(1, 64), weight)
        torch.testing.assert_close(with_layer, comm.all_reduce(y), atol=0.5, rtol=0.05)
        for empty in (x[:0], x[:0].view(0, 8)):
            assert comm.all_reduce(empty).shape == empty.shape
        assert comm.all_gather(x[:0]).numel() == 0
        comm.check()


def test_a_communicator_over_nodes_does_what_others_do(ranks: RankPool) -> None:
    ranks.run(4, use_all_of_it)


def ask_for_what_is_of_one_node() -> None:
    with make(TWO_BY_TWO, max_message_bytes=1 << 20) as comm:
        x = torch.ones(2, 64, dtype=torch.bfloat16)
        why = "works only within a node"
        calls: list[Any] = [
            lambda: comm.empty(8),
            comm.channels,
            lambda: comm.run("anything", {"x": x}),
            lambda: compile_program(two_shot_ll, comm, dtype=x.dtype, max_bytes=1024),
        ]
        for call in calls:
            with pytest.raises(UnsupportedInputError, match=why):
                call()
        # As within a node: what is too large, or of another type, is declined on all ranks alike.
        large = torch.ones((1 << 19) + 8, dtype=torch.bfloat16)
        assert not comm.accepts(large)
        assert comm.try_all_reduce(large) is None
        assert "max_message_bytes=1048576" in comm.plan(large).reason
        assert comm.accepts(large[: 1 << 19])
        assert not comm.accepts_all_gather(large)
        assert not comm.accepts_reduce_scatter(large.repeat(4))
        assert not comm.accepts(x.to(torch.int32))
        assert comm.all_reduce(x).eq(4).all()


def test_what_works_only_within_a_node_is_declined_with_the_reason(ranks: RankPool) -> None:
    ranks.run(4, ask_for_what_is_of_one_node)


def ask_nodes_of_one_rank_for_norms() -> None:
    with make(Layout(2, 1)) as comm:
        x, weight = torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
        why = "the norm is the last phase in a node, and nodes of one rank have none"
        assert not comm.accepts_all_reduce_add_rms_norm(x, weight)
        assert comm.plan_all_reduce_add_rms_norm(x, weight).reason == why
        assert not comm.accepts_linear_all_reduce_add_rms_norm(x, torch.ones(64, 64, dtype=torch.bfloat16), weight)
        with pytest.raises(UnsupportedInputError, match=why):
            comm.all_reduce_add_rms_norm(x, None, weight, EPS)
        assert {declined.reason for declined in comm.stats().declined} == {why}


def test_nodes_of_one_rank_decline_norms(ranks: RankPool) -> None:
    ranks.run(2, ask_nodes_of_one_rank_for_norms)


# ---- Set-up --------------------------------------------------------------------------------------------------------


def set_up_with(names: list[str | None], options: dict[int, dict[str, Any]]) -> str:
    rank = dist.get_rank()
    return error_of_setup(node=names[rank], **options.get(rank, {}))


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (["a", "a", "b"], {}, "RendezvousError: the ranks are on 2 nodes, and not as many on each: rank 0: "),
        (
            ["a", "b", None],
            {},
            "RendezvousError: option node is given on some ranks (rank 0: 'a', rank 1: 'b'), but not",
        ),
        (
            ["a", "b", "c"],
            {2: {"algorithm": "two_shot"}},
            "RendezvousError: the ranks have different options: algorithm is 'two_shot' on rank 2, 'auto' on ",
        ),
        (["a", "b", "c"], {r: {"dsl": "a:b"} for r in range(3)}, "ConfigError: option dsl is 'a:b' (Python): programs"),
    ],
    ids=["uneven", "a name that is missing", "another option", "programs"],
)
def test_ranks_that_do_not_fit_are_told_alike(
    ranks: RankPool, names: list[str | None], options: dict[int, dict[str, Any]], words: str
) -> None:
    texts = ranks.run(3, set_up_with, names, options)
    assert len(set(texts)) == 1
    assert texts[0].startswith(words)


def fail_on_one_rank(where: str) -> str:
    """What all ranks are told if a step fails on rank 3; the group can be used afterwards."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("no such luck")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 3:
            patch.setattr(where, fail)
        try:
            make(TWO_BY_TWO, timeout_s=6.0).close()
        except llm_comm.LlmCommError as error:
            said = f"{type(error).__name__}: {error}"
        else:
            raise AssertionError("a communicator was made")
    gc.collect()
    with make(TWO_BY_TWO) as comm:
        assert comm.all_reduce(torch.ones(5)).eq(4).all()
    return said


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (
            "llm_comm._core.make_emulated_core",
            "set-up of the device failed on 1 of 4 ranks: rank 3: OSError: no such luck",
        ),
        ("llm_comm.nodes.group._connect_partners", "connection between the nodes failed on "),
        ("llm_comm.nodes.group._try", "first exchange between the nodes failed on "),
        ("llm_comm.nodes.group.store_of", "store of the nodes failed on 1 of 4 ranks: rank 3: OSError: no such luck"),
    ],
    ids=["core", "connection", "exchange", "store"],
)
def test_a_step_that_fails_on_one_node_fails_on_all(ranks: RankPool, where: str, words: str) -> None:
    texts = [unnamed(text) for text in ranks.run(4, fail_on_one_rank, where)]
    assert len(set(texts)) == 1
    assert words in texts[0]
    assert texts[0].endswith("rank 3: OSError: no such luck")


def make_several() -> None:
    with make(TWO_BY_TWO):
        pass  # whatever torch keeps of the first groups
    with nothing_leaked():
        for _ in range(2):
            with make(TWO_BY_TWO) as first, make(TWO_BY_TWO) as second:
                for comm in (first, second, first):
                    assert comm.all_reduce(torch.ones(100)).eq(4).all()


def use_after_close() -> None:
    comm = make(TWO_BY_TWO)
    x = torch.ones(100)
    comm.all_reduce(x)
    comm.close()
    comm.close()
    for call in (comm.all_reduce, comm.all_gather, comm.reduce_scatter):
        with pytest.raises(RuntimeError, match="this communicator is closed"):
            call(x)
    assert comm.stats().by_operation()["all_reduce"].calls == 1


def test_a_closed_communicator_says_so(ranks: RankPool) -> None:
    ranks.run(4, use_after_close)


def drop_several() -> None:
    with make(TWO_BY_TWO):
        pass
    with nothing_leaked():
        for _ in range(2):
            comm = make(TWO_BY_TWO)
            assert comm.all_reduce(torch.ones(100)).eq(4).all()
            dist.barrier()  # for the others it may be gone as soon as for this rank
            del comm
            gc.collect()
        for thread in threading.enumerate():
            if "llm_comm" in thread.name:
                thread.join(10)
                assert not thread.is_alive()


def test_communicators_that_are_dropped_leave_nothing_behind(ranks: RankPool) -> None:
    ranks.run(4, drop_several)


def test_communicators_leave_nothing_behind(ranks: RankPool) -> None:
    ranks.run(4, make_several)
