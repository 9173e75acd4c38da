"""The communicator: one group's collectives, on GPUs or on emulated ones."""

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
from llm_comm.nodes.topology import find_topology
from llm_comm.operations import torch_operators
from llm_comm.operations.all_reduce import AllReduce
from llm_comm.operations.all_reduce_add_rms_norm import AllReduceAddRmsNorm
from llm_comm.operations.gather_scatter import GatherScatter
from llm_comm.operations.generic import GenericOperations
from llm_comm.operations.linear import Linear
from llm_comm.operations.linear_all_reduce import LinearAllReduce, LinearAllReduceAddRmsNorm
from llm_comm.operations.linear_layers import LinearLayers
from llm_comm.operations.parts import AllGather, ReduceScatter
from llm_comm.operations.sums import Sums
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

logger = logging.getLogger("llm_comm")


class Communicator(Sums, GatherScatter, LinearLayers):
    """All-reduce and its kin for the ranks of one process group, on one machine or on several with equally many each.

    Making one is collective over the group: either all ranks get one or all raise. Calls are collective too: all ranks
    make the same calls, with the same shapes and dtypes, in the same order. Work is enqueued on the current CUDA stream
    and can be captured in CUDA graphs. A call on another stream than the last one waits for that one, which must still
    exist; graphs of one communicator must not run on two streams at once (``Config.debug`` notices). For inference:
    nothing is differentiated, so in grad mode an operand that requires grad is an UnsupportedInputError. Tensors that
    are written count up their version. Under a TorchDispatchMode, a tracer or a transform of torch.func, calls go by
    the registered torch operators.

    Args:
        group: The ranks, each with a device of its own: 1 to 8 processes of this machine, or as many on each of several
            machines (docs/operate/nodes.md: what else works only within a machine). gloo or NCCL.
        device: CUDA device of this rank, or ``"cpu"`` for an emulated GPU that works on CPU tensors. None takes the
            current CUDA device if there is one and the build has CUDA kernels, else an emulated GPU.
        config: Options, the same on all ranks; None loads them (``Config.load``).

    Raises:
        RendezvousError: Ranks are missing, configured differently, or cannot reach each other's memory, or not as many
            are on each machine. The text says which and why.
        ConfigError: An option of a rank is not allowed, or its tuning table or a program that is named cannot be used.
        UnsupportedInputError: The device of a rank is neither a CUDA device nor the CPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str | int | None = None,
        config: Config | None = None,
    ) -> None:
        rendezvous, self.device, self.config = agree(group, device, config)
        # Where nobody chose a level here, one that the application has set for this logger stays.
        if "log" in self.config.origins or logger.level == logging.NOTSET:
            logger.setLevel(self.config.log.upper())
        self.is_emulated = self.device.type == "cpu"
        self.rank, self.world_size = rendezvous.rank, rendezvous.world_size
        try:
            connected = self._connect(rendezvous)
        except BaseException as error:
            # Whoever keeps the error keeps the frames that it went through, and what they hold: the device's memory.
            _clear_frames(error)
            raise
        self.memory_kind = connected.memory_kind
        self._handle, self._planner = connected.handle, connected.planner
        self._heap = SymmetricHeap(rendezvous, self._handle, connected.memory_kind == "cudaIpc")
        common = (self._handle, self._planner)
        layers, (sums, norms, gathers, scatters) = Linear(*common), self._between_ranks()
        self._operations = torch_operators.Operations(
            sums,
            norms,
            gathers,
            scatters,
            layers,
            Linear(*common, silu_and_mul=True),
            Linear(*common, many_tokens=True),
            LinearAllReduce(self._handle, layers, sums),
            LinearAllReduceAddRmsNorm(self._handle, layers, norms),
        )
        self._other_operations = GenericOperations(*common, "" if self._multi_node is None else WITHIN_A_NODE)
        # Found with one look-up each.
        self._all_reduce = self._operations.all_reduce.run
        self._all_reduce_add_rms_norm = self._operations.all_reduce_add_rms_norm.run
        self._all_gather = self._operations.all_gather.run
        self._reduce_scatter = self._operations.reduce_scatter.run
        self._linear = self._operations.linear.run
        self._linear_of_any_batch = self._operations.linear_of_any_batch.run
        self._linear_silu_and_mul = self._operations.linear_silu_and_mul.run
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
        """Connects the ranks of this machine; where there are others, also what is between them. Collective."""
        topology = find_topology(rendezvous, self.config)
        #: What there is between nodes; None where all ranks are on one.
        self._multi_node: MultiNodeGroup | None = None
        if topology is not None:
            self._multi_node = set_up(rendezvous, topology, self.device, self.config)
            return self._multi_node
        compared = compare(rendezvous, self.device, self.config, rendezvous.world_size)
        return connect(rendezvous, self.device, self.config, compared)

    def _between_ranks(self) -> tuple[AllReduce, AllReduceAddRmsNorm, AllGather, ReduceScatter]:
        """The operations in which other ranks take part."""
        if self._multi_node is not None:
            return self._multi_node.operations()
        common = (self._handle, self._planner)
        of_parts = (*common, self.rank)
        return AllReduce(*common), AllReduceAddRmsNorm(*common), AllGather(*of_parts), ReduceScatter(*of_parts)

    def _load_programs(self, rendezvous: Rendezvous) -> None:
        """Has the programs of llm_comm.dsl compiled that options or the table name. Collective."""
        if self.config.dsl is None and not programs.named_by(self.config, self.table):
            return
        try:
            # By name, as the programs themselves: they are made of a communicator's parts, so their layer is above.
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
        """Runs an operation of the registry that has no method here: of an algorithm of one's own, say.

        Args:
            operation: Its name; ``llm-comm algorithms`` lists operations, with their buffers and parameters.
            buffers: Tensors by name: on this communicator's device, contiguous, of one type and number of elements.
                Outputs share no memory with any other. An optional one may be None or left out.
            row: Elements of a row, for an operation that works by rows.
            parameters: The operation's own, the same on all ranks.

        Raises:
            UnsupportedInputError: There is no such operation, a tensor or a number does not fit or is missing,
                ``plan_for`` of the same is declined, or a mode, tracer or transform of torch would miss the call.
            CommunicatorError: This or an earlier call has failed, as of ``all_reduce``.
        """
        self._other_operations.run(operation, buffers, row, parameters)

    # ---- Memory ---------------------------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new tensor in symmetric memory, which all ranks have mapped: operations whose tensors all lie there read
        and write those of the peers directly.

        Collective: every rank makes the same call, and all get a tensor or all raise. It takes a millisecond or more,
        and must not come while a CUDA graph is captured. The tensor is an ordinary one, of memory that is not torch's:
        views and slices lie in symmetric memory too, ``out=`` and CUDA graphs take it, and ``record_stream`` does
        nothing.

        When the tensor and all its views are gone on every rank, a later call of ``empty`` gives the memory to other
        tensors, or back to the device: it waits for the device then. It does neither once CUDA graphs hold operations
        of this communicator. A tensor that outlives the communicator keeps its memory, which is then that of this rank
        alone.

        Args:
            shape: The same on all ranks.
            dtype: The same on all ranks; None: torch's default.

        Raises:
            RendezvousError: The ranks ask for different tensors, or one of them has no memory. The communicator, and
                the group, can be used as before.
            MissingRankError: A rank has not made the call within ``Config.timeout_s``.
            UnsupportedInputError: There is no such tensor, a CUDA graph is being captured, or the ranks are on several
                nodes.
        """
        self.check_one_node("Communicator.empty")
        tensor = self._heap.empty(shape, torch.get_default_dtype() if dtype is None else dtype)
        if not self._planner.has_symmetric:
            self._planner.has_symmetric = True
            self._forget()  # prepared without what symmetric memory makes possible
        return tensor

    def channels(
        self, memory: torch.Tensor | None = None, *, semaphores: int = 16, code: str | bytes | None = None
    ) -> Channels:
        """Channels to every other rank, for kernels of one's own: see docs/reference/own_kernels.md.

        Collective, as ``empty`` is. The proxy of port channels runs from now on.

        Args:
            memory: Where the channels write to: a tensor of ``empty``, or a contiguous view of one that begins at a
                multiple of 16 bytes; the same on all ranks. None: a new one of 1 MiB.
            semaphores: Of each pair of ranks and each kind of channel. No other object shares them. The same on all
                ranks.
            code: Source or image of the kernels that are to use the channels. Where given, a digest of it is compared
                between the ranks: kernels that differ would exchange wrong data, and nothing else would tell.

        Raises:
            RendezvousError: The ranks ask for different channels or have different code, or one of them has no memory
                or no proxy.
            MissingRankError: A rank has not made the call within ``Config.timeout_s``.
            UnsupportedInputError: There are no such channels, a CUDA graph is being captured, or the ranks are on
                several nodes.
        """
        self.check_one_node("Communicator.channels")
        return open_channels(self._heap, self._handle, memory, semaphores, code)

    def release(self) -> None:
        """Gives the memory of the workspace back to the device, until ``restore``: for an engine that sleeps.

        Collective: every rank makes the same call, and the memory of all goes or none. Waits for the device. Prepared
        calls and CUDA graphs stay good for afterwards. Until then every operation, ``empty`` and ``channels`` are a
        RuntimeError, and what a graph of this communicator would compute is not computed: do not replay it. Tensors of
        ``empty``, and memory of programs of llm_comm.dsl, stay as they are. On a GPU one granule of VMM, 2 MiB, stays
        too. Once released, nothing changes. ``close`` may follow.

        Raises:
            UnsupportedInputError: The memory cannot be released (``why_not_releasable`` says why), or a CUDA graph is
                being captured. The communicator can be used as before.
            RendezvousError: A rank refuses: its communicator has failed, for one. As before on the others.
            MissingRankError: A rank has not made the call within ``Config.timeout_s``; the group is lost.
            RuntimeError: The communicator is closed.
        """
        self._handle.core_of_released()
        if self.is_released:
            return
        release(self._heap.rendezvous(), self._handle, self.why_not_releasable)
        logger.info("%s: the workspace is released", self._heap.rendezvous().names.in_group(self.rank))

    def restore(self) -> None:
        """Takes memory for the workspace again, at the addresses of before, after ``release``: graphs can be replayed.

        Collective. Where nothing is released, nothing changes.

        Raises:
            RendezvousError: A rank has no memory for it, say. The communicator is released as before on all ranks: free
                memory and call it again, or close it.
            MissingRankError: A rank has not made the call within ``Config.timeout_s``; the group is lost.
            RuntimeError: The communicator is closed.
        """
        self._handle.core_of_released()
        if not self.is_released:
            return
        restore(self._heap.rendezvous(), self._handle)
        logger.info("%s: the workspace is restored", self._heap.rendezvous().names.in_group(self.rank))

    @property
    def is_released(self) -> bool:
        """Whether the workspace has no memory now, by ``release``. The same on all ranks."""
        return self._handle.is_released

    @property
    def why_not_releasable(self) -> str:
        """Why ``release`` declines, the same on all ranks, or ""."""
        if self._multi_node is not None:
            return f"releasing {WITHIN_A_NODE}"
        return why_not_releasable(self.memory_kind, self.multicast)

    def check_one_node(self, call: str) -> None:
        """Raises UnsupportedInputError, on all ranks alike, where ``call`` would be of ranks on several nodes."""
        if self._multi_node is not None:
            raise UnsupportedInputError(f"{call} {WITHIN_A_NODE}")

    # ---- State --------------------------------------------------------------------------------------------------

    def use_table(self, table: TuningTable) -> None:
        """Selects by another tuning table from now on. For tuning; make the same call on every rank.

        Raises:
            ConfigError: A row names a program that was not compiled when this communicator was made.
        """
        self._planner.check_table(table)
        if self._multi_node is not None:
            table = self._multi_node.use_table(table)
        self._planner.table = table
        self._forget()
        self._handle.core_of_released().load(self._planner.choosable())

    def _forget(self) -> None:
        """Drops what is prepared and planned."""
        self._operations.all_reduce.forget()
        self._operations.all_reduce_add_rms_norm.forget()
        self._operations.all_gather.forget()
        self._operations.reduce_scatter.forget()
        self._operations.linear.forget()
        self._operations.linear_silu_and_mul.forget()
        self._operations.linear_of_any_batch.forget()
        self._other_operations.forget()

    def check(self) -> None:
        """Raises the CommunicatorError of an earlier call, if one has failed; costs no synchronization.

        Where CUDA graphs hold operations, it also looks whether some have run beside others
        (docs/operate/failures.md)."""
        self._handle.check(look_at_order=True)

    def stats(self) -> Stats:
        """What this rank has called, declined and ended so far (docs/operate/statistics.md). May be called from any
        thread, by a rank alone, and after ``close``."""
        return self._handle.stats()

    def on_error(self, callback: Callable[[CommunicatorError], None], *, exits: bool = False) -> None:
        """Calls ``callback`` with the error when this communicator fails, though no call is made any more.

        It comes within ``Config.timeout_s``, once, in a thread of the communicator (at once, in this one, if it has
        failed already), and must not wait for the GPU; to end the process it has to use ``os._exit``. A bound method
        does not keep its object alive. Where there is no callback, the error is logged. From then on every operation
        raises it.

        Args:
            callback: Called with what the operations raise.
            exits: From now on this communicator fails too when the process of another rank has exited without closing
                its own, though no operation waits for that rank: a second later, or as soon as this process ends or
                drops the communicator (where the callback is still there). A rank whose interpreter ends, by an
                exception for one, counts as one that has closed.
        """
        self._handle.on_error(callback, exits)

    @property
    def table(self) -> TuningTable:
        """The tuning table that selects; over several nodes with the bound of messages that holds there."""
        return self._planner.table

    @property
    def table_of_node(self) -> TuningTable:
        """The same with the bound within a node."""
        return self._planner.table if self._multi_node is None else self._multi_node.table

    @property
    def programs(self) -> Mapping[str, Kernels]:
        """Programs of llm_comm.dsl that are compiled for ``all_reduce``, by the names that options and tables give them
        (docs/reference/dsl.md). The same on all ranks."""
        return MappingProxyType(self._planner.programs)

    @property
    def multicast(self) -> Multicast:
        """Whether NVLink multicast is set up, the same on all ranks, and why (not)."""
        return self._planner.multicast

    @property
    def limits(self) -> _core.Limits:
        """What bounds a launch on the devices of all ranks."""
        return self._planner.limits

    @property
    def nodes(self) -> int:
        """On how many nodes the ranks are (docs/operate/nodes.md)."""
        return 1 if self._multi_node is None else self._multi_node.nodes

    @property
    def rank_in_node(self) -> int:
        """The number of this rank among those of its node, from 0."""
        return self.rank if self._multi_node is None else self._multi_node.place

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that this rank holds for the communicator, allocated once; 0 while it is released."""
        return 0 if self.is_released else self._handle.core().workspace_bytes()

    def close(self) -> None:
        """Frees the workspace. Call it on every rank when the last operation has ended; more than once is no error.

        Waits for the eager calls of this communicator and for the current stream, not for graphs that are replayed on
        other streams. Where a CUDA graph holds operations of it, the workspace (``workspace_bytes``) stays until the
        process ends, as the graph might be replayed: operations that begin from now on do nothing.

        In a process that was forked from the one that made the communicator, nothing changes.
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
