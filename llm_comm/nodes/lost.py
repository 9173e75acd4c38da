"""The error of a rank whose exchange with its partners on other nodes has failed."""

from __future__ import annotations

from llm_comm.errors import PeerTimeout
from llm_comm.nodes.placement import Placement
from llm_comm.runtime.status import RankError, fit


def lost_partners(placement: Placement, transport: str, where: str, why: str) -> RankError:
    """Build the error of a communicator whose partners on other nodes are lost.

    Args:
        placement: Of the ranks.
        transport: By which they exchange.
        where: In what it has failed, as "in a hierarchical all_reduce"; or "".
        why: What the transport says.
    """
    names, rank, others = placement.names, placement.rank, placement.others
    failed = f"failed {where}" if where else "failed"
    text = (
        f"{names.in_group(rank)}: exchange with {names.each(others)} by {transport} {failed}: {why}. A node, or a "
        "rank of it, has died, hangs, makes other calls than this rank, or cannot be reached. This communicator cannot "
        "be used any more."
    )
    brief = f"lost {names.several(others)} between the nodes"
    return RankError(PeerTimeout.__name__, fit(text), brief, rank, others[0])
