"""Sets up the libraries that llm_comm is compared with, on all ranks or on none.

Ranks that compared different libraries would wait for each other in collectives of which the other knows nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from llm_comm.bench import report
from llm_comm.cli import launch
from llm_comm.errors import MissingRankError, RendezvousError
from llm_comm.runtime.rendezvous import Rendezvous

T = TypeVar("T")

# A rank that has failed waits in the vote for those that wait for it in the library's own set-up: until the limit of
# the group ends that, and then some.
_VOTE_TIMEOUT_S = 2 * launch.GROUP_TIMEOUT.total_seconds()


class NotUsableError(RuntimeError):
    """A library could not be set up on some rank. Raised on all ranks, with the same text."""


def set_up(what: str, step: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Runs ``step``, and returns its result once it has succeeded on every rank. Collective.

    What can fail on one rank alone, such as an import, should be a step before the one in which ranks wait for each
    other.

    Raises:
        NotUsableError: It failed somewhere; the text names ``what``, the ranks and the reasons.
        MissingRankError: A rank did not come to the vote.
    """
    result, failure = None, None
    try:
        result = step()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = report.first_line(error)
    try:
        Rendezvous(group, _VOTE_TIMEOUT_S).vote(what, failure)
    except MissingRankError:  # no vote: the others may not know that there is none
        raise
    except RendezvousError as error:
        raise NotUsableError(str(error)) from None
    return result  # type: ignore[return-value]
