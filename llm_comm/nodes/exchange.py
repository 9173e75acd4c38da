"""Exchange between nodes: sums in node order, all-to-all, all-gather, and the comparison of calls."""

from __future__ import annotations

import hashlib

import torch

from llm_comm.nodes.topology import Topology
from llm_comm.nodes.transport import Transport
from llm_comm.planning.node_rows import WHOLE
from llm_comm.runtime.devices import is_capturing

_PATTERNS = {2: torch.int16, 4: torch.int32}


def sum_in_order(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Sum the node sums into ``out``: in fp32 from the first node to the last, rounded once.

    On the CPU, NaN is set to 0x7FFF (fp32: 0x7FFFFFFF), the only NaN that additions and conversions on GPUs produce.

    Args:
        parts: [nodes, elements], at least two nodes, bfloat16, float16 or float32.
        out: [elements], of the same dtype.
    """
    first, *rest, last = parts.unbind()
    # With two operands of one dtype torch adds in fp32 and rounds once, in one kernel.
    total = first.to(torch.float32, copy=True) if rest else first
    for part in rest:
        total.add_(part)
    torch.add(total, last, out=out)
    if out.device.type == "cpu":
        patterns = out.view(_PATTERNS[out.element_size()])
        patterns.masked_fill_(out.isnan(), torch.iinfo(patterns.dtype).max)


_LINE_BYTES = 16


class Exchange:
    """Exchange between the nodes of one communicator.

    Args:
        transport: Transport between partners, the ranks with the same index in their nodes.
        nodes: Number of nodes.
    """

    def __init__(self, transport: Transport, nodes: int) -> None:
        self.transport = transport
        self.nodes = nodes

    def describe(self, how: str) -> str:
        """Return what ``add`` does, in words, for a plan."""
        steps = "all-gather" if how == WHOLE else "all-to-all and all-gather"
        return f"{steps} between the nodes by {self.transport.name}"

    def add(self, node_sum: torch.Tensor, total: torch.Tensor, how: str) -> None:
        """Compute the sum over the nodes into ``total``, bitwise equal on all nodes.

        Args:
            node_sum: [elements], sum of this node: bfloat16, float16 or float32, at least one element, as many on all
                nodes.
            total: Like ``node_sum``; may be ``node_sum``.
            how: One of ``node_rows.EXCHANGES``, equal on all nodes. The result does not depend on it.

        Raises:
            RuntimeError: The transport failed.
        """
        if how == WHOLE:
            parts = node_sum.new_empty(self.nodes, node_sum.numel())
            self.gather(parts, node_sum)
            sum_in_order(parts, total)
            return
        # Pieces consist of whole lines. The padding at the end is summed too, and dropped.
        count, in_line = node_sum.numel(), _LINE_BYTES // node_sum.element_size()
        piece = -(-count // (self.nodes * in_line)) * in_line
        whole = piece * self.nodes
        padded = node_sum if whole == count else node_sum.new_zeros(whole)
        if padded is not node_sum:
            padded[:count].copy_(node_sum)
        parts = node_sum.new_empty(self.nodes, piece)
        self.scatter(parts, padded, piece, [piece] * self.nodes)
        mine = node_sum.new_empty(piece)
        sum_in_order(parts, mine)
        gathered = total if whole == count else padded
        self.gather(gathered, mine)
        if gathered is not total:
            total.copy_(gathered[:count])

    def gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """All-gather contiguous tensors of any dtype, see ``Transport.all_gather``."""
        self.transport.all_gather(_as_bytes(out), _as_bytes(x))

    def scatter(self, out: torch.Tensor, x: torch.Tensor, mine: int, sizes: list[int]) -> None:
        """All-to-all of contiguous tensors of any dtype: each node receives its piece of ``x``.

        Args:
            out: Pieces from all nodes for this node.
            x: Pieces for all nodes.
            mine: Elements of a piece for this node.
            sizes: Elements of the piece for each node.
        """
        item = x.element_size()
        self.transport.all_to_all(
            _as_bytes(out), _as_bytes(x), [mine * item] * self.nodes, [size * item for size in sizes]
        )


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


_BYTES = 256
_DIGEST = 8


class Agreement:
    """Comparison of calls between nodes. Kernels compare calls within a node only. Each comparison is an exchange that
    blocks the host.

    Args:
        transport: Transport between partners.
        topology: Nodes of all ranks.
        device: Device of the communicator.
    """

    def __init__(self, transport: Transport, topology: Topology, device: torch.device) -> None:
        self._transport = transport
        self._topology = topology
        self._device = device

    def differences(self, call: str) -> str:
        """Return the calls of all partners in words if they differ; otherwise "". Always "" in a capture, where nothing
        runs.

        Args:
            call: Call of this rank, with everything in which calls can differ.

        Raises:
            RuntimeError: The transport failed.
        """
        if is_capturing(self._device):
            return ""
        text = call.encode("ascii", "replace")
        mine = hashlib.sha256(text).digest()[:_DIGEST] + text[: _BYTES - _DIGEST]
        sent = torch.frombuffer(bytearray(mine.ljust(_BYTES)), dtype=torch.uint8).to(self._device)
        received = torch.empty(len(self._topology.nodes), _BYTES, dtype=torch.uint8, device=self._device)
        self._transport.all_gather(received.view(-1), sent)
        calls = [bytes(of_node.tolist()) for of_node in received.cpu()]
        if all(each == calls[0] for each in calls):
            return ""
        return "; ".join(
            f"{self._topology.names.full(rank)}: {each[_DIGEST:].decode(errors='replace').rstrip()}"
            for rank, each in zip(self._topology.partners, calls, strict=True)
        )
