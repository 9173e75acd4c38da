"""What vLLM and llm_comm do together: run by ``test_vllm_contract.py`` with the Python of an environment that has vLLM.

``python scenarios.py FD`` imports vLLM once, then reads names of scenarios from stdin. For each it forks the ranks,
lets them run the function of that name, and writes one line to the descriptor: {"name": ..., "errors": [...]}. A rank
leaves one error, the traceback, if its function raises or its process does not end as the scenario says.

The code of vLLM is that of the published wheel. What it is not given, and what takes its place:

- NVML, the compiled operators and xgrammar: the stand-ins of ``setup_vllm.py``, by which vLLM takes this machine for
  one with a GPU: platform, GroupCoordinator and CudaCommunicator are those of CUDA.
- NCCL: the device group is gloo. vLLM's own CUDA all-reduces find no CUDA and disable themselves, all but torch's
  symmetric memory, which a variable switches off. So vLLM's own way ends in torch.distributed.
- CUDA tensors: they are CPU tensors, as llm_comm runs on emulated GPUs. vLLM's operators are registered for them
  (``dispatch_key``, below).
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

os.environ.update(VLLM_ALLREDUCE_USE_SYMM_MEM="0", GLOO_SOCKET_IFNAME="lo")

from vllm.platforms import current_platform

type(current_platform).dispatch_key = "CPU"  # before the operators are registered, which the next import does

import vllm.logger  # noqa: E402
import vllm.plugins  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce  # noqa: E402
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

import llm_comm  # noqa: E402
from llm_comm import _core  # noqa: E402
from llm_comm.errors import ConfigError, PeerTimeout  # noqa: E402
from llm_comm.integrations import vllm as plugin  # noqa: E402

DIED_OF_THE_WATCHDOG = 1
_RANKS_S = 120.0


# ---- Scenarios: each runs in every rank, in processes that have not touched vLLM before ----------------------------


def scenario(world: int = 2, exit_codes: tuple[int, ...] | None = None, **environment: str) -> Callable[[Any], Any]:
    """Marks a scenario: how many ranks, how their processes end, and what the operator had set."""

    def mark(function: Any) -> Any:
        @wraps(function)
        def run() -> None:
            os.environ.update(environment)
            function()

        run.world, run.exit_codes = world, exit_codes or (0,) * world
        return run

    return mark


@scenario()
def the_entry_point_is_found_and_loading_twice_is_harmless() -> None:
    theirs = current_platform.get_device_communicator_cls()
    load_plugins()
    wrapped = type(current_platform).get_device_communicator_cls
    assert (theirs, current_platform.get_device_communicator_cls()) == (plugin.THEIR_CLASS, plugin.OUR_CLASS)
    load_plugins()
    assert type(current_platform).get_device_communicator_cls == wrapped


@scenario()
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


@scenario()
def compiled_all_reduces_reach_llm_comm() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return tensor_model_parallel_all_reduce(x * 2) + 1

    with vllm_groups():
        calls = calls_of_llm_comm()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (4, 7):
            assert torch.equal(compiled(data((rows, 64))), expected_sum((rows, 64)) * 2 + 1)
        assert len(calls) == 2


@scenario()
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
def other_collectives_stay_those_of_vllm() -> None:
    ours = plugin_class()
    public = {name for name in vars(ours) if not name.startswith("_")}
    assert public & set(dir(CudaCommunicator)) == {"all_reduce", "destroy"}


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


@scenario(world=4)
def each_data_parallel_replica_joins_alone() -> None:
    config = VllmConfig()
    config.parallel_config.data_parallel_size = 2
    config.parallel_config.distributed_executor_backend = "external_launcher"  # the ranks are there already
    with vllm_groups(tensor_parallel=2, config=config):
        assert parallel_state.get_tp_group().device_communicator._llm_comm.world_size == 2
        assert parallel_state.get_dp_group().device_communicator._llm_comm is None
        assert parallel_state.get_ep_group().device_communicator._llm_comm is None


@scenario(LLM_COMM_ENABLE="0", LLM_COMM_ALGORITHM="nonsense")
def llm_comm_enable_0_leaves_vllm_untouched() -> None:
    before = dict(vars(type(current_platform)))
    with vllm_groups() as log:
        assert len(log.having("is not active: LLM_COMM_ENABLE is off")) == (dist_rank() == 0)
        assert dict(vars(type(current_platform))) == before
        assert type(parallel_state.get_tp_group().device_communicator) is CudaCommunicator
        assert torch.equal(parallel_state.get_tp_group().all_reduce(data((4, 4))), expected_sum((4, 4)))


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
        assert len(log.having("is not active: rank 1: enable is false")) == (dist_rank() == 0)


@scenario(LLM_COMM_ALGORITHM="one_shot", LLM_COMM_LOG="error")
def options_come_from_all_places_in_order() -> None:
    section = {"algorithm": "two_shot", "workspace_bytes": 8 << 20}
    use_config_file("log: info\nalgorithm: one_shot\npdl: false")
    with vllm_groups(config=VllmConfig(additional_config={"llm_comm": section})) as log:
        config = parallel_state.get_tp_group().device_communicator._llm_comm.config
        found = (config.algorithm, config.workspace_bytes, config.log, config.pdl, config.timeout_s)
        assert found == ("two_shot", 8 << 20, "error", False, 600.0), found
        assert len(log.having("all-reduce two_shot to 64 MiB, then vLLM's own")) == (dist_rank() == 0)


@scenario()
def the_time_limit_is_that_of_vllm_unless_set() -> None:
    config = VllmConfig()
    config.parallel_config.distributed_timeout_seconds = 77
    with vllm_groups(config=config):
        assert parallel_state.get_tp_group().device_communicator._llm_comm.config.timeout_s == 77.0


@scenario()
def norms_are_not_fused_with_all_reduces() -> None:
    config = VllmConfig()
    config.compilation_config.pass_config.fuse_allreduce_rms = True
    with vllm_groups(config=config) as log:
        assert config.compilation_config.pass_config.fuse_allreduce_rms is False
        assert len(log.having("vLLM's fuse_allreduce_rms is off")) == (dist_rank() == 0)


@scenario(LLM_COMM_ENABLE="0")
def norms_are_fused_as_vllm_wants_where_llm_comm_is_off() -> None:
    config = VllmConfig()
    config.compilation_config.pass_config.fuse_allreduce_rms = True
    with vllm_groups(config=config):
        assert config.compilation_config.pass_config.fuse_allreduce_rms is True


@scenario(VLLM_BATCH_INVARIANT="1")
def batch_invariance_means_one_way_for_all_sizes() -> None:
    with vllm_groups():
        x = torch.empty(0).expand(0)
        communicator = parallel_state.get_tp_group().device_communicator._llm_comm
        assert communicator.accepts(x)
        assert communicator.config.max_message_bytes > 1 << 40


@scenario(world=1)
def the_deployment_example_is_valid() -> None:
    example = Path(__file__).parents[3] / "configs/vllm_deployment.yaml"
    arguments = FlexibleArgumentParser().load_config_file(str(example))
    additional = json.loads(arguments[arguments.index("--additional-config") + 1])
    with set_current_vllm_config(VllmConfig(additional_config=additional)):
        config = sys.modules[plugin_class().__module__].load_config()
    defaults = llm_comm.Config(timeout_s=600.0)
    assert (config, config.origins["algorithm"]) == (defaults, "Python")


@scenario()
def an_unknown_option_stops_vllm_on_every_rank() -> None:
    error = start_error(VllmConfig(additional_config={"llm_comm": {"algoritm": "one_shot"}}))
    assert "unknown option 'algoritm' in additional_config['llm_comm']; valid: enable, " in error, error


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
    assert "rank 1: LLM_COMM_TIMEOUT_S='soon' is not allowed; valid: a number of seconds > 0" in error, error


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
    assert "rank 1: RuntimeError: out of emulated memory" in warning, warning
    context.__exit__(None, None, None)


@scenario()
def a_version_of_vllm_that_llm_comm_does_not_know_is_left_alone() -> None:
    with mock.patch("vllm.config.get_current_vllm_config_or_none") as renamed:
        del renamed  # only to name what is taken away
        del vllm.config.get_current_vllm_config_or_none
        load_plugins()
        sys.modules.pop("llm_comm.integrations.vllm_communicator", None)
        assert current_platform.get_device_communicator_cls() == plugin.THEIR_CLASS
        vllm.config.get_current_vllm_config_or_none = None  # for the patch to put back


@scenario()
def a_platform_that_does_not_name_its_communicator_is_left_alone() -> None:
    log = Log()
    with mock.patch("vllm.platforms.current_platform", mock.Mock(spec=["is_cuda"])):
        load_plugins()
    assert log.having("it does not know this version of vLLM", logging.WARNING)


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
    context = vllm_groups()
    context.__enter__()
    if dist_rank() == 0:
        logging.getLogger("vllm").addHandler(logging.FileHandler(last_words))
        with contextlib.suppress(PeerTimeout):
            parallel_state.get_tp_group().all_reduce(data((4, 4)))
        time.sleep(60)  # the engine takes no notice
    deadline = time.monotonic() + 30
    while not (last_words.exists() and "Ending this process" in last_words.read_text()):
        assert time.monotonic() < deadline, "rank 0 said nothing"
        time.sleep(0.1)
    assert "llm_comm: rank 0: nothing came from rank 1" in last_words.read_text()


# ---- What they are made of ------------------------------------------------------------------------------------------


class Log(logging.Handler):
    """All that vLLM logs from now on."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[logging.LogRecord] = []
        logging.getLogger("vllm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def having(self, text: str, level: int = logging.DEBUG, of: str = "vllm") -> list[str]:
        records = [r for r in self._records if r.name.startswith(of) and r.levelno >= level]
        return [r.getMessage() for r in records if text in r.getMessage()]


def load_plugins() -> None:
    """As each process of vLLM does."""
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()


@contextlib.contextmanager
def vllm_groups(
    tensor_parallel: int = 2, pipeline_parallel: int = 1, config: VllmConfig | None = None
) -> Iterator[Log]:
    """The groups of vLLM, made as its GPU worker makes them and destroyed as it destroys them."""
    log = Log()
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


def use_config_file(text: str, name: str = "options.yaml") -> None:
    path = shared_directory() / name
    mine = path.with_suffix(f".{dist_rank()}")
    mine.write_text(text)
    mine.replace(path)  # the other rank may be reading it
    os.environ["LLM_COMM_CONFIG"] = str(path)


def shared_directory() -> Path:
    return Path(os.environ["SHARED_DIRECTORY"])


def plugin_class() -> type:
    from llm_comm.integrations.vllm_communicator import LlmCommCommunicator

    return LlmCommCommunicator


def calls_of_llm_comm() -> list[torch.Size]:
    """The shapes that the communicator of the tensor-parallel group sums from now on."""
    communicator: llm_comm.Communicator = parallel_state.get_tp_group().device_communicator._llm_comm
    shapes: list[torch.Size] = []
    original = communicator.all_reduce

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        shapes.append(x.shape)
        return original(x)

    communicator.all_reduce = all_reduce
    return shapes


def data(shape: tuple[int, ...], rank: int | None = None) -> torch.Tensor:
    """Different at every place and on every rank, and small enough for all sums to be exact in bfloat16."""
    rank = dist.get_rank() if rank is None else rank
    places = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return ((places * 7 + rank * 5) % 17 - rank).to(torch.bfloat16)


def expected_sum(shape: tuple[int, ...], ranks: tuple[int, ...] = (0, 1)) -> torch.Tensor:
    return torch.stack([data(shape, rank) for rank in ranks]).float().sum(0).to(torch.bfloat16)


def dist_rank() -> int:
    """The rank of this process, also before there are groups."""
    return int(os.environ["RANK"])


# ---- The process that forks the ranks -------------------------------------------------------------------------------


def run(name: str) -> list[str]:
    function = globals()[name]
    with tempfile.TemporaryDirectory() as directory:
        ranks = [fork_rank(function, rank, Path(directory)) for rank in range(function.world)]
        codes = wait_for(ranks)
        errors = []
        for rank, (code, wanted) in enumerate(zip(codes, function.exit_codes, strict=True)):
            trace = Path(directory, f"error{rank}")
            if trace.exists():
                errors.append(f"rank {rank}: {trace.read_text()}")
            elif code != wanted:
                errors.append(f"rank {rank}: the process ended with {code}, not {wanted} (negative: a signal)")
        return errors


def fork_rank(function: Any, rank: int, directory: Path) -> int:
    pid = os.fork()
    if pid != 0:
        return pid
    code = 0
    try:
        multiprocessing.current_process().name = f"VllmWorker-{rank}"
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(function.world), SHARED_DIRECTORY=str(directory))
        torch.set_num_threads(1)
        function()
    except BaseException:
        (directory / f"error{rank}").write_text(traceback.format_exc())
        code = 3
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_for(pids: list[int]) -> list[int]:
    """Exit codes. Whoever is still there when the time is up is killed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + _RANKS_S
    while len(codes) < len(pids):
        for pid in pids:
            if pid in codes:
                continue
            if time.monotonic() > deadline:
                os.kill(pid, 9)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def main() -> None:
    if hasattr(vllm.logger, "configure_logging"):  # since 0.33; before, importing it is enough
        vllm.logger.configure_logging(VllmConfig().logging_config)
    results = os.fdopen(int(sys.argv[1]), "w")
    for line in sys.stdin:
        name = line.strip()
        print(json.dumps({"name": name, "errors": run(name)}), file=results, flush=True)


if __name__ == "__main__":
    main()
