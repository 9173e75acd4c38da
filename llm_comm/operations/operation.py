"""What the operations of a communicator have in common."""

from __future__ import annotations

from typing import Any, TypeVar

from llm_comm.config import Config
from llm_comm.planning.selection import MAX_PREPARED, TuningTable
from llm_comm.runtime.core_handle import CoreHandle
from llm_comm.runtime.devices import current_stream_of

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Operation:
    """One operation of one communicator.

    Args:
        handle: Of the core that launches it.
        world_size: Ranks of the communicator.
        table: Tuning table that selects.
        config: Options of the communicator.
    """

    def __init__(self, handle: CoreHandle, world_size: int, table: TuningTable, config: Config) -> None:
        self._handle = handle
        self._device = handle.device
        self._current_stream = current_stream_of(handle.device)
        self._world_size = world_size
        self._table = table
        self._config = config
        #: What is ready to be launched, by size, type and the like.
        self._prepared: dict[Any, Any] = {}

    def use_table(self, table: TuningTable) -> None:
        """Selects by another tuning table from now on."""
        self._table = table
        self.forget()

    def forget(self) -> None:
        """Drops what is prepared."""
        self._prepared.clear()


def keep(cache: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Puts a value in a cache of bounded size."""
    if len(cache) >= MAX_PREPARED:
        cache.clear()
    cache[key] = value
