"""This rank's part in a group that llm_comm serves, from joining it to the end of the process."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from llm_comm.communicator import Communicator
from llm_comm.config import EngineOptions
from llm_comm.errors import CommunicatorError
from llm_comm.installation import VERSION
from llm_comm.integrations import sleeping, statistics
from llm_comm.integrations.descriptions import FIRST_FUSED, describe_parts, describe_plans, format_bytes
from llm_comm.integrations.engine_config import options_of
from llm_comm.integrations.joining import NotJoinedError, SwitchedOffError, join
from llm_comm.nodes.all_reduce import WHY_NOT_ALONE
from llm_comm.planning.selection import message_limit
from llm_comm.planning.tables import ALL_REDUCE
from llm_comm.runtime.rank_names import name_group

_EXIT_CODE = 1


class Member:
    """This rank's part in a group that llm_comm serves: its communicator, whose failure ends the process.

    Args:
        communicator: Closed by ``close``.
        group_name: The engine's name of the group.
        log: Comes out where the engine's messages do. It takes the last words of the process, if it has to end.
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

        A CUDA graph is replayed without Python, so nobody would see the error, and the engine would serve sums that
        lack a peer. An engine notices when one of its processes ends, and stops with an error; torch's watchdog of NCCL
        relies on the same. Wrong results go unnoticed for less than 0.6 s.
        """
        # An exit of another rank ends this process too: kernels of other libraries would wait for that rank without
        # end, and hold up this process.
        self.communicator.on_error(self._end, exits=True)

    def _end(self, error: CommunicatorError) -> None:
        if self._is_closed:
            return
        last_words = f"{error}\nEnding this process: what the engine computes from here on would be wrong."
        self._log.critical("llm_comm: %s", last_words)
        # Not sys.exit: the main thread may be waiting for the GPU or for another rank.
        os._exit(_EXIT_CODE)

    def summary(self, engine: str, *, sums: bool = True) -> str:
        """The line for the log of rank 0 that says what llm_comm does from now on.

        Args:
            engine: Its name.
            sums: Whether the group sums; else it gathers and scatters alone.
        """
        communicator = self.communicator
        config, table = options_of(communicator), communicator.table
        where = "emulated GPUs" if communicator.is_emulated else communicator.memory_kind
        if communicator.nodes > 1:
            where = f"{communicator.nodes} nodes, {where}"
        if sums and communicator.nodes > 1:
            limit = format_bytes(message_limit(ALL_REDUCE, table, config))
            plans = f"hierarchical to {limit}, then {engine}'s own"
            what = f"all-reduce {plans} ({table.describe()} in each node); {describe_parts(table, config)}"
        elif sums:
            plans = describe_plans(table, config, f"{engine}'s own", communicator.multicast, communicator.programs)
            what = f"all-reduce {plans} ({table.describe()}); {describe_parts(table, config)}"
        else:
            beyond = f", then {engine}'s own"
            what = f"{describe_parts(table, config, beyond)} ({table.describe()})"
        return (
            f"llm_comm {VERSION} is active for group {self.group_name} ({communicator.world_size} ranks, {where}): "
            f"{what}; timeout {config.timeout_s:g} s; {communicator.multicast.describe(config)}"
        )

    def say_once(self, text: str, *tensors: torch.Tensor) -> None:
        """Log on rank 0 what happens for the first time, with the number of ranks and the shapes of ``tensors``."""
        if text not in self._said:
            self._said.add(text)
            if dist.get_rank() == 0:
                self._log.info(text, self.communicator.world_size, *(tuple(tensor.shape) for tensor in tensors))

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float, **options: Any
    ) -> tuple[torch.Tensor, ...] | None:
        """The fused sum and norm of ``Communicator.all_reduce_add_rms_norm``; None, the same on all ranks, if it is not
        served: nothing has been summed then.

        Raises:
            UnsupportedInputError: It is not served, and must be: with ``batch_invariant_norm`` llm_comm computes the
                norms of all batches.
        """
        communicator = self.communicator
        if communicator.config.batch_invariant_norm == "llm_comm":
            # The engine's norm would have other bits. What is not served is an error of the call below.
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
        attempt: Callable[..., torch.Tensor | None],
        x: torch.Tensor,
        weight: torch.Tensor,
        first: str,
        **options: Any,
    ) -> torch.Tensor | None:
        """A linear layer of this rank; None if it is not served.

        Args:
            attempt: Takes the communicator, ``x``, the weight and the options; returns a new tensor or None.
            x, weight, options: Of the layer.
            first: Logged for the first layer that is served.
        """
        result = attempt(self.communicator, x, weight, **options)
        if result is not None:
            self.say_once(first, x, weight)
        return result

    def close(self) -> None:
        """Makes no use of the group, which may be gone."""
        with contextlib.ExitStack() as last:
            last.callback(setattr, self, "_is_closed", True)
            # It waits for the GPU: for ever, where a kernel of NCCL waits for a dead rank.
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
    """Joins ``group``; None, on all of its ranks, if they do without llm_comm, and a line in ``log`` that says why.

    Args:
        group_name: The engine's name of the group.
        engine: Name of the engine.
        log: Comes out where the engine's messages do.
        group, device, load_config: See ``join``.

    Raises:
        ConfigError: A rank has a wrong option. Raised on all ranks, so that the engine does not start.
        AbsentRanksError: A rank did not come. Raised on those that did, so that the engine does not start.
    """
    name_group(group, group_name)
    try:
        communicator = join(group, device, load_config)
    except SwitchedOffError as error:
        if dist.get_rank() == 0:
            log.info("llm_comm is not active: %s. %s's own collectives are used.", error, engine)
        return None
    except NotJoinedError as error:
        # Every rank says so: whichever log is read, it tells why decoding is slower than hoped for.
        text = "llm_comm %s is not active for group %s: %s. %s's own collectives are used."
        log.warning(text, VERSION, group_name, error, engine)
        return None
    statistics.follow(group_name, communicator, dist.get_rank(), log)
    sleeping.follow(group_name, communicator, log)
    return Member(communicator, group_name, log)


def why_not_fused(communicator: Communicator) -> str | None:
    """Why no all-reduce of the group is fused with its norm, if so: the same on all ranks."""
    return f"it {WHY_NOT_ALONE}" if communicator.nodes == communicator.world_size > 1 else None
