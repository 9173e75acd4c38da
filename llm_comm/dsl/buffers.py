"""Buffers of a DSL program, as the user's function sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from llm_comm.dsl.errors import Fault, ProgramError, users_frame, users_line
from llm_comm.dsl.ir import Absolute, Buffer, Chunk, Rank, Relative, Space


class Chunks:
    """Buffer of every rank as a sequence of chunks.

    ``chunks[p.rank]`` is the chunk with the number of the rank, ``chunks[0]`` the first chunk. Errors and pictures name
    the buffer by the variable that holds it.

    Args:
        shape: Description of the buffer, without a name.
        take_name: Makes a name unique.
        ranks: Returns the ranks that run the line being traced.
        world: Number of ranks.
    """

    def __init__(
        self, shape: Buffer, take_name: Callable[[str], str], ranks: Callable[[], frozenset[int]], world: int
    ) -> None:
        self.shape = shape
        self.buffer: Buffer | None = None
        self._take_name = take_name
        self._ranks = ranks
        self._world = world

    def __len__(self) -> int:
        return self.shape.chunks

    def __iter__(self) -> Iterator[Chunk]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Rank | int) -> Chunk:
        buffer = self._named()
        index = Relative(index.offset % self._world) if isinstance(index, Relative) else index
        if isinstance(index, bool) or not isinstance(index, int | Relative | Absolute):
            raise ProgramError(
                Fault.MISUSE,
                f"{buffer.name}[{index!r}]: a chunk is named by a whole number or a rank (p.rank + 1)",
                users_line(),
            )
        for rank in sorted(self._ranks()):
            at = index if isinstance(index, int) else index.on(rank, self._world)
            if not 0 <= at < buffer.chunks:
                raise ProgramError(
                    Fault.MISUSE,
                    f"{buffer.name}[{index}] on rank {rank} is chunk {at}, but {buffer.name} has {buffer.chunks} "
                    f"chunk(s), 0 to {buffer.chunks - 1}: cut it into more, or use another index",
                    users_line(),
                )
        return Chunk(buffer, index)

    def _named(self) -> Buffer:
        if self.buffer is None:
            shape = self.shape
            name = shape.space.value
            if not shape.space.is_tensor:
                name = next((name for name, value in users_frame().f_locals.items() if value is self), name)
            self.buffer = replace(shape, name=self._take_name(name))
        return self.buffer


class Tensor:
    """Input or output tensor of the operation.

    Args:
        space: Input or output.
        parts_of_message: Number of such tensors in one message. An all-gather has ``world`` inputs in its message.
        needs_multiple_of: The number of chunks must be a multiple of this.
        make: Makes the chunks.
    """

    def __init__(
        self, space: Space, parts_of_message: int, needs_multiple_of: int, make: Callable[[Buffer], Chunks]
    ) -> None:
        self._space = space
        self._parts_of_message = parts_of_message
        self._needs_multiple_of = needs_multiple_of
        self._make = make
        self._chunks: Chunks | None = None

    def chunks(self, count: int, *, symmetric: bool = False) -> Chunks:
        """Cut the tensor into equal chunks.

        Args:
            count: Number of chunks, equal in all calls of a program: a tensor is cut once.
            symmetric: The tensor is in symmetric memory, and peers may access it: ``put`` to an output, ``get`` from an
                input. Callers must pass such tensors.

        Raises:
            ProgramError: ``count`` does not fit the operation, or the tensor was cut differently before.
        """
        name = self._space.value
        if count < 1 or count % self._needs_multiple_of:
            raise ProgramError(
                Fault.MISUSE,
                f"the {name} of this operation has a part for each rank: it is cut into a multiple of "
                f"{self._needs_multiple_of} chunks, not into {count}",
                users_line(),
            )
        shape = Buffer("", self._space, count, count * self._parts_of_message, is_symmetric=symmetric)
        if self._chunks is None:
            self._chunks = self._make(shape)
        if self._chunks.shape != shape:
            before = self._chunks.shape
            raise ProgramError(
                Fault.MISUSE,
                f"the {name} is cut into {count} chunks (symmetric={symmetric}), but was cut into {before.chunks} "
                f"(symmetric={before.is_symmetric}) before: cut it once, and use these chunks",
                users_line(),
            )
        return self._chunks
