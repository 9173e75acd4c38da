"""Transports of data between nodes: NCCL and gloo behind one small interface. ``ucx.py`` has the third."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, Store

from llm_comm import _core
from llm_comm.config import Config
from llm_comm.errors import ConfigError, UnsupportedInputError
from llm_comm.runtime.core_handle import keep_in_child


class _Partners(Protocol):
    def abort(self) -> None: ...


_kept: list[_Partners] = []


def keep_for_graphs(partners: _Partners) -> None:
    """Keeps it until the end of the process, and ends it then."""
    _kept.append(partners)


@atexit.register
def _end_all() -> None:
    """Before the CUDA context goes, which they would hang in."""
    for partners in _kept:
        with contextlib.suppress(Exception):
            partners.abort()


os.register_at_fork(after_in_child=lambda: atexit.unregister(_end_all))  # the partners are the parent's


_FIRST_WAIT_S, _LONGEST_WAIT_S = 20e-6, 1e-3
_CHECK_S = 0.02


class Transport(Protocol):
    """Between the ranks that have the same place in their nodes. All make the same calls in the same order.

    A rank makes one call at a time; ``look`` and ``abort`` may come beside it.
    """

    #: For plans and messages.
    name: str

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Enqueues on the current stream: ``out`` gets the ``x`` of all nodes, in node order.

        Args:
            out: Contiguous bytes, as many as all ``x`` have.
            x: Contiguous bytes, as many on all nodes, at least one.

        Raises:
            RuntimeError: It failed, or did not end in time.
        """

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        """The same: each node gets its piece of ``x``.

        Args:
            out: Contiguous bytes: the pieces from all nodes, in node order.
            x: Contiguous bytes: the pieces for all nodes, in node order.
            out_sizes, in_sizes: Bytes of each piece.
        """

    def set_limit(self, timeout_s: float) -> None:
        """Bounds later calls, in seconds."""

    def look(self) -> str:
        """Why nothing works any more, as far as that is known without a call; "" as long as it does. Asked for now and
        then by a thread of its own."""

    def abort(self) -> None:
        """Ends what hangs, as the communicator has failed. From any thread; afterwards nothing works any more."""

    def close(self) -> None:
        """Ends the connections, unless a CUDA graph might use them. Call it on every rank."""


def _finish(work: dist.Work | None) -> None:
    """Has the current stream wait for what has been enqueued; None where torch has seen to it."""
    if work is not None:
        work.wait()


def kind_of_transport(config: Config, device: torch.device, nodes: int) -> str:
    """Which transport option ``node_transport`` means here: "nccl", "gloo" or "ucx".

    Args:
        config: Of the communicator, the same on all ranks.
        device: Of the communicator.
        nodes: How many there are.

    Raises:
        ConfigError: It cannot be used here.
    """
    kind = config.node_transport
    # NCCL takes no two ranks of one GPU.
    why_not_nccl = (
        "the ranks have emulated GPUs" if device.type == "cpu" else "ranks share a GPU" if config.share_gpu else ""
    )
    if kind == "auto":
        return "gloo" if why_not_nccl else "nccl"
    why = why_not_nccl if kind == "nccl" else ""
    if kind == "ucx" and nodes > _core.max_world_size:
        why = f"there are {nodes} nodes, and it serves up to {_core.max_world_size}"
    if why:
        raise ConfigError(
            f"option node_transport is {kind!r} ({config.origins.get('node_transport', 'Python')}), but {why}: "
            "leave it 'auto'"
        )
    return kind


class StreamTransport:
    """By NCCL, on the current stream of the device: calls return at once, and CUDA graphs capture them.

    Args:
        store: By which the partners find each other: theirs alone.
        node, nodes: Of this rank, and how many there are.
        timeout_s: Bound in seconds of a call that no graph holds. torch ends the process that waits longer.
    """

    name = "NCCL"

    def __init__(self, store: Store, node: int, nodes: int, timeout_s: float) -> None:
        self.has_been_captured = False
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._partners: Any = dist.ProcessGroupNCCL(store, node, nodes, options)
        keep_in_child(self._partners)
        self._gather, self._exchange = AllgatherOptions(), AllToAllOptions()
        self._gather.asyncOp = self._exchange.asyncOp = False

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self._note_capture()
        _finish(self._partners._allgather_base(out, x, self._gather))

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        self._note_capture()
        _finish(self._partners.alltoall_base(out, x, out_sizes, in_sizes, self._exchange))

    def set_limit(self, timeout_s: float) -> None:
        self._partners._set_default_timeout(timedelta(seconds=timeout_s))

    def look(self) -> str:
        return ""  # NCCL ends the process by itself

    def abort(self) -> None:
        self._partners.abort()

    def close(self) -> None:
        if not self.has_been_captured:  # a graph that is replayed would use what is not there any more
            self._partners.shutdown()

    def _note_capture(self) -> None:
        if not self.has_been_captured and torch.cuda.is_current_stream_capturing():
            self.has_been_captured = True
            keep_for_graphs(self._partners)


class HostTransport:
    """By gloo, on tensors of the CPU; those of a GPU go through the host's memory, which no CUDA graph captures.

    Args:
        store, node, nodes, timeout_s: As of ``StreamTransport``.
        check: Raises where the communicator has failed for another reason: nothing more will come then.
        tell: Takes whether this rank waits, once that has taken a while.
    """

    name = "gloo"

    def __init__(
        self,
        store: Store,
        node: int,
        nodes: int,
        timeout_s: float,
        check: Callable[[], None],
        tell: Callable[[bool], None],
    ) -> None:
        self._partners: Any = dist.ProcessGroupGloo(store, node, nodes, timedelta(seconds=timeout_s))
        keep_in_child(self._partners)
        self._timeout_s = timeout_s
        self._check = check
        self._tell = tell

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        on_host = _host_memory(out, x)
        self._wait(self._open()._allgather_base(*on_host))
        _put_back(out, on_host[0])

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        on_host = _host_memory(out, x)
        self._wait(self._open().alltoall_base(*on_host, out_sizes, in_sizes))
        _put_back(out, on_host[0])

    def set_limit(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # gloo's own limit is not to come before the one that has a message.
        self._open()._set_default_timeout(timedelta(seconds=2 * timeout_s))

    def look(self) -> str:
        return ""

    def abort(self) -> None:
        """Nothing hangs: every wait here looks at ``check``."""

    def close(self) -> None:
        self._partners = None

    def _open(self) -> Any:
        if self._partners is None:
            raise RuntimeError("the connections between the nodes are closed")
        return self._partners

    def _wait(self, work: dist.Work) -> None:
        try:
            self._wait_until(work)
        finally:
            self._tell(False)

    def _wait_until(self, work: dist.Work) -> None:
        begin = last_check = time.monotonic()
        pause = _FIRST_WAIT_S
        while not work.is_completed():
            now = time.monotonic()
            if now - begin > self._timeout_s:
                raise RuntimeError(f"nothing came for {self._timeout_s:g} s (LLM_COMM_TIMEOUT_S)")
            if now - last_check > _CHECK_S:
                last_check = now
                self._tell(True)
                self._check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT_S)
        work.wait()


def _host_memory(out: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if x.device.type == "cpu":
        return out, x
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedInputError("data between nodes goes through the host's memory: no CUDA graph can capture that")
    return torch.empty(out.shape, dtype=out.dtype), x.cpu()


def _put_back(out: torch.Tensor, on_host: torch.Tensor) -> None:
    if on_host is not out:
        out.copy_(on_host)
