"""All-gathers and reduce-scatters of SGLang by llm_comm: run by ``test_sglang_gather.py``, as ``scenarios.py`` is by
its test.

SGLang's own way needs NCCL; ``Nccl`` of ``nccl_stand_in.py`` takes its place in the group that a scenario looks at.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import scenarios
import torch
import torch.distributed as dist
from nccl_stand_in import Nccl, bits, served
from rank_processes import Log, data, dist_rank, expected_sum, scenario, serve, use_config_file
from scenarios import GroupCoordinator, ours, parallel_state, sglang_groups, start_error
from sglang.srt.layers import dp_attention
from sglang.srt.plugins.hook_registry import HookRegistry

GroupCoordinator.all_gather = scenarios._without_the_question_for_cpu_tensors(GroupCoordinator.all_gather)

KINDS = (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
_SOURCES = Path(parallel_state.__file__).parents[1]

# ---- What is served: bit for bit what SGLang would have made --------------------------------------------------------


@scenario(smoke=True)
def gathers_are_those_of_sglang() -> None:
    check_gathers()


@scenario(world=3)
def gathers_of_three_ranks_are_those_of_sglang() -> None:
    check_gathers()


def check_gathers() -> None:
    with group() as tp:
        for dtype in KINDS:
            for shape, dim in (((4, 8), 0), ((4, 8), -1), ((3, 5), 1), ((2, 3, 4), 1), ((7,), 0)):
                x = data(shape).abs().to(dtype)
                before = x.clone()
                result, theirs = tp.coordinator.all_gather(x, dim), tp.theirs("all_gather", x, dim)
                assert bits(result) == bits(theirs), (dtype, shape, dim)
                assert bits(x) == bits(before), "the input was changed"
            x = data((4, 8)).abs().to(dtype)
            for out_shape in ((tp.world * 4, 8), (tp.world, 4, 8)):  # the latter for logits
                out, theirs = torch.empty(out_shape, dtype=dtype), torch.empty(out_shape, dtype=dtype)
                tp.coordinator.all_gather_into_tensor(out, x)
                tp.theirs("all_gather_into_tensor", theirs, x)
                assert bits(out) == bits(theirs), (dtype, out_shape)
        assert len(tp.served) == 7 * len(KINDS)
        assert not tp.nccl_of_ours


@scenario(smoke=True)
def scatters_are_the_one_sum() -> None:
    check_scatters()


@scenario(world=3)
def scatters_of_three_ranks_are_the_one_sum() -> None:
    check_scatters()


def check_scatters() -> None:
    with group() as tp:
        for shape in ((tp.world * 4, 8), (tp.world, 3, 5), (2, tp.world)):  # the last: NCCL counts elements
            exact = data(shape)
            out, theirs = (exact.new_empty(exact.numel() // tp.world) for _ in range(2))
            tp.coordinator.reduce_scatter_tensor(out, exact)
            tp.theirs("reduce_scatter_tensor", theirs, exact.reshape(-1))
            assert bits(out) == bits(theirs), shape
            # Sums that depend on their order.
            x = torch.randn(shape, generator=torch.Generator().manual_seed(tp.rank)).to(torch.bfloat16)
            part = tp.coordinator.all_reduce(x.clone()).reshape(-1).chunk(tp.world)[tp.rank]
            tp.coordinator.reduce_scatter_tensor(out, x)
            assert bits(out) == bits(part), shape
        along = tp.coordinator.reduce_scatter_along_dim(data((5, tp.world * 2)), 1)
        everyone = tuple(range(tp.world))
        assert torch.equal(along, expected_sum((5, tp.world * 2), everyone).chunk(tp.world, 1)[tp.rank])
        assert len(tp.served) == 7
        assert not tp.nccl_of_ours


@scenario(world=3)
def parts_of_any_sizes_and_lists_of_tensors() -> None:
    with group() as tp:
        for sizes in ([2, 2, 2], [1, 4, 3], [5, 0, 1], [0, 0, 2]):
            hidden, ids = data((sizes[tp.rank], 16)), data((sizes[tp.rank], 3)).to(torch.int64)
            gathered = tp.coordinator.all_gatherv([hidden, ids], sizes)
            theirs = tp.theirs("all_gatherv", [hidden, ids], sizes)
            assert [bits(x) for x in gathered] == [bits(x) for x in theirs], sizes
            out = torch.empty(sum(sizes), 16, dtype=torch.bfloat16)
            (alone,) = tp.coordinator.all_gatherv(hidden, sizes=sizes, output=out)
            assert alone is out
            assert bits(out) == bits(theirs[0])
            whole = data((sum(sizes), 16))
            part = tp.coordinator.reduce_scatterv(whole, sizes=sizes)
            assert bits(part) == bits(tp.theirs("reduce_scatterv", whole, None, sizes)), sizes
            given = torch.empty_like(part)
            assert tp.coordinator.reduce_scatterv(whole, output=given, sizes=sizes) is given
            assert bits(given) == bits(part)
        assert not tp.nccl_of_ours


@scenario(world=3)
def outputs_decide_nothing() -> None:
    """Ranks may differ in their layout: the part of one row is contiguous whatever its strides."""
    with group() as tp:
        sizes = [1, 3, 2]
        out = torch.zeros(sizes[tp.rank], 16).to(torch.bfloat16)[:, ::2]
        tp.coordinator.reduce_scatterv(data((6, 8)), output=out, sizes=sizes)
        assert torch.equal(out, expected_sum((6, 8), (0, 1, 2)).split(sizes)[tp.rank])
        # An output that begins in the middle of the input, as llm_comm alone would not have it.
        memory = torch.zeros(9, 8).to(torch.bfloat16)
        memory[:6] = data((6, 8))
        tp.coordinator.reduce_scatter_tensor(memory[5:7], memory[:6])
        assert torch.equal(memory[5:7], expected_sum((6, 8), (0, 1, 2)).chunk(3)[tp.rank])
        assert len(tp.served) == 2


@scenario(smoke=True)
def compiled_calls_reach_llm_comm() -> None:
    with group() as tp:
        coordinator = tp.coordinator

        def layer(x: torch.Tensor) -> torch.Tensor:
            whole = x.new_empty(2 * x.shape[0], x.shape[1])
            coordinator.all_gather_into_tensor(whole, x * 2)
            wide = coordinator.all_gather(whole + 1, dim=-1)
            part = wide.new_empty(wide.shape[0] // 2, wide.shape[1])
            coordinator.reduce_scatter_tensor(part, wide)
            return part

        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (4, 7):
            assert torch.equal(compiled(data((rows, 64))), layer(data((rows, 64))))
        methods = ["all_gather_into_tensor", "all_gather", "reduce_scatter_tensor"]
        assert [method for method, _ in tp.served] == methods * 4


@scenario()
def logits_are_gathered_by_llm_comm() -> None:
    from sglang.srt.distributed import communication_op

    with group() as tp:
        gathered = communication_op.tensor_model_parallel_all_gather(data((5, 24)), dim=-1)
        assert torch.equal(gathered, torch.cat([data((5, 24), rank) for rank in (0, 1)], -1))
        assert tp.served == [("all_gather", (5, 24))]
    # That is what they call, where SGLang's own kernel for NVLink multicast does not take them.
    gatherer = (_SOURCES / "distributed/device_communicators/triton_symm_mem_ag.py").read_text()
    assert "return tensor_model_parallel_all_gather(x, dim=-1)" in gatherer
    processor = (_SOURCES / "layers/logits_processor.py").read_text()
    assert re.search(r"logits = self\._logits_gatherer\(logits\)", processor)
    assert "attn_tp_all_gather_into_tensor(" in processor


# ---- Attention data parallelism and context parallelism -------------------------------------------------------------


@scenario()
def tokens_of_attention_replicas_of_one_rank_are_exchanged() -> None:
    with group(attn_dp=2) as tp, replicas(attn_tp=1):
        whole, local = torch.empty(8, 16, dtype=torch.bfloat16), data((4, 16))
        dp_attention._dp_gather_via_all_gather(whole, local, None, is_partial=True)
        assert torch.equal(whole, torch.cat([data((4, 16), rank) for rank in (0, 1)]))
        mine = torch.empty_like(local)
        dp_attention.dp_reduce_scatter_tensor(mine, data((8, 16)))
        assert torch.equal(mine, expected_sum((8, 16)).chunk(2)[tp.rank])
        assert [method for method, _ in tp.served] == ["all_gather_into_tensor", "reduce_scatter_tensor"]
        assert not tp.nccl_of_ours


@scenario(world=4)
def tokens_of_attention_replicas_of_two_ranks_are_exchanged() -> None:
    with group(attn_dp=2) as tp, replicas(attn_tp=2):
        attention = Group("attn_tp", tp.log)
        whole, local = torch.empty(8, 16, dtype=torch.bfloat16), data((4, 16))
        dp_attention._dp_gather_via_all_gather(whole, local, None, is_partial=True)
        sums = [expected_sum((4, 16), ranks) for ranks in ((0, 1), (2, 3))]
        assert torch.equal(whole, torch.cat(sums))
        assert [m for m, _ in attention.served + tp.served] == ["reduce_scatter_tensor", "all_gather_into_tensor"]
        mine = torch.empty_like(local)
        dp_attention.dp_reduce_scatter_tensor(mine, data((8, 16)))
        assert torch.equal(mine, expected_sum((8, 16), (0, 1, 2, 3)).chunk(2)[tp.rank // 2])
        assert tp.served[-1] == ("reduce_scatter_tensor", (8 * 16,))
        assert attention.served[-1] == ("all_gather_into_tensor", (2, 16))
        assert not tp.nccl_of_ours + attention.nccl_of_ours


@scenario(world=4)
def context_parallel_groups_gather_by_llm_comm() -> None:
    with group("attn_cp", attn_cp=2) as cp:
        assert cp.coordinator.world_size == 2
        rank = dist.get_rank()
        mates = (rank % 2, rank % 2 + 2)
        out = torch.empty(6, 4, dtype=torch.bfloat16)
        dp_attention.attn_cp_all_gather_into_tensor(out, data((3, 4)))
        assert torch.equal(out, torch.cat([data((3, 4), mate) for mate in mates]))
        assert cp.served == [("all_gather_into_tensor", (3, 4))]
        assert type(cp.coordinator.ca_comm).__name__ != "LlmCommAllReduce"  # it sums nothing
        communicator = cp.coordinator.llm_comm_gather_scatter._member.communicator
    said = ":0 (2 ranks, emulated GPUs): all-gather and reduce-scatter to 64 MiB, then SGLang's own (emulated)"
    assert len(cp.log.having("is active for group attn_cp" + said)) == (dist_rank() == 0)
    assert not communicator._handle.is_open


# ---- What is declined or switched off goes the way of SGLang --------------------------------------------------------


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="1024")
def what_llm_comm_declines_goes_the_way_of_sglang() -> None:
    with group() as tp:
        small, large = data((1, 8)), data((40, 64))
        whole = torch.cat([data((40, 64), rank) for rank in (0, 1)])
        assert torch.equal(tp.coordinator.all_gather(large, 0), whole)
        out = torch.empty_like(whole)
        tp.coordinator.all_gather_into_tensor(out, large)
        assert torch.equal(out, whole)
        part = torch.empty(20, 64, dtype=torch.bfloat16)
        tp.coordinator.reduce_scatter_tensor(part, large)
        assert torch.equal(part, expected_sum((40, 64)).chunk(2)[tp.rank])
        assert torch.equal(
            tp.coordinator.reduce_scatterv(large, sizes=[10, 30]), expected_sum((40, 64)).split([10, 30])[tp.rank]
        )
        integers = torch.arange(8).reshape(4, 2)
        assert torch.equal(tp.coordinator.reduce_scatterv(integers), integers.chunk(2)[tp.rank] * 2)
        assert torch.equal(tp.coordinator.all_gatherv(large, output=out)[0], whole)
        assert not tp.served
        # Of a list, some: the rest goes to NCCL together.
        del tp.nccl.calls[:]
        gathered = tp.coordinator.all_gatherv([large, small, large])
        assert [len(x) for x in gathered] == [80, 2, 80]
        assert torch.equal(gathered[1], torch.cat([data((1, 8), rank) for rank in (0, 1)]))
        assert torch.equal(gathered[2], whole)
        assert (tp.served, tp.nccl.calls) == ([("all_gatherv", (1, 8))], ["group", "all_gather", "all_gather"])


@scenario(LLM_COMM_ALL_GATHER="0")
def all_gather_can_be_switched_off_alone() -> None:
    with group() as tp:
        exchange_once(tp)
        assert [method for method, _ in tp.served] == ["reduce_scatter_tensor", "reduce_scatterv"]
    said = "reduce-scatter to 64 MiB; all_gather is false (LLM_COMM_ALL_GATHER)"
    assert len(tp.log.having(said)) == (dist_rank() == 0)


@scenario(LLM_COMM_REDUCE_SCATTER="0")
def reduce_scatter_can_be_switched_off_alone() -> None:
    with group() as tp:
        exchange_once(tp)
        assert [method for method, _ in tp.served] == ["all_gather", "all_gather_into_tensor", "all_gatherv"]


@scenario(world=4, LLM_COMM_ALL_GATHER="0", LLM_COMM_REDUCE_SCATTER="0")
def with_both_off_groups_that_do_nothing_else_are_left_alone() -> None:
    with sglang_groups(tp=4, attn_cp=2) as log:
        assert type(scenarios.group("attn_cp").ca_comm).__name__ != "LlmCommAllReduce"
        assert not hasattr(scenarios.group("attn_cp"), "llm_comm_gather_scatter")
        assert not hasattr(scenarios.group("tp"), "llm_comm_gather_scatter")
        # With that of "attention_tp", which sums, all that there is by default.
        assert ours("tp")._llm_comm.workspace_bytes == 32 << 20
        assert not [target for target in HookRegistry._patched if "gather" in target or "scatter" in target]
    said = "and group attn_cp:0 does nothing else"
    assert len(log.having(said)) == (dist_rank() == 0)


@scenario(LLM_COMM_ENABLE="0")
def llm_comm_enable_0_leaves_gathers_to_sglang() -> None:
    with sglang_groups():
        assert not hasattr(scenarios.group("tp"), "llm_comm_gather_scatter")
        assert not hasattr(GroupCoordinator.all_gather, "__wrapped__")


@scenario()
def a_switch_that_only_one_rank_has_switches_all_off() -> None:
    if dist_rank() == 1:
        use_config_file("reduce_scatter: false")
    with sglang_groups() as log:
        coordinator = scenarios.group("tp")
        assert not hasattr(coordinator, "llm_comm_gather_scatter")
        coordinator.pynccl_comm = nccl = Nccl(coordinator.cpu_group)
        assert torch.equal(coordinator.all_gather(data((1, 4)), 0), torch.cat([data((1, 4), r) for r in (0, 1)]))
        assert nccl.calls == ["all_gather"]
        (warning,) = log.having("is not active for group tp:0")
        assert "the ranks of group tp:0 have different options: reduce_scatter is True on rank 0 (" in warning, warning


@scenario()
def a_wrong_switch_of_one_rank_stops_sglang_on_every_rank() -> None:
    if dist_rank() == 1:
        os.environ["LLM_COMM_ALL_GATHER"] = "sometimes"
    error = start_error()
    assert "rank 1 (global rank 1): LLM_COMM_ALL_GATHER='sometimes' is not allowed; valid: true or false" in error, (
        error
    )


@scenario()
def one_rank_that_cannot_be_hooked_takes_the_others_along() -> None:
    if dist_rank() == 1:
        mock.patch.object(HookRegistry, "_apply_target", side_effect=failing_for("all_gatherv")).start()
    with sglang_groups() as log:
        assert not hasattr(scenarios.group("tp"), "llm_comm_gather_scatter")
        assert torch.equal(scenarios.group("tp").all_reduce(data((4, 4))), expected_sum((4, 4)))
        said = "; but SGLang gathers and scatters itself: rank 1 (global rank 1): it cannot be set up in SGLang "
        assert len(log.having(said)) == (dist_rank() == 0)


@scenario()
def the_log_tells_of_the_first_call_of_each_kind() -> None:
    with group() as tp:
        for _ in range(2):
            exchange_once(tp)
            tp.coordinator.all_gatherv(data((1 + tp.rank, 4)), [1, 2])
    for said in (
        "llm_comm: first all_gather of group tp:0 (2 ranks, shape (2, 4))",
        "llm_comm: first all_gather_into_tensor of group tp:0 (2 ranks, shape (2, 4))",
        "llm_comm: first all_gatherv of group tp:0 (2 ranks, shape (2, 4))",
        "llm_comm: first all_gatherv of group tp:0 (2 ranks, shape (1, 4), sizes [1, 2])",
        "llm_comm: first reduce_scatter_tensor of group tp:0 (2 ranks, shape (16,))",
        "llm_comm: first reduce_scatterv of group tp:0 (2 ranks, shape (4, 4))",
    ):
        assert len(tp.log.having(said)) == (dist_rank() == 0), said
    assert len(tp.log.having("llm_comm: first ")) == 6 * (dist_rank() == 0)


@scenario()
def a_list_of_outputs_is_left_to_sglang() -> None:
    with group() as tp:
        outputs = [torch.empty(2, 4) for _ in range(2)]
        tp.coordinator.all_gather(data((2, 4)).float(), output_tensor_list=outputs)
        assert torch.equal(outputs[1], data((2, 4), 1).float())
        assert not tp.served


@scenario(SGLANG_ENABLE_DETERMINISTIC_INFERENCE="1", LLM_COMM_DETERMINISTIC="1")
def deterministic_mode_scatters_the_one_sum_at_all_sizes() -> None:
    parallel_state.set_custom_all_reduce(False)  # as the mode does
    with group() as tp:
        x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(tp.rank)).to(torch.bfloat16)
        part = tp.coordinator.all_reduce(x.clone()).split([1024, 3072])[tp.rank]
        assert bits(tp.coordinator.reduce_scatterv(x, sizes=[1024, 3072])) == bits(part)
        assert tp.served == [("reduce_scatterv", (4096, 64))]


# ---- What they are made of ------------------------------------------------------------------------------------------


class Group:
    """One of SGLang's groups, with a stand-in for its NCCL."""

    def __init__(self, name: str, log: Log) -> None:
        self.log = log
        self.coordinator = scenarios.group(name)
        self.rank, self.world = self.coordinator.rank_in_group, self.coordinator.world_size
        self.coordinator.pynccl_comm = self.nccl = Nccl(self.coordinator.cpu_group)
        self.served = served(self.coordinator.llm_comm_gather_scatter)
        self._calls_of_theirs = 0

    def theirs(self, method: str, *arguments: Any) -> Any:
        """What SGLang alone makes of a call."""
        before = len(self.nccl.calls)
        with mock.patch.object(self.coordinator, "llm_comm_gather_scatter", None):
            result = getattr(self.coordinator, method)(*arguments)
        assert len(self.nccl.calls) > before, "SGLang's own way has changed"
        self._calls_of_theirs += len(self.nccl.calls) - before
        return result

    @property
    def nccl_of_ours(self) -> int:
        """How often NCCL was called otherwise."""
        return len(self.nccl.calls) - self._calls_of_theirs


@contextlib.contextmanager
def group(name: str = "tp", **sizes: int) -> Iterator[Group]:
    """A group that llm_comm serves, of all ranks if not said otherwise."""
    with sglang_groups(tp=int(os.environ["WORLD_SIZE"]), **sizes) as log:
        yield Group(name, log)


@contextlib.contextmanager
def replicas(attn_tp: int) -> Iterator[None]:
    """What SGLang's attention data parallelism asks of its server, which is not there."""
    tp, rank = scenarios.group("tp"), dist.get_rank()
    sizes = {"tp_size": tp.world_size, "tp_rank": rank, "attn_tp_size": attn_tp, "attn_tp_rank": rank % attn_tp}
    groups = {"tp_group": tp, "attn_tp_group": scenarios.group("attn_tp")}
    parallel = SimpleNamespace(**sizes, **groups, attn_dp_size=tp.world_size // attn_tp, attn_cp_size=1)
    answers = {  # of 0.5.17; 0.5.23 asks ``get_parallel``
        "get_tensor_model_parallel_world_size": parallel.tp_size,
        "get_tensor_model_parallel_rank": rank,
        "get_attn_tensor_model_parallel_world_size": attn_tp,
        "get_attn_tensor_model_parallel_rank": parallel.attn_tp_rank,
        "get_attention_dp_size": parallel.attn_dp_size,
        "get_tp_group": tp,
        "get_attn_tp_group": parallel.attn_tp_group,
        "get_parallel": parallel,
        "world_dp_gather_enabled": False,
        "is_dp_gatherv_active": False,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            if hasattr(dp_attention, name):
                stack.enter_context(mock.patch.object(dp_attention, name, return_value=answer))
        yield


def exchange_once(tp: Group) -> None:
    """All five operations, each right whoever serves it."""
    whole = torch.cat([data((2, 4), rank) for rank in (0, 1)])
    assert torch.equal(tp.coordinator.all_gather(data((2, 4)), 0), whole)
    out = torch.empty_like(whole)
    tp.coordinator.all_gather_into_tensor(out, data((2, 4)))
    assert torch.equal(out, whole)
    assert torch.equal(tp.coordinator.all_gatherv(data((2, 4)), [2, 2])[0], whole)
    mine = expected_sum((4, 4)).chunk(2)[tp.rank]
    part = torch.empty_like(mine)
    tp.coordinator.reduce_scatter_tensor(part, data((4, 4)))
    assert torch.equal(part, mine)
    assert torch.equal(tp.coordinator.reduce_scatterv(data((4, 4)), sizes=[2, 2]), mine)


def failing_for(name: str) -> Any:
    original = HookRegistry._apply_target

    def apply(target: str, hooks: Any) -> None:
        if target.endswith(f".{name}"):
            raise AttributeError(name)
        original(target, hooks)

    return apply


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # as SGLang does
    serve(globals(), "sglang_scheduler_{}")
