"""UCX between nodes: a kernel asks a host proxy to put data into the partners' memory, and to signal."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from llm_comm import _core
from llm_comm.nodes.topology import Topology
from llm_comm.nodes.transport import keep_for_graphs

#: Bytes that a block sends to a partner at once. The host memory of a rank is up to 64 times this for each partner. The
#: value is not measured.
PART_BYTES = 128 << 10

_LATE_S = 0.02  # seconds after which a call counts as waiting for a partner

# Stops UCX from changing the process beyond communication: its signal handlers, and its patches of mmap.
_QUIET = {"UCX_HANDLE_ERRORS": "none", "UCX_MEM_MMAP_HOOK_MODE": "none"}


def load() -> str:
    """Load UCX and return its version. The package ``libucx`` (``pip install libucx-cu13``) has precedence over the
    system's library.

    Raises:
        RuntimeError: UCX is missing or too old.
    """
    added = {name: value for name, value in _QUIET.items() if name not in os.environ}
    os.environ.update(added)  # UCX reads these once, when it is loaded
    try:
        try:
            import libucx
        except ImportError:
            pass
        else:
            libucx.load_library()
        return _core.ucx_version()
    finally:
        for name in added:
            del os.environ[name]


class UcxTransport:
    """Port channels over UCX, through host memory that GPU kernels read and write directly. On a GPU, calls run on its
    current stream, are asynchronous, and can be captured in CUDA graphs.

    Args:
        store: Store through which the partners connect, used by them only. A process that can read it can write to
            their memory.
        topology: Topology of the ranks; up to 8 nodes.
        device: Device of the communicator.
        timeout_s: Time limit in seconds of every wait.
        tell: Called with whether this rank has been waiting for some time.

    Raises:
        RuntimeError: UCX is missing, or the partners cannot be reached.
        ValueError: There are too many nodes.
    """

    name = "UCX"

    def __init__(
        self,
        store: Store,
        topology: Topology,
        device: torch.device,
        timeout_s: float,
        tell: Callable[[bool], None] = lambda waits: None,
    ) -> None:
        load()
        self._node, self._nodes = topology.node, len(topology.nodes)
        self._device = device
        self._notify = tell
        self._exchange = _core.NodeExchange(
            rank=self._node,
            ranks=self._nodes,
            part_bytes=PART_BYTES,
            timeout_s=timeout_s,
            device=-1 if device.type == "cpu" else (device.index or 0),
        )
        self._is_kept = False
        self._began: float | None = None  # begin of a call in progress
        try:
            store.set(f"ucx/{self._node}", self._exchange.address().hex())
            keys = [f"ucx/{node}" for node in range(self._nodes)]
            store.wait(keys, timedelta(seconds=timeout_s))
            names = [topology.names.full(rank) for rank in topology.partners]
            self._exchange.connect([bytes.fromhex(store.get(key).decode()) for key in keys], names)
        except BaseException:
            self._exchange.close()
            raise

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self._run(out, x, [(0, x.nbytes, node * x.nbytes, x.nbytes) for node in range(self._nodes)])

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        ways = zip(_offsets(in_sizes), in_sizes, _offsets(out_sizes), out_sizes, strict=True)
        self._run(out, x, list(ways))

    def set_limit(self, timeout_s: float) -> None:
        self._exchange.set_limit(timeout_s)

    def look(self) -> str:
        began = self._began
        self._notify(began is not None and time.monotonic() - began > _LATE_S)
        return self._exchange.error()

    def abort(self) -> None:
        self._exchange.abort()

    def close(self) -> None:
        if not self._is_kept:  # a replayed graph needs the proxy
            self._exchange.close()

    def _run(self, out: torch.Tensor, x: torch.Tensor, pieces: list[tuple[int, int, int, int]]) -> None:
        is_on_host = self._device.type == "cpu"
        stream = 0 if is_on_host else torch.cuda.current_stream(self._device).cuda_stream
        self._began = time.monotonic()
        try:
            if not self._exchange.run(x.data_ptr(), out.data_ptr(), pieces, stream):
                raise RuntimeError(self._exchange.error())
        finally:
            self._began = None
        if not self._is_kept and self._exchange.has_been_captured():
            self._is_kept = True
            keep_for_graphs(self._exchange)


def _offsets(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][: len(sizes)]
