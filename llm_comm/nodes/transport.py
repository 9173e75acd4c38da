"""Transports of data between nodes: NCCL and gloo behind one interface. ``ucx.py`` has the third."""

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
    """Keep the connections until the process ends, for graphs that may use them. Abort them then."""
    _kept.append(partners)


@atexit.register
def _end_all() -> None:
    """Abort before the CUDA context is destroyed: the connections would hang in it."""
    for partners in _kept:
        with contextlib.suppress(Exception):
            partners.abort()


os.register_at_fork(after_in_child=lambda: atexit.unregister(_end_all))  # the connections belong to the parent


_FIRST_WAIT_S, _LONGEST_WAIT_S = 20e-6, 1e-3
_CHECK_S = 0.02


class Transport(Protocol):
    """Transport between partners: the ranks with the same local rank in their nodes.

    All partners make the same calls in the same order.

    A rank makes one call at a time. Only ``look`` and ``abort`` may run concurrently with a call.
    """

    #: Name in plans and messages.
    name: str

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Enqueue on the current stream: ``out`` receives the ``x`` of all nodes, in node order.

        Args:
            out: Contiguous bytes, the size of all ``x`` together.
            x: Contiguous bytes, at least one, as many on all nodes.

        Raises:
            RuntimeError: The call failed or timed out.
        """

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        """Enqueue on the current stream: each node receives its piece of ``x``.

        Args:
            out: Contiguous bytes: pieces from all nodes, in node order.
            x: Contiguous bytes: pieces for all nodes, in node order.
            out_sizes, in_sizes: Bytes of each piece of ``out`` and ``x``.

        Raises:
            RuntimeError: The call failed or timed out.
        """

    def set_limit(self, timeout_s: float) -> None:
        """Set the time limit of later calls, in seconds."""

    def look(self) -> str:
        """Return why the transport has failed, as far as this is visible without a call, or "". A thread polls this."""

    def abort(self) -> None:
        """Abort hanging calls after the communicator has failed. Any thread may call this. The transport cannot be used
        afterwards."""

    def close(self) -> None:
        """Close the connections, unless a CUDA graph may use them. Every rank must call this."""


def _finish(work: dist.Work | None) -> None:
    """Make the current stream wait for the enqueued work. None: torch has already done so."""
    if work is not None:
        work.wait()


def kind_of_transport(config: Config, device: torch.device, nodes: int) -> str:
    """Return the transport that option ``node_transport`` selects: "nccl", "gloo" or "ucx".

    Args:
        config: Options of the communicator, equal on all ranks.
        device: Device of the communicator.
        nodes: Number of nodes.

    Raises:
        ConfigError: The transport cannot be used here.
    """
    kind = config.node_transport
    # NCCL rejects two ranks on one GPU.
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
    """NCCL on the device's current stream. Calls are asynchronous, and CUDA graphs capture them.

    Args:
        store: Store through which the partners connect, used by them only.
        node: Node of this rank.
        nodes: Number of nodes.
        timeout_s: Time limit in seconds of a call outside of graphs. torch ends the process if a call exceeds it.
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
        if not self.has_been_captured:  # a replayed graph would use the closed connections
            self._partners.shutdown()

    def _note_capture(self) -> None:
        if not self.has_been_captured and torch.cuda.is_current_stream_capturing():
            self.has_been_captured = True
            keep_for_graphs(self._partners)


class HostTransport:
    """gloo on CPU tensors. GPU tensors are copied through host memory, which CUDA graphs cannot capture.

    Args:
        store, node, nodes, timeout_s: Arguments of ``StreamTransport``.
        check: Raises if the communicator has failed for another reason, in which case no data will come.
        tell: Called with True while this rank has waited for some time, and with False after the wait.
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
        self._notify = tell

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
        # gloo's own limit must be later than the one here, which has a useful message.
        self._open()._set_default_timeout(timedelta(seconds=2 * timeout_s))

    def look(self) -> str:
        return ""

    def abort(self) -> None:
        """Do nothing: every wait here polls ``check``."""

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
            self._notify(False)

    def _wait_until(self, work: dist.Work) -> None:
        begin = last_check = time.monotonic()
        pause = _FIRST_WAIT_S
        while not work.is_completed():
            now = time.monotonic()
            if now - begin > self._timeout_s:
                raise RuntimeError(f"nothing came for {self._timeout_s:g} s (LLM_COMM_TIMEOUT_S)")
            if now - last_check > _CHECK_S:
                last_check = now
                self._notify(True)
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
