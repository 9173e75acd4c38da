"""What is to be computed, and the plan for it."""

from __future__ import annotations

from dataclasses import dataclass

from llm_comm import _core, registry

#: The protocol where there is no algorithm, and the algorithm where there is nothing to exchange.
NONE = "none"


@dataclass(frozen=True)
class Problem:
    """What a call is to compute, the same on all ranks.

    Attributes:
        operation: Its name in the registry.
        count: Elements of a rank's input; of an operation on parts, of the largest part.
        row: Of these, elements of a row, for an operation that works by rows; else 0.
        data_type: Name of the elements' type.
        world_size: Ranks.
        parameters: The operation's own, in its order.
    """

    operation: str
    count: int
    row: int
    data_type: str
    world_size: int
    parameters: tuple[float, ...] = ()

    def message_bytes(self) -> int:
        """Size of ``count`` elements: what a table goes by."""
        return self.count * registry.data_types()[self.data_type]

    def whole_bytes(self) -> int:
        """Size of a rank's input; of an operation on parts, of the tensor of all parts. What limits go by."""
        if not registry.operations()[self.operation].has_parts:
            return self.message_bytes()
        rows, *sizes = self.parameters
        return int(rows) * int(sum(sizes)) * registry.data_types()[self.data_type]

    def is_in_rows(self) -> bool:
        """Whether a rank's part of an operation on parts is more than one piece of the tensor."""
        return registry.operations()[self.operation].has_parts and self.parameters[0] != 1

    def has_equal_parts(self) -> bool:
        """Whether the ranks' parts, of an operation on parts, are of one size."""
        if not registry.operations()[self.operation].has_parts:
            return True
        return len(set(self.parameters[1 : 1 + self.world_size])) == 1

    def for_core(self) -> _core.Problem:
        """The same as the core takes it."""
        return _core.Problem(
            count=self.count,
            row=self.row,
            data_type=tuple(registry.data_types()).index(self.data_type),
            world_size=self.world_size,
            parameters=self.parameters,
        )


@dataclass(frozen=True)
class Plan:
    """What a communicator runs for a message.

    Attributes:
        operation: What is computed.
        algorithm: Name of the algorithm, or of a program as ``"dsl:NAME"``; ``"2PH"`` over several nodes, where the
            numbers are those of the kernels within a node; ``"none"`` where nothing has to be exchanged, or
            ``"declined"``.
        protocol: ``"LL"``, ``"HB"`` or ``"Port"``; ``"DSL"`` of a program; ``"LL+HB"`` where phases of 2PH differ;
            ``"none"`` where there is no algorithm.
        blocks: Blocks of a launch.
        threads: Threads of a block.
        tile_lines: Lines of 16 bytes that a block exchanges with each peer at a time.
        cluster: Blocks that share a row.
        depth: Tiles sent ahead of the one waited for.
        chunks: Launches that the message takes.
        chunk_elements: Elements of all launches but the last; of an all-gather, bytes.
        message_bytes: Size of the message; of an all-gather or reduce-scatter, of the largest rank's part.
        reason: Why this plan.
        row: Elements of a row, for an operation that works by rows; else 0.
        symmetric: Name of the algorithm that runs in its place where the tensors of the call are in symmetric memory;
            "" for none, or where there are no such tensors.
    """

    operation: str
    algorithm: str
    protocol: str
    blocks: int
    threads: int
    tile_lines: int
    cluster: int
    depth: int
    chunks: int
    chunk_elements: int
    message_bytes: int
    reason: str
    row: int = 0
    symmetric: str = ""

    @property
    def chunk_rows(self) -> int:
        """Rows of all launches but the last; 0 for an operation that does not work by rows."""
        return self.chunk_elements // self.row if self.row else 0


def without_kernel(operation: str, outcome: str, message_bytes: int, why: str, row: int = 0) -> Plan:
    """The plan of a message that is ``"declined"``, or for which there is nothing to do (``"none"``)."""
    return Plan(operation, outcome, NONE, 0, 0, 0, 0, 0, 0, 0, message_bytes, why, row)


def declined(operation: str, message_bytes: int, why: str) -> Plan:
    """The plan of a message that llm_comm does not serve."""
    return without_kernel(operation, "declined", message_bytes, why)
