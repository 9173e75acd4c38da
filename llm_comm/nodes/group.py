"""Communicator over several nodes: set-up, parts, and the calls that it declines."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from llm_comm.config import Config
from llm_comm.errors import ConfigError
from llm_comm.nodes.all_reduce import AllReduceAddRmsNormOverNodes, AllReduceOverNodes
from llm_comm.nodes.exchange import Agreement, Exchange
from llm_comm.nodes.gather_scatter import AllGatherOverNodes, ReduceScatterOverNodes
from llm_comm.nodes.hierarchy import Hierarchy
from llm_comm.nodes.in_node import InNode
from llm_comm.nodes.topology import NodeRendezvous, Topology
from llm_comm.nodes.transport import HostTransport, StreamTransport, Transport, kind_of_transport
from llm_comm.nodes.ucx import UcxTransport
from llm_comm.nodes.watch import NodeWatch, store_of
from llm_comm.planning.node_rows import NodeRows, rows_for
from llm_comm.planning.planner import Planner
from llm_comm.planning.tables import TuningTable
from llm_comm.runtime.connect import Connected, compare, connect
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.rendezvous import Rendezvous

logger = logging.getLogger("llm_comm")

#: Reason why calls are not served over several nodes.
WHY = "works only within a node, and the ranks are on several"


# The size limit applies to whole calls. Their in-node phases are never declined for size.
_EVERY_SIZE = 1 << 60


class MultiNodeGroup:
    """Parts of a communicator over several nodes.

    Args:
        topology: Topology of its ranks.
        connected: Connection of the ranks of this node.
        transport: Transport between nodes.
        node_watch: Watch over the other nodes; started by this constructor.
        config: Options of the communicator.
    """

    def __init__(
        self,
        topology: Topology,
        connected: Connected,
        transport: Transport,
        node_watch: NodeWatch,
        config: Config,
    ) -> None:
        handle, planner = connected.handle, connected.planner
        world = sum(map(len, topology.nodes))
        self.handle = handle
        self.memory_kind = connected.memory_kind
        # Sums over nodes are exact, and so is their size limit.
        exact = config.replace(wire="none")
        #: Planner for all ranks: plans calls as a whole.
        self.planner = Planner(world, planner.table, exact, planner.limits, planner.multicast)
        self._local_size = planner.world_size
        self._in_node = Planner(
            planner.world_size,
            planner.table,
            exact.replace(max_message_bytes=_EVERY_SIZE),
            planner.limits,
            planner.multicast,
        )
        self._transport = transport
        self._topology = topology
        self._watch = node_watch
        in_node = InNode(handle, self._in_node, topology.local_rank)
        exchange = Exchange(transport, len(topology.nodes))
        # as kernels do within a node
        compares = config.debug or handle.device.type == "cpu"
        agreement = Agreement(transport, topology, handle.device) if compares else None
        rows = self._rows_of(planner.table)
        self._hierarchy = Hierarchy(handle, topology, in_node, exchange, rows, node_watch.is_notified, agreement)
        self.planner.table = self.use_table(planner.table)
        node_watch.start()

    def operations(
        self,
    ) -> tuple[AllReduceOverNodes, AllReduceAddRmsNormOverNodes, AllGatherOverNodes, ReduceScatterOverNodes]:
        """Return the operations over all ranks of the communicator."""
        common = (self.handle, self.planner, self._hierarchy)
        return (
            AllReduceOverNodes(*common),
            AllReduceAddRmsNormOverNodes(*common),
            AllGatherOverNodes(*common),
            ReduceScatterOverNodes(*common),
        )

    def use_table(self, table: TuningTable) -> TuningTable:
        """Select by a tuning table, whose rows are for the ranks of one node, within nodes and between them.

        Returns:
            The table for whole calls, with the size limit that holds over several nodes.
        """
        self._in_node.table = table
        self._hierarchy.rows = rows = self._rows_of(table)
        # Over several nodes, large sums are a reduce-scatter and an all-gather in the node, without a fused kernel.
        return table._replace(max_message_bytes=rows.limit, large_fused_bytes=None)

    @property
    def table(self) -> TuningTable:
        """Tuning table for the ranks of one node."""
        return self._in_node.table

    def _rows_of(self, table: TuningTable) -> NodeRows:
        return rows_for(table.nodes, table.name, self.nodes, self._local_size)

    def describe(self) -> str:
        """Return the nodes in words for the log: "2 nodes of 4 ranks, NCCL between them"."""
        nodes = self._topology.nodes
        return f"{len(nodes)} nodes of {len(nodes[0])} ranks, {self._transport.name} between them"

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self._topology.nodes)

    @property
    def local_rank(self) -> int:
        """Rank of this process in its node."""
        return self._topology.local_rank

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """End the operations between nodes; the caller closes the handle inside the block. Every rank must call this.

        The block begins after a call of another thread has ended, and after failures were reported to the other nodes.
        The connections are closed at its end.
        """
        with self._hierarchy.call_lock:
            self._watch.stop()
            try:
                yield
            finally:
                self._transport.close()


def set_up(rendezvous: Rendezvous, topology: Topology, device: torch.device, config: Config) -> MultiNodeGroup:
    """Compare the ranks of the group, connect those of each node, and connect the nodes. Collective.

    Raises:
        ConfigError: An option or tuning table cannot be used. Raised on all ranks alike.
        RendezvousError: The ranks do not fit together, or a step failed on one. Raised on all ranks alike.
    """
    # The switch sums in an undefined order, so node sums would not be reproducible.
    config = config.replace(multicast="0")
    compared = compare(rendezvous, device, config, len(topology.ranks_here))
    if config.dsl is not None:
        raise ConfigError(
            f"option dsl is {config.dsl!r} ({config.origins.get('dsl', 'Python')}): programs work only within a node, "
            "and the ranks are on several"
        )
    if config.wire != "none" and rendezvous.rank == 0:
        logger.warning(
            "llm_comm: option wire is %r (%s), and the ranks are on several nodes: their all-reduces are exact",
            config.wire,
            config.origins.get("wire", "Python"),
        )
    kind = kind_of_transport(config, device, len(topology.nodes))
    name = rendezvous.gather("name of the communicator", secrets.token_hex(8))[0]
    # Half of the time limit: a rank that failed early waits in the next vote for timeout_s only.
    limit_s = config.timeout_s / 2
    store = rendezvous.attempt("store of the nodes", lambda: store_of(rendezvous.group, name, limit_s))
    here = NodeRendezvous(rendezvous, topology)
    connected = connect(here, device, config, compared)
    transport = None
    try:
        transport = rendezvous.attempt(
            "connection between the nodes",
            lambda: _connect_partners(store, topology, connected.handle, device, kind, limit_s),
            undo=lambda made: made.close(),
        )
        rendezvous.attempt("first exchange between the nodes", lambda: _try(transport, topology, device, limit_s))

        def finish() -> MultiNodeGroup:
            transport.set_limit(config.timeout_s)
            of_watch = PrefixStore("watch", store), topology, connected.handle, transport, config.timeout_s
            return MultiNodeGroup(topology, connected, transport, NodeWatch(*of_watch), config)

        return rendezvous.attempt("watch between the nodes", finish, undo=lambda made: made._watch.stop())
    except BaseException:
        connected.handle.close()
        if transport is not None:
            transport.close()
        raise


def _connect_partners(
    store: Store,
    topology: Topology,
    handle: CoreHandle,
    device: torch.device,
    kind: str,
    timeout_s: float,
) -> Transport:
    of_partners = PrefixStore(f"place/{topology.local_rank}", store)
    common = (of_partners, topology.node, len(topology.nodes), timeout_s)
    if kind == "nccl":
        return StreamTransport(*common)
    words = f"waits for {topology.names.several(topology.others)} between the nodes"

    def tell(waits: bool) -> None:
        handle.remark(words if waits else "")

    if kind == "ucx":
        return UcxTransport(of_partners, topology, device, timeout_s, tell)
    return HostTransport(*common, handle.check, tell)


def _try(transport: Transport, topology: Topology, device: torch.device, timeout_s: float) -> None:
    """Connect all pairs of partners, which NCCL cannot do in a capture, and check that data arrives."""
    nodes, node = len(topology.nodes), topology.node
    own = torch.full((nodes,), node, dtype=torch.uint8, device=device)
    gathered = torch.empty(nodes * nodes, dtype=torch.uint8, device=device)
    exchanged = torch.empty(nodes, dtype=torch.uint8, device=device)
    transport.all_gather(gathered, own)
    transport.all_to_all(exchanged, own, [1] * nodes, [1] * nodes)
    if device.type == "cuda":
        _wait(device, timeout_s)
    expected = list(range(nodes))
    if gathered.view(nodes, nodes)[:, 0].tolist() != expected or exchanged.tolist() != expected:
        raise RuntimeError(f"{transport.name} brought {gathered.tolist()} and {exchanged.tolist()} from {expected}")


def _wait(device: torch.device, timeout_s: float) -> None:
    """Wait until the device has executed what is enqueued on its current stream."""
    with torch.cuda.device(device):
        done = torch.cuda.Event()
        done.record()
    deadline = time.monotonic() + timeout_s
    while not done.query():
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing came for {timeout_s:g} s (LLM_COMM_TIMEOUT_S)")
        time.sleep(1e-3)
