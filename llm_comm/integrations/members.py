"""Membership of this rank in a group of an engine that llm_comm serves, from set-up to close."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from llm_comm.communicator import Communicator
from llm_comm.config import EngineOptions
from llm_comm.errors import CommunicatorError
from llm_comm.installation import VERSION
from llm_comm.integrations import sleeping, statistics
from llm_comm.integrations.descriptions import (
    FIRST_FUSED,
    describe_gather_scatter,
    describe_plans,
    describe_wire,
    format_bytes,
)
from llm_comm.integrations.engine_config import options_of
from llm_comm.integrations.joining import NotJoinedError, SwitchedOffError, join
from llm_comm.nodes.all_reduce import WHY_NOT_ALONE
from llm_comm.planning.selection import exact_limit, limits_whole_tensor, message_limit
from llm_comm.planning.tables import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from llm_comm.runtime.rank_names import name_group

_EXIT_CODE = 1
_Result = TypeVar("_Result")


class Member:
    """Membership of this rank in one group. A failure of the communicator ends the process.

    Args:
        communicator: Communicator of the group. ``close`` closes it.
        group_name: The engine's name of the group.
        log: Logger whose messages appear in the engine's log. It also gets the reason when the process is ended.
    """

    def __init__(self, communicator: Communicator, group_name: str, log: logging.Logger) -> None:
        self.communicator = communicator
        self.group_name = group_name
        self._log = log
        self._said: set[str] = set()
        self._is_closed = False
        self._watch()

    def _watch(self) -> None:
        """End this process when the communicator fails.

        CUDA graphs are replayed without Python, so no exception would reach the engine, and it would serve all-reduces
        that lack a peer. Engines detect the end of a process and stop with an error. torch's NCCL watchdog relies on
        this too. Wrong results are served for less than 0.6 s.
        """
        # exits: the exit of another rank ends this process too. Otherwise a kernel of another library, such as NCCL,
        # would wait for that rank forever and block this process.
        self.communicator.on_error(self._end, exits=True)

    def _end(self, error: CommunicatorError) -> None:
        if self._is_closed:
            return
        last_words = f"{error}\nEnding this process: what the engine computes from here on would be wrong."
        self._log.critical("llm_comm: %s", last_words)
        # sys.exit would not end the process: the main thread may be waiting for the GPU or for another rank.
        os._exit(_EXIT_CODE)

    def summary(self, engine: str, *, sums: bool = True) -> str:
        """Return the start line for the log of rank 0: which collectives of the group llm_comm serves.

        Args:
            engine: Name of the engine.
            sums: Whether llm_comm serves all-reduces of the group, or only all-gathers and reduce-scatters.
        """
        communicator = self.communicator
        config, table = options_of(communicator), communicator.table
        where = "emulated GPUs" if communicator.is_emulated else communicator.memory_kind
        if communicator.nodes > 1:
            where = f"{communicator.nodes} nodes, {where}"
        if sums and communicator.nodes > 1:
            limit = format_bytes(exact_limit(table, config))
            plans = f"hierarchical to {limit}, then {engine}'s own"
            what = f"all-reduce {plans} ({table.describe()} in each node); {describe_gather_scatter(table, config)}"
        elif sums:
            plans = describe_plans(table, config, f"{engine}'s own", communicator.multicast, communicator.programs)
            what = f"all-reduce {plans} ({table.describe()})"
            what += describe_wire(config, message_limit(ALL_REDUCE, table, config))
            what += f"; {describe_gather_scatter(table, config)}"
        else:
            beyond = f", then {engine}'s own"
            what = f"{describe_gather_scatter(table, config, beyond)} ({table.describe()})"
            if communicator.nodes == 1:
                shards = 1 if limits_whole_tensor(config) else communicator.world_size
                whole = shards * message_limit(ALL_GATHER, table, config)
                is_on = {REDUCE_SCATTER: config.reduce_scatter, ALL_GATHER: config.all_gather}
                what += describe_wire(config, whole, [name for name, on in is_on.items() if on])
        return (
            f"llm_comm {VERSION} is active for group {self.group_name} ({communicator.world_size} ranks, {where}): "
            f"{what}; timeout {config.timeout_s:g} s; {communicator.multicast.describe(config)}"
        )

    def say_once(self, text: str, *tensors: torch.Tensor) -> None:
        """Log ``text`` on rank 0 the first time, formatted with the number of ranks and the shapes of ``tensors``."""
        if text not in self._said:
            self._said.add(text)
            if dist.get_rank() == 0:
                self._log.info(text, self.communicator.world_size, *(tuple(tensor.shape) for tensor in tensors))

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float, **options: Any
    ) -> tuple[torch.Tensor, ...] | None:
        """Compute ``Communicator.all_reduce_add_rms_norm``, or return None if llm_comm declines the call.

        All ranks decline alike, and a declined call has communicated nothing.

        Raises:
            UnsupportedInputError: llm_comm declines the call, but ``batch_invariant_norm`` is "llm_comm": then
                llm_comm must compute the norms of all batches.
        """
        communicator = self.communicator
        if communicator.config.batch_invariant_norm == "llm_comm":
            # The engine's norm rounds differently, so it may not replace a declined call. This call raises instead.
            x, residual = x.contiguous(), None if residual is None else residual.contiguous()
            call: Callable[..., tuple[torch.Tensor, ...] | None] = communicator.all_reduce_add_rms_norm
        else:
            call = communicator.try_all_reduce_add_rms_norm
        results = call(x, residual, weight, epsilon, **options)
        if results is not None:
            self.say_once(FIRST_FUSED, x)
        return results

    def try_linear(
        self,
        attempt: Callable[..., _Result | None],
        x: torch.Tensor,
        weight: torch.Tensor,
        first: str,
        **options: Any,
    ) -> _Result | None:
        """Compute a linear layer on this rank, or return None if llm_comm declines it.

        Args:
            attempt: Method of the communicator, called with ``x``, ``weight`` and ``options``. Returns new tensors or
                None.
            x, weight, options: Operands of the layer.
            first: Log line for the first layer that llm_comm computes.
        """
        result = attempt(self.communicator, x, weight, **options)
        if result is not None:
            self.say_once(first, x, weight)
        return result

    def close(self) -> None:
        """Close the communicator. The engine's process group is not used: vLLM may have destroyed it already."""
        with contextlib.ExitStack() as last:
            last.callback(setattr, self, "_is_closed", True)
            # This call waits for the GPU: forever, if a kernel of NCCL waits for a dead rank. So _is_closed is set
            # after it, and until then a failure still ends the process.
            last.callback(self.communicator.close)
            statistics.leave(self.group_name, self.communicator, self._log)
            sleeping.leave(self.communicator)


def enter(
    group_name: str,
    group: dist.ProcessGroup,
    device: torch.device,
    load_config: Callable[[], EngineOptions],
    *,
    engine: str,
    log: logging.Logger,
) -> Member | None:
    """Set llm_comm up for ``group``, and return this rank's membership. Collective.

    The result is None on all ranks if the group runs without llm_comm. A log line then has the reason.

    Args:
        group_name: The engine's name of the group.
        engine: Name of the engine.
        log: Logger whose messages appear in the engine's log.
        group, device, load_config: Arguments of ``join``.

    Raises:
        ConfigError: A rank has a wrong option. Raised on all ranks, so that the engine does not start.
        AbsentRanksError: A rank did not vote or was lost. Raised on the ranks that are left, so that the engine does
            not start.
    """
    name_group(group, group_name)
    try:
        communicator = join(group, device, load_config)
    except SwitchedOffError as error:
        if dist.get_rank() == 0:
            log.info("llm_comm is not active: %s. %s's own collectives are used.", error, engine)
        return None
    except NotJoinedError as error:
        # All ranks log this, so that every log explains why decoding is slower than expected.
        text = "llm_comm %s is not active for group %s: %s. %s's own collectives are used."
        log.warning(text, VERSION, group_name, error, engine)
        return None
    statistics.follow(group_name, communicator, dist.get_rank(), log)
    sleeping.follow(group_name, communicator, log)
    return Member(communicator, group_name, log)


def why_not_fused(communicator: Communicator) -> str | None:
    """Return the reason why the group cannot fuse all-reduces with norms, or None. All ranks return the same."""
    return f"it {WHY_NOT_ALONE}" if communicator.nodes == communicator.world_size > 1 else None
