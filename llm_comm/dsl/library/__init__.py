"""Programs that come with llm_comm: to use, and to begin with."""

from __future__ import annotations

from llm_comm.dsl.library.all_gather_hb import all_gather_hb
from llm_comm.dsl.library.all_gather_ll import all_gather_ll
from llm_comm.dsl.library.all_to_all_ll import all_to_all_ll
from llm_comm.dsl.library.broadcast_ll import broadcast_ll
from llm_comm.dsl.library.hierarchical_ll import hierarchical_ll
from llm_comm.dsl.library.one_shot_hb import one_shot_hb
from llm_comm.dsl.library.one_shot_ll import one_shot_ll
from llm_comm.dsl.library.reduce_scatter_ll import reduce_scatter_ll
from llm_comm.dsl.library.ring_ll import ring_ll
from llm_comm.dsl.library.two_shot_hb import two_shot_hb
from llm_comm.dsl.library.two_shot_ll import two_shot_ll
from llm_comm.dsl.programs import ProgramText

#: All of them.
PROGRAMS: tuple[ProgramText, ...] = (
    one_shot_ll,
    one_shot_hb,
    two_shot_ll,
    two_shot_hb,
    ring_ll,
    hierarchical_ll,
    all_gather_ll,
    all_gather_hb,
    reduce_scatter_ll,
    all_to_all_ll,
    broadcast_ll,
)

__all__ = [
    "PROGRAMS",
    "all_gather_hb",
    "all_gather_ll",
    "all_to_all_ll",
    "broadcast_ll",
    "hierarchical_ll",
    "one_shot_hb",
    "one_shot_ll",
    "reduce_scatter_ll",
    "ring_ll",
    "two_shot_hb",
    "two_shot_ll",
]
