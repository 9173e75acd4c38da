"""Text of C++: indented lines, and the spelling of ranks and element types."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from llm_comm.dsl.ir import Rank, Relative

_NUMBERS = {
    torch.bfloat16: "kBFloat16",
    torch.float16: "kFloat16",
    torch.float32: "kFloat32",
}


class Text:
    """Indented lines of source."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    def add(self, *lines: str) -> None:
        """Append lines at the current depth."""
        self._lines += ["  " * self._depth + line if self._depth else line for line in lines]

    @contextmanager
    def block(self, head: str, end: str = "}", remark: str | None = None) -> Iterator[None]:
        """Put the lines of the block in braces after ``head``. ``remark`` is a comment after the opening brace."""
        self.add(f"{head} {{{'' if remark is None else f'  {comment(remark)}'}".lstrip())
        self._depth += 1
        yield
        self._depth -= 1
        self.add(end)

    def joined(self) -> str:
        """Return the whole text."""
        return "\n".join(self._lines) + "\n"


def comment(text: str) -> str:
    """Return a one-line C++ comment. Control characters are escaped. A trailing backslash is dropped: it would extend
    the comment to the next line."""
    return f"// {text.encode('unicode_escape').decode()}".rstrip("\\ ")


def number_of(rank: Rank | int) -> str:
    """Return the expression for a rank's or chunk's number."""
    if isinstance(rank, Relative):
        return f"r{rank.offset}" if rank.offset else "rank"
    return f"{rank if isinstance(rank, int) else rank.rank}u"


def address_of(rank: Rank) -> str:
    """Return the expression for the address of a rank's workspace."""
    return f"at{rank.offset}" if isinstance(rank, Relative) else f"at_rank({rank.rank}u)"


def runs_on(only: frozenset[int]) -> str:
    """Return the condition that this rank is among ``only``."""
    tests = " || ".join(f"rank == {rank}" for rank in sorted(only))
    return f"({tests})" if len(only) > 1 else tests


@dataclass(frozen=True)
class Element:
    """Element type of a message.

    Attributes:
        dtype: torch dtype.
        number: Name of the DataType of data_type.h for sums; None: elements can only be moved.
        storage: C++ type for access to unaligned or partial lines.
    """

    dtype: torch.dtype
    number: str | None
    storage: str


def element_of(dtype: torch.dtype) -> Element:
    """Return the element type for a torch dtype."""
    width = min(dtype.itemsize, 4)
    return Element(dtype, _NUMBERS.get(dtype), f"uint{8 * width}_t")
