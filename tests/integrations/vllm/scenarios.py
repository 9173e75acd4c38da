"""What vLLM and llm_comm do together: run by ``test_vllm_contract.py`` with the Python of an environment that has vLLM.

The code of vLLM is that of the published wheel. What it is not given, and what takes its place:

- NVML, the compiled operators and xgrammar: the stand-ins of ``vllm_environment.py``, by which vLLM takes this machine
  for one with a GPU: platform, GroupCoordinator and CudaCommunicator are those of CUDA.
- NCCL: the device group is gloo. vLLM's own CUDA all-reduces find no CUDA and disable themselves, all but torch's
  symmetric memory, which a variable switches off. So vLLM's own way ends in torch.distributed.
- CUDA tensors: they are CPU tensors, as llm_comm runs on emulated GPUs. vLLM's operators are registered for them
  (``dispatch_key``, below).
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lost_seams import check_every_symbol, lose
from rank_processes import (
    DIED_OF_THE_WATCHDOG,
    Log,
    calls_of,
    data,
    dist_rank,
    expected_sum,
    lose_rank_1,
    scenario,
    shared_directory,
    use_config_file,
    use_nccl_library_by,
    wait_for_text,
)

os.environ.update(VLLM_ALLREDUCE_USE_SYMM_MEM="0", GLOO_SOCKET_IFNAME="lo")

from vllm.platforms import current_platform

type(current_platform).dispatch_key = "CPU"  # before the operators are registered, which the next import does

import vllm.logger  # noqa: E402
import vllm.plugins  # noqa: E402
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce  # noqa: E402
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator  # noqa: E402
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

import llm_comm  # noqa: E402
from llm_comm import _core  # noqa: E402
from llm_comm.config import EngineOptions  # noqa: E402
from llm_comm.errors import ConfigError, PeerTimeout  # noqa: E402
from llm_comm.integrations import joining, members  # noqa: E402
from llm_comm.integrations.seams import load  # noqa: E402
from llm_comm.integrations.vllm import configuration, gathering, plugin, seams  # noqa: E402

BENCH_PLUGINS = str(Path(__file__).parents[3] / "bench_serving" / "plugins")


# ---- Scenarios: each runs in every rank, in processes that have not touched vLLM before ----------------------------


@scenario()
def the_entry_point_is_found_and_loading_twice_is_harmless() -> None:
    theirs = current_platform.get_device_communicator_cls()
    load_plugins()
    wrapped = type(current_platform).get_device_communicator_cls
    assert (theirs, current_platform.get_device_communicator_cls()) == (plugin.THEIR_CLASS, plugin.OUR_CLASS)
    load_plugins()
    assert type(current_platform).get_device_communicator_cls == wrapped


@scenario(smoke=True)
def eager_all_reduces_reach_llm_comm() -> None:
    with vllm_groups() as log:
        calls = calls_of_llm_comm()
        for shape in ((16, 128), (1, 1), (3, 1001), (256, 4096)):
            x = data(shape)
            before = x.clone()
            result = parallel_state.get_tp_group().all_reduce(x)
            assert result.data_ptr() != x.data_ptr()
            assert torch.equal(x, before), "the input was changed"
            assert torch.equal(result, expected_sum(shape))
        assert len(calls) == 4
    assert len(log.having("is active for group tp:0 (2 ranks")) == (dist_rank() == 0)


@scenario(
    LLM_COMM_DSL="llm_comm.dsl.library:two_shot_ll",
    LLM_COMM_ALGORITHM="dsl:two_shot_ll",
    LLM_COMM_DSL_MAX_BYTES="16K",
)
def all_reduces_go_through_a_program_of_the_dsl() -> None:
    os.environ["LLM_COMM_CACHE_DIR"] = str(shared_directory())
    with vllm_groups() as log:
        calls = calls_of_llm_comm()
        group = parallel_state.get_tp_group()
        communicator = group.device_communicator._llm_comm
        for shape in ((16, 128), (3, 1001)):
            assert communicator.plan(data(shape)).algorithm == "dsl:two_shot_ll"
            assert torch.equal(group.all_reduce(data(shape)), expected_sum(shape))
            assert communicator._handle.core().last_call().operation == "program two_shot_ll"
        assert len(calls) == 2
        assert torch.equal(group.all_reduce(data((256, 4096))), expected_sum((256, 4096)))
        assert communicator._handle.core().last_call().operation == "two-shot all-reduce"
        assert len(log.having("all-reduce dsl:two_shot_ll to 16 KiB, else one_shot to ")) == (dist_rank() == 0)


@scenario(smoke=True)
def compiled_all_reduces_reach_llm_comm() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return tensor_model_parallel_all_reduce(x * 2) + 1

    with vllm_groups():
        calls = calls_of_llm_comm()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (4, 7):
            assert torch.equal(compiled(data((rows, 64))), expected_sum((rows, 64)) * 2 + 1)
        assert len(calls) == 2


@scenario(smoke=True)
def graph_capture_accepts_the_class() -> None:
    with vllm_groups(), mock.patch("torch.cuda.current_stream", return_value=None):
        group = parallel_state.get_tp_group()
        with group.graph_capture(parallel_state.GraphCaptureContext(None)):
            assert torch.equal(group.all_reduce(data((8, 32))), expected_sum((8, 32)))


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="4096")
def what_llm_comm_declines_goes_the_way_of_vllm() -> None:
    with vllm_groups():
        calls = calls_of_llm_comm()
        group = parallel_state.get_tp_group()
        too_large, whole = (64, 64), torch.full((5,), dist.get_rank(), dtype=torch.int64)
        transposed = data((16, 8)).t()
        assert torch.equal(group.all_reduce(data(too_large)), expected_sum(too_large))
        assert torch.equal(group.all_reduce(whole), torch.full((5,), 1, dtype=torch.int64))
        assert torch.equal(group.all_reduce(transposed), expected_sum((16, 8)).t())
        assert not calls
        assert torch.equal(group.all_reduce(data((16, 64))), expected_sum((16, 64)))
        assert len(calls) == 1


@scenario()
def all_other_collectives_stay_those_of_vllm() -> None:
    ours = plugin_class()
    public = {name for name in vars(ours) if not name.startswith("_")}
    sleep = {"suspend", "resume", "checkpoint_prepare", "checkpoint_restore"}
    assert public & set(dir(CudaCommunicator)) - sleep == {"all_reduce", "destroy"}
    inherited = {name for name in vars(gathering._Gathering) if not name.startswith("_")}
    gather = {"all_gather", "all_gatherv", "custom_all_gather"}
    scatter = {"reduce_scatter", "reduce_scatterv", "reduce_scatterv_into_output", "custom_reduce_scatter"}
    assert inherited == gather | scatter


@scenario()
def the_worker_of_rank_0_is_known_by_its_name() -> None:
    executor = Path(vllm.__file__).parent / "v1/executor/multiproc_executor.py"
    assert f'name=f"{plugin.RANK_0_PROCESS.removesuffix("0")}{{rank}}"' in executor.read_text()


@scenario(world=4)
def tensor_parallel_groups_of_a_pipeline_are_joined_one_by_one() -> None:
    with vllm_groups(tensor_parallel=2, pipeline_parallel=2):
        group = parallel_state.get_tp_group()
        communicator = group.device_communicator._llm_comm
        assert (communicator.rank, communicator.world_size) == (dist.get_rank() % 2, 2)
        assert parallel_state.get_pp_group().device_communicator._llm_comm is None
        first = dist.get_rank() // 2 * 2
        assert torch.equal(group.all_reduce(data((4, 8))), expected_sum((4, 8), (first, first + 1)))


@scenario(world=4, LLM_COMM_MULTI_NODE="1")
def a_group_over_two_nodes_sums_and_gathers_hierarchically() -> None:
    os.environ["LLM_COMM_NODE"] = f"node-{dist_rank() // 2}"
    everyone = (0, 1, 2, 3)
    with vllm_groups(tensor_parallel=4) as log:
        calls = calls_of_llm_comm()
        group = parallel_state.get_tp_group()
        communicator = group.device_communicator._llm_comm
        assert (communicator.nodes, communicator.world_size) == (2, 4)
        assert communicator.plan(data((16, 128))).algorithm == "2PH"
        for shape in ((16, 128), (1, 1), (3, 1001), (256, 1024)):
            assert torch.equal(group.all_reduce(data(shape)), expected_sum(shape, everyone))
        assert len(calls) == 4
        gathered = group.all_gather(data((4, 8)), dim=-1)
        assert torch.equal(gathered, torch.cat([data((4, 8), rank) for rank in everyone], dim=-1))
        assert communicator.stats().by_operation()["all_gather"].calls == 1
        # What is declined goes vLLM's way on all ranks.
        whole = torch.full((5,), dist.get_rank(), dtype=torch.int64)
        assert torch.equal(group.all_reduce(whole), torch.full((5,), 6, dtype=torch.int64))
    for text in ("active for group tp:0 (4 ranks, 2 nodes, ", "all-reduce hierarchical to "):
        assert len(log.having(text)) == (dist_rank() == 0)


@scenario(world=4)
def a_group_over_two_nodes_is_left_to_vllm_unless_asked_for() -> None:
    os.environ["LLM_COMM_NODE"] = f"node-{dist_rank() // 2}"
    with vllm_groups(tensor_parallel=4) as log:
        group = parallel_state.get_tp_group()
        assert group.device_communicator._llm_comm is None
        assert torch.equal(group.all_reduce(data((4, 8))), expected_sum((4, 8), (0, 1, 2, 3)))
    assert log.having("the ranks are on 2 nodes (node-0, node-1), and multi_node is false (default)", logging.WARNING)
    assert log.having("LLM_COMM_MULTI_NODE=1 on all ranks serves groups over several nodes")


@scenario(world=3, LLM_COMM_MULTI_NODE="1")
def a_group_with_uneven_nodes_is_left_to_vllm() -> None:
    os.environ["LLM_COMM_NODE"] = f"node-{dist_rank() // 2}"
    with vllm_groups(tensor_parallel=3) as log:
        group = parallel_state.get_tp_group()
        assert group.device_communicator._llm_comm is None
        assert torch.equal(group.all_reduce(data((4, 8))), expected_sum((4, 8), (0, 1, 2)))
    assert log.having("are on 2 nodes, and not as many on each", logging.WARNING)


@scenario(world=4)
def each_data_parallel_replica_sums_alone() -> None:
    config = VllmConfig()
    config.parallel_config.data_parallel_size = 2
    config.parallel_config.distributed_executor_backend = "external_launcher"  # the ranks are there already
    with vllm_groups(tensor_parallel=2, config=config):
        assert parallel_state.get_tp_group().device_communicator._llm_comm.world_size == 2
        assert parallel_state.get_ep_group().device_communicator._llm_comm is None


@scenario(LLM_COMM_ENABLE="0", LLM_COMM_ALGORITHM="nonsense")
def llm_comm_enable_0_leaves_vllm_untouched() -> None:
    before = dict(vars(type(current_platform)))
    with vllm_groups() as log:
        assert len(log.having("is not active: LLM_COMM_ENABLE is off")) == (dist_rank() == 0)
        assert dict(vars(type(current_platform))) == before
        assert type(parallel_state.get_tp_group().device_communicator) is CudaCommunicator
        assert torch.equal(parallel_state.get_tp_group().all_reduce(data((4, 4))), expected_sum((4, 4)))


@scenario(LLM_COMM_ENABLE="0", BENCH_SERVING_FREE="1")
def the_bound_of_bench_serving_waits_for_nobody() -> None:
    sys.path.append(BENCH_PLUGINS)  # by which its entry point is found
    with vllm_groups() as log:
        group = parallel_state.get_tp_group()
        assert len(log.having("all-reduces of this group return uninitialised memory (tp:0)")) == 1
        for _ in range(1 + dist_rank()):
            x = data((4, 4))
            result = group.all_reduce(x)
            assert (result.shape, result.dtype) == (x.shape, x.dtype)
            assert result.data_ptr() != x.data_ptr()
        from llm_comm_bench import vllm_worker
        from vllm.v1.worker.worker_base import WorkerBase

        added = {name for name in vars(vllm_worker.Extension) if not name.startswith("__")}
        assert added
        assert not added & set(dir(WorkerBase)), "vLLM refuses an extension that hides something"


@scenario(LLM_COMM_ENABLE="0")
def the_plugins_of_bench_serving_do_nothing_unasked() -> None:
    sys.path.append(BENCH_PLUGINS)
    with vllm_groups():
        assert type(parallel_state.get_tp_group().device_communicator) is CudaCommunicator


@scenario(LLM_COMM_ENABLE="0", VLLM_BATCH_INVARIANT="1")
def the_worker_of_bench_serving_tells_of_batch_invariant_mode() -> None:
    sys.path.append(BENCH_PLUGINS)
    with vllm_groups() as log:
        from llm_comm_bench.vllm_worker import Extension

        said = "bench_serving: the engine is in its deterministic mode"
        with mock.patch.dict(os.environ, VLLM_BATCH_INVARIANT="0"):
            Extension.tell_mode(None)
            assert not log.having(said)
        Extension.tell_mode(None)
        assert len(log.having(said)) == (dist_rank() == 0)


@scenario(VLLM_PLUGINS="another")
def vllm_plugins_selects() -> None:
    with vllm_groups():
        assert type(parallel_state.get_tp_group().device_communicator) is CudaCommunicator


@scenario()
def additional_config_switches_off() -> None:
    with vllm_groups(config=VllmConfig(additional_config={"llm_comm": {"enable": False}})) as log:
        assert type(parallel_state.get_tp_group().device_communicator) is CudaCommunicator
        assert len(log.having("is not active: enable is false in additional_config")) == (dist_rank() == 0)


@scenario()
def a_configuration_file_switches_off() -> None:
    use_config_file("enable: false")
    with vllm_groups() as log:
        assert parallel_state.get_tp_group().device_communicator._llm_comm is None
        assert torch.equal(parallel_state.get_tp_group().all_reduce(data((4, 4))), expected_sum((4, 4)))
        assert len(log.having("is not active: enable is false")) == (dist_rank() == 0)
        assert not log.having("", logging.WARNING, of="vllm.llm_comm")


@scenario()
def one_rank_that_is_switched_off_takes_the_others_along() -> None:
    use_config_file("enable: false" if dist_rank() == 1 else "", f"options{dist_rank()}.yaml")
    with vllm_groups() as log:
        assert parallel_state.get_tp_group().device_communicator._llm_comm is None
        assert len(log.having("is not active: rank 1 (global rank 1): enable is false")) == (dist_rank() == 0)


@scenario()
def a_rank_without_llm_comm_ends_the_start_of_the_others() -> None:
    if dist_rank() == 1:
        os.environ["LLM_COMM_ENABLE"] = "0"
    said = shared_directory() / "error"
    with mock.patch.object(joining, "JOIN_TIMEOUT_S", 2.0):
        context = vllm_groups()
        if dist_rank() == 1:
            with contextlib.suppress(RuntimeError):  # the other rank is gone when vLLM makes the next group
                context.__enter__()
            wait_for_text(said, "set up llm_comm")
            return
        try:
            context.__enter__()
            error = "vLLM has started, and has not set up llm_comm"
        except joining.AbsentRanksError as absent:
            error = str(absent)
        said.write_text(error)
        assert "not every rank of the engine came to set up llm_comm" in error, error
        assert "LLM_COMM_ENABLE, VLLM_PLUGINS and SGLANG_PLUGINS are set as on the others" in error, error


@scenario(smoke=True, LLM_COMM_ALGORITHM="one_shot", LLM_COMM_LOG="error")
def options_come_from_all_places_in_order() -> None:
    section = {"algorithm": "two_shot", "workspace_bytes": 8 << 20}
    use_config_file("log: info\nalgorithm: one_shot\npdl: true")
    with vllm_groups(config=VllmConfig(additional_config={"llm_comm": section})) as log:
        config = parallel_state.get_tp_group().device_communicator._llm_comm.config
        found = (config.algorithm, config.workspace_bytes, config.log, config.pdl, config.timeout_s)
        assert found == ("two_shot", 8 << 20, "error", True, 600.0), found
        assert len(log.having("all-reduce two_shot to 64 MiB, then vLLM's own")) == (dist_rank() == 0)


@scenario()
def the_time_limit_is_that_of_vllm_and_launches_do_not_depend_unless_set() -> None:
    config = VllmConfig()
    config.parallel_config.distributed_timeout_seconds = 77
    with vllm_groups(config=config):
        options = parallel_state.get_tp_group().device_communicator._llm_comm.config
        assert (options.timeout_s, options.pdl) == (77.0, False)


@scenario()
def norms_are_not_fused_with_all_reduces() -> None:
    config = VllmConfig()
    config.compilation_config.pass_config.fuse_allreduce_rms = True
    with vllm_groups(config=config) as log:
        assert config.compilation_config.pass_config.fuse_allreduce_rms is False
        assert len(log.having("vLLM's fuse_allreduce_rms, which sums past llm_comm, is off")) == (dist_rank() == 0)


@scenario(LLM_COMM_FUSE="0")
def norms_are_left_alone_where_ours_are_not_fused_either() -> None:
    """Who switches our fusion off still wants sums by llm_comm, which vLLM's goes past."""
    config = VllmConfig()
    config.compilation_config.pass_config.fuse_allreduce_rms = True
    with vllm_groups(config=config) as log:
        assert config.compilation_config.pass_config.fuse_allreduce_rms is False
        said = "not fused with RMSNorm: fuse is false (LLM_COMM_FUSE); vLLM's fuse_allreduce_rms, which sums past"
        assert len(log.having(said)) == (dist_rank() == 0)


@scenario(LLM_COMM_ENABLE="0")
def norms_are_fused_as_vllm_wants_where_llm_comm_is_off() -> None:
    config = VllmConfig()
    config.compilation_config.pass_config.fuse_allreduce_rms = True
    with vllm_groups(config=config):
        assert config.compilation_config.pass_config.fuse_allreduce_rms is True


@scenario(VLLM_BATCH_INVARIANT="1", LLM_COMM_SUM="any")
def batch_invariance_means_one_way_for_all_sizes() -> None:
    with vllm_groups():
        x = torch.empty(0).expand(0)
        communicator = parallel_state.get_tp_group().device_communicator._llm_comm
        assert communicator.accepts(x)
        assert communicator.config.max_message_bytes > 1 << 40
        assert communicator.config.sum == "rank_order"


@scenario(VLLM_BATCH_INVARIANT="1", LLM_COMM_WIRE="fp8")
def batch_invariance_excludes_quantized_sums() -> None:
    error = start_error(VllmConfig())
    assert "option wire is 'fp8' (LLM_COMM_WIRE), and VLLM_BATCH_INVARIANT is on: quantized sums" in error, error


@scenario(LLM_COMM_WIRE="int8", LLM_COMM_WIRE_MIN_BYTES="64K")
def large_sums_are_quantized_if_asked_for() -> None:
    with vllm_groups() as log:
        communicator = parallel_state.get_tp_group().device_communicator._llm_comm
        said = log.having("; all-reduces from 64 KiB to 256 MiB are quantized (int8): lossy; ")
        assert len(said) == (dist_rank() == 0)
        for rows in (15, 16):
            x = torch.randn(rows, 2048, generator=torch.Generator().manual_seed(dist.get_rank())).to(torch.bfloat16)
            total = tensor_model_parallel_all_reduce(x)
            assert (communicator.plan(x).algorithm == "two_shot_int8_hb") == (rows == 16)
            exact = x.clone()
            dist.all_reduce(exact)
            assert (total.float() - exact.float()).abs().max() < 0.2
            others = [torch.empty_like(total) for _ in range(2)]
            dist.all_gather(others, total)
            assert torch.equal(*others)
        assert communicator.stats().bytes_saved > 0


@scenario(VLLM_BATCH_INVARIANT="1")
def batch_invariant_sums_are_those_of_llm_comm() -> None:
    with vllm_groups():
        calls = calls_of_llm_comm()
        # Sums that depend on the order of their terms in fp32 as well.
        row = torch.randn(1, 512, generator=torch.Generator().manual_seed(dist.get_rank())).to(torch.bfloat16)
        alone = tensor_model_parallel_all_reduce(row)
        for rows in (3, 4096):
            together = tensor_model_parallel_all_reduce(row.repeat(rows, 1))
            assert torch.equal(together, alone.expand(rows, -1))
        assert len(calls) == 3


@scenario(world=1)
def the_deployment_example_is_valid() -> None:
    example = Path(__file__).parents[3] / "configs/vllm_deployment.yaml"
    arguments = FlexibleArgumentParser().load_config_file(str(example))
    additional = json.loads(arguments[arguments.index("--additional-config") + 1])
    with set_current_vllm_config(VllmConfig(additional_config=additional)):
        config = configuration.load_config()
    defaults = EngineOptions.load({}, timeout_s=600.0)
    assert (config, config.origins["algorithm"]) == (defaults, "Python")


@scenario(world=1)
def what_the_check_of_bench_serving_asks_of_the_compiler_is_known() -> None:
    sys.path.append(str(Path(__file__).parents[3]))
    from torch._inductor import config as inductor

    from bench_serving.engines import vllm as harness
    from bench_serving.settings import SHAPES, Settings

    asked = harness.options(Settings("vllm", str(SHAPES / "llama-2-70b"), check=True), False)["compilation_config"]
    config = CompilationConfig(**asked)
    VllmConfig(compilation_config=config)
    options = config.inductor_compile_config
    assert all(options[name] == value for name, value in asked["inductor_compile_config"].items())
    assert all(hasattr(inductor, name) for name in asked["inductor_compile_config"])


@scenario()
def unknown_names_of_one_rank_are_a_warning() -> None:
    """As after a way back to an older llm_comm. The ranks stay alike: nobody uses such a name."""
    if dist_rank() == 1:
        os.environ["LLM_COMM_ALGORITM"] = "one_shot"
    section = {"algoritm": "one_shot"} if dist_rank() == 1 else {}
    with vllm_groups(config=VllmConfig(additional_config={"llm_comm": section})) as log:
        assert parallel_state.get_tp_group().device_communicator._llm_comm is not None
        assert torch.equal(parallel_state.get_tp_group().all_reduce(data((4, 4))), expected_sum((4, 4)))
        ignored = log.having("(did you mean ", logging.WARNING)
        assert len(ignored) == 2 * (dist_rank() == 1), ignored
        assert all(" is ignored: llm_comm " in line for line in ignored), ignored


@scenario()
def a_wrong_value_stops_vllm_on_every_rank() -> None:
    error = start_error(VllmConfig(additional_config={"llm_comm": {"algorithm": "ring"}}))
    assert "additional_config['llm_comm']: option algorithm is 'ring'" in error, error
    assert "valid: 'auto' or 'one_shot' or 'two_shot'" in error, error


@scenario()
def a_wrong_variable_of_one_rank_stops_vllm_on_every_rank() -> None:
    if dist_rank() == 1:
        os.environ["LLM_COMM_TIMEOUT_S"] = "soon"
    error = start_error(VllmConfig())
    assert "rank 1 (global rank 1): LLM_COMM_TIMEOUT_S='soon' is not allowed; valid: a number of seconds" in error, (
        error
    )


@scenario(LLM_COMM_TABLE="/does/not/exist.yaml")
def a_tuning_table_that_cannot_be_read_stops_vllm() -> None:
    error = start_error(VllmConfig())
    assert "option table (LLM_COMM_TABLE): tuning table /does/not/exist.yaml" in error, error


@scenario()
def a_set_up_that_fails_on_one_rank_leaves_vllm_working() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of emulated memory")

    with mock.patch.object(_core, "make_emulated_core", fail if dist_rank() == 1 else _core.make_emulated_core):
        context = vllm_groups()
        log = context.__enter__()
    assert torch.equal(parallel_state.get_tp_group().all_reduce(data((4, 4))), expected_sum((4, 4)))
    (warning,) = log.having("is not active for group tp:0", logging.WARNING)
    assert "of group tp:0: rank 1 (global rank 1, pid " in warning, warning
    assert "): RuntimeError: out of emulated memory" in warning, warning
    context.__exit__(None, None, None)


@scenario(smoke=True, world=1)
def each_symbol_of_vllm_that_is_lost_switches_its_features_off() -> None:
    check_every_symbol(seams.TABLE)


@scenario(world=1)
def without_a_symbol_of_the_all_reduce_vllm_is_left_alone() -> None:
    for row in seams.ROWS:
        if row.feature == seams.ALL_REDUCE and row.is_required:
            lose(seams.TABLE, row.symbols)
            log = Log("vllm")
            load_plugins()
            assert current_platform.get_device_communicator_cls() == plugin.THEIR_CLASS
            (warning,) = log.having("llm_comm is not active: vLLM", logging.WARNING)
            assert f"has no {row.symbols}. vLLM's own collectives are used." in warning, warning


@scenario()
def all_reduces_need_nothing_but_their_own_symbols() -> None:
    """A release without anything else that llm_comm knows, one that raises where a module is imported among it."""
    own = {row.symbols for row in seams.ROWS if row.feature == seams.ALL_REDUCE}
    others = {row.symbols for row in seams.ROWS} - own
    lose(seams.TABLE, *(symbol for symbols in others for symbol in symbols.split()))
    mock.patch.dict("sys.modules", {"vllm.compilation.passes.pass_manager": None, "vllm.ir.ops": None}).start()
    mock.patch("vllm.distributed.get_tp_group", side_effect=AssertionError).start()
    with vllm_groups() as log, mock.patch("vllm.config.CompilationMode", None):
        group = parallel_state.get_tp_group()
        calls = calls_of_llm_comm()
        parts = [data((16, 128), rank) for rank in range(2)]
        assert torch.equal(group.all_reduce(data((16, 128))), expected_sum((16, 128)))
        assert torch.equal(group.all_gather(data((16, 128)), 0), torch.cat(parts))
        assert len(calls) == 1
        is_first = dist_rank() == 0
        assert len(log.having("is active for group tp:0 (2 ranks")) == is_first
        assert len(log.having("; but vLLM gathers and scatters itself: vLLM ")) == is_first
        assert len(log.having("; not fused with RMSNorm: vLLM ")) == is_first
        said = log.having("on: all-reduce; all-gather and reduce-scatter: off, vLLM ", logging.WARNING)
        assert [line.count(": off, vLLM ") for line in said] == [len(seams.LOST) - 1] * is_first


@scenario()
def the_wrapper_of_nccl_loads_the_library_in_its_place() -> None:
    use_nccl_library_by(importlib.import_module("vllm.distributed.device_communicators.pynccl_wrapper"))


@scenario()
def another_communicator_class_is_left_alone() -> None:
    with mock.patch.object(type(current_platform), "get_device_communicator_cls", classmethod(lambda _: "a.B")):
        load_plugins()
        assert current_platform.get_device_communicator_cls() == "a.B"


@scenario()
def elastic_expert_parallelism_keeps_its_exact_class() -> None:
    load_plugins()
    config = VllmConfig()
    config.parallel_config.enable_elastic_ep = True
    with set_current_vllm_config(config):
        assert current_platform.get_device_communicator_cls() == plugin.THEIR_CLASS


@scenario(exit_codes=(DIED_OF_THE_WATCHDOG, 0), LLM_COMM_TIMEOUT_S="1")
def a_peer_that_stays_away_ends_the_process_with_its_name() -> None:
    last_words = shared_directory() / "last_words"
    if dist_rank() == 1:  # it hears of the error, and would end too
        mock.patch.object(members.Member, "_watch").start()
    context = vllm_groups()
    context.__enter__()
    if dist_rank() == 0:
        logging.getLogger("vllm").addHandler(logging.FileHandler(last_words))
        with contextlib.suppress(PeerTimeout):
            parallel_state.get_tp_group().all_reduce(data((4, 4)))
        time.sleep(60)  # the engine takes no notice
    said = wait_for_text(last_words, "Ending this process")
    assert "llm_comm: group tp:0, rank 0 (global rank 0, pid " in said, said
    assert "): nothing came from rank 1 (global rank 1, pid " in said, said


@scenario(smoke=True, exit_codes=(DIED_OF_THE_WATCHDOG, -signal.SIGKILL))
def a_peer_that_dies_ends_the_process_without_the_time_out() -> None:
    context = vllm_groups()
    context.__enter__()
    lose_rank_1()


# ---- Sleep mode -----------------------------------------------------------------------------------------------------


class Worker:
    """Of vLLM's worker, which imports all models and Triton, the two methods that llm_comm wraps."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, bool]] = []

    def sleep(self, level: int = 1) -> None:
        self.calls.append(("sleep", level, communicator_of_tp().is_released))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", tags, communicator_of_tp().is_released))


def communicator_of_tp() -> llm_comm.Communicator:
    communicator: llm_comm.Communicator = parallel_state.get_tp_group().device_communicator._llm_comm
    return communicator


@contextlib.contextmanager
def worker_module() -> Iterator[type]:
    module = ModuleType("vllm.v1.worker.gpu_worker")
    module.Worker = type("Worker", (), dict(vars(Worker)))  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {module.__name__: module}):
        yield module.Worker


@scenario()
def the_worker_has_the_methods_of_sleep_mode() -> None:
    source = (Path(vllm.__file__).parent / "v1/worker/gpu_worker.py").read_text()
    (worker,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Worker")
    methods = {node.name: node for node in worker.body if isinstance(node, ast.FunctionDef)}
    for name, argument in (("sleep", "level"), ("wake_up", "tags")):
        assert [each.arg for each in methods[name].args.args] == ["self", argument]
    executor = (Path(vllm.__file__).parent / "v1/executor/abstract.py").read_text()
    for name in ("sleep", "wake_up"):
        assert f'collective_rpc("{name}"' in executor, "on all ranks of an engine"


@scenario(smoke=True, LLM_COMM_SLEEP="1")
def workspaces_are_released_while_vllm_sleeps() -> None:
    with worker_module() as kind, vllm_groups() as log:
        worker = kind()
        communicator = communicator_of_tp()
        group = parallel_state.get_tp_group()
        assert torch.equal(group.all_reduce(data((16, 128))), expected_sum((16, 128)))
        for level in (1, 2):
            worker.sleep(level)
            assert communicator.is_released
            worker.wake_up(tags=["weights"])
            assert not communicator.is_released
            worker.wake_up(tags=["kv_cache"])
            assert torch.equal(group.all_reduce(data((16, 128))), expected_sum((16, 128)))
        awake = [("wake_up", ["weights"], False), ("wake_up", ["kv_cache"], False)]
        assert worker.calls[:3] == [("sleep", 1, True), *awake]
        is_first = dist_rank() == 0
        assert len(log.having("group tp:0 sleeps: its workspaces (64 MiB on each rank) are released")) == 2 * is_first
        assert len(log.having("group tp:0 is awake")) == 2 * is_first


@scenario(LLM_COMM_SLEEP="1")
def one_rank_without_the_methods_of_sleep_mode_takes_the_others_along() -> None:
    if dist_rank() == 1:
        lose(seams.TABLE, "vllm.v1.worker.gpu_worker:Worker.wake_up")
    with worker_module() as kind, vllm_groups() as log:
        kind().sleep()
        assert not communicator_of_tp().is_released, "one rank that releases alone ends the group"
        said = "; its workspaces stay while vLLM sleeps: rank 1 (global rank 1): vLLM "
        assert len(log.having(said)) == (dist_rank() == 0)


@scenario()
def workspaces_stay_without_option_sleep() -> None:
    with worker_module() as kind, vllm_groups() as log:
        worker = kind()
        worker.sleep()
        worker.wake_up()
        assert [released for _, _, released in worker.calls] == [False, False]
        assert not log.having("sleeps")


@scenario(LLM_COMM_SLEEP="1")
def workspaces_that_cannot_be_released_stay() -> None:
    with worker_module() as kind, vllm_groups() as log:
        worker, communicator = kind(), communicator_of_tp()
        communicator.memory_kind = "cudaIpc"
        worker.sleep()
        assert not communicator.is_released
        group = parallel_state.get_tp_group()
        assert torch.equal(group.all_reduce(data((16, 128))), expected_sum((16, 128)))
        said = log.having("group tp:0 keeps its workspaces (64 MiB on each rank) while it sleeps", logging.WARNING)
        assert ["cudaIpc" in each for each in said] == [True] * (dist_rank() == 0)


@scenario(LLM_COMM_SLEEP="1")
def a_group_that_is_destroyed_does_not_sleep() -> None:
    with worker_module() as kind:
        with vllm_groups():
            pass
        with mock.patch.object(parallel_state, "get_tp_group"):
            kind().sleep()


@scenario(world=4, LLM_COMM_SLEEP="1")
def groups_of_several_engines_do_not_sleep() -> None:
    """Two replicas with data parallelism: each sleeps when it is told to."""
    config = VllmConfig()
    config.parallel_config.data_parallel_size = 2
    config.parallel_config.distributed_executor_backend = "external_launcher"  # the ranks are there already
    with worker_module() as kind, vllm_groups(tensor_parallel=2, config=config):
        dp = parallel_state.get_dp_group().device_communicator._llm_comm
        if dist_rank() // 2 == 0:
            kind().sleep()
            assert communicator_of_tp().is_released
            kind().wake_up()
        assert dp is None or not dp.is_released
        assert not communicator_of_tp().is_released
        dist.barrier()


@scenario(applies=hasattr(parallel_state, "checkpoint_prepare_distributed_state"), LLM_COMM_SLEEP="1")
def workspaces_are_released_for_a_checkpoint_of_the_process() -> None:
    with vllm_groups(), mock.patch("torch.accelerator.synchronize"):
        group, communicator = parallel_state.get_tp_group(), communicator_of_tp()
        for prepare, restore in (
            (parallel_state.checkpoint_prepare_distributed_state, parallel_state.checkpoint_restore_distributed_state),
            (parallel_state.suspend_device_comms, parallel_state.resume_device_comms),
        ):
            prepare()
            assert communicator.is_released
            restore()
            assert not communicator.is_released
            assert torch.equal(group.all_reduce(data((16, 128))), expected_sum((16, 128)))


# ---- Models that are not compiled -----------------------------------------------------------------------------------


class Layer:
    """Of a model such as DeepSeek-V3.2: its attention and its MLP leave their sums to the norms behind them.
    ``is_gemma``: of one such as MiniMax-M3."""

    def __init__(self, made: Any, hidden: int, is_gemma: bool = False) -> None:
        self.module, self.function = made, seams.GEMMA_FUNCTION if is_gemma else seams.FUNCTION
        self.weight_bias = 1.0 if is_gemma else 0.0
        self.norms = [
            GemmaRMSNorm(hidden, eps=1e-5) if is_gemma else RMSNorm(hidden, eps=1e-5, dtype=torch.bfloat16)
            for _ in range(2)
        ]
        for number, norm in enumerate(self.norms):
            norm.weight.data = torch.linspace(0.5, 1.5 + number, hidden).bfloat16()

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for norm in self.norms:
            x, residual = getattr(self.module, self.function)(x * (1 + dist_rank()), residual, norm)
        return x, residual

    def expected(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for norm in self.norms:
            total = ((x * 1).float() + (x * 2).float()).bfloat16()
            residual = (total.float() + residual.float()).bfloat16()
            values = residual.float()
            values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
            x = (values * (norm.weight.float() + self.weight_bias)).bfloat16()
        return x, residual


def model_module() -> ModuleType:
    """As of a model, which has imported vLLM's function by its name."""
    made = ModuleType("vllm.models.deepseek_v32.a_model")
    setattr(made, seams.FUNCTION, load(seams.TABLE.first_of(seams.SUMMING_NORM)))
    setattr(made, seams.GEMMA_FUNCTION, load(seams.SUMMING_GEMMA_NORM))
    sys.modules[made.__name__] = made
    return made


def not_compiled() -> VllmConfig:
    return VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))


@contextlib.contextmanager
def served_calls(*names: str) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """The calls of methods ``names`` that llm_comm serves the tensor-parallel group: name, and shape of the first
    tensor."""
    communicator = communicator_of_tp()
    calls: list[tuple[str, tuple[int, ...]]] = []

    def noting(name: str) -> Any:
        original = getattr(communicator, name)

        def call(x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            result = original(x, *arguments, **options)
            if result is not None:
                calls.append((name, tuple(x.shape)))
            return result

        return mock.patch.object(communicator, name, call)

    with contextlib.ExitStack() as noted:
        for name in names:
            noted.enter_context(noting(name))
        yield calls


def assert_near(got: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> None:
    """Up to roundings of bf16."""
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=0.02)


def run_layer(made: ModuleType, tokens: int = 4, is_gemma: bool = False) -> list[tuple[int, ...]]:
    """Runs a layer, looks at what it computes, and returns the shapes of fused calls."""
    layer, x, residual = Layer(made, 64, is_gemma), data((tokens, 64), rank=0), data((tokens, 64), rank=1)
    before = residual.clone()
    with torch.no_grad(), served_calls("all_reduce_add_rms_norm") as calls:
        got = layer.forward(x, residual)
        assert torch.equal(residual, before) or not calls, "the residual belongs to the caller"
        assert_near(got, layer.expected(x, before))
    return [shape for _, shape in calls]


@scenario(smoke=True)
def norms_of_models_that_are_not_compiled_sum_by_the_fused_kernel() -> None:
    made = model_module()
    with vllm_groups(config=not_compiled()) as log:
        assert run_layer(made) == [(4, 64)] * 2
        functions = "fused_allreduce_rms_norm or fused_allreduce_gemma_rms_norm"
        said = f"vLLM does not compile the model (it is in models that call {functions})"
        assert len(log.having("not fused with RMSNorm: " + said)) == (dist_rank() == 0)
        assert len(log.having("llm_comm: first all-reduce fused with its RMSNorm")) == (dist_rank() == 0)
        # A model that is imported later.
        assert run_layer(model_module()) == [(4, 64)] * 2
        assert run_layer(made, is_gemma=True) == run_layer(model_module(), is_gemma=True) == [(4, 64)] * 2


@scenario(LLM_COMM_MAX_MESSAGE_BYTES="256")
def what_the_kernel_declines_is_summed_and_normed_by_vllm() -> None:
    made = model_module()
    with vllm_groups(config=not_compiled()):
        assert run_layer(made) == []
        assert run_layer(made, tokens=2) == [(2, 64)] * 2
        assert run_layer(made, is_gemma=True) == []


@scenario(LLM_COMM_FUSE="0")
def norms_of_models_that_are_not_compiled_stay_vllms() -> None:
    made = model_module()
    before = getattr(made, seams.FUNCTION)
    with vllm_groups(config=not_compiled()):
        assert getattr(made, seams.FUNCTION) is before
        assert run_layer(made) == []


@scenario()
def norms_that_compute_something_else_are_left_to_vllm() -> None:
    made = model_module()
    with vllm_groups(config=not_compiled()):
        function = getattr(made, seams.FUNCTION)
        assert function.by_llm_comm
        norm = RMSNorm(64, var_hidden_size=32, dtype=torch.bfloat16)
        with mock.patch.object(LlmComm := plugin_class(), "all_reduce_add_rms_norm") as fused:
            x, residual = data((4, 64)), torch.ones(4, 64, dtype=torch.bfloat16)
            _, summed = function(x, residual, norm)
            fused.assert_not_called()
        assert torch.equal(summed, expected_sum((4, 64)) + 1), LlmComm


@scenario()
def one_rank_without_the_function_takes_the_others_along() -> None:
    made = model_module()
    if dist_rank() == 1:
        lose(seams.TABLE, seams.TABLE.first_of(seams.SUMMING_NORM))
    with vllm_groups(config=not_compiled()) as log:
        assert run_layer(made) == []
        said = "or fused_allreduce_gemma_rms_norm: rank 1 (global rank 1): vLLM "
        assert len(log.having(said)) == (dist_rank() == 0)


@scenario()
def models_that_are_compiled_keep_vllms_function() -> None:
    made = model_module()
    before = getattr(made, seams.FUNCTION)
    with vllm_groups(config=VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.VLLM_COMPILE))):
        assert getattr(made, seams.FUNCTION) is before


# ---- What they are made of ------------------------------------------------------------------------------------------


def load_plugins() -> None:
    """As each process of vLLM does."""
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()


@contextlib.contextmanager
def vllm_groups(
    tensor_parallel: int = 2, pipeline_parallel: int = 1, config: VllmConfig | None = None
) -> Iterator[Log]:
    """The groups of vLLM, made as its GPU worker makes them and destroyed as it destroys them."""
    log = Log("vllm")
    load_plugins()
    rank, world = dist_rank(), int(os.environ["WORLD_SIZE"])
    with set_current_vllm_config(config or VllmConfig()):
        # A file: a port could be taken by the time it is used.
        method = f"file://{shared_directory() / 'rendezvous'}"
        parallel_state.init_distributed_environment(world, rank, method, rank, "gloo")
        parallel_state.ensure_model_parallel_initialized(tensor_parallel, pipeline_parallel)
        yield log
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def start_error(config: VllmConfig) -> str:
    try:
        with vllm_groups(config=config):
            raise AssertionError("vLLM has started")
    except ConfigError as error:
        return str(error)


def plugin_class() -> type:
    from llm_comm.integrations.vllm.communicator import LlmCommCommunicator

    return LlmCommCommunicator


def calls_of_llm_comm() -> list[torch.Size]:
    """The shapes that the communicator of the tensor-parallel group sums from now on."""
    return calls_of(parallel_state.get_tp_group().device_communicator._llm_comm)
