"""The sum between nodes of what each of them has summed: exchanged by a transport, added in node order."""

from __future__ import annotations

import torch

from llm_comm.nodes.sums import sum_in_order
from llm_comm.nodes.transport import Transport
from llm_comm.planning.node_rows import WHOLE

_LINE_BYTES = 16


class Exchange:
    """Of one communicator.

    Args:
        transport: Between the ranks with the same place in their nodes.
        nodes: How many they are.
    """

    def __init__(self, transport: Transport, nodes: int) -> None:
        self.transport = transport
        self.nodes = nodes

    def describe(self, how: str) -> str:
        """What ``add`` does, for a plan."""
        steps = "all-gather" if how == WHOLE else "all-to-all and all-gather"
        return f"{steps} between the nodes by {self.transport.name}"

    def add(self, node_sum: torch.Tensor, total: torch.Tensor, how: str) -> None:
        """Puts the sum over the nodes into ``total``, bitwise the same on all of them.

        Args:
            node_sum: [elements] of bfloat16, float16 or float32, as many on all nodes, at least one; of this node.
            total: Like ``node_sum``; it may be ``node_sum``.
            how: One of ``node_rows.EXCHANGES``, the same on all nodes. The sum does not depend on it.

        Raises:
            RuntimeError: As of the transport.
        """
        if how == WHOLE:
            parts = node_sum.new_empty(self.nodes, node_sum.numel())
            self.gather(parts, node_sum)
            sum_in_order(parts, total)
            return
        # Pieces of whole lines; what is beyond the end in the last ones is summed, and dropped.
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
        """All-gather of contiguous tensors of any dtype, as of ``Transport.all_gather``."""
        self.transport.all_gather(_as_bytes(out), _as_bytes(x))

    def scatter(self, out: torch.Tensor, x: torch.Tensor, mine: int, sizes: list[int]) -> None:
        """All-to-all of contiguous tensors of any dtype: each node gets its piece of ``x``.

        Args:
            out: The pieces from all nodes for this one.
            x: The pieces for all nodes.
            mine: Elements of a piece for this node.
            sizes: Elements of the piece for each node.
        """
        item = x.element_size()
        self.transport.all_to_all(
            _as_bytes(out), _as_bytes(x), [mine * item] * self.nodes, [size * item for size in sizes]
        )


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)
