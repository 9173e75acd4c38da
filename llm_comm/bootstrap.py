"""How the ranks of a group find each other: votes and gathers over torch.distributed, descriptors over unix sockets.

Every step either succeeds on all ranks or raises the same RendezvousError on all, and ends within a time limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from llm_comm.errors import RendezvousError

T = TypeVar("T")

_MESSAGE_BYTES = 4096
_MAX_ERROR_BYTES = 1500


class Rendezvous:
    """Collective set-up steps over a torch ProcessGroup (gloo or NCCL); all ranks make the same calls in order.

    Args:
        group: The ranks to set up, not WORLD in general.
        timeout_s: Bound in seconds of each step.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._timeout_s = timeout_s
        on_cpu = "gloo" in str(dist.get_backend_config(group)) or "gloo" in dist.get_backend(group)
        self._device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def gather(self, value: Any) -> list[Any]:
        """The JSON-able ``value`` of every rank, by rank.

        Raises:
            RendezvousError: A rank did not come within the time limit.
        """
        text = json.dumps(value, ensure_ascii=False).encode()
        if len(text) > _MESSAGE_BYTES:
            raise ValueError(f"a rendezvous message has {len(text)} bytes, at most {_MESSAGE_BYTES} fit")
        mine = torch.frombuffer(bytearray(text.ljust(_MESSAGE_BYTES)), dtype=torch.uint8).to(self._device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            work = dist.all_gather(everyone, mine, group=self.group, async_op=True)
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {self.rank}: not all {self.world_size} ranks came to the rendezvous of llm_comm within "
                f"{self._timeout_s:g} s (LLM_COMM_TIMEOUT_S): {error}"
            ) from error
        return [json.loads(bytes(t.cpu().tolist())) for t in everyone]

    def attempt(self, what: str, step: Callable[[], T]) -> T:
        """Runs ``step`` here, and returns its result once it has succeeded on every rank.

        Raises:
            RendezvousError: It failed somewhere; the text says on which ranks and why, and is the same on all.
        """
        result, error = self._try(step)
        self.vote(what, error)
        assert result is not None or error is None
        return result  # type: ignore[return-value]

    def vote(self, what: str, error: str | None) -> None:
        """Raises RendezvousError on all ranks if any rank has an error."""
        errors = self.gather(error and _fit(error))
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
        if failed:
            raise RendezvousError(f"{what} failed on {len(failed)} of {self.world_size} ranks: " + "; ".join(failed))

    @staticmethod
    def _try(step: Callable[[], T]) -> tuple[T | None, str | None]:
        try:
            return step(), None
        except Exception as error:  # whatever it is, the other ranks must hear of it
            return None, f"{type(error).__name__}: {error}"

    def exchange_descriptors(self, descriptor: int) -> dict[int, int]:
        """Sends a file descriptor to every peer; returns theirs by rank, for the caller to close.

        Raises:
            RendezvousError: A peer could not be reached or did not send in time.
        """
        # Abstract sockets leave nothing behind in the file system, whatever becomes of the process.
        name = f"\0llm_comm-{uuid.uuid4().hex}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(name)
            server.listen(self.world_size)
            names = self.gather(name)
            return self.attempt("exchange of file descriptors", lambda: self._exchange(server, names, descriptor))

    def _exchange(self, server: socket.socket, names: list[str], descriptor: int) -> dict[int, int]:
        # Half of the time limit: a rank that failed at once already waits in the vote, for as long as that.
        deadline = time.monotonic() + self._timeout_s / 2
        received: dict[int, int] = {}
        try:
            for peer, name in enumerate(names):
                if peer == self.rank:
                    continue
                # The sockets listen since before their names were gathered, and their queues hold all ranks: neither
                # connect nor send waits for the peer.
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.settimeout(_left(deadline))
                    connection.connect(name)
                    socket.send_fds(connection, [f"{names[peer]} {self.rank}".encode()], [descriptor])
            while len(received) < self.world_size - 1:
                server.settimeout(_left(deadline))
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(_left(deadline))
                    message, descriptors, _, _ = socket.recv_fds(connection, 256, 1)
                sender = _sender(message, names[self.rank])
                if sender is None or len(descriptors) != 1:
                    _close_all(descriptors)  # not one of us
                    continue
                received[sender] = descriptors[0]
        except BaseException:
            _close_all(received.values())
            raise
        return received


def host_identity() -> dict[str, str]:
    """What tells the machine of this process from others; containers of one machine share the boot id."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return {"host": socket.gethostname(), "boot_id": file.read().strip()}
    return {"host": socket.gethostname(), "boot_id": socket.gethostname()}


def _fit(error: str) -> str:
    """What of an error text fits a rendezvous message. JSON writes control characters at length, so they go."""
    printable = "".join(c if c.isprintable() else " " for c in error)
    return printable.encode(errors="replace")[:_MAX_ERROR_BYTES].decode(errors="ignore")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the other ranks did not send their file descriptors in time")
    return left


def _sender(message: bytes, own_name: str) -> int | None:
    name, _, rank = message.decode(errors="replace").rpartition(" ")
    return int(rank) if name == own_name and rank.isdigit() else None


def _close_all(descriptors: Any) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
