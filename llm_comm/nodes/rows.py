"""Tensors of which each rank has a part along a dimension, in the order of the ranks and in the order by places: the
ranks of all nodes with the first place in their nodes, then those with the second, and so on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from llm_comm.nodes.placement import Placement
from llm_comm.operations.parts import Parts


class Rows:
    """How the parts of a contiguous tensor move between the two.

    Args:
        parts: How the tensor is divided.
        placement: Of the ranks.
        scale: How many of what is copied make one of the elements that ``parts`` counts.
    """

    def __init__(self, parts: Parts, placement: Placement, scale: int = 1) -> None:
        self._rows = parts.rows
        self._sizes = [size * scale for size in parts.row_sizes]
        self._nodes = placement.nodes
        places = len(placement.nodes[0])
        in_blocks = all(ranks == tuple(range(n * places, (n + 1) * places)) for n, ranks in enumerate(placement.nodes))
        # Where parts are alike, and the ranks of a node stand together, one strided copy does.
        self._is_regular = in_blocks and len(set(parts.row_sizes)) == 1

    @property
    def whole(self) -> int:
        """Elements of the tensor."""
        return self._rows * sum(self._sizes)

    def of(self, rank: int) -> int:
        """Elements of the part of a rank."""
        return self._rows * self._sizes[rank]

    def put_in_rank_order(self, by_place: torch.Tensor, room: Sequence[int], whole: torch.Tensor) -> None:
        """Copies parts to where they belong.

        Args:
            by_place: [elements]: the parts, each in a space of so many elements as ``room`` says of its place.
            whole: [elements]: where they go.
        """
        for of_whole, part in self._pairs(whole, by_place, room):
            of_whole.copy_(part)

    def put_by_place(self, whole: torch.Tensor, by_place: torch.Tensor) -> None:
        """Copies the parts of ``whole`` one behind the other into ``by_place``, of as many elements."""
        for of_whole, part in self._pairs(whole, by_place, None):
            part.copy_(of_whole)

    def _pairs(
        self, whole: torch.Tensor, by_place: torch.Tensor, room: Sequence[int] | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of both, of equal shapes, that hold the same elements."""
        if self._is_regular:
            nodes, places = len(self._nodes), len(self._nodes[0])
            part = (self._rows, self._sizes[0])
            in_rank_order = whole.view(self._rows, nodes, places, self._sizes[0])
            yield in_rank_order.permute(2, 1, 0, 3), by_place.view(places, nodes, *part)
            return
        wide, at = whole.view(self._rows, sum(self._sizes)), 0
        for place in range(len(self._nodes[0])):
            for ranks in self._nodes:
                rank = ranks[place]
                size = self._sizes[rank]
                if self._rows * size:
                    part_of_whole = wide.narrow(1, sum(self._sizes[:rank]), size)
                    yield part_of_whole, by_place[at : at + self._rows * size].view(self._rows, size)
                at += self.of(rank) if room is None else room[place]
