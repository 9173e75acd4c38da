"""What SGLang and llm_comm do together: run by ``test_sglang_contract.py`` in an environment that has SGLang.

The code of SGLang is that of the published wheel. What it is not given, and what takes its place:

- triton and torchvision: the stand-ins of ``sglang_environment.py``.
- CUDA: SGLang takes this machine for one with a CPU, so its GroupCoordinator is the one of all platforms, with gloo for
  NCCL; only llm_comm is told that the platform is CUDA. Its own custom all-reduce cannot be made then, and takes the
  place of itself on a machine where it fails; where a test needs one that works, ``Theirs`` stands in.
- CUDA tensors: CPU tensors, as llm_comm runs on emulated GPUs. SGLang's operators are registered for them
  (``_for_cpu_tensors``), and ``GroupCoordinator.all_reduce`` does not ask whether a tensor is on the CPU, of which it
  would not tell its communicators (``_without_the_question_for_cpu_tensors``).
- Modules that import models, of which groups need one name only: modules of the same names (``_take_the_place_of``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lost_seams import check_every_symbol, lose
from rank_processes import (
    DIED_OF_THE_WATCHDOG,
    STAND_INS,
    Log,
    calls_of,
    data,
    dist_rank,
    expected_sum,
    lose_rank_1,
    scenario,
    serve,
    shared_directory,
    use_config_file,
    use_nccl_library_by,
    wait_for_text,
)

os.environ.update(GLOO_SOCKET_IFNAME="lo")

# torch.compile asks for triton when it is imported, which SGLang 0.5.23 does, and would keep the stand-in's "types".
sys.modules["triton"] = None  # type: ignore[assignment]
import torch._dynamo  # noqa: E402

del sys.modules["triton"]

_register_operator = torch.library.Library.impl


def _for_cpu_tensors(library: Any, name: Any, function: Any, key: str = "", **options: Any) -> Any:
    return _register_operator(library, name, function, "CPU" if key == "CUDA" else key, **options)


torch.library.Library.impl = _for_cpu_tensors

import sglang  # noqa: E402
import sglang.srt.layers.dp_attention  # noqa: E402
import sglang.srt.plugins  # noqa: E402
from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.distributed.device_communicators import custom_all_reduce  # noqa: E402
from sglang.srt.distributed.parallel_state import GroupCoordinator  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from llm_comm import _core  # noqa: E402
from llm_comm.errors import ConfigError, PeerTimeout  # noqa: E402
from llm_comm.integrations import joining, members  # noqa: E402
from llm_comm.integrations.seams import load  # noqa: E402
from llm_comm.integrations.sglang import seams  # noqa: E402


def _take_the_place_of(name: str, **attributes: Any) -> None:
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(attributes)


def _without_the_question_for_cpu_tensors(function: Any) -> Any:
    source, count = re.subn(r"\bif input_\.is_cpu:", "if False:", textwrap.dedent(inspect.getsource(function)))
    assert count == 1, f"GroupCoordinator.{function.__name__} has changed"
    scope: dict[str, Any] = {}
    exec(source, function.__globals__, scope)
    return scope[function.__name__]


GroupCoordinator.all_reduce = _without_the_question_for_cpu_tensors(GroupCoordinator.all_reduce)
_take_the_place_of("sglang.srt.layers.sampler", SYNC_TOKEN_IDS_ACROSS_TP=False)
_take_the_place_of("sglang.srt.distributed.bootstrap", reset_parallel_initialised=lambda: None)
# Nor is it to find the stand-in when it runs.
sys.modules.update({name: None for name in sys.modules if name.split(".")[0] == "triton"})

MEMORY_SAVER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_SOURCES = Path(sglang.__file__).parent / "srt"

BENCH_PLUGINS = str(Path(__file__).parents[3] / "bench_serving" / "plugins")


# ---- Scenarios: each runs in every rank, in processes that have not made a group before -----------------------------


@scenario(smoke=True)
def eager_all_reduces_reach_llm_comm() -> None:
    with sglang_groups() as log:
        calls = calls_of(ours("tp")._llm_comm)
        for shape in ((16, 128), (1, 1), (3, 1001), (256, 4096)):
            x = data(shape)
            before = x.clone()
            result = group("tp").all_reduce(x)
            assert result.data_ptr() != x.data_ptr()
            assert torch.equal(x, before), "the input was changed"
            assert torch.equal(result, expected_sum(shape))
        assert len(calls) == 4
    assert len(log.having("is active for group tp:0 (2 ranks")) == (dist_rank() == 0)


@scenario(smoke=True, LLM_COMM_MAX_MESSAGE_BYTES="1024")
def compiled_all_reduces_reach_llm_comm_first() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return tp.all_reduce(x * 2) + 1

    with sglang_groups(theirs=True):
        tp, calls = group("tp"), calls_of(ours("tp")._llm_comm)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (4, 7, 9):
            assert torch.equal(compiled(data((rows, 64))), expected_sum((rows, 64)) * 2 + 1)
        assert calls == [(4, 64), (7, 64)]
        assert ours("tp")._theirs.shapes == [(9, 64)]


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="4096")
def what_llm_comm_declines_goes_to_nccl_where_sglang_has_no_custom_all_reduce() -> None:
    with sglang_groups():
        calls = calls_of(ours("tp")._llm_comm)
        check_declined()
        assert not calls
        assert torch.equal(group("tp").all_reduce(data((16, 64))), expected_sum((16, 64)))
        assert len(calls) == 1


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="4096")
def what_llm_comm_declines_goes_to_the_custom_all_reduce_of_sglang() -> None:
    with sglang_groups(theirs=True):
        calls = calls_of(ours("tp")._llm_comm)
        theirs = ours("tp")._theirs
        check_declined()
        assert (len(theirs.shapes), len(calls)) == (3, 0)
        assert torch.equal(group("tp").all_reduce(data((16, 64))), expected_sum((16, 64)))
        assert (len(theirs.shapes), len(calls)) == (3, 1)


@scenario(smoke=True)
def it_passes_for_the_custom_all_reduce_of_sglang() -> None:
    with sglang_groups(theirs=True):
        ca_comm = group("tp").ca_comm
        assert isinstance(ca_comm, Theirs)
        assert ca_comm.max_size == Theirs.max_size
        assert not hasattr(ca_comm, "reduce_scatter")
        with ca_comm.capture():
            assert ca_comm._theirs.is_capturing
        assert not ca_comm._theirs.is_capturing


@scenario()
def where_sglang_has_none_it_passes_for_none() -> None:
    with sglang_groups():
        ca_comm = group("tp").ca_comm
        assert not isinstance(ca_comm, Theirs)
        assert not hasattr(ca_comm, "max_size")
        with ca_comm.capture():
            assert torch.equal(group("tp").all_reduce(data((8, 32))), expected_sum((8, 32)))


@scenario()
def where_that_of_sglang_is_disabled_on_all_ranks_it_passes_for_none() -> None:
    with sglang_groups(theirs=True, theirs_disabled=True) as log:
        assert not isinstance(group("tp").ca_comm, Theirs)
        assert torch.equal(group("tp").all_reduce(data((4, 4))), expected_sum((4, 4)))
        check_declined()
        assert not log.having("llm_comm", logging.WARNING)


@scenario(smoke=True)
def groups_capture_graphs_within_the_context_of_sglang() -> None:
    stream = torch.cpu.Stream()
    current = mock.patch.object(parallel_state, "get_current_device_stream_fast", return_value=stream)
    with sglang_groups(theirs=True), current:
        calls, theirs = calls_of(ours("tp")._llm_comm), ours("tp")._theirs
        with group("tp").graph_capture(parallel_state.GraphCaptureContext(stream)):
            assert theirs.is_capturing
            assert torch.equal(group("tp").all_reduce(data((8, 32))), expected_sum((8, 32)))
        assert (len(calls), theirs.is_capturing) == (1, False)


@scenario(world=1)
def all_that_groups_use_of_a_custom_all_reduce_is_there() -> None:
    source = (_SOURCES / "distributed/parallel_state.py").read_text()
    used = set(re.findall(r"\bca_comm\.(\w+)", source))
    for_amd = {"all_gather_reg", "all_gather_unreg", "should_custom_ag", "reduce_scatter", "fused_allreduce_rmsnorm",
               "fused_ar_rms", "custom_fused_ar_rms", "custom_fused_ar_rms_per_group_quant"}  # fmt: skip
    from llm_comm.integrations.sglang.communicator import LlmCommAllReduce

    member = SimpleNamespace(communicator=None)
    assert {"should_custom_ar", "custom_all_reduce", "capture", "disabled"} <= used
    assert not [name for name in used - for_amd if not hasattr(LlmCommAllReduce(member, None, False), name)]


@scenario()
def the_wrapper_of_nccl_loads_the_library_in_its_place() -> None:
    use_nccl_library_by(importlib.import_module("sglang.srt.distributed.device_communicators.pynccl_wrapper"))


@scenario()
def sglang_is_alone_in_its_way_once_it_disables_us() -> None:
    with sglang_groups():
        calls = calls_of(ours("tp")._llm_comm)
        group("tp").ca_comm.disabled = True
        assert torch.equal(group("tp").all_reduce(data((4, 4))), expected_sum((4, 4)))
        assert not calls


@scenario()
def one_rank_whose_custom_all_reduce_is_disabled_takes_that_of_the_others_along() -> None:
    with sglang_groups(theirs=True, theirs_disabled=dist_rank() == 1) as log:
        assert ours("tp")._theirs is None
        check_declined()
        assert torch.equal(group("tp").all_reduce(data((4, 4))), expected_sum((4, 4)))
    said = log.having("own custom all-reduce is not used in group tp:0: it is disabled on rank 1 (")
    assert len(said) == (dist_rank() == 0)


@scenario(world=4)
def tensor_parallel_groups_of_a_pipeline_are_joined_one_by_one() -> None:
    with sglang_groups(tp=2, pp=2):
        communicator = ours("tp")._llm_comm
        assert (communicator.rank, communicator.world_size) == (dist.get_rank() % 2, 2)
        assert group("pp").ca_comm is None
        first = dist.get_rank() // 2 * 2
        assert torch.equal(group("tp").all_reduce(data((4, 8))), expected_sum((4, 8), (first, first + 1)))


@scenario(world=4, LLM_COMM_MULTI_NODE="1")
def a_group_over_two_nodes_sums_hierarchically() -> None:
    os.environ["LLM_COMM_NODE"] = f"node-{dist_rank() // 2}"
    everyone = (0, 1, 2, 3)
    with sglang_groups(tp=4) as log:
        communicator = ours("tp")._llm_comm
        assert (communicator.nodes, communicator.world_size) == (2, 4)
        assert communicator.plan(data((16, 128))).algorithm == "2PH"
        calls = calls_of(communicator)
        for shape in ((16, 128), (1, 1), (3, 1001), (256, 1024)):
            assert torch.equal(group("tp").all_reduce(data(shape)), expected_sum(shape, everyone))
        assert len(calls) == 4
        whole = torch.full((5,), dist.get_rank(), dtype=torch.int64)
        assert torch.equal(group("tp").all_reduce(whole), torch.full((5,), 6, dtype=torch.int64))
    for text in ("active for group tp:0 (4 ranks, 2 nodes, ", "all-reduce hierarchical to "):
        assert len(log.having(text)) == (dist_rank() == 0)


@scenario(world=4)
def a_group_over_two_nodes_is_left_to_sglang_unless_asked_for() -> None:
    os.environ["LLM_COMM_NODE"] = f"node-{dist_rank() // 2}"
    with sglang_groups(tp=4) as log:
        assert group("tp").ca_comm is None
        assert torch.equal(group("tp").all_reduce(data((4, 8))), expected_sum((4, 8), (0, 1, 2, 3)))
    assert log.having("the ranks are on 2 nodes (node-0, node-1), and multi_node is false (default)", logging.WARNING)


@scenario(world=4)
def attention_of_data_parallel_replicas_is_summed_in_groups_of_its_own() -> None:
    with sglang_groups(tp=4, attn_dp=2):
        assert ours("tp")._llm_comm.world_size == 4
        first = dist.get_rank() // 2 * 2
        assert ours("attn_tp")._llm_comm.world_size == 2
        result = group("attn_tp").all_reduce(data((4, 8)))
        assert torch.equal(result, expected_sum((4, 8), (first, first + 1)))


@scenario(world=4)
def groups_share_the_memory_of_one() -> None:
    found = workspaces({"attn_dp": 2, "moe_ep": 2})
    assert found == {"tp": 32, "attn_tp": 10, "moe_ep": 10, "moe_tp": 10}, found


@scenario(world=4)
def groups_that_only_gather_take_their_share() -> None:
    found = workspaces({"attn_cp": 2})
    assert found == {"tp": 32, "attn_cp": 16, "attn_tp": 16}, found


@scenario(world=4)
def a_group_that_is_the_only_one_takes_all_memory() -> None:
    found = workspaces({"attn_dp": 4, "moe_ep": 4})
    assert found == {"tp": 64}, found


@scenario(world=4, LLM_COMM_WORKSPACE_BYTES="8M")
def memory_that_an_operator_has_chosen_is_for_each_group() -> None:
    found = workspaces({"attn_dp": 2})
    assert found == {"tp": 8, "attn_tp": 8}, found


@scenario()
def groups_of_an_unknown_version_take_as_much_as_one() -> None:
    from llm_comm.integrations.sglang import groups

    with mock.patch.object(groups, "get_parallel", side_effect=ValueError), mock.patch.object(groups, "_WIDTHS", {}):
        assert workspaces({}, tp=2) == {"tp": 64}


def workspaces(widths: dict[str, int], tp: int = 4) -> dict[str, int]:
    """MiB by group, without those that SGLang takes another one for."""
    from llm_comm.integrations.sglang.gathering import ATTRIBUTE

    with sglang_groups(tp=tp, **widths):
        found: dict[str, int] = {}
        of = set()
        for name in ("tp", "attn_cp", "attn_tp", "moe_dp", "moe_ep", "moe_tp"):
            gather_scatter = getattr(group(name), ATTRIBUTE, None)
            if gather_scatter is not None and id(group(name)) not in of:
                of.add(id(group(name)))
                found[name] = gather_scatter._member.communicator.workspace_bytes >> 20
        return found


@scenario(world=4)
def experts_are_summed_in_groups_of_their_own() -> None:
    with sglang_groups(tp=4, moe_ep=2):
        rank = dist.get_rank()
        for name, ranks in (("moe_ep", (rank % 2, rank % 2 + 2)), ("moe_tp", (rank // 2 * 2, rank // 2 * 2 + 1))):
            assert ours(name)._llm_comm.world_size == 2
            assert torch.equal(group(name).all_reduce(data((4, 8))), expected_sum((4, 8), ranks))


@scenario(world=1)
def a_group_of_one_is_left_alone() -> None:
    with sglang_groups(tp=1):
        assert group("tp").ca_comm is None


@scenario(LLM_COMM_ENABLE="0", LLM_COMM_ALGORITHM="nonsense")
def llm_comm_enable_0_leaves_sglang_untouched() -> None:
    with sglang_groups(theirs=True) as log:
        assert type(group("tp").ca_comm) is Theirs
        assert torch.equal(group("tp").all_reduce(data((4, 4))), expected_sum((4, 4)))
        assert len(log.having("is not active: LLM_COMM_ENABLE is off")) == (dist_rank() == 0)


@scenario(LLM_COMM_ENABLE="0", BENCH_SERVING_FREE="1")
def the_bound_of_bench_serving_waits_for_nobody() -> None:
    sys.path.append(BENCH_PLUGINS)  # by which its entry point is found
    logging.getLogger("sglang").setLevel(logging.INFO)
    with sglang_groups(theirs=True) as log:
        is_rank_0 = dist_rank() == 0
        assert len(log.having("bench_serving: custom all-reduce of group tp:0: Theirs, disabled=False")) == is_rank_0
        assert len(log.having("all-reduces of this group return uninitialised memory (tp:0)")) == is_rank_0
        assert log.having(f"rank {dist_rank()} of group tp is process {os.getpid()}")
        for _ in range(1 + dist_rank()):
            x = data((4, 4))
            result = group("tp").all_reduce(x)
            assert (result.shape, result.dtype) == (x.shape, x.dtype)
            assert result.data_ptr() != x.data_ptr()


@scenario()
def the_plugins_of_bench_serving_tell_of_llm_comm() -> None:
    sys.path.append(BENCH_PLUGINS)
    logging.getLogger("sglang").setLevel(logging.INFO)
    with sglang_groups() as log:
        ours("tp")
        assert len(log.having("bench_serving: custom all-reduce of group tp:0: ")) == (dist_rank() == 0)
        assert not log.having("deterministic mode")
        assert torch.equal(group("tp").all_reduce(data((4, 4))), expected_sum((4, 4)))


@scenario(SGLANG_ENABLE_DETERMINISTIC_INFERENCE="1", LLM_COMM_DETERMINISTIC="1")
def the_plugins_of_bench_serving_tell_of_deterministic_mode() -> None:
    sys.path.append(BENCH_PLUGINS)
    logging.getLogger("sglang").setLevel(logging.INFO)
    parallel_state.set_custom_all_reduce(False)  # as the mode does
    with sglang_groups() as log:
        assert len(log.having("bench_serving: the engine is in its deterministic mode")) == (dist_rank() == 0)
        assert len(log.having("group tp:0: LlmCommAllReduce, disabled=False")) == (dist_rank() == 0)


@scenario(LLM_COMM_ENABLE="0", BENCH_SERVING_PROFILE="1")
def schedulers_have_the_methods_by_which_bench_serving_records_kernels() -> None:
    """The scheduler's own module needs kernels of SGLang that are not installed here."""
    sys.path.append(BENCH_PLUGINS)
    module: Any = ModuleType("sglang.srt.managers.scheduler")
    module.Scheduler = type("Scheduler", (), {})
    with mock.patch.dict(sys.modules, {module.__name__: module}), sglang_groups(theirs=True):
        scheduler = module.Scheduler()
        with tempfile.TemporaryDirectory() as directory:
            scheduler.start_kernel_profile()
            scheduler.begin_kernel_section()
            scheduler.stop_kernel_profile(directory=directory, names="batch-1")
            assert os.listdir(directory) == [f"batch-1.rank{dist_rank()}.json.gz"]


@scenario(SGLANG_PLUGINS="another")
def sglang_plugins_selects() -> None:
    with sglang_groups():
        assert group("tp").ca_comm is None
        assert not HookRegistry._hooks


@scenario()
def disable_custom_all_reduce_is_respected() -> None:
    parallel_state.set_custom_all_reduce(False)
    with sglang_groups(tp=2) as log:
        assert group("tp").ca_comm is None
        assert torch.equal(group("tp").all_reduce(data((4, 4))), expected_sum((4, 4)))
        assert len(log.having("is not active: --disable-custom-all-reduce is set")) == (dist_rank() == 0)


@scenario(SGLANG_ENABLE_DETERMINISTIC_INFERENCE="1")
def deterministic_mode_is_left_to_nccl() -> None:
    parallel_state.set_custom_all_reduce(False)  # as the mode does
    with sglang_groups() as log:
        assert group("tp").ca_comm is None
        assert len(log.having("is not active: deterministic inference is on")) == (dist_rank() == 0)


@scenario(SGLANG_ENABLE_DETERMINISTIC_INFERENCE="1", LLM_COMM_DETERMINISTIC="1", LLM_COMM_WIRE="int8")
def deterministic_mode_excludes_quantized_sums() -> None:
    parallel_state.set_custom_all_reduce(False)
    error = start_error()
    assert "option wire is 'int8' (LLM_COMM_WIRE), and deterministic is on (LLM_COMM_DETERMINISTIC)" in error, error


@scenario(LLM_COMM_WIRE="fp8", LLM_COMM_WIRE_MIN_BYTES="64K")
def large_sums_are_quantized_if_asked_for() -> None:
    with sglang_groups() as log:
        communicator = ours("tp")._llm_comm
        said = log.having("; all-reduces and reduce-scatters from 64 KiB to 256 MiB are quantized (fp8): lossy; ")
        assert len(said) == (dist_rank() == 0)
        for rows in (15, 16):
            x = torch.randn(rows, 2048, generator=torch.Generator().manual_seed(dist.get_rank())).to(torch.bfloat16)
            total, exact = group("tp").all_reduce(x.clone()), x.clone()
            assert (communicator.plan(x).algorithm == "two_shot_fp8_hb") == (rows == 16)
            dist.all_reduce(exact)
            assert (total.float() - exact.float()).abs().max() < 1.0
            others = [torch.empty_like(total) for _ in range(2)]
            dist.all_gather(others, total)
            assert torch.equal(*others)


@scenario(SGLANG_ENABLE_DETERMINISTIC_INFERENCE="1", LLM_COMM_DETERMINISTIC="1", LLM_COMM_SUM="any")
def deterministic_mode_can_have_one_order_of_sums_at_all_sizes() -> None:
    parallel_state.set_custom_all_reduce(False)
    with sglang_groups():
        communicator = ours("tp")._llm_comm
        assert communicator.config.max_message_bytes > 1 << 40
        assert communicator.config.sum == "rank_order"
        calls = calls_of(communicator)
        # Sums that depend on the order of their terms in fp32 as well.
        row = torch.randn(1, 512, generator=torch.Generator().manual_seed(dist.get_rank())).to(torch.bfloat16)
        alone = group("tp").all_reduce(row)
        for rows in (3, 4096):
            together = group("tp").all_reduce(row.repeat(rows, 1))
            assert torch.equal(together, alone.expand(rows, -1))
        assert len(calls) == 3


@scenario(world=1)
def deterministic_mode_is_known_by_its_variable() -> None:
    setters = [p for p in (_SOURCES / "server_args.py", _SOURCES / "arg_groups/serving_hook.py") if p.exists()]
    assert any("envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.set(" in path.read_text() for path in setters)


@scenario()
def elastic_expert_parallelism_is_left_alone() -> None:
    with server_options(moe={"elastic_ep_backend": "nixl"}), sglang_groups() as log:
        assert group("tp").ca_comm is None
        assert len(log.having("is not active: elastic expert parallelism")) == (dist_rank() == 0)


@scenario()
def encoder_servers_are_left_alone() -> None:
    """Only their rank 0 has loaded plugins."""
    if dist_rank() == 0:
        load_plugins()
    with (
        mock.patch("sglang.srt.runtime_context.get_disagg", return_value=SimpleNamespace(encoder_only=True)),
        mock.patch("sglang.srt.utils.is_cuda", return_value=True),
        mock.patch.object(joining, "JOIN_TIMEOUT_S", 5.0),
        distributed(),
    ):
        log = Log("sglang")
        make_groups(2, 1, 1, 1)
        assert group("tp").ca_comm is None
        assert torch.equal(group("tp").all_reduce(data((4, 4))), expected_sum((4, 4)))
        assert len(log.having("is not active: --encoder-only loads plugins in the process of rank 0 alone")) == (
            dist_rank() == 0
        )


@scenario(world=1)
def encoder_servers_are_known_by_their_option() -> None:
    files = [_SOURCES / "server_args.py", *(_SOURCES / "arg_groups").rglob("*.py")]
    (file,) = (path for path in files if "\n    encoder_only: A[" in path.read_text(encoding="utf-8"))
    declaration = file.read_text(encoding="utf-8").partition("encoder_only: A[")[2].partition("= False")[0]
    assert 'NS("disagg")' in declaration or file.name == "disagg.py"


@scenario()
def a_rank_without_llm_comm_ends_the_start_of_the_others() -> None:
    if dist_rank() == 1:
        os.environ["LLM_COMM_ENABLE"] = "0"
    load_plugins()
    with (
        mock.patch("sglang.srt.utils.is_cuda", return_value=True),
        mock.patch.object(joining, "JOIN_TIMEOUT_S", 2.0),
    ):
        context = distributed()
        context.__enter__()
        if dist_rank() == 1:
            make_groups(2, 1, 1, 1)  # which waits for nobody
            wait_for_text(shared_directory() / "error", "llm_comm")
            return
        try:
            make_groups(2, 1, 1, 1)
            error = "SGLang has started"
        except joining.AbsentRanksError as absent:
            error = str(absent)
        (shared_directory() / "error").write_text(f"{error}\n{'llm_comm'}")
        assert "not every rank of the engine came to set up llm_comm" in error, error
        assert "LLM_COMM_ENABLE, VLLM_PLUGINS and SGLANG_PLUGINS are set as on the others" in error, error


@scenario()
def a_fusion_that_sums_past_llm_comm_is_told() -> None:
    with server_options(comm={"flashinfer_allreduce_fusion_backend": "auto"}), sglang_groups() as log:
        said = "but SGLang's FlashInfer all-reduce fusion comes first where it applies "
        assert len(log.having(said)) == len(log.having(", past llm_comm: SGLang ")) == (dist_rank() == 0)


@contextlib.contextmanager
def flashinfer_groups() -> Iterator[tuple[Log, Any, Any]]:
    """Groups of a SGLang that sums and norms by FlashInfer: the log, SGLang's module for it, ``flashinfer.comm``."""
    sys.path.insert(0, str(STAND_INS))
    options = {"flashinfer_allreduce_fusion_backend": "trtllm", "enable_aiter_allreduce_fusion": False}
    with server_options(comm=options), mock.patch("sglang.srt.utils.is_cuda", return_value=True):
        with mock.patch("sglang.srt.utils.common.is_cuda", return_value=True):
            fusion = importlib.import_module("sglang.srt.layers.flashinfer_comm_fusion")  # keeps names of FlashInfer
        stack = contextlib.ExitStack()
        patches = {
            "_preflight_check_workspace_memory": lambda **_: True,
            "resolve_flashinfer_allreduce_fusion_backend": lambda *_: "trtllm",
            "get_server_args": lambda: None,
            "resolve_fusion_world_size": lambda **_: 2,
            "resolve_fusion_group": lambda **_: (2, dist_rank(), group("tp")),
            "is_flashinfer_available": lambda: True,
        }
        for name, function in patches.items():
            if hasattr(fusion, name):
                stack.enter_context(mock.patch.object(fusion, name, function))
        with stack, sglang_groups() as log:
            yield log, fusion, importlib.import_module("flashinfer.comm")
            assert not log.having("to initialize FlashInfer", logging.WARNING)


def norm_by_flashinfer(fusion: Any, rows: int = 4) -> None:
    """A norm that SGLang leaves to FlashInfer, and a look at its results."""
    x, residual = data((rows, 64)), data((rows, 64), rank=0)
    weight = torch.linspace(0.5, 1.5, 64).bfloat16()
    normed, new_residual = fusion.flashinfer_allreduce_residual_rmsnorm(x, residual, weight, eps=1e-5)
    total = expected_sum((rows, 64)).float() + residual.float()
    want = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()
    torch.testing.assert_close(new_residual.float(), total, rtol=0.02, atol=0.02)
    torch.testing.assert_close(normed.float(), want, rtol=0.02, atol=0.02)


@scenario(smoke=True, LLM_COMM_MAX_MESSAGE_BYTES="1K")
def what_sglang_leaves_to_flashinfer_is_computed_by_llm_comm_where_it_serves_it() -> None:
    with flashinfer_groups() as (log, fusion, theirs):
        said = "; and what SGLang sums by FlashInfer, where llm_comm serves it"
        assert len(log.having(said)) == (dist_rank() == 0)
        fused, summed = fused_calls(), calls_of(ours("tp")._llm_comm)
        norm_by_flashinfer(fusion)
        assert (fused, theirs.calls) == ([(4, 64)], [])
        if hasattr(fusion, "flashinfer_allreduce"):
            x = data((4, 64))
            assert torch.equal(fusion.flashinfer_allreduce(x, use_attn_tp_group=True), expected_sum((4, 64)))
            assert (summed, theirs.calls) == ([(4, 64)], [])
        norm_by_flashinfer(fusion, rows=16)  # too large for llm_comm
        assert (fused, theirs.calls) == ([(4, 64)], [1])
        ours("tp").leave()
        norm_by_flashinfer(fusion)
        assert (fused, theirs.calls) == ([(4, 64)], [1, 1])


@scenario()
def a_release_whose_option_is_not_known_may_sum_by_flashinfer() -> None:
    lose(
        seams.TABLE,
        *(symbol for row in seams.ROWS if row.feature == seams.THEIR_FUSION for symbol in row.symbols.split()),
    )
    with flashinfer_groups() as (_, fusion, theirs):
        fused = fused_calls()
        norm_by_flashinfer(fusion)
        assert (fused, theirs.calls) == ([(4, 64)], [])


@scenario(LLM_COMM_FUSE="0")
def norms_of_flashinfer_stay_its_own_where_norms_are_not_fused() -> None:
    with flashinfer_groups() as (_, fusion, theirs):
        fused = fused_calls()
        norm_by_flashinfer(fusion)
        assert (fused, theirs.calls) == ([], [1])


@scenario(world=1)
def the_options_that_are_looked_at_have_these_names() -> None:
    runner = (_SOURCES / "model_executor/model_runner.py").read_text()
    assert "get_exec().moe.elastic_ep_backend is not None" in runner
    runners = (_SOURCES / "model_executor/runner/base_runner.py").read_text()
    assert "flashinfer_allreduce_fusion_backend is None" in runners


@scenario()
def a_configuration_file_switches_off() -> None:
    use_config_file("enable: false")
    with sglang_groups(theirs=True) as log:
        assert type(group("tp").ca_comm) is Theirs
        assert torch.equal(group("tp").all_reduce(data((4, 4))), expected_sum((4, 4)))
        assert len(log.having("is not active: enable is false")) == (dist_rank() == 0)
        assert not log.having("llm_comm", logging.WARNING)


@scenario()
def one_rank_that_is_switched_off_takes_the_others_along() -> None:
    use_config_file("enable: false" if dist_rank() == 1 else "", f"options{dist_rank()}.yaml")
    with sglang_groups() as log:
        assert group("tp").ca_comm is None
        assert len(log.having("is not active: rank 1 (global rank 1): enable is false")) == (dist_rank() == 0)


@scenario()
def the_time_limit_is_that_of_sglang_unless_set() -> None:
    parallel_state._MODEL_PARALLEL_GROUP_TIMEOUT = timedelta(seconds=77)
    with sglang_groups():
        assert ours("tp")._llm_comm.config.timeout_s == 77.0


@scenario()
def the_time_limit_is_that_of_engines_if_sglang_has_none() -> None:
    with sglang_groups():
        assert ours("tp")._llm_comm.config.timeout_s == joining.ENGINE_TIMEOUT_S


@scenario(world=1)
def the_deployment_example_is_valid() -> None:
    from llm_comm.integrations.sglang import communicator

    os.environ["LLM_COMM_CONFIG"] = str(Path(__file__).parents[3] / "configs/sglang_deployment.yaml")
    config = communicator.load_config()
    assert config.origins["algorithm"].startswith(os.environ["LLM_COMM_CONFIG"] + ":")
    assert config == communicator.EngineOptions.load({}, timeout_s=600.0)


@scenario()
def a_wrong_variable_of_one_rank_stops_sglang_on_every_rank() -> None:
    if dist_rank() == 1:
        os.environ["LLM_COMM_TIMEOUT_S"] = "soon"
    error = start_error()
    assert "rank 1 (global rank 1): LLM_COMM_TIMEOUT_S='soon' is not allowed; valid: a number of seconds" in error, (
        error
    )


@scenario()
def unknown_names_of_one_rank_are_a_warning() -> None:
    """As after a way back to an older llm_comm. The ranks stay alike: nobody uses such a name."""
    if dist_rank() == 1:
        use_config_file("algoritm: one_shot")
        os.environ["LLM_COMM_ALGORITM"] = "one_shot"
    with sglang_groups() as log:
        assert torch.equal(group("tp").all_reduce(data((4, 4))), expected_sum((4, 4)))
        assert log.having("is active for group tp:0") or dist_rank() == 1
        ignored = log.having("(did you mean ", logging.WARNING)
        assert len(ignored) == 2 * (dist_rank() == 1), ignored
        assert all(" is ignored: llm_comm " in line for line in ignored), ignored


@scenario(LLM_COMM_TABLE="/does/not/exist.yaml")
def a_tuning_table_that_cannot_be_read_stops_sglang() -> None:
    error = start_error()
    assert "option table (LLM_COMM_TABLE): tuning table /does/not/exist.yaml" in error, error


@scenario(world=1)
def what_ends_the_constructor_of_a_group_ends_the_server() -> None:
    scheduler = (_SOURCES / "managers/scheduler.py").read_text()
    body = scheduler[scheduler.index("\ndef run_scheduler_process(") :]
    making, handling = body.index("scheduler = Scheduler("), body.index("except Exception:")
    assert making < handling < body.index("parent_process.send_signal(signal.SIGQUIT)")


@scenario()
def a_set_up_that_fails_on_one_rank_leaves_sglang_working() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of emulated memory")

    with mock.patch.object(_core, "make_emulated_core", fail if dist_rank() == 1 else _core.make_emulated_core):
        context = sglang_groups(theirs=True)
        log = context.__enter__()
    assert torch.equal(group("tp").all_reduce(data((4, 4))), expected_sum((4, 4)))
    assert group("tp").ca_comm.shapes == [(4, 4)]
    (warning,) = log.having("is not active for group tp:0", logging.WARNING)
    assert "of group tp:0: rank 1 (global rank 1, pid " in warning, warning
    assert "): RuntimeError: out of emulated memory" in warning, warning
    context.__exit__(None, None, None)


@scenario()
def a_version_of_sglang_that_llm_comm_does_not_know_is_left_alone() -> None:
    del parallel_state._ENABLE_CUSTOM_ALL_REDUCE
    load_plugins()
    log = Log("sglang")
    with mock.patch("sglang.srt.utils.is_cuda", return_value=True), distributed():
        made = parallel_state.init_model_parallel_group(
            [[0, 1]], dist.get_rank(), "gloo", use_custom_allreduce=True, group_name="tp"
        )
        assert made.ca_comm is None
        assert torch.equal(made.all_reduce(data((4, 4))), expected_sum((4, 4)))
        (warning,) = log.having("is not active for group tp:0: it cannot be set up in SGLang", logging.WARNING)
        assert "_ENABLE_CUSTOM_ALL_REDUCE" in warning, warning


@scenario(smoke=True, world=1)
def each_symbol_of_sglang_that_is_lost_switches_its_features_off() -> None:
    check_every_symbol(seams.TABLE)


@scenario(world=1)
def without_a_symbol_of_the_all_reduce_sglang_is_left_alone() -> None:
    for row in seams.ROWS:
        if row.feature == seams.ALL_REDUCE and row.is_required:
            lose(seams.TABLE, *row.symbols.split())
            log = Log("sglang")
            load_plugins()
            (warning,) = log.having("llm_comm is not active: SGLang ", logging.WARNING)
            assert f"has no {' or '.join(row.symbols.split())}. SGLang's own collectives are used." in warning, warning
    assert not HookRegistry._hooks


@scenario()
def all_reduces_need_nothing_but_their_own_symbols() -> None:
    """A release without anything else that llm_comm knows, and one that renamed options of the server."""
    own = {row.symbols for row in seams.ROWS if row.feature == seams.ALL_REDUCE and row.is_required}
    others = {row.symbols for row in seams.ROWS} - own
    lose(seams.TABLE, *(symbol for symbols in others for symbol in symbols.split()))
    mock.patch.dict("sys.modules", {"sglang.srt.layers.layernorm": None, "sglang.srt.layers.linear": None}).start()
    with server_options(comm={"fusion_backend": "auto"}), sglang_groups() as log:
        assert torch.equal(group("tp").all_reduce(data((16, 128))), expected_sum((16, 128)))
        gather_scatter = [data((16, 128), rank) for rank in range(2)]
        assert torch.equal(group("tp").all_gather(data((16, 128)), 0), torch.cat(gather_scatter))
        assert ours("tp").communicator is not None
        is_first = dist_rank() == 0
        assert len(log.having("is active for group tp:0 (2 ranks")) == is_first
        assert len(log.having("; but SGLang gathers and scatters itself: SGLang ")) == is_first
        assert len(log.having("; not fused with RMSNorm: SGLang ")) == is_first
        said = log.having("on: all-reduce; all-gather and reduce-scatter: off, SGLang ", logging.WARNING)
        assert [line.count(": off, SGLang ") for line in said] == [len(seams.LOST) - 1] * is_first
        assert [line.count(" is missing. ") for line in said] == [2] * is_first


@scenario()
def a_platform_that_is_not_cuda_is_left_alone() -> None:
    with sglang_groups(cuda=False) as log:
        assert group("tp").ca_comm is None
        assert len(log.having("is not active: the platform is not CUDA")) == (dist_rank() == 0)


@scenario(world=1)
def loading_twice_is_harmless() -> None:
    load_plugins()
    hooked = GroupCoordinator.__init__
    load_plugins()
    assert GroupCoordinator.__init__ is hooked
    assert hooked.__wrapped__ is not hooked


@scenario(smoke=True, world=1, LLM_COMM_ALGORITHM="two_shot")
def a_new_process_finds_the_plugin_and_its_options() -> None:
    assert in_a_new_process() == "True two_shot"


@scenario(world=1, SGLANG_PLUGINS="another")
def a_new_process_loads_no_plugin_that_is_not_selected() -> None:
    assert in_a_new_process() == "False"


@scenario()
def leaving_a_group_closes_llm_comm() -> None:
    with sglang_groups():
        ca_comm = ours("tp")
        communicator = ca_comm._llm_comm
    assert ca_comm._llm_comm is None
    assert not communicator._handle.is_open


@scenario(exit_codes=(DIED_OF_THE_WATCHDOG, 0), LLM_COMM_TIMEOUT_S="1")
def a_peer_that_stays_away_ends_the_process_with_its_name() -> None:
    last_words = shared_directory() / "last_words"
    if dist_rank() == 1:  # it hears of the error, and would end too
        mock.patch.object(members.Member, "_watch").start()
    context = sglang_groups()
    context.__enter__()
    if dist_rank() == 0:
        logging.getLogger("sglang").addHandler(logging.FileHandler(last_words))
        with contextlib.suppress(PeerTimeout):
            group("tp").all_reduce(data((4, 4)))
        time.sleep(60)  # the engine takes no notice
    said = wait_for_text(last_words, "Ending this process")
    assert "llm_comm: group tp:0, rank 0 (global rank 0, pid " in said, said
    assert "): nothing came from rank 1 (global rank 1, pid " in said, said


@scenario(smoke=True, exit_codes=(DIED_OF_THE_WATCHDOG, -signal.SIGKILL))
def a_peer_that_dies_ends_the_process_without_the_time_out() -> None:
    context = sglang_groups()
    context.__enter__()
    lose_rank_1()


# ---- The memory saver -----------------------------------------------------------------------------------------------


class MemorySaver:
    """Stands in for torch_memory_saver, and notes whether llm_comm's workspaces have memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, bool]] = []

    def pause(self, tag: str) -> None:
        self.calls.append(("pause", tag, ours("tp")._llm_comm.is_released))

    def resume(self, tag: str) -> None:
        self.calls.append(("resume", tag, ours("tp")._llm_comm.is_released))


def weight_updater(saver: MemorySaver) -> Any:
    """SGLang's own object that serves both requests of a scheduler which is idle."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    given = {
        "tp_worker": SimpleNamespace(model_runner=None),
        "draft_worker": None,
        "tp_cpu_group": group("tp").cpu_group,
        "memory_saver_adapter": saver,
        "flush_cache": lambda **_: True,
        "is_fully_idle": lambda **_: True,
    }
    taken = {field.name for field in dataclasses.fields(SchedulerWeightUpdaterManager) if field.init}
    return SchedulerWeightUpdaterManager(**{name: value for name, value in given.items() if name in taken})


def release_and_resume(manager: Any, tags: list[str]) -> None:
    """As the scheduler does it."""
    request = SimpleNamespace(tags=tags)
    with mock.patch("torch.get_device_module", return_value=mock.Mock()):
        manager.release_memory_occupation(request)
        assert ours("tp")._llm_comm.is_released == ours("tp")._llm_comm.config.sleep
        manager.resume_memory_occupation(request)
        assert not ours("tp")._llm_comm.is_released


def import_the_scheduler() -> None:
    """Of it, the module that serves requests about memory; a scheduler has it before it makes groups. What that imports
    of models and requests, of which its two methods use names alone, is stood in for."""
    names_only = {"__getattr__": lambda name: type(name, (), {})}
    _take_the_place_of("sglang.srt.disaggregation.utils", DisaggregationMode=SimpleNamespace(DECODE=1, PREFILL=2))
    _take_the_place_of("sglang.srt.managers.io_struct", **names_only)
    _take_the_place_of("sglang.srt.utils.weight_checker", **names_only)
    importlib.import_module("sglang.srt.managers.scheduler_components.weight_updater")


@scenario()
def the_scheduler_imports_what_is_hooked_before_it_makes_groups() -> None:
    source = (_SOURCES / "managers/scheduler.py").read_text()
    assert "\nfrom sglang.srt.managers.scheduler_components.weight_updater import" in source


@scenario(smoke=True, LLM_COMM_SLEEP="1")
def workspaces_are_released_with_the_memory_of_sglang() -> None:
    import_the_scheduler()
    with sglang_groups() as log:
        assert torch.equal(group("tp").all_reduce(data((16, 128))), expected_sum((16, 128)))
        saver = MemorySaver()
        manager = weight_updater(saver)
        for tags in (["kv_cache"], ["cuda_graph", "kv_cache"]):
            release_and_resume(manager, tags)
            assert torch.equal(group("tp").all_reduce(data((16, 128))), expected_sum((16, 128)))
        assert {released for _, _, released in saver.calls} == {False}
        is_first = dist_rank() == 0
        assert len(log.having("group tp:0 sleeps: its workspaces (64 MiB on each rank) are released")) == 2 * is_first
        assert len(log.having("group tp:0 is awake")) == 2 * is_first


@scenario()
def workspaces_stay_without_option_sleep() -> None:
    import_the_scheduler()
    with sglang_groups() as log:
        release_and_resume(weight_updater(MemorySaver()), ["kv_cache"])
        assert not log.having("sleeps")


@scenario(LLM_COMM_SLEEP="1")
def a_request_that_sglang_refuses_releases_nothing() -> None:
    import_the_scheduler()
    with sglang_groups():
        manager = weight_updater(MemorySaver())
        manager.is_fully_idle = lambda **_: False
        try:
            manager.release_memory_occupation(SimpleNamespace(tags=["kv_cache"]))
        except AssertionError:
            assert not ours("tp")._llm_comm.is_released
        else:
            raise AssertionError("it was not refused")


@scenario(LLM_COMM_SLEEP="1")
def one_rank_without_the_memory_saver_takes_the_others_along() -> None:
    import_the_scheduler()
    symbol = f"{MEMORY_SAVER}.resume_memory_occupation"
    if dist_rank() == 1:
        lose(seams.TABLE, symbol)
    with sglang_groups() as log:
        assert torch.equal(group("tp").all_reduce(data((16, 128))), expected_sum((16, 128)))
        said = "; its workspaces stay while SGLang releases memory: rank 1 (global rank 1): SGLang "
        assert len(log.having(said)) == (dist_rank() == 0)
        assert load(symbol).__module__ != "llm_comm.integrations.sleeping"
        with mock.patch("torch.get_device_module", return_value=mock.Mock()):
            weight_updater(MemorySaver()).release_memory_occupation(SimpleNamespace(tags=["kv_cache"]))
        assert not ours("tp")._llm_comm.is_released, "one rank that releases alone ends the group"


# ---- What they are made of ------------------------------------------------------------------------------------------


class Theirs:
    """Stands in for SGLang's custom all-reduce on a machine where it works: takes all tensors, sums over gloo."""

    max_size = 1 << 24

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.disabled = False
        self.is_capturing = False
        self.shapes: list[tuple[int, ...]] = []
        self._group = group

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        return not self.disabled

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(input.shape))
        result = input.clone()
        dist.all_reduce(result, group=self._group)
        return result

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self.is_capturing = True
        yield
        self.is_capturing = False


def check_declined() -> None:
    """Sums what llm_comm never takes, and what a limit of 4096 bytes leaves over."""
    tp = group("tp")
    whole = torch.full((5,), dist.get_rank(), dtype=torch.int64)
    assert torch.equal(tp.all_reduce(data((64, 64))), expected_sum((64, 64)))
    assert torch.equal(tp.all_reduce(whole), torch.full((5,), 1, dtype=torch.int64))
    assert torch.equal(tp.all_reduce(data((16, 8)).t()), expected_sum((16, 8)).t())


def load_plugins() -> None:
    """As each process of SGLang does."""
    sglang.srt.plugins._plugins_loaded = False
    sglang.srt.plugins.load_plugins()


@contextlib.contextmanager
def distributed() -> Iterator[None]:
    rank, world = dist_rank(), int(os.environ["WORLD_SIZE"])
    # A file: a port could be taken by the time it is used.
    method = f"file://{shared_directory() / 'rendezvous'}"
    timeout = parallel_state._MODEL_PARALLEL_GROUP_TIMEOUT
    seconds = None if timeout is None else int(timeout.total_seconds())
    parallel_state.init_distributed_environment(world, rank, method, rank, "gloo", timeout=seconds)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@contextlib.contextmanager
def sglang_groups(
    tp: int = 2,
    pp: int = 1,
    attn_dp: int = 1,
    moe_ep: int = 1,
    cuda: bool = True,
    theirs: bool = False,
    theirs_disabled: bool = False,
    attn_cp: int = 1,
) -> Iterator[Log]:
    """The groups of SGLang, made as its scheduler makes them, after its plugins; destroyed as it destroys them.

    Args:
        tp, pp, attn_dp, moe_ep, attn_cp: Sizes.
        cuda: What llm_comm is told of the platform.
        theirs: Whether SGLang has a custom all-reduce that works.
        theirs_disabled: Whether it has disabled itself on this rank.
    """
    log = Log("sglang")
    load_plugins()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("sglang.srt.utils.is_cuda", return_value=cuda))
        if theirs:

            def make(group: dist.ProcessGroup, device: torch.device) -> Theirs:
                made = Theirs(group, device)
                made.disabled = theirs_disabled
                return made

            chosen = make if theirs_disabled else Theirs
            stack.enter_context(mock.patch.object(custom_all_reduce, "dispatch_custom_allreduce", return_value=chosen))
        stack.enter_context(distributed())
        make_groups(tp, pp, attn_dp, moe_ep, attn_cp=attn_cp)
        yield log


def make_groups(tp: int, pp: int, attn_dp: int, moe_ep: int, pdmux: bool = False, attn_cp: int = 1) -> None:
    if "tensor_model_parallel_size" in parallel_state.initialize_model_parallel.__annotations__:  # 0.5.17
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            attention_data_parallel_size=attn_dp,
            expert_model_parallel_size=moe_ep,
            attention_context_model_parallel_size=attn_cp,
            duplicate_tp_group=pdmux,
        )
        return
    sizes = {"tp_size": tp, "pp_size": pp, "attn_dp_size": attn_dp, "moe_ep_size": moe_ep}
    others = {"attn_cp_size": attn_cp, "moe_dp_size": 1, "attn_dcp_size": 1, "shared_experts_tp_size": None}
    with get_parallel().override(**sizes, **others):
        parallel_state.initialize_model_parallel(duplicate_tp_group=pdmux)


def group(name: str) -> GroupCoordinator:
    found: GroupCoordinator = getattr(parallel_state, f"_{name.upper()}")
    return found


def ours(name: str) -> Any:
    from llm_comm.integrations.sglang.communicator import LlmCommAllReduce

    ca_comm = group(name).ca_comm
    assert type(ca_comm) is LlmCommAllReduce
    return ca_comm


def fused_calls(group_name: str = "tp") -> list[tuple[int, ...]]:
    """The shapes of the group's fused calls from now on."""
    shapes: list[tuple[int, ...]] = []
    communicator = ours(group_name)._llm_comm
    original = communicator.all_reduce_add_rms_norm

    def all_reduce_add_rms_norm(x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        results = original(x, *arguments, **options)
        shapes.append(tuple(x.shape))
        return results

    communicator.all_reduce_add_rms_norm = all_reduce_add_rms_norm
    return shapes


@contextlib.contextmanager
def server_options(**sections: dict[str, Any]) -> Iterator[None]:
    """What a server publishes of its options, as far as llm_comm looks at it."""
    options = {
        "moe": {"elastic_ep_backend": None, "ep_dispatch_algorithm": None},
        "comm": {"flashinfer_allreduce_fusion_backend": None, "enable_symm_mem": False},
        **sections,
    }
    published = SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in options.items()})
    with mock.patch("sglang.srt.runtime_context.get_exec", return_value=published):
        yield


def start_error() -> str:
    try:
        with sglang_groups():
            raise AssertionError("SGLang has started")
    except ConfigError as error:
        return str(error)


def in_a_new_process() -> str:
    """What a scheduler, which SGLang starts with a new interpreter, has after it has loaded its plugins."""
    code = """
import sys
import tempfile
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.distributed.parallel_state import GroupCoordinator
hooked = hasattr(GroupCoordinator.__init__, "__wrapped__") and hasattr(GroupCoordinator.destroy, "__wrapped__")
if "llm_comm.integrations.sglang" in sys.modules:
    from llm_comm.integrations.sglang.communicator import load_config
    print(hooked, load_config().algorithm)
else:
    print(hooked)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # as SGLang does
    serve(globals(), "sglang_scheduler_{}")
