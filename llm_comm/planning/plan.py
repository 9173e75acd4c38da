"""Problem (input of planning) and plan (its result)."""

from __future__ import annotations

from dataclasses import dataclass

from llm_comm import _core, registry

#: Protocol of a plan without an algorithm; algorithm of a plan that exchanges nothing.
NONE = "none"


@dataclass(frozen=True)
class Problem:
    """Computation of a call, equal on all ranks.

    Attributes:
        operation: Name in the registry.
        count: Number of elements of a rank's input. For operations on shards: of the largest one. For parts whose sizes
            are on the device: of the largest possible one.
        row: Elements of a row, for an operation on rows; else 0.
        data_type: Name of the elements' type.
        world_size: Number of ranks.
        parameters: Numbers that the operation's kernels take. For operations on shards: rows before the divided
            dimension, then the elements of each rank's shard of a row. For the fused norm: epsilon, quantization and
            weight bias.
    """

    operation: str
    count: int
    row: int
    data_type: str
    world_size: int
    parameters: tuple[float, ...] = ()

    def message_bytes(self) -> int:
        """Return the size of ``count`` elements in bytes, by which tables select."""
        return self.count * registry.data_types()[self.data_type]

    def whole_bytes(self) -> int:
        """Return the size in bytes that ``max_message_bytes`` limits: a rank's input; for operations on shards, the
        whole tensor. Parts whose sizes are on the device count as the largest possible ones."""
        operation = registry.operations()[self.operation]
        if operation.bounds_parts:
            return self.world_size * self.message_bytes()
        if not operation.has_shards:
            return self.message_bytes()
        rows, *sizes = self.parameters
        return int(rows) * int(sum(sizes)) * registry.data_types()[self.data_type]

    def has_strided_shards(self) -> bool:
        """Return whether a shard is strided: it consists of several pieces of the tensor."""
        return registry.operations()[self.operation].has_shards and self.parameters[0] != 1

    def has_equal_shards(self) -> bool:
        """Return whether all shards have one size. True for operations without shards."""
        if not registry.operations()[self.operation].has_shards:
            return True
        return len(set(self.parameters[1 : 1 + self.world_size])) == 1

    def for_core(self) -> _core.Problem:
        """Convert to the core's problem."""
        return _core.Problem(
            count=self.count,
            row=self.row,
            data_type=tuple(registry.data_types()).index(self.data_type),
            world_size=self.world_size,
            parameters=self.parameters,
        )


@dataclass(frozen=True)
class Plan:
    """Launch of a communicator for one message.

    Attributes:
        operation: Name of the operation.
        algorithm: Name of the algorithm, or ``"dsl:NAME"`` of a DSL program. ``"2PH"`` over several nodes; the launch
            parameters are then those of the kernels within a node. ``"none"`` if nothing is exchanged. ``"declined"``
            if the message is not served.
        protocol: ``"LL"``, ``"HB"`` or ``"Port"``; ``"DSL"`` for a program; ``"LL+HB"`` if the phases of 2PH differ;
            ``"none"`` without an algorithm.
        blocks: Thread blocks of a launch.
        threads: Threads of a block.
        tile_lines: 16-byte lines that a block exchanges with each peer at a time.
        cluster: Blocks that share a row.
        depth: Tiles that a block sends ahead of the one it waits for.
        chunks: Number of launches for the message.
        chunk_elements: Elements of each launch but the last; bytes where bytes are moved.
        message_bytes: Size of the message in bytes. For operations on shards: of the largest one.
        reason: Why this plan was selected.
        row: Elements of a row, for an operation on rows; else 0.
        symmetric: Name of the algorithm that replaces ``algorithm`` if all tensors of the call are in symmetric memory.
            "" if there is none, or before the first tensor in symmetric memory exists.
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
        """Rows of each launch but the last; 0 for an operation without rows."""
        return self.chunk_elements // self.row if self.row else 0


def without_kernel(operation: str, outcome: str, message_bytes: int, why: str, row: int = 0) -> Plan:
    """Return the plan of a message that is ``"declined"``, or that needs no kernel (``"none"``)."""
    return Plan(operation, outcome, NONE, 0, 0, 0, 0, 0, 0, 0, message_bytes, why, row)


def declined(operation: str, message_bytes: int, why: str) -> Plan:
    """Return the plan of a declined message."""
    return without_kernel(operation, "declined", message_bytes, why)
