"""All-gathers and reduce-scatters of vLLM by llm_comm: run by ``test_vllm_gather.py``, as ``scenarios.py`` is by its
test.

vLLM's own way needs NCCL; ``Nccl`` of ``nccl_stand_in.py`` takes its place in the group that a scenario looks at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import scenarios
import torch
import torch.distributed as dist
from nccl_stand_in import Nccl, bits, served
from rank_processes import data, dist_rank, expected_sum, scenario
from scenarios import CudaCommunicator, Log, parallel_state, start_error, vllm_groups
from vllm.config import VllmConfig
from vllm.distributed.communication_op import tensor_model_parallel_all_gather, tensor_model_parallel_reduce_scatter
from vllm.distributed.device_communicators import all2all

from llm_comm.bench.wire_reference import quantized_all_reduce

KINDS = (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
#: vLLM 0.33 asks for a custom collective first, where a model splits its sequence.
ASKS_FOR_CUSTOM = hasattr(CudaCommunicator, "custom_all_gather")


# ---- What is served: bit for bit what vLLM would have made ----------------------------------------------------------


@scenario(smoke=True)
def gathers_are_those_of_vllm() -> None:
    check_gathers()


@scenario(world=3)
def gathers_of_three_ranks_are_those_of_vllm() -> None:
    check_gathers()


def check_gathers() -> None:
    with group() as tp:
        for dtype in KINDS:
            for shape, dim in (((4, 8), 0), ((4, 8), -1), ((3, 5), 1), ((2, 3, 4), 1), ((2, 3, 4), -1), ((7,), 0)):
                x = data(shape).abs().to(dtype)
                before = x.clone()
                result, theirs = tp.coordinator.all_gather(x, dim), tp.theirs("all_gather", x, dim)
                assert bits(result) == bits(theirs), (dtype, shape, dim)
                assert bits(x) == bits(before), "the input was changed"
        with_gaps = data((8, 6)).t()
        assert bits(tp.coordinator.all_gather(with_gaps, 0)) == bits(tp.theirs("all_gather", with_gaps, 0))
        assert len(tp.served) == 6 * len(KINDS) + 1
        assert not tp.nccl_of_ours


@scenario(smoke=True)
def scatters_are_the_one_sum() -> None:
    check_scatters()


@scenario(world=3)
def scatters_of_three_ranks_are_the_one_sum() -> None:
    check_scatters()


def check_scatters() -> None:
    with group() as tp:
        world, rank = tp.nccl.world_size, tp.nccl.rank
        for shape, dim in (((world * 4, 8), 0), ((5, world * 8), 1), ((5, world * 8), -1), ((2, world, 3), 1)):
            exact = data(shape)
            result = tp.coordinator.reduce_scatter(exact, dim)
            assert bits(result) == bits(tp.theirs("reduce_scatter", exact, dim)), (shape, dim)
            # Sums that depend on their order.
            x = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)
            part = tp.coordinator.all_reduce(x).chunk(world, dim)[rank].contiguous()
            assert bits(tp.coordinator.reduce_scatter(x, dim)) == bits(part), (shape, dim)
        assert len(tp.served) == 8
        assert not tp.nccl_of_ours


@scenario(world=3)
def parts_of_any_sizes_and_lists_of_tensors() -> None:
    with group() as tp:
        rank = dist.get_rank()
        for sizes in ([2, 2, 2], [1, 4, 3], [5, 0, 1], [0, 0, 2]):
            hidden, ids = data((sizes[rank], 16)), data((sizes[rank], 3)).to(torch.int64)
            gathered = tp.coordinator.all_gatherv([hidden, ids], dim=0, sizes=sizes)
            theirs = tp.theirs("all_gatherv", [hidden, ids], 0, sizes)
            assert [bits(x) for x in gathered] == [bits(x) for x in theirs], sizes
            alone = tp.coordinator.all_gatherv(hidden, 0, sizes)
            assert bits(alone) == bits(theirs[0])
            whole = data((sum(sizes), 16))
            part = tp.coordinator.reduce_scatterv(whole, 0, sizes)
            assert bits(part) == bits(tp.theirs("reduce_scatterv", whole, 0, sizes)), sizes
            out = torch.empty_like(part)
            assert tp.communicator.reduce_scatterv_into_output(whole, out, 0, sizes) is out
            assert bits(out) == bits(part)
        assert bits(tp.coordinator.all_gatherv(data((2, 4)))) == bits(tp.theirs("all_gatherv", data((2, 4))))
        assert not tp.nccl_of_ours


@scenario(world=3)
def layouts_that_differ_between_ranks_part_nobody() -> None:
    """One row is contiguous whatever its strides; more rows of the same slice are not."""
    with group() as tp:
        sizes = [1, 3, 2]
        sliced = data((sizes[dist.get_rank()], 8))[:, :4]
        gathered = tp.coordinator.all_gatherv(sliced, 0, sizes)
        assert torch.equal(gathered, torch.cat([data((size, 8), rank)[:, :4] for rank, size in enumerate(sizes)]))
        whole = data((6, 8))
        out = torch.zeros(sizes[dist.get_rank()], 16).to(torch.bfloat16)[:, ::2]
        tp.communicator.reduce_scatterv_into_output(whole, out, 0, sizes)
        assert torch.equal(out, expected_sum((6, 8), (0, 1, 2)).split(sizes)[dist.get_rank()])
        assert len(tp.served) == 2


@scenario(smoke=True)
def compiled_calls_reach_llm_comm() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return tensor_model_parallel_reduce_scatter(tensor_model_parallel_all_gather(x * 2, 0) + 1, 0)

    with group() as tp:
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (4, 7):
            assert torch.equal(compiled(data((rows, 64))), (data((rows, 64)) * 2 + 1) * 2)
        assert tp.served == [
            (m, s) for n in (4, 7) for m, s in (("all_gather", (n, 64)), ("reduce_scatter", (2 * n, 64)))
        ]


@scenario()
def logits_are_gathered_by_llm_comm() -> None:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    with group() as tp:
        logits = data((5, 24)).float()
        gathered = LogitsProcessor._gather_logits(SimpleNamespace(use_all_gather=True), logits)
        assert torch.equal(gathered, torch.cat([data((5, 24), rank).float() for rank in (0, 1)], -1))
        assert tp.served == [("all_gather", (5, 24))]
        assert scenarios.current_platform.use_all_gather()


@scenario(applies=ASKS_FOR_CUSTOM)
def models_that_split_their_sequence_ask_llm_comm_first() -> None:
    from vllm.models.common.ops.sequence_parallel import sp_all_gather, sp_reduce_scatter

    def layer(x: torch.Tensor) -> torch.Tensor:
        return sp_reduce_scatter(sp_all_gather(x * 2) + 1)

    with group() as tp:
        expected = (data((4, 64)) * 2 + 1) * 2
        assert torch.equal(layer(data((4, 64))), expected)
        assert [method for method, _ in tp.served] == ["custom_all_gather", "custom_reduce_scatter"]
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(data((4, 64))), expected)
        assert [method for method, _ in tp.served[2:]] == ["all_gather", "reduce_scatter"]


@scenario(applies=ASKS_FOR_CUSTOM, LLM_COMM_ALL_GATHER="0")
def models_that_split_their_sequence_keep_what_vllm_has_where_it_is_off() -> None:
    from vllm.models.common.ops.sequence_parallel import sp_all_gather, sp_reduce_scatter

    with group() as tp:
        tp.communicator.ca_comm = SimpleNamespace(custom_all_gather=lambda x: x * 3, custom_reduce_scatter=None)
        compiled = torch.compile(sp_all_gather, fullgraph=True, backend="aot_eager")
        for gather in (sp_all_gather, compiled):
            assert torch.equal(gather(data((4, 64))), data((4, 64)) * 3)
        assert torch.equal(sp_reduce_scatter(data((4, 8))), expected_sum((4, 8)).chunk(2)[dist.get_rank()])
        assert [method for method, _ in tp.served] == ["custom_reduce_scatter"]


# ---- Experts: tokens go to all ranks and come back ------------------------------------------------------------------


@scenario(smoke=True)
def tokens_of_data_parallel_replicas_are_exchanged_by_llm_comm() -> None:
    with group("dp", tensor_parallel=1, config=replicated(2)) as dp, exchange(dp, [3, 5]) as manager:
        hidden, weights, ids = (data((3 + 2 * dist.get_rank(), n)) for n in (16, 2, 2))
        gathered = manager.dispatch(hidden, weights.float(), ids.to(torch.int64))
        assert [x.shape for x in gathered] == [(8, 16), (8, 2), (8, 2)]
        assert torch.equal(gathered[0], torch.cat([data((3, 16), 0), data((5, 16), 1)]))
        both = manager.dispatch_router_logits(hidden, weights)
        assert torch.equal(both[1], torch.cat([data((3, 2), 0), data((5, 2), 1)]))
        mine = manager.combine(data((8, 16)))
        assert torch.equal(mine, expected_sum((8, 16)).split([3, 5])[dist.get_rank()])
        assert [method for method, _ in dp.served] == ["all_gatherv"] * 5 + ["reduce_scatterv"]
        assert not dp.nccl_of_ours
    said = "is active for group dp:0 (2 ranks, emulated GPUs): all-gather and reduce-scatter to 64 MiB, then vLLM's own"
    assert len(dp.log.having(said)) == (dist_rank() == 0)


@scenario(LLM_COMM_WIRE="fp8", LLM_COMM_WIRE_MIN_BYTES="1K")
def hidden_states_of_tokens_are_quantized_and_nothing_else() -> None:
    sizes = [48, 40]
    with group("dp", tensor_parallel=1, config=replicated(2)) as dp, exchange(dp, sizes) as manager:
        parts = [
            torch.randn(size, 16, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)
            for rank, size in enumerate(sizes)
        ]
        x, whole = parts[dist.get_rank()], torch.cat(parts)
        hidden, logits = manager.dispatch_router_logits(x, x)
        also_hidden, weights, ids = manager.dispatch(x, x, x.view(torch.int16))
        quantized = torch.cat([quantized_all_reduce([part], "e4m3") for part in parts])
        assert bits(hidden) == bits(also_hidden) == bits(quantized) != bits(whole)
        gather = dp.coordinator.all_gatherv
        assert bits(logits) == bits(weights) == bits(ids.view(x.dtype)) == bits(gather(x, 0, sizes)) == bits(whole)
        in_one_row, wide = gather([x.flatten()], 0, [768, 640]), gather([x.float()], 0, sizes)
        assert (bits(in_one_row[0]), bits(wide[0])) == (bits(whole.flatten()), bits(whole.float()))
        assert dp.communicator._llm_comm.stats().bytes_saved > 0
    said = "reduce-scatters and all-gathers that permit it from 1 KiB to 128 MiB are quantized (fp8): lossy; "
    assert len(dp.log.having(said)) == (dist_rank() == 0)


@scenario(world=4)
def tokens_split_over_all_ranks_are_exchanged_in_the_group_of_experts() -> None:
    config = replicated(2)
    config.parallel_config.tensor_parallel_size = 2
    config.parallel_config.enable_expert_parallel = True
    sizes = [2, 1, 4, 3]
    with group("ep", config=config) as ep, exchange(ep, sizes) as manager:
        hidden = data((sizes[dist.get_rank()], 16))
        gathered = manager.dispatch(hidden, hidden, hidden, is_sequence_parallel=True)[0]
        assert torch.equal(gathered, torch.cat([data((size, 16), rank) for rank, size in enumerate(sizes)]))
        mine = manager.combine(data((10, 16)), is_sequence_parallel=True)
        assert torch.equal(mine, expected_sum((10, 16), (0, 1, 2, 3)).split(sizes)[dist.get_rank()])
        assert [method for method, _ in ep.served] == ["all_gatherv"] * 3 + ["reduce_scatterv"]


@scenario(world=4)
def groups_that_gather_nothing_are_not_served() -> None:
    config = replicated(2)
    config.parallel_config.all2all_backend = "deepep_low_latency"
    # Its kernels are not there; groups ask for them when they are made.
    with mock.patch.object(all2all, "DeepEPLLAll2AllManager", mock.Mock()), vllm_groups(2, config=config):
        assert [kind for kind in ("tp", "dcp", "pcp", "pp", "dp", "ep") if parts_of(kind) is not None] == ["tp"]


@scenario(world=4)
def groups_share_the_memory_of_one() -> None:
    assert workspaces_of_three_groups() == {"tp": 32, "dp": 16, "ep": 16}


@scenario(world=4, LLM_COMM_WORKSPACE_BYTES="8M")
def memory_that_an_operator_has_chosen_is_for_each_group() -> None:
    assert workspaces_of_three_groups() == {"tp": 8, "dp": 8, "ep": 8}


@scenario(world=4, LLM_COMM_ALL_GATHER="0", LLM_COMM_REDUCE_SCATTER="0")
def groups_that_are_not_served_have_no_share() -> None:
    assert workspaces_of_three_groups() == {"tp": 64}


def workspaces_of_three_groups() -> dict[str, int]:
    """MiB by group."""
    config = replicated(2)
    config.parallel_config.tensor_parallel_size = 2
    config.parallel_config.enable_expert_parallel = True
    with vllm_groups(2, config=config):
        kinds = ("tp", "dcp", "pcp", "pp", "dp", "ep")
        groups = {kind: getattr(parallel_state, f"get_{kind}_group")().device_communicator for kind in kinds}
        found = {kind: getattr(communicator, "_llm_comm", None) for kind, communicator in groups.items()}
        return {kind: comm.workspace_bytes >> 20 for kind, comm in found.items() if comm is not None}


@scenario(world=4)
def replicas_of_a_dense_model_exchange_nothing() -> None:
    config = replicated(2)
    config.model_config = SimpleNamespace(is_moe=False, architecture="LlamaForCausalLM")
    from llm_comm.integrations.vllm import gathering

    with mock.patch.object(gathering, "get_current_vllm_config_or_none", return_value=config):
        assert not any(gathering.only_gathers(kind) for kind in ("tp", "dp", "ep", "pp"))
        assert gathering.only_gathers("pcp")
        config.model_config.is_moe = True
        assert [kind for kind in ("tp", "dp", "ep", "pp") if gathering.only_gathers(kind)] == ["dp"]


@scenario()
def groups_that_only_gather_sum_as_vllm_does() -> None:
    with group("dp", tensor_parallel=1, config=replicated(2)) as dp:
        calls = scenarios.calls_of(dp.communicator._llm_comm)
        dp.communicator.pynccl_comm = None
        assert torch.equal(dp.coordinator.all_reduce(data((4, 4))), expected_sum((4, 4)))
        assert not calls


# ---- What is declined or switched off goes the way of vLLM ----------------------------------------------------------


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="1024")
def what_llm_comm_declines_goes_the_way_of_vllm() -> None:
    with group() as tp:
        small, large = data((4, 8)), data((40, 64))
        assert torch.equal(tp.coordinator.all_gather(large, 0), torch.cat([data((40, 64), rank) for rank in (0, 1)]))
        assert torch.equal(tp.coordinator.reduce_scatter(large, 0), expected_sum((40, 64)).chunk(2)[dist.get_rank()])
        whole = torch.arange(8).reshape(4, 2)
        assert torch.equal(tp.coordinator.reduce_scatter(whole, 0), whole.chunk(2)[dist.get_rank()] * 2)
        sizes = [40, 40]
        assert torch.equal(tp.coordinator.reduce_scatterv(torch.cat([large] * 2), 0, sizes), expected_sum((40, 64)))
        assert torch.equal(tp.coordinator.all_gatherv(large, 0, sizes)[40:], data((40, 64), 1))
        assert not tp.served
        # Of a list, some: the rest goes to NCCL together.
        del tp.nccl.calls[:]
        gathered = tp.coordinator.all_gatherv([large, small[:1], large], 0, None)
        assert [len(x) for x in gathered] == [80, 2, 80]
        assert torch.equal(gathered[1], torch.cat([data((4, 8), rank)[:1] for rank in (0, 1)]))
        assert torch.equal(gathered[2], gathered[0])
        assert (tp.served, tp.nccl.calls) == ([("all_gatherv", (1, 8))], ["group", "all_gather", "all_gather"])


@scenario(LLM_COMM_ALL_GATHER="0")
def all_gather_can_be_switched_off_alone() -> None:
    with group() as tp:
        exchange_once(tp)
        assert [method for method, _ in tp.served] == ["reduce_scatter", "reduce_scatterv"]
    said = "reduce-scatter to 64 MiB; all_gather is false (LLM_COMM_ALL_GATHER)"
    assert len(tp.log.having(said)) == (dist_rank() == 0)


@scenario()
def reduce_scatter_can_be_switched_off_alone() -> None:
    with group(config=VllmConfig(additional_config={"llm_comm": {"reduce_scatter": False}})) as tp:
        exchange_once(tp)
        assert [method for method, _ in tp.served] == ["all_gather", "all_gatherv"]
    assert len(tp.log.having("all-gather to 64 MiB; reduce_scatter is false (Python)")) == (dist_rank() == 0)


@scenario(world=4, LLM_COMM_ALL_GATHER="0", LLM_COMM_REDUCE_SCATTER="0")
def with_both_off_groups_that_do_nothing_else_are_left_alone() -> None:
    with vllm_groups(2, config=replicated(2)) as log:
        tp, dp = parallel_state.get_tp_group(), parallel_state.get_dp_group()
        assert dp.device_communicator._llm_comm is None
        tp.device_communicator.pynccl_comm = nccl = Nccl(tp.cpu_group)
        first = dist.get_rank() // 2 * 2
        gathered = tp.all_gather(data((2, 4)), 0)
        assert torch.equal(gathered, torch.cat([data((2, 4), rank) for rank in (first, first + 1)]))
        assert nccl.calls == ["all_gather"]
        assert torch.equal(tp.all_reduce(data((2, 4))), expected_sum((2, 4), (first, first + 1)))
    said = "is not active: all_gather and reduce_scatter are false, and group dp:0 does nothing else"
    assert len(log.having(said)) == (dist_rank() == 0)


@scenario(LLM_COMM_ENABLE="0")
def llm_comm_enable_0_leaves_gathers_to_vllm() -> None:
    with vllm_groups(1, config=replicated(2)):
        assert type(parallel_state.get_dp_group().device_communicator) is CudaCommunicator


@scenario()
def a_switch_that_only_one_rank_has_switches_all_off() -> None:
    if dist_rank() == 1:
        scenarios.use_config_file("all_gather: false")
    with vllm_groups() as log:
        communicator = parallel_state.get_tp_group().device_communicator
        assert (communicator._llm_comm, communicator._gather_scatter) == (None, None)
        communicator.pynccl_comm = nccl = Nccl(communicator.cpu_group)
        assert torch.equal(communicator.all_gather(data((1, 4)), 0), torch.cat([data((1, 4), r) for r in (0, 1)]))
        assert nccl.calls == ["all_gather"]
        (warning,) = log.having("is not active for group tp:0")
        assert "the ranks of group tp:0 have different options: all_gather is True on rank 0 (" in warning, warning


@scenario()
def a_wrong_switch_of_one_rank_stops_vllm_on_every_rank() -> None:
    if dist_rank() == 1:
        scenarios.os.environ["LLM_COMM_REDUCE_SCATTER"] = "sometimes"
    error = start_error(VllmConfig())
    assert (
        "rank 1 (global rank 1): LLM_COMM_REDUCE_SCATTER='sometimes' is not allowed; valid: true or false" in error
    ), error


@scenario()
def the_log_tells_of_the_first_call_of_each_kind() -> None:
    with group() as tp:
        for _ in range(2):
            exchange_once(tp)
            tp.coordinator.all_gatherv(data((1 + dist.get_rank(), 4)), 0, [1, 2])
    for said in (
        "llm_comm: first all_gather of group tp:0 (2 ranks, shape (2, 4))",
        "llm_comm: first all_gatherv of group tp:0 (2 ranks, shape (2, 4))",
        "llm_comm: first all_gatherv of group tp:0 (2 ranks, shape (1, 4), sizes [1, 2])",
        "llm_comm: first reduce_scatter of group tp:0 (2 ranks, shape (4, 4))",
        "llm_comm: first reduce_scatterv of group tp:0 (2 ranks, shape (4, 4))",
    ):
        assert len(tp.log.having(said)) == (dist_rank() == 0), said
    assert len(tp.log.having("llm_comm: first ")) == 5 * (dist_rank() == 0)


@scenario()
def a_destroyed_group_is_closed() -> None:
    with group("dp", tensor_parallel=1, config=replicated(2)) as dp:
        communicator = dp.communicator._llm_comm
    assert dp.communicator._gather_scatter is None
    assert not communicator._handle.is_open


# ---- What they are made of ------------------------------------------------------------------------------------------


class Group:
    """One of vLLM's groups, with a stand-in for its NCCL."""

    def __init__(self, kind: str, log: Log) -> None:
        self.log = log
        self.coordinator = getattr(parallel_state, f"get_{kind}_group")()
        self.communicator = self.coordinator.device_communicator
        self.communicator.pynccl_comm = self.nccl = Nccl(self.coordinator.cpu_group)
        self.served = served(self.communicator._gather_scatter)
        self._calls_of_theirs = 0

    def theirs(self, method: str, *arguments: Any) -> Any:
        """What vLLM's own class makes of a call."""
        before = len(self.nccl.calls)
        result = getattr(CudaCommunicator, method)(self.communicator, *arguments)
        assert len(self.nccl.calls) > before, "vLLM's own way has changed"
        self._calls_of_theirs += len(self.nccl.calls) - before
        return result

    @property
    def nccl_of_ours(self) -> int:
        """How often NCCL was called otherwise."""
        return len(self.nccl.calls) - self._calls_of_theirs


@contextlib.contextmanager
def group(kind: str = "tp", tensor_parallel: int = 0, config: VllmConfig | None = None) -> Iterator[Group]:
    """A group that llm_comm serves; of all ranks, if not said otherwise."""
    size = config.parallel_config.data_parallel_size if config is not None else 1
    with vllm_groups(tensor_parallel or int(scenarios.os.environ["WORLD_SIZE"]) // size, config=config) as log:
        yield Group(kind, log)


def parts_of(kind: str) -> Any:
    communicator = getattr(parallel_state, f"get_{kind}_group")().device_communicator
    return None if communicator is None else communicator._gather_scatter


def replicated(count: int) -> VllmConfig:
    """That of data-parallel replicas, whose ranks are there already."""
    config = VllmConfig()
    config.parallel_config.data_parallel_size = count
    config.parallel_config.distributed_executor_backend = "external_launcher"
    return config


@contextlib.contextmanager
def exchange(of: Group, sizes: list[int]) -> Iterator[Any]:
    """vLLM's exchange of tokens by all-gather and reduce-scatter, for a batch with so many tokens for each rank."""
    manager = all2all.AgRsAll2AllManager(of.coordinator.cpu_group)
    batch = SimpleNamespace(dp_metadata=SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: sizes))
    with mock.patch.object(all2all, "get_forward_context", return_value=batch):
        yield manager


def exchange_once(tp: Group) -> None:
    """All four operations, each right whoever serves it."""
    rank = dist.get_rank()
    whole = torch.cat([data((2, 4), other) for other in (0, 1)])
    assert torch.equal(tp.coordinator.all_gather(data((2, 4)), 0), whole)
    assert torch.equal(tp.coordinator.all_gatherv(data((2, 4)), 0, [2, 2]), whole)
    assert torch.equal(tp.coordinator.reduce_scatter(data((4, 4)), 0), expected_sum((4, 4)).chunk(2)[rank])
    assert torch.equal(tp.coordinator.reduce_scatterv(data((4, 4)), 0, [2, 2]), expected_sum((4, 4)).chunk(2)[rank])
