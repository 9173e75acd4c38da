"""Common parts of the hierarchical operations of a communicator, and the handling of failures between nodes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from llm_comm import _core
from llm_comm.errors import CommunicatorError, MismatchError, UnsupportedInputError
from llm_comm.nodes.exchange import Agreement, Exchange
from llm_comm.nodes.in_node import InNode
from llm_comm.nodes.topology import Topology
from llm_comm.nodes.watch import lost_partners
from llm_comm.planning.node_rows import NodeRow, NodeRows
from llm_comm.planning.plan import NONE, Plan, Problem, declined, without_kernel
from llm_comm.planning.planner import Planner
from llm_comm.planning.selection import Layout, why_not_served
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.status import RankError


class SideStream:
    """Side stream on which chunks are exchanged while the node processes other chunks. On emulated GPUs, where calls
    are synchronous, everything runs in the order of the calls.

    CUDA graphs capture the side stream: its work begins after an event of the current stream, and ``joined`` makes the
    current stream wait for it. Kernels of the node and of NCCL run concurrently and cannot deadlock: NCCL leaves SMs
    free, so blocks of the node's kernels always start, and these kernels wait only for ranks of their node.

    Args:
        device: Device of the communicator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._has_begun = False

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """At the end of the block, also after an exception, make the current stream wait for this stream. Buffers may
        be freed after that."""
        self._has_begun = False
        try:
            yield
        finally:
            # If nothing was enqueued, the stream is not part of the capture, and waiting for it would be an error.
            if self._stream is not None and self._has_begun:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def behind(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Call ``enqueue`` on this stream, after the work enqueued on the current stream so far.

        Returns:
            Function that makes the current stream wait for that work.
        """
        if self._stream is None:
            enqueue()
            return _nothing
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        self._has_begun = True
        with torch.cuda.stream(self._stream):
            enqueue()
        done = self._stream.record_event()
        return lambda: current.wait_event(done)


def _nothing() -> None:
    """Wait for nothing: the work was synchronous."""


#: Stands for the absence of a side stream, on any device.
IN_ORDER = SideStream(torch.device("cpu"))


#: Two-phase hierarchical algorithm of the MSCCL++ paper: a phase in the node, one between nodes, one in the node.
ALGORITHM = "2PH"

#: Takes buffer addresses and a stream. Returns False if the communicator has failed.
Run = Callable[..., bool]


class Hierarchy:
    """Common parts of the hierarchical operations of one communicator.

    Args:
        handle: Handle of its core.
        topology: Topology of its ranks.
        in_node: Calls within the node.
        exchange: Exchange between nodes.
        rows: Table rows for the exchange; may be replaced.
        is_notified: Returns whether another rank has reported a failure. This communicator has then ended.
        agreement: Compares calls before they run; None: no comparison.
    """

    def __init__(
        self,
        handle: CoreHandle,
        topology: Topology,
        in_node: InNode,
        exchange: Exchange,
        rows: NodeRows,
        is_notified: Callable[[], bool],
        agreement: Agreement | None,
    ) -> None:
        self.device = handle.device
        self.topology = topology
        self.in_node = in_node
        self.exchange = exchange
        self.rows = rows
        self.side = SideStream(handle.device)
        #: Held during a whole operation: phases of two operations must not interleave. Reentrant, because a signal
        #: handler that interrupts an operation may close the communicator.
        self.call_lock = threading.RLock()
        self._is_in_call = False
        self._is_notified = is_notified
        self._agreement = agreement
        self._handle = handle

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.topology.nodes)

    def without_phases(self, problem: Problem, planner: Planner, why_not: str = "") -> Layout | None:
        """Return the layout of a call that is declined or has nothing to do; None for any other call.

        Args:
            problem: Computation of the call.
            planner: Planner for the ranks of all nodes.
            why_not: Further reason to decline, or "".
        """
        operation, nbytes = problem.operation, problem.message_bytes()
        why = why_not_served(problem, planner.table, planner.config) or why_not
        if why:
            return Layout(declined(operation, nbytes, why), None)
        if nbytes == 0:
            nothing = "no rows" if problem.row else "empty message"
            return Layout(without_kernel(operation, "none", 0, nothing, problem.row), None)
        return None

    def layout(
        self,
        operation: str,
        message_bytes: int,
        what: str,
        phases: list[Layout | str],
        make: Callable[[_core.Counter], Run],
    ) -> Layout:
        """Return the layout of a call.

        Args:
            operation: Name of the operation.
            message_bytes: ``Plan.message_bytes``.
            what: Everything in which calls of the operation can differ, in words.
            phases: Phases in order: layouts of calls within the node, and descriptions of exchanges.
            make: Returns a function that runs the call and counts it.
        """
        words = [phase if isinstance(phase, str) else _in_words(phase.plan) for phase in phases]
        within = [phase.plan for phase in phases if isinstance(phase, Layout)]
        # The plan with rows has the most informative parameters.
        first = next((plan for plan in within if plan.row), within[0] if within else None)
        reason = f"{self.nodes} nodes of {self.in_node.ranks}: {', '.join(words)}"
        plan = Plan(
            operation=operation,
            algorithm=ALGORITHM,
            protocol="+".join(dict.fromkeys(plan.protocol for plan in within)) or NONE,
            blocks=max((plan.blocks for plan in within), default=0),
            threads=max((plan.threads for plan in within), default=0),
            tile_lines=first.tile_lines if first else 0,
            cluster=first.cluster if first else 0,
            depth=first.depth if first else 0,
            chunks=max((plan.chunks for plan in within), default=1),
            chunk_elements=first.chunk_elements if first else 0,
            message_bytes=message_bytes,
            reason=reason,
            row=first.row if first else 0,
        )
        return Layout(
            plan, None, program=lambda counter: self._guarded(operation, f"{operation} of {what}", make(counter))
        )

    def between(self, row: NodeRow, chunks: int = 1) -> str:
        """Return the exchange of a row in words, with the origin of the row."""
        in_chunks = f" in {chunks} chunks" if chunks > 1 else ""
        return f"{self.exchange.describe(row.exchange)}{in_chunks} ({self.rows.origin})"

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new buffer."""
        return torch.empty(count, dtype=dtype, device=self.device)

    def _guarded(self, operation: str, call: str, run: Run) -> Run:
        def guarded(*of_call: int) -> bool:
            self._handle.check_open()  # before the lock: in a forked child, no thread exists that could release it
            with self.call_lock:
                if self._is_in_call:
                    raise RuntimeError(
                        f"{operation} is called within another operation of this communicator and thread, as by a "
                        "signal handler: call it when that has returned"
                    )
                self._is_in_call = True
                try:
                    return self._in_turn(operation, call, lambda: run(*of_call))
                finally:
                    self._is_in_call = False

        return guarded

    def _in_turn(self, operation: str, call: str, run: Callable[[], bool]) -> bool:
        """Run a call. This thread holds ``call_lock``."""
        try:
            # Check first: if the first phase is an exchange, no kernel would notice a failure, and the partners may be
            # at another call.
            self._handle.check()
        except CommunicatorError:  # reported by the caller
            return False
        try:
            differences = "" if self._agreement is None else self._agreement.differences(call)
            if differences:
                self._end_for_mismatch(differences)
                return False
            return run()
        except (UnsupportedInputError, ValueError):  # declined on all ranks alike
            raise
        except CommunicatorError:  # already known
            return False
        except RuntimeError as error:
            self._fail(operation, error)
            return False
        # such as KeyboardInterrupt: other ranks are in phases that this rank never joins
        except BaseException as error:
            self._handle.fail(f"{type(error).__name__} interrupted {operation}")
            raise

    def _end_for_mismatch(self, differences: str) -> None:
        topology = self.topology
        text = (
            f"{topology.names.in_group(topology.rank)}: the nodes disagree about a call: {differences}. All ranks "
            "must make the same calls in the same order. This communicator can no longer be used."
        )
        brief = f"disagrees with {topology.names.several(topology.others)}"
        self._handle.end_with(RankError(MismatchError.__name__, text, brief, topology.rank, topology.others[0]))

    def _fail(self, operation: str, error: RuntimeError) -> None:
        """End the communicator because the transport failed, unless another rank has reported a cause."""
        if self._is_notified():
            return
        where = f"in a hierarchical {operation}"
        self._handle.end_with(lost_partners(self.topology, self.exchange.transport.name, where, _first_line(error)))


def _first_line(error: Exception) -> str:
    """Return the first line of a message of gloo or NCCL, without their generic advice."""
    lines = str(error).partition(". This is typically caused by")[0].strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _in_words(plan: Plan) -> str:
    return f"{plan.operation} by {plan.algorithm} ({plan.protocol}) in the node"
