"""Parts that the hierarchical operations of a communicator have in common, and how a failure between nodes ends it."""

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
from llm_comm.runtime.status import RankError, fit


class SideStream:
    """Stream beside the one of the calls: chunks are exchanged on it while the node works on others. On emulated GPUs,
    where a call returns when it is done, everything runs in the order in which it is enqueued.

    CUDA graphs capture what is on it: it begins behind the current stream, and ends before ``joined`` does. Kernels of
    the node and of NCCL run at the same time then. Neither keeps the other from ending: NCCL leaves multiprocessors
    free, so blocks of the node's kernels always start; and what those wait for is in their node alone.

    Args:
        device: Of the communicator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._has_begun = False

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """At its end, also by an exception, the current stream waits for all that is on this one: buffers may be given
        back then."""
        self._has_begun = False
        try:
            yield
        finally:
            # A stream on which nothing has begun is in no capture, which must not wait for it.
            if self._stream is not None and self._has_begun:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def behind(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Enqueues on this stream, behind what is on the current one so far.

        Returns:
            What has the current stream wait until that is done.
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
    """It is done."""


#: No other stream, on any device.
IN_ORDER = SideStream(torch.device("cpu"))


#: Of the paper: a phase in the node, one between nodes, one in the node.
ALGORITHM = "2PH"

#: Takes the addresses of the buffers, and a stream. False: the communicator has failed.
Run = Callable[..., bool]


class Hierarchy:
    """Common parts of the hierarchical operations of one communicator.

    Args:
        handle: Handle of its core.
        topology: Of its ranks.
        in_node: Calls within the node.
        exchange: Between the nodes.
        rows: How calls go between them; others may be put in their place.
        hears: Whether another rank knows of a failure, at which the communicator has ended then.
        agreement: Compares calls before they run; None: nobody does.
    """

    def __init__(
        self,
        handle: CoreHandle,
        topology: Topology,
        in_node: InNode,
        exchange: Exchange,
        rows: NodeRows,
        hears: Callable[[], bool],
        agreement: Agreement | None,
    ) -> None:
        self.device = handle.device
        self.topology = topology
        self.in_node = in_node
        self.exchange = exchange
        self.rows = rows
        self.side = SideStream(handle.device)
        #: Held for the whole length of an operation: of its phases none may lie between those of another one. A thread
        #: takes it again where a signal handler that interrupts an operation closes the communicator.
        self.turn = threading.RLock()
        self._is_in_call = False
        self._hears = hears
        self._agreement = agreement
        self._handle = handle

    @property
    def nodes(self) -> int:
        """How many there are."""
        return len(self.topology.nodes)

    def without_phases(self, problem: Problem, planner: Planner, why_not: str = "") -> Layout | None:
        """The layout of a call that is declined or has nothing to do; None for any other call.

        Args:
            planner: Planner for the ranks of all nodes.
            why_not: A reason to decline the call that the planner does not know.
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
        """The layout of a call.

        Args:
            message_bytes: As of ``Plan``.
            what: Everything in which calls of the operation can differ, in words.
            phases: Calls within the node, and in words those between nodes, in their order.
            make: Makes what runs the call, and counts it.
        """
        words = [phase if isinstance(phase, str) else _in_words(phase.plan) for phase in phases]
        within = [phase.plan for phase in phases if isinstance(phase, Layout)]
        # What works by rows says most of a call.
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
        """What goes between the nodes by a row of ``rows``, in words, and who says so."""
        in_chunks = f" in {chunks} chunks" if chunks > 1 else ""
        return f"{self.exchange.describe(row.exchange)}{in_chunks} ({self.rows.origin})"

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A new buffer."""
        return torch.empty(count, dtype=dtype, device=self.device)

    def _guarded(self, operation: str, call: str, run: Run) -> Run:
        def guarded(*of_call: int) -> bool:
            self._handle.check_open()  # before the lock: in a forked child nobody may be there to give it back
            with self.turn:
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
        """Runs a call, while this thread has the turn."""
        try:
            # Where the first phase is between nodes, nothing else would notice: partners may be at another call.
            self._handle.check()
        except CommunicatorError:  # told by whoever called
            return False
        try:
            differences = "" if self._agreement is None else self._agreement.differences(call)
            if differences:
                self._end_for_mismatch(differences)
                return False
            return run()
        except (UnsupportedInputError, ValueError):  # of this call, on all ranks alike
            raise
        except CommunicatorError:  # it is known already
            return False
        except RuntimeError as error:
            self._fail(operation, error)
            return False
        except BaseException as error:  # such as KeyboardInterrupt: the others are in phases that this rank never joins
            self._handle.fail(f"{type(error).__name__} interrupted {operation}")
            raise

    def _end_for_mismatch(self, differences: str) -> None:
        topology = self.topology
        text = (
            f"{topology.names.in_group(topology.rank)}: the nodes disagree about a call: {differences}. All ranks "
            "must make the same calls in the same order. This communicator cannot be used any more."
        )
        brief = f"disagrees with {topology.names.several(topology.others)}"
        self._handle.end_with(RankError(MismatchError.__name__, fit(text), brief, topology.rank, topology.others[0]))

    def _fail(self, operation: str, error: RuntimeError) -> None:
        """Ends the communicator because the transport has failed, unless another rank knows better."""
        if self._hears():
            return
        where = f"in a hierarchical {operation}"
        self._handle.end_with(lost_partners(self.topology, self.exchange.transport.name, where, _first_line(error)))


def _first_line(error: Exception) -> str:
    """What gloo and NCCL say, without their advice."""
    lines = str(error).partition(". This is typically caused by")[0].strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _in_words(plan: Plan) -> str:
    return f"{plan.operation} by {plan.algorithm} ({plan.protocol}) in the node"
