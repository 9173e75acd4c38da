"""The error of a rank whose exchange with its partners on other nodes has failed."""

from __future__ import annotations

from llm_comm.errors import PeerTimeout
from llm_comm.nodes.placement import Placement
from llm_comm.runtime.status import RankError, fit


def lost_partners(placement: Placement, transport: str, where: str, why: str) -> RankError:
    """That of a communicator that ends because of it.

    Args:
        placement: Of the ranks.
        transport: By which they exchange.
        where: In what it has failed, as "in a hierarchical all_reduce"; or "".
        why: What the transport says.
    """
    others = [rank for rank in placement.partners if rank != placement.rank]
    brief = f"lost {' or '.join(f'rank {rank}' for rank in others)} between the nodes"
    failed = f"failed {where}" if where else "failed"
    text = (
        f"{placement.describe(placement.rank)}: exchange with {', '.join(map(placement.describe, others))} by "
        f"{transport} {failed}: {why}. A node, or a rank of it, has died, "
        "hangs, makes other calls than this rank, or cannot be reached. This communicator cannot be used any more."
    )
    return RankError(PeerTimeout.__name__, fit(text), brief, placement.rank, others[0])
