"""How results are judged: buffers that show what was written beside them, and verdicts that the ranks compare."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from common import Session

GUARD_BYTES = 1024
POISON = 0xA5


def weights_of(count: int, device: torch.device) -> torch.Tensor:
    """Weights for digests: odd, so that a change of one element always changes the digest. They wrap around, as the
    digests do."""
    return torch.arange(count, dtype=torch.int64, device=device) * 0x1E3779B97F4A7C16 | 1


class Guarded:
    """``count`` elements at an element-aligned place between guard bytes, poisoned."""

    def __init__(self, count: int, dtype: torch.dtype, offset: int, device: torch.device) -> None:
        start = GUARD_BYTES + offset * dtype.itemsize
        end = start + count * dtype.itemsize
        self._bytes = torch.empty(end + GUARD_BYTES, dtype=torch.uint8, device=device)
        self._guards = (self._bytes[:start], self._bytes[end:])
        self.data = self._bytes[start:end].view(dtype)
        self.poison()

    def poison(self) -> None:
        self._bytes.fill_(POISON)

    def damage(self) -> torch.Tensor:
        """Number of guard bytes that something has written."""
        return torch.stack([(guard != POISON).sum() for guard in self._guards]).sum()


@dataclass(frozen=True)
class Where:
    """What a verdict is about. Calls of one ``result`` must give the same bits, whatever algorithm they took."""

    case: int
    result: str
    message: object
    call: object


class Verdicts:
    """Outcomes of calls. They stay on the device until `settle`, so that calls follow each other closely."""

    FINDINGS = ("wrong", "beyond the float64 bound", "guard bytes overwritten", "input elements changed")

    def __init__(self, ranks: Session) -> None:
        self._ranks = ranks
        self._pending: list[tuple[Where, torch.Tensor]] = []

    def add(self, where: Where, findings: list[torch.Tensor], digest: torch.Tensor) -> None:
        self._pending.append((where, torch.stack([*findings, digest])))

    def settle(self) -> list[str]:
        """Compares with the other ranks; waits for them. Returns one text a failed call, the same on all ranks."""
        if not self._pending:
            return []
        by_rank = self._ranks.gather(torch.stack([outcome for _, outcome in self._pending]).cpu())
        digest_of: dict[tuple[int, str], int] = {}
        failures = []
        for i, (where, _) in enumerate(self._pending):
            outcomes = by_rank[:, i].tolist()
            problems = [
                f"rank {rank}: {number} {finding}"
                for rank, outcome in enumerate(outcomes)
                for finding, number in zip(self.FINDINGS, outcome[:-1], strict=True)
                if number
            ]
            digests = [outcome[-1] for outcome in outcomes]
            if len(set(digests)) > 1:
                problems.append(f"the ranks' results differ: digests {digests}")
            elif digest_of.setdefault((where.case, where.result), digests[0]) != digests[0]:
                problems.append("the result differs from that of another algorithm")
            if problems:
                failures.append(
                    f"case {where.case}, {where.result}: {where.message}; {where.call}: " + "; ".join(problems)
                )
        self._pending.clear()
        return failures
