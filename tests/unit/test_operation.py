"""What operations keep of the calls so far, and that a communicator can drop all of it."""

from __future__ import annotations

from typing import Any
from unittest import mock

from llm_comm.communicator import Communicator
from llm_comm.operations.generic import GenericOperations
from llm_comm.operations.operation import MAX_PREPARED, keep


def test_what_is_kept_is_bounded() -> None:
    """Prefill brings ever new sizes."""
    cache: dict[int, int] = {}
    for size in range(3 * MAX_PREPARED):
        keep(cache, size, -size)
        assert len(cache) <= MAX_PREPARED
        assert cache[size] == -size


def test_as_many_are_kept_as_there_is_room_for() -> None:
    cache: dict[int, int] = {}
    for size in range(MAX_PREPARED):
        keep(cache, size, -size)
    assert cache == {size: -size for size in range(MAX_PREPARED)}


def test_a_table_of_a_communicator_concerns_every_operation() -> None:
    comm = mock.Mock(_multi_node=None)  # on one node
    comm._forget = lambda: Communicator._forget(comm)
    Communicator.use_table(comm, table := mock.Mock())
    assert comm._planner.table is table
    for operation in (comm._operations.all_reduce, comm._operations.all_reduce_add_rms_norm, comm._other_operations):
        operation.forget.assert_called_once_with()


def test_calls_by_name_are_dropped_too() -> None:
    operations: Any = GenericOperations(mock.Mock(), mock.Mock())
    known = {name: mock.Mock() for name in ("broadcast", "all_to_all")}
    operations._operations.update(known)
    operations.forget()
    for operation in known.values():
        operation.forget.assert_called_once_with()
