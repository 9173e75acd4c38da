"""C++ as text: lines, indented, and the spelling of ranks and types of elements."""

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
    """Lines of source, one behind the other."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    def add(self, *lines: str) -> None:
        """Appends lines at the depth of now."""
        self._lines += ["  " * self._depth + line if self._depth else line for line in lines]

    @contextmanager
    def block(self, head: str, end: str = "}", remark: str | None = None) -> Iterator[None]:
        """Lines inside stand in braces behind ``head``. ``remark`` stands behind the brace, as a comment."""
        self.add(f"{head} {{{'' if remark is None else f'  {comment(remark)}'}".lstrip())
        self._depth += 1
        yield
        self._depth -= 1
        self.add(end)

    def joined(self) -> str:
        """All of them."""
        return "\n".join(self._lines) + "\n"


def comment(text: str) -> str:
    """A comment of one line for any text. Control characters are escaped. A backslash at the end is dropped: it would
    make the next line of the source a part of the comment."""
    return f"// {text.encode('unicode_escape').decode()}".rstrip("\\ ")


def number_of(rank: Rank | int) -> str:
    """The number of a rank, or of a chunk."""
    if isinstance(rank, Relative):
        return f"r{rank.offset}" if rank.offset else "rank"
    return f"{rank if isinstance(rank, int) else rank.rank}u"


def address_of(rank: Rank) -> str:
    """The workspace of a rank."""
    return f"at{rank.offset}" if isinstance(rank, Relative) else f"at_rank({rank.rank}u)"


def runs_on(only: frozenset[int]) -> str:
    """Whether this rank is one of them."""
    tests = " || ".join(f"rank == {rank}" for rank in sorted(only))
    return f"({tests})" if len(only) > 1 else tests


@dataclass(frozen=True)
class Element:
    """Of a message.

    Attributes:
        dtype: As torch has it.
        number: The DataType of data_type.h that sums it; None: elements are moved only.
        storage: By which loads and stores take it apart where a line is not aligned, or not full.
    """

    dtype: torch.dtype
    number: str | None
    storage: str


def element_of(dtype: torch.dtype) -> Element:
    """The element of a dtype of torch."""
    width = min(dtype.itemsize, 4)
    return Element(dtype, _NUMBERS.get(dtype), f"uint{8 * width}_t")
