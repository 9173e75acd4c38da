"""Names of groups and ranks in errors and log lines: "group tp:0, rank 1 (global rank 3, pid 4712 on worker-7)".

An engine has several groups, so the rank within a group does not tell an operator which process is meant. All messages
therefore add the global rank, and the process and host once the ranks have exchanged these.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

#: ``group_desc`` of a torch group without a description.
_UNDEFINED = "undefined"
#: Names that engines have given to their groups.
_given: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def name_group(group: dist.ProcessGroup, name: str) -> None:
    """Set the name of ``group`` in errors and log lines, such as ``tp:0``."""
    _given[group] = name


@dataclass(frozen=True)
class RankName:
    """Name of one rank.

    Attributes:
        rank: Rank within the group.
        global_rank: Rank in torch's default group.
        where: Process, host and node, in words; "" while unknown.
    """

    rank: int
    global_rank: int
    where: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.details})"

    @property
    def details(self) -> str:
        """Text in brackets after the rank."""
        return f"global rank {self.global_rank}{self.where and f', {self.where}'}"


@dataclass(frozen=True)
class RankNames:
    """Names of the ranks of a group, by index. ``part`` makes those of a subset, such as the ranks of one node.

    Attributes:
        group: Name of the group.
        members: Names of the ranks.
        size: Number of ranks of the whole group.
    """

    group: str
    members: tuple[RankName, ...]
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> RankNames:
        """Return the names of the ranks of a torch group."""
        members = tuple(RankName(i, number) for i, number in enumerate(dist.get_process_group_ranks(group)))
        return cls(_name_of(group), members, len(members))

    def with_processes(self, said: Sequence[Mapping[str, Any]]) -> RankNames:
        """Return a copy with process and host. ``said`` has ``pid`` and ``host`` of each rank."""
        words = (f"pid {each['pid']} on {each['host']}" if "pid" in each else "" for each in said)
        members = (replace(member, where=where) for member, where in zip(self.members, words, strict=True))
        return replace(self, members=tuple(members))

    def with_nodes(self, names: Mapping[int, str]) -> RankNames:
        """Return a copy with the name of each rank's node."""
        members = (replace(m, where=f"{m.where}{m.where and ', '}{names[m.rank]}") for m in self.members)
        return replace(self, members=tuple(members))

    def part(self, ranks: Iterable[int]) -> RankNames:
        """Return the names of a subset of the ranks, indexed from 0."""
        return replace(self, members=tuple(self.members[rank] for rank in ranks))

    @property
    def of_group(self) -> str:
        """ "group tp:0"."""
        return f"group {self.group}"

    def number(self, index: int) -> int:
        """Rank within the whole group of ``index``. An index outside of ``members`` is returned unchanged."""
        return self.members[index].rank if 0 <= index < len(self.members) else index

    def short(self, index: int) -> str:
        """ "rank 1", for a rank that the text has named in full already."""
        return f"rank {self.number(index)}"

    def full(self, index: int) -> str:
        """ "rank 1 (global rank 3, pid 4712 on worker-7)", or "rank 9" for an index outside of ``members``."""
        return str(self.members[index]) if 0 <= index < len(self.members) else f"rank {index}"

    def in_group(self, index: int) -> str:
        """ "group tp:0, rank 1 (global rank 3, pid 4712 on worker-7)", the begin of an error text."""
        return f"{self.of_group}, {self.full(index)}"

    def each(self, indices: Iterable[int]) -> str:
        """Several ranks, each in full, for an operator who must find each process."""
        return ", ".join(self.full(index) for index in indices)

    def several(self, indices: Iterable[int]) -> str:
        """One rank in full, or several as "ranks 0, 2 (global ranks 4, 6)"."""
        members = [self.members[index] for index in indices]
        if len(members) == 1:
            return str(members[0])
        numbers = ", ".join(str(member.rank) for member in members)
        return f"ranks {numbers} (global ranks {', '.join(str(member.global_rank) for member in members)})"


def _name_of(group: dist.ProcessGroup) -> str:
    if group in _given:
        return _given[group]
    if group is dist.group.WORLD:
        return "WORLD"
    described = getattr(group, "group_desc", _UNDEFINED)  # torch 2.4
    return group.group_name if described in ("", _UNDEFINED) else described
