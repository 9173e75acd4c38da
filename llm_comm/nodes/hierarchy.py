"""What the hierarchical operations of a communicator are made of, and how a failure between nodes ends it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

from llm_comm import _core
from llm_comm.errors import CommunicatorError, MismatchError, UnsupportedInputError
from llm_comm.nodes.agreement import Agreement
from llm_comm.nodes.exchange import Exchange
from llm_comm.nodes.in_node import InNode
from llm_comm.nodes.lost import lost_partners
from llm_comm.nodes.placement import Placement
from llm_comm.nodes.side_stream import SideStream
from llm_comm.planning.node_rows import NodeRow, NodeRows
from llm_comm.planning.plan import NONE, Plan
from llm_comm.planning.selection import Layout
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.status import RankError, fit

#: Of the paper: a phase in the node, one between nodes, one in the node.
ALGORITHM = "2PH"

#: Takes the addresses of the buffers, and a stream. False: the communicator has failed.
Run = Callable[..., bool]


class Hierarchy:
    """Of one communicator.

    Args:
        handle: Of its core.
        placement: Of its ranks.
        in_node: Calls within the node.
        exchange: Between the nodes.
        rows: How calls go between them; others may be put in their place.
        hears: Whether another rank knows of a failure, at which the communicator has ended then.
        agreement: Compares calls before they run; None: nobody does.
    """

    def __init__(
        self,
        handle: CoreHandle,
        placement: Placement,
        in_node: InNode,
        exchange: Exchange,
        rows: NodeRows,
        hears: Callable[[], bool],
        agreement: Agreement | None,
    ) -> None:
        self.device = handle.device
        self.placement = placement
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
        return len(self.placement.nodes)

    @property
    def ranks_of_node(self) -> int:
        """How many there are on each node."""
        return self.in_node.ranks

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
        reason = f"{self.nodes} nodes of {self.ranks_of_node}: {', '.join(words)}"
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
        placement = self.placement
        text = (
            f"{placement.names.in_group(placement.rank)}: the nodes disagree about a call: {differences}. All ranks "
            "must make the same calls in the same order. This communicator cannot be used any more."
        )
        brief = f"disagrees with {placement.names.several(placement.others)}"
        self._handle.end_with(RankError(MismatchError.__name__, fit(text), brief, placement.rank, placement.others[0]))

    def _fail(self, operation: str, error: RuntimeError) -> None:
        """Ends the communicator because the transport has failed, unless another rank knows better."""
        if self._hears():
            return
        where = f"in a hierarchical {operation}"
        self._handle.end_with(lost_partners(self.placement, self.exchange.transport.name, where, _first_line(error)))


def _first_line(error: Exception) -> str:
    """What gloo and NCCL say, without their advice."""
    lines = str(error).partition(". This is typically caused by")[0].strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _in_words(plan: Plan) -> str:
    return f"{plan.operation} by {plan.algorithm} ({plan.protocol}) in the node"


def chunks(count: int, chunk_bytes: int, places: int, itemsize: int) -> list[int]:
    """Elements of each chunk of a message, alike but for the last: of whole lines for each place, so that slices are
    alike too. One where ``chunk_bytes`` is 0."""
    if chunk_bytes == 0:
        return [count]
    step = math.lcm(16, itemsize) // itemsize * places
    chunk = max(1, chunk_bytes // itemsize // step) * step
    return [min(chunk, count - first) for first in range(0, count, chunk)]


def slices(count: int, places: int, itemsize: int) -> list[int]:
    """How many of ``count`` elements the rank of each place has: alike, of whole lines but for the last."""
    in_line = math.lcm(16, itemsize) // itemsize
    slice_ = -(-count // (places * in_line)) * in_line
    return [min(slice_, max(0, count - place * slice_)) for place in range(places)]
