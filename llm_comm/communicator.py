"""Communicator: the collectives of one process group, on GPUs or on emulated ones."""

from __future__ import annotations

import contextlib
import importlib
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType

import torch
import torch.distributed as dist

from llm_comm import _core
from llm_comm.config import Config
from llm_comm.errors import CommunicatorError, UnsupportedInputError
from llm_comm.nodes.group import WHY as WITHIN_A_NODE
from llm_comm.nodes.group import MultiNodeGroup, set_up
from llm_comm.nodes.topology import Topology, find_topology
from llm_comm.operations import torch_operators
from llm_comm.operations.all_reduce import AllReduce
from llm_comm.operations.all_reduce_add_rms_norm import AllReduceAddRmsNorm
from llm_comm.operations.all_reduce_ops import AllReduceOps
from llm_comm.operations.all_to_all_v import AllToAllV
from llm_comm.operations.experts import ExpertLayers, Experts
from llm_comm.operations.gather_scatter import GatherScatter
from llm_comm.operations.generic import GenericOperations
from llm_comm.operations.linear import Linear
from llm_comm.operations.linear_all_reduce import LinearAllReduce, LinearAllReduceAddRmsNorm
from llm_comm.operations.linear_layers import LinearLayers
from llm_comm.operations.moe import ExpertParallel, MoeCombine, MoeDispatch
from llm_comm.operations.rope import LinearRope, RopeLayers
from llm_comm.operations.router import Router, RouterLayers
from llm_comm.operations.shards import AllGather, AllToAll, LossyAllGather, ReduceScatter
from llm_comm.planning import programs
from llm_comm.planning.multicast import Multicast
from llm_comm.planning.programs import Kernels
from llm_comm.planning.tables import TuningTable
from llm_comm.runtime.channels import Channels, open_channels
from llm_comm.runtime.connect import Connected, agree, compare, connect
from llm_comm.runtime.release import release, restore, why_not_releasable
from llm_comm.runtime.rendezvous import Rendezvous
from llm_comm.runtime.statistics import Stats
from llm_comm.runtime.symmetric_heap import SymmetricHeap
from llm_comm.runtime.workspaces import SHARING, UnsharedMemoryError

logger = logging.getLogger("llm_comm")


class Communicator(AllReduceOps, GatherScatter, LinearLayers, RopeLayers, ExpertLayers, RouterLayers, ExpertParallel):
    """Collectives of the ranks of one process group: all-reduce, all-gather, reduce-scatter, and fused forms of them.

    The ranks are on one machine, or on several with equally many ranks each. Construction is collective: all ranks get
    a communicator or all raise. Calls are collective too: all ranks must make the same calls, with the same shapes and
    dtypes, in the same order.

    Work is enqueued on the current CUDA stream and can be captured in CUDA graphs. A call on another stream than the
    previous call waits for that stream, which must still exist. Graphs of one communicator must not run on two streams
    at once; ``Config.debug`` detects this.

    The communicator is for inference. Nothing is differentiated: in grad mode, an operand that requires grad raises
    UnsupportedInputError. Writes increment the version counter of a tensor. Under a TorchDispatchMode, a tracer or a
    transform of torch.func, calls run through the registered torch operators.

    Args:
        group: Process group over gloo or NCCL, one device for each rank: 1 to 16 processes of this machine, or as many
            on each of several machines. docs/operate/nodes.md lists what is available on one machine only.
        device: CUDA device of this rank, or ``"cpu"`` for an emulated GPU on CPU tensors. None takes the current CUDA
            device; without a GPU or CUDA kernels in the build, an emulated one.
        config: Options, equal on all ranks. None loads them (``Config.load``).

    Attributes:
        rank: Rank of this process in the group.
        world_size: Number of ranks.
        device: Device of the tensors.
        config: Options in use.
        is_emulated: True for an emulated GPU on CPU tensors.
        memory_kind: Memory of the workspaces: "VMM", "VMM fabric", "cudaIpc", or "POSIX shared memory".

    Raises:
        RendezvousError: Ranks are missing, configured differently, cannot access each other's memory, or are unevenly
            distributed over machines. The text says which ranks and why.
        ConfigError: An option of a rank is invalid, or its tuning table or a named DSL program cannot be used.
        UnsupportedInputError: The device of a rank is neither a CUDA device nor the CPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str | int | None = None,
        config: Config | None = None,
    ) -> None:
        rendezvous, self.device, self.config = agree(group, device, config)
        # A level that the application has set for this logger stays, unless the option log is set.
        if "log" in self.config.origins or logger.level == logging.NOTSET:
            logger.setLevel(self.config.log.upper())
        self.is_emulated = self.device.type == "cpu"
        self.rank, self.world_size = rendezvous.rank, rendezvous.world_size
        try:
            connected = self._connect(rendezvous)
        except BaseException as error:
            # A caller that keeps the exception would keep its frames, and through their locals device memory.
            _clear_frames(error)
            raise
        self.memory_kind = connected.memory_kind
        self._handle, self._planner = connected.handle, connected.planner
        self._heap = SymmetricHeap(rendezvous, self._handle, SHARING[self.memory_kind])
        common = (self._handle, self._planner)
        layers, (sums, norms, gathers, lossy_gathers, scatters) = Linear(*common), self._between_ranks()
        why_none = "" if self._multi_node is None else WITHIN_A_NODE
        self._operations = torch_operators.Operations(
            sums,
            norms,
            gathers,
            lossy_gathers,
            scatters,
            AllToAll(*common, self.rank, why_none),
            AllToAllV(*common, why_none),
            layers,
            Linear(*common, epilogue="silu_and_mul"),
            Linear(*common, epilogue="gelu_tanh_and_mul"),
            Linear(*common, many_tokens=True),
            LinearAllReduce(self._handle, layers, sums),
            LinearAllReduceAddRmsNorm(self._handle, layers, norms),
        )
        self._linear_rope = LinearRope(*common)
        self._experts, self._router = Experts(*common), Router(*common)
        self._moe_dispatch, self._moe_combine = MoeDispatch(*common, why_none), MoeCombine(*common, why_none)
        self._other_operations = GenericOperations(*common, why_none)
        # Bound at set-up to save attribute look-ups in calls.
        self._all_reduce = self._operations.all_reduce.run
        self._all_reduce_add_rms_norm = self._operations.all_reduce_add_rms_norm.run
        self._all_gather = self._operations.all_gather.run
        self._lossy_all_gather = self._operations.lossy_all_gather.run
        self._reduce_scatter = self._operations.reduce_scatter.run
        self._all_to_all = self._operations.all_to_all.run
        self._linear = self._operations.linear.run
        self._batch_invariant_linear = self._operations.batch_invariant_linear.run
        self._linear_silu_and_mul = self._operations.linear_silu_and_mul.run
        self._linear_gelu_tanh_and_mul = self._operations.linear_gelu_tanh_and_mul.run
        self._linear_all_reduce = self._operations.linear_all_reduce.run
        self._linear_all_reduce_add_rms_norm = self._operations.linear_all_reduce_add_rms_norm.run
        if self._multi_node is None:
            self._load_programs(rendezvous)
        self.name = torch_operators.register(self._operations)
        logger.info(
            "%s of %d%s on %s: workspace %d bytes (%s), %s",
            rendezvous.names.in_group(self.rank),
            self.world_size,
            "" if self._multi_node is None else f" ({self._multi_node.describe()})",
            "an emulated GPU" if self.is_emulated else self.device,
            self.workspace_bytes,
            self.memory_kind,
            self.table.describe(),
        )

    def _connect(self, rendezvous: Rendezvous) -> Connected | MultiNodeGroup:
        """Connect the ranks of this machine and, if there are several machines, the connections between them.
        Collective."""
        #: Connections between nodes; None if all ranks are on one node.
        self._multi_node: MultiNodeGroup | None = None
        topology = find_topology(rendezvous, self.device, self.config)
        try:
            return self._connect_nodes(rendezvous, topology)
        except UnsharedMemoryError as error:  # raised on all ranks alike: all go on
            if not rendezvous.spans_hosts:
                raise
            _clear_frames(error)
            if rendezvous.rank == 0:
                text = "llm_comm: %s: each host is a node of its own, though an NVLink domain connects them: %s"
                logger.warning(text, rendezvous.names.of_group, error)
        return self._connect_nodes(rendezvous, find_topology(rendezvous, self.device, self.config, in_domains=False))

    def _connect_nodes(self, rendezvous: Rendezvous, topology: Topology | None) -> Connected | MultiNodeGroup:
        """Connect the ranks of each node, and the nodes. ``topology`` is None if all ranks are on one. Collective."""
        if topology is not None:
            self._multi_node = set_up(rendezvous, topology, self.device, self.config)
            return self._multi_node
        compared = compare(rendezvous, self.device, self.config, rendezvous.world_size)
        return connect(rendezvous, self.device, self.config, compared)

    def _between_ranks(self) -> tuple[AllReduce, AllReduceAddRmsNorm, AllGather, AllGather, ReduceScatter]:
        """Build the operations that communicate between ranks. The second all-gather is the lossy one."""
        if self._multi_node is not None:
            sums, norms, over_nodes, scatters = self._multi_node.operations()
            return sums, norms, over_nodes, over_nodes, scatters
        common = (self._handle, self._planner)
        of_shards = (*common, self.rank)
        gathers = AllGather(*of_shards)
        lossy = gathers if self.config.wire == "none" else LossyAllGather(*of_shards)
        return AllReduce(*common), AllReduceAddRmsNorm(*common), gathers, lossy, ReduceScatter(*of_shards)

    def _load_programs(self, rendezvous: Rendezvous) -> None:
        """Compile the DSL programs that options or the tuning table name. Collective."""
        if self.config.dsl is None and not programs.named_by(self.config, self.table):
            return
        try:
            # Imported by name, as the programs are: llm_comm.dsl uses parts of the communicator and is the higher
            # layer.
            name = "llm_comm.dsl.selected"
            selected = rendezvous.attempt(f"import of {name}", lambda: importlib.import_module(name))
            self._planner.programs = selected.load(rendezvous, self._heap, self._handle, self.config, self.table)
        except BaseException as error:
            self.close()
            _clear_frames(error)
            raise

    # ---- Operations ---------------------------------------------------------------------------------------------

    def run(
        self, operation: str, buffers: Mapping[str, torch.Tensor | None], *, row: int = 0, **parameters: float
    ) -> None:
        """Run an operation of the registry that has no method, such as one of your own.

        Args:
            operation: Name of the operation. ``llm-comm algorithms`` lists operations with their buffers and
                parameters.
            buffers: Tensors by name: contiguous, on this communicator's device, of one dtype and number of elements. An
                output must not overlap another buffer. Optional buffers may be None or omitted.
            row: Elements of a row, for an operation on rows.
            parameters: Parameters of the operation, equal on all ranks.

        Raises:
            UnsupportedInputError: The operation is unknown, a tensor or parameter is missing or invalid, or the plan
                declines the call (``plan_for``). Also if a mode, tracer or transform of torch would miss the call.
            CommunicatorError: This or an earlier call has failed, see ``all_reduce``.
        """
        self._other_operations.run(operation, buffers, row, parameters)

    # ---- Memory ---------------------------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a tensor in symmetric memory, which all ranks have mapped. Collective.

        Operations whose tensors are all symmetric access the peers' tensors directly. All ranks get a tensor or all
        raise. A call takes a millisecond or more and must not be made during a graph capture. Views and slices are
        symmetric too. The tensor can be an ``out=`` and can be used in CUDA graphs. ``record_stream`` has no effect on
        it, since the memory is not torch's.

        Memory is reused or freed by a later call of ``empty``, after the tensor and its views are gone on every rank.
        That call synchronizes the device. Once CUDA graphs hold operations of this communicator, memory is neither
        reused nor freed. A tensor that outlives the communicator keeps its memory, for this rank only.

        Args:
            shape: Shape, equal on all ranks.
            dtype: Dtype, equal on all ranks. None: torch's default.

        Raises:
            RendezvousError: The ranks ask for different tensors, or a rank has no memory. Communicator and group stay
                usable.
            MissingRankError: A rank has not made the call within ``Config.timeout_s``.
            UnsupportedInputError: Shape or dtype is invalid, a CUDA graph is being captured, or the ranks are on
                several nodes.
        """
        self.check_one_node("Communicator.empty")
        tensor = self._heap.empty(shape, torch.get_default_dtype() if dtype is None else dtype)
        if not self._planner.has_symmetric:
            self._planner.has_symmetric = True
            self._forget()  # calls were prepared without algorithms for symmetric memory
        return tensor

    def channels(
        self, memory: torch.Tensor | None = None, *, semaphores: int = 16, code: str | bytes | None = None
    ) -> Channels:
        """Open channels to every other rank, for user kernels (docs/reference/own_kernels.md). Collective.

        The proxy thread of port channels runs from this call on.

        Args:
            memory: Destination of the channels, at the same symmetric offset on all ranks: a tensor of ``empty``, or a
                contiguous view of one that begins at a multiple of 16 bytes. None: a new tensor of 1 MiB.
            semaphores: Number of semaphores for each pair of ranks and each kind of channel, equal on all ranks. They
                belong to this object only.
            code: Source or image of the kernels that use the channels. If given, ranks compare a digest of it. Kernels
                that differ would exchange wrong data without an error.

        Raises:
            RendezvousError: The ranks ask for different channels or have different code, or a rank has no memory or
                proxy.
            MissingRankError: A rank has not made the call within ``Config.timeout_s``.
            UnsupportedInputError: An argument is invalid, a CUDA graph is being captured, or the ranks are on several
                nodes.
        """
        self.check_one_node("Communicator.channels")
        return open_channels(self._heap, self._handle, memory, semaphores, code)

    def release(self) -> None:
        """Free the memory of the workspace until ``restore``, for an engine in sleep mode. Collective.

        All ranks free their memory or none does. The call waits for the device. Prepared calls and CUDA graphs are
        valid again after ``restore``. Until then every operation, ``empty`` and ``channels`` raise RuntimeError, and
        graphs with operations of this communicator must not be replayed: their results are not computed.

        Tensors of ``empty`` and memory of DSL programs are not freed, nor is one VMM granule (2 MiB) on a GPU. A second
        call has no effect. ``close`` is allowed after it.

        Raises:
            UnsupportedInputError: The memory cannot be released (``why_not_releasable`` says why), or a CUDA graph is
                being captured. The communicator stays usable.
            RendezvousError: A rank refuses, for example because its communicator has failed. Nothing changes on the
                others.
            MissingRankError: A rank has not made the call within ``Config.timeout_s``. The process group is lost.
            RuntimeError: The communicator is closed.
        """
        self._handle.core_of_released()
        if self.is_released:
            return
        release(self._heap.rendezvous(), self._handle, self.why_not_releasable)
        logger.info("%s: the workspace is released", self._heap.rendezvous().names.in_group(self.rank))

    def restore(self) -> None:
        """Allocate the memory of the workspace again after ``release``, at its old addresses. Collective.

        Graphs can be replayed afterwards. Without a ``release`` the call has no effect.

        Raises:
            RendezvousError: A rank has no memory, for example. All ranks stay released: free memory and call again, or
                close.
            MissingRankError: A rank has not made the call within ``Config.timeout_s``. The process group is lost.
            RuntimeError: The communicator is closed.
        """
        self._handle.core_of_released()
        if not self.is_released:
            return
        restore(self._heap.rendezvous(), self._handle, SHARING[self.memory_kind])
        logger.info("%s: the workspace is restored", self._heap.rendezvous().names.in_group(self.rank))

    @property
    def is_released(self) -> bool:
        """True while ``release`` has freed the workspace. Equal on all ranks."""
        return self._handle.is_released

    @property
    def why_not_releasable(self) -> str:
        """Reason why ``release`` is impossible, equal on all ranks, or ""."""
        if self._multi_node is not None:
            return f"releasing {WITHIN_A_NODE}"
        return why_not_releasable(self.memory_kind, self.multicast)

    def check_one_node(self, call: str) -> None:
        """Raise UnsupportedInputError, on all ranks alike, if the ranks are on several nodes. ``call`` names the
        caller."""
        if self._multi_node is not None:
            raise UnsupportedInputError(f"{call} {WITHIN_A_NODE}")

    # ---- State --------------------------------------------------------------------------------------------------

    def use_table(self, table: TuningTable) -> None:
        """Replace the tuning table, for tuning. Every rank must make the same call.

        Raises:
            ConfigError: A row names a DSL program that was not compiled when this communicator was made.
        """
        self._planner.check_table(table)
        if self._multi_node is not None:
            table = self._multi_node.use_table(table)
        self._planner.table = table
        self._forget()
        self._handle.core_of_released().load(self._planner.choosable())

    def _forget(self) -> None:
        """Drop prepared calls and plans."""
        self._operations.all_reduce.forget()
        self._operations.all_reduce_add_rms_norm.forget()
        self._operations.all_gather.forget()
        self._operations.lossy_all_gather.forget()
        self._operations.reduce_scatter.forget()
        self._operations.all_to_all.forget()
        self._operations.all_to_all_v.forget()
        self._operations.linear.forget()
        self._operations.linear_silu_and_mul.forget()
        self._operations.linear_gelu_tanh_and_mul.forget()
        self._operations.batch_invariant_linear.forget()
        self._linear_rope.forget()
        self._experts.forget()
        self._router.forget()
        self._moe_dispatch.forget()
        self._moe_combine.forget()
        self._other_operations.forget()

    def check(self) -> None:
        """Raise the CommunicatorError of an earlier call that failed. Does not synchronize with the device.

        If CUDA graphs hold operations, also check whether replays overlapped with other operations
        (docs/operate/failures.md).
        """
        self._handle.check(look_at_order=True)

    def stats(self) -> Stats:
        """Return this rank's counts of calls, declined inputs and ended operations (docs/operate/statistics.md).

        Any thread may call this, on one rank alone, and after ``close``.
        """
        return self._handle.stats()

    def on_error(self, callback: Callable[[CommunicatorError], None], *, exits: bool = False) -> None:
        """Call ``callback`` with the error when this communicator fails, even if no further call is made.

        The callback runs once, within ``Config.timeout_s``, in a thread of the communicator. After an earlier failure
        it runs at once in the calling thread. It must not wait for the GPU, and must use ``os._exit`` to end the
        process. A bound method does not keep its object alive. Without a callback the error is logged. Every operation
        raises it afterwards.

        Args:
            callback: Receives the exception that operations raise.
            exits: Fail also if another rank's process exits without closing its communicator, although no operation
                waits for it. The failure comes one second after the exit, or as soon as this process ends or drops the
                communicator while the callback still exists. A rank whose interpreter ends, even by an exception,
                counts as closed.
        """
        self._handle.on_error(callback, exits)

    @property
    def table(self) -> TuningTable:
        """Tuning table in use. Over several nodes it has the size limit that holds there."""
        return self._planner.table

    @property
    def table_of_node(self) -> TuningTable:
        """Tuning table in use, with the size limit within a node."""
        return self._planner.table if self._multi_node is None else self._multi_node.table

    @property
    def programs(self) -> Mapping[str, Kernels]:
        """DSL programs compiled for this communicator (docs/reference/dsl.md), by the names that options and tables
        use. Equal on all ranks."""
        return MappingProxyType(self._planner.programs)

    @property
    def multicast(self) -> Multicast:
        """State of NVLink multicast with its reason, equal on all ranks."""
        return self._planner.multicast

    @property
    def limits(self) -> _core.Limits:
        """Launch limits that hold on the devices of all ranks."""
        return self._planner.limits

    @property
    def nodes(self) -> int:
        """Number of nodes of the ranks (docs/operate/nodes.md)."""
        return 1 if self._multi_node is None else self._multi_node.nodes

    @property
    def rank_in_node(self) -> int:
        """Rank of this process among the ranks of its node, from 0."""
        return self.rank if self._multi_node is None else self._multi_node.local_rank

    @property
    def workspace_bytes(self) -> int:
        """Device memory of this rank's workspace in bytes; 0 while it is released."""
        return 0 if self.is_released else self._handle.core().workspace_bytes()

    def close(self) -> None:
        """Free the workspace. Every rank must call it, after its last operation. Further calls have no effect.

        The call waits for eager calls of this communicator and for the current stream, not for graphs that are replayed
        on other streams. If a CUDA graph holds operations, the graph could be replayed: the workspace
        (``workspace_bytes``) is then kept until the process ends, and operations that begin after ``close`` do nothing.

        In a process forked from the one that made the communicator, the call has no effect.
        """
        if self._handle.is_of_parent:
            return
        self._forget()
        self._planner.programs = {}
        self._heap.close()
        with contextlib.nullcontext() if self._multi_node is None else self._multi_node.closing():
            self._handle.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _clear_frames(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
