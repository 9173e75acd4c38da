"""Names of groups and their ranks for errors and log lines: "group tp:0, rank 1 (global rank 3, pid 4712 on worker-7)".

A rank of a group says little to an operator whose engine has several groups. So whatever names a rank does so here, by
its number in the group and by its global rank, and by process and host once the ranks have exchanged these.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

#: What torch says of a group to which nobody has given a description.
_UNDEFINED = "undefined"
#: Names that engines have for their groups.
_given: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def name_group(group: dist.ProcessGroup, name: str) -> None:
    """Have errors and log lines call ``group`` by an engine's name, such as ``tp:0``."""
    _given[group] = name


@dataclass(frozen=True)
class RankName:
    """One rank.

    Attributes:
        rank: Its number in the group.
        global_rank: Its rank in torch's default group.
        where: Process, host and node, in words; "" where they are not known yet.
    """

    rank: int
    global_rank: int
    where: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.details})"

    @property
    def details(self) -> str:
        """What stands in brackets behind the number."""
        return f"global rank {self.global_rank}{self.where and f', {self.where}'}"


@dataclass(frozen=True)
class RankNames:
    """The ranks of a group, or those of its ranks that are connected with each other (``part``), by index.

    Attributes:
        group: Name of the group.
        members: The ranks.
        size: Number of ranks of the whole group.
    """

    group: str
    members: tuple[RankName, ...]
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> RankNames:
        """The ranks of a group of torch, by the name that it has been given."""
        members = tuple(RankName(i, number) for i, number in enumerate(dist.get_process_group_ranks(group)))
        return cls(_name_of(group), members, len(members))

    def with_processes(self, said: Sequence[Mapping[str, Any]]) -> RankNames:
        """The same with what each rank has said of its process: ``pid`` and ``host``."""
        words = (f"pid {each['pid']} on {each['host']}" if "pid" in each else "" for each in said)
        members = (replace(member, where=where) for member, where in zip(self.members, words, strict=True))
        return replace(self, members=tuple(members))

    def with_nodes(self, names: Mapping[int, str]) -> RankNames:
        """The same with the node of each rank, in words."""
        members = (replace(m, where=f"{m.where}{m.where and ', '}{names[m.rank]}") for m in self.members)
        return replace(self, members=tuple(members))

    def part(self, ranks: Iterable[int]) -> RankNames:
        """Some ranks of the group, which are connected with each other."""
        return replace(self, members=tuple(self.members[rank] for rank in ranks))

    @property
    def of_group(self) -> str:
        """ "group tp:0"."""
        return f"group {self.group}"

    def number(self, index: int) -> int:
        """Number of a rank in the whole group; a number that is no index stays."""
        return self.members[index].rank if 0 <= index < len(self.members) else index

    def short(self, index: int) -> str:
        """ "rank 1", for a rank that a text has named in full."""
        return f"rank {self.number(index)}"

    def full(self, index: int) -> str:
        """ "rank 1 (global rank 3, pid 4712 on worker-7)". A number that is no rank's has no details."""
        return str(self.members[index]) if 0 <= index < len(self.members) else f"rank {index}"

    def in_group(self, index: int) -> str:
        """ "group tp:0, rank 1 (global rank 3, pid 4712 on worker-7)", the begin of a text."""
        return f"{self.of_group}, {self.full(index)}"

    def each(self, indices: Iterable[int]) -> str:
        """Some ranks, each in full: for ranks that somebody has to look for."""
        return ", ".join(self.full(index) for index in indices)

    def several(self, indices: Iterable[int]) -> str:
        """One rank in full, or "ranks 0, 2 (global ranks 4, 6)": for ranks that have something in common."""
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
