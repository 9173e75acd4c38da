"""How the ranks of a group find each other: votes and gathers over torch.distributed, descriptors over unix sockets.

Every step either succeeds on all ranks or raises the same RendezvousError on all, and ends within a time limit. What a
rank does alone and can fail at belongs into an ``attempt``, or the others would wait for it in vain: then they raise
``MissingRankError``, which nobody may take for an answer that all ranks have got.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from llm_comm.errors import MissingRankError, RendezvousError

T = TypeVar("T")

_MESSAGE_BYTES = 4096
_MAX_ERROR_BYTES = 1500


class Rendezvous:
    """Collective set-up steps over a torch ProcessGroup (gloo or NCCL); all ranks make the same calls in order.

    Args:
        group: The ranks to set up, not WORLD in general.
        timeout_s: Bound in seconds of each step. Of a group of NCCL alone that has run nothing yet, the first step also
            connects NCCL, for which torch has a limit of its own.
        device: CUDA device of this rank, for groups of NCCL alone; None takes the current one.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, device: torch.device | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._timeout_s = timeout_s
        on_cpu = "gloo" in str(dist.get_backend_config(group)) or "gloo" in dist.get_backend(group)
        if on_cpu:
            self._device = torch.device("cpu")
        elif device is not None and device.type == "cuda":
            self._device = device
        else:
            self._device = torch.device("cuda", torch.cuda.current_device())

    def gather(self, what: str, value: Any) -> list[Any]:
        """The JSON-able ``value`` of every rank, by rank. ``what`` names the step.

        Raises:
            MissingRankError: A rank did not come within the time limit, or is at another step.
        """
        text = json.dumps([what, value], ensure_ascii=False).encode()
        if len(text) > _MESSAGE_BYTES:
            raise ValueError(f"a rendezvous message has {len(text)} bytes, at most {_MESSAGE_BYTES} fit")
        mine = torch.frombuffer(bytearray(text.ljust(_MESSAGE_BYTES)), dtype=torch.uint8).to(self._device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            work = dist.all_gather(everyone, mine, group=self.group, async_op=True)
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise MissingRankError(
                f"rank {self.rank}: not all {self.world_size} ranks came to the rendezvous of llm_comm within "
                f"{self._timeout_s:g} s (LLM_COMM_TIMEOUT_S): {error}"
            ) from error
        said = [json.loads(bytes(t.cpu().tolist())) for t in everyone]
        if any(step != what for step, _ in said):
            steps = ", ".join(f"rank {rank}: {step}" for rank, (step, _) in enumerate(said))
            raise MissingRankError(f"the ranks are at different steps of the rendezvous of llm_comm: {steps}")
        return [word for _, word in said]

    def attempt(self, what: str, step: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Runs ``step`` here, and returns its result once it has succeeded on every rank.

        Args:
            what: Names the step.
            step: What can fail.
            undo: Takes the result of a step that has succeeded here but not everywhere.

        Raises:
            RendezvousError: It failed somewhere; the text says on which ranks and why, and is the same on all.
        """
        result, error = self._try(step)
        try:
            self.vote(what, error)
        except BaseException:
            if undo is not None and error is None:
                undo(result)  # type: ignore[arg-type]
            raise
        return result  # type: ignore[return-value]

    def vote(self, what: str, error: str | None) -> None:
        """Raises RendezvousError on all ranks if any rank has an error."""
        errors = self.gather(what, error and _fit(error))
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
        with self.attempt("socket for file descriptors", self._listen, undo=socket.socket.close) as server:
            # The names of sockets are public on a machine, so a peer shows that it belongs to the group by a word.
            invitations = self.gather("names of sockets", [server.getsockname()[1:].decode(), secrets.token_hex(16)])
            return self.attempt(
                "exchange of file descriptors",
                lambda: self._exchange(server, invitations, descriptor),
                undo=lambda received: _close_all(received.values()),
            )

    def _listen(self) -> socket.socket:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Abstract sockets leave nothing behind in the file system, whatever becomes of the process.
            server.bind(f"\0llm_comm-{secrets.token_hex(16)}")
            server.listen(self.world_size)
        except BaseException:
            server.close()
            raise
        return server

    def _exchange(self, server: socket.socket, invitations: list[list[str]], descriptor: int) -> dict[int, int]:
        # Half of the time limit: a rank that failed at once already waits in the vote, for as long as that.
        deadline = time.monotonic() + self._timeout_s / 2
        for peer, (name, secret) in enumerate(invitations):
            if peer == self.rank:
                continue
            # The sockets listen since before their names were gathered, and their queues hold all ranks: neither
            # connect nor send waits for the peer.
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_left(deadline))
                connection.connect("\0" + name)
                socket.send_fds(connection, [f"{secret} {self.rank}".encode()], [descriptor])
        received: dict[int, int] = {}
        try:
            # Whoever connects is listened to at the same time: a stranger who says nothing holds nobody up.
            with selectors.DefaultSelector() as selector, contextlib.ExitStack() as connections:
                selector.register(server, selectors.EVENT_READ)
                while len(received) < self.world_size - 1:
                    for key, _ in selector.select(_left(deadline)):
                        if key.fileobj is server:
                            connection = connections.enter_context(server.accept()[0])
                            selector.register(connection, selectors.EVENT_READ, connection)
                        else:
                            selector.unregister(key.fileobj)
                            self._receive(key.data, invitations[self.rank][1], received)
        except BaseException:
            _close_all(received.values())
            raise
        return received

    def _receive(self, connection: socket.socket, own_secret: str, received: dict[int, int]) -> None:
        """Takes what a peer has sent; whatever is not from a peer that is still to come is dropped."""
        message, descriptors, flags, _ = socket.recv_fds(connection, 256, 1, socket.MSG_CMSG_CLOEXEC)
        sender = _sender(message, own_secret)
        is_awaited = sender is not None and sender in range(self.world_size) and sender not in (self.rank, *received)
        if is_awaited and flags & socket.MSG_CTRUNC:
            _close_all(descriptors)
            raise OSError(errno.EMFILE, f"no room for the file descriptor of rank {sender}: raise RLIMIT_NOFILE")
        if sender is None or not is_awaited or len(descriptors) != 1:
            _close_all(descriptors)
            return
        received[sender] = descriptors[0]


def host_identity() -> dict[str, str]:
    """What tells the machine of this process from others; containers of one machine share the boot id."""
    not_there = contextlib.suppress(FileNotFoundError, PermissionError)
    with not_there, open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
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


def _sender(message: bytes, own_secret: str) -> int | None:
    secret, _, rank = message.decode(errors="replace").rpartition(" ")
    is_ours = hmac.compare_digest(secret.encode(), own_secret.encode())
    return int(rank) if is_ours and rank.isdecimal() else None


def _close_all(descriptors: Any) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
