"""Rendezvous of the ranks of a group: votes and gathers over torch.distributed, file descriptors over unix sockets.

Every step succeeds on all ranks or raises the same error on all, within a time limit. An action of one rank that can
fail must run inside ``attempt`` or ``collect``. Otherwise the peers wait in vain and raise ``MissingRankError``.

``MissingRankError`` is the one error that may be raised on some ranks only. The process group cannot be used after it,
since gloo closes all connections. After any other error the group stays usable.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from llm_comm.errors import ConfigError, LlmCommError, MissingRankError, RendezvousError, UnsupportedInputError, quoted
from llm_comm.runtime.descriptors import Exchange, Invitation, close_all, invite, listen
from llm_comm.runtime.rank_names import RankNames

#: Length in bytes of every message: the gather needs equal lengths.
MESSAGE_BYTES = 4096
_MAX_ERROR_BYTES = 1500


class Failure(NamedTuple):
    """Error of a rank: class name and text."""

    kind: str
    text: str


class Message(NamedTuple):
    """Message of a rank at a step: a JSON-able value, or the failure of the rank."""

    step: str
    value: Any
    failure: Failure | None = None


def encode(message: Message) -> bytes:
    """Encode a message as ``MESSAGE_BYTES`` bytes of padded JSON.

    Raises:
        ValueError: The message is too long, or JSON cannot represent it.
    """
    failure = message.failure and [message.failure.kind, _fit(message.failure.text)]
    text = json.dumps([message.step, message.value, failure], ensure_ascii=False)
    # File names may hold surrogates of undecodable bytes, which UTF-8 cannot encode.
    data = text.encode(errors="backslashreplace")
    if len(data) > MESSAGE_BYTES:
        raise ValueError(f"a rendezvous message has {len(data)} bytes, at most {MESSAGE_BYTES} fit")
    return data.ljust(MESSAGE_BYTES)


def decode(data: bytes) -> Message:
    """Decode a message that has arrived.

    Raises:
        RendezvousError: ``data`` is no message; the text shows its first bytes.
    """
    try:
        step, value, failure = json.loads(data)
        if not isinstance(step, str):
            raise ValueError("no step")
        if failure is not None:
            kind, text = failure
            if not (isinstance(kind, str) and isinstance(text, str)):
                raise ValueError("no failure")
            failure = Failure(kind, text)
    except (ValueError, TypeError, RecursionError) as error:
        raise RendezvousError(
            f"this is no message of this version of llm_comm: {quoted(bytes(data[:64]))} ({type(error).__name__})"
        ) from None
    return Message(step, value, failure)


def _fit(error: str) -> str:
    """Cut an error text to the size of a message. Control characters become spaces, since JSON escapes lengthen
    them."""
    printable = "".join(c if c.isprintable() else " " for c in error[:_MAX_ERROR_BYTES])
    return printable.encode(errors="replace")[:_MAX_ERROR_BYTES].decode(errors="ignore")


T = TypeVar("T")

#: Error classes that are raised on all ranks as they are; all others become RendezvousError.
_RAISED_AS_THEY_ARE: dict[str, type[LlmCommError]] = {
    kind.__name__: kind for kind in (ConfigError, UnsupportedInputError)
}


#: Shortest wait in seconds. torch counts whole milliseconds and takes 0 as no limit.
_SHORTEST_WAIT_S = 0.001


class Rendezvous:
    """Collective set-up steps over a torch ProcessGroup (gloo or NCCL). All ranks make the same calls in the same
    order.

    Args:
        group: Ranks to set up, in general a part of WORLD.
        timeout_s: Time limit of each step in seconds. In a group with NCCL only, the first step may also connect NCCL,
            for which torch has its own limit.
        device: CUDA device of this rank, used in groups with NCCL only. None uses the current one.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, device: torch.device | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        #: Names of the ranks for errors. They hold processes and hosts after the ranks have compared their nodes.
        self.names = RankNames.of(group)
        self.timeout_s = timeout_s
        #: Whether the ranks are on several hosts of an NVLink domain. Known when the ranks have compared their nodes.
        self.spans_hosts = False
        on_cpu = "gloo" in str(dist.get_backend_config(group)) or "gloo" in dist.get_backend(group)
        if on_cpu:
            self.device = torch.device("cpu")
        elif device is not None and device.type == "cuda":
            self.device = device
        else:
            self.device = torch.device("cuda", torch.cuda.current_device())

    @property
    def is_on_device(self) -> bool:
        """True if messages travel on a CUDA stream, which could be under capture."""
        return self.device.type == "cuda"

    def gather(self, what: str, value: Any) -> list[Any]:
        """Return the JSON-able ``value`` of every rank, by rank. ``what`` names the step.

        Raises:
            MissingRankError: A rank did not arrive within the time limit, or is at another step.
            RendezvousError: A rank's value does not fit a message, or a rank sent something else.
        """
        return self._synchronize(what, value, None)

    def collect(self, what: str, step: Callable[[], Any], *, own_error: bool = False) -> list[Any]:
        """Run ``step`` on every rank and return the results of all ranks, by rank. The results must be JSON-able.

        Args:
            what: Name of the step.
            step: Action that can fail.
            own_error: Raise the original exception of this rank if every rank has failed with the same text.

        Raises:
            RendezvousError: See ``attempt``.
        """
        value, failure, error = self._try(step)
        try:
            return self._synchronize(what, value, failure, error if own_error else None)
        finally:
            # A traceback references the frames of its callers. Kept in a local variable, the error would form a cycle
            # that keeps a dropped communicator alive.
            del error

    def attempt(self, what: str, step: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Run ``step`` here, and return its result after it has succeeded on every rank.

        Args:
            what: Name of the step.
            step: Action that can fail.
            undo: Receives the result of a step that succeeded here but failed on another rank.

        Raises:
            RendezvousError: The step failed on a rank. The text is equal on all ranks and lists the ranks and their
                errors.
            ConfigError, UnsupportedInputError: The step failed, and on each failed rank by this class of error.
        """
        result, failure = self._try(step)[:2]
        try:
            self._synchronize(what, None, failure)
        except BaseException:
            if undo is not None and failure is None:
                undo(result)  # type: ignore[arg-type]
            raise
        return result  # type: ignore[return-value]

    def vote(self, what: str, error: str | None) -> None:
        """Raise RendezvousError on all ranks if any rank passes an error."""
        self._synchronize(what, None, None if error is None else Failure("", error))

    def _synchronize(
        self, what: str, value: Any, failure: Failure | None, own_error: Exception | None = None
    ) -> list[Any]:
        """Gather the messages of all ranks and return their values, or raise the common error if a rank failed.

        ``own_error``: exception to raise if all ranks have failed alike.
        """
        try:
            data = encode(Message(what, value, failure))
        except (ValueError, TypeError, RecursionError) as error:
            data = encode(Message(what, None, _failure_of(error)))
        said = [self._decode(rank, found) for rank, found in enumerate(self._gather(data))]
        if any(message.step != what for message in said):
            steps = ", ".join(f"{self.names.full(rank)}: {quoted(message.step)}" for rank, message in enumerate(said))
            raise MissingRankError(
                f"the ranks of {self.names.of_group} are at different steps of the rendezvous of llm_comm: {steps}"
            )
        failures = {rank: message.failure for rank, message in enumerate(said) if message.failure is not None}
        if failures:
            if own_error is not None and len(failures) == self.world_size and len(set(failures.values())) == 1:
                try:
                    raise own_error
                finally:
                    del own_error  # avoid a reference cycle, see ``collect``
            raise _error_of_all(what, failures, self.names)
        return [message.value for message in said]

    def _gather(self, data: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            work = dist.all_gather(everyone, mine, group=self.group, async_op=True)
            work.wait(timedelta(seconds=max(self.timeout_s, _SHORTEST_WAIT_S)))
        except RuntimeError as error:
            members = self.names.each(range(self.names.size))
            raise MissingRankError(
                f"{self.names.in_group(self.rank)}: not all {self.names.size} ranks came to the rendezvous of llm_comm "
                f"within {self.timeout_s:g} s (LLM_COMM_TIMEOUT_S). The group has {members}. {error}"
            ) from error
        return [bytes(found.cpu().tolist()) for found in everyone]

    def _decode(self, rank: int, data: bytes) -> Message:
        try:
            return decode(data)
        except RendezvousError as error:  # raised on all ranks alike
            raise RendezvousError(f"of {self.names.in_group(rank)}: {error}") from None

    @staticmethod
    def _try(step: Callable[[], T]) -> tuple[T | None, Failure | None, Exception | None]:
        try:
            return step(), None, None
        except Exception as error:  # any error: the peers must be notified
            return None, _failure_of(error), error

    def exchange_descriptors(self, descriptor: int) -> dict[int, int]:
        """Send a file descriptor to every peer. Return the peers' descriptors by rank; the caller must close them.

        Raises:
            RendezvousError: A peer could not be reached or did not send in time.
        """
        with self.attempt("socket for file descriptors", self._listen, undo=socket.socket.close) as server:
            said = self.collect("names of sockets", lambda: invite(server))
            return self.attempt(
                "exchange of file descriptors",
                lambda: self._exchange(server, said, descriptor),
                undo=lambda received: close_all(received.values()),
            )

    def share_descriptors(
        self, made: str, make: Callable[[], int], used: str, use: Callable[[dict[int, int]], object]
    ) -> None:
        """Create a file descriptor on every rank and use those of the peers. All descriptors are closed at the end.

        Args:
            made: Name of the step that creates the descriptor.
            make: Creates the descriptor of this rank.
            used: Name of the step that uses the peers' descriptors.
            use: Takes the peers' descriptors by rank.

        Raises:
            RendezvousError: See ``attempt`` and ``exchange_descriptors``.
        """
        own = self.attempt(made, make, undo=os.close)
        try:
            peers = self.exchange_descriptors(own)
        finally:
            os.close(own)
        try:
            self.attempt(used, lambda: use(peers))
        finally:
            close_all(peers.values())

    def _listen(self) -> socket.socket:
        return listen()

    def _exchange(self, server: socket.socket, said: list[Any], descriptor: int) -> dict[int, int]:
        invitations = [Invitation(name, secret) for name, secret in said]
        # Half of the time limit: a rank that failed early waits in the next vote for timeout_s only.
        return Exchange(self.rank, server, invitations, descriptor, self.timeout_s / 2, self.names).run()


def host_identity() -> dict[str, str]:
    """Return host name and boot id of this machine. Containers of one machine share the boot id but not the name."""
    not_there = contextlib.suppress(FileNotFoundError, PermissionError)
    with not_there, open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return {"host": socket.gethostname(), "boot_id": file.read().strip()}
    return {"host": socket.gethostname(), "boot_id": socket.gethostname()}


def _failure_of(error: Exception) -> Failure:
    try:
        text = str(error)
    except Exception:  # an exception whose __str__ raises is still an error
        text = "it has no text"
    return Failure(type(error).__name__, text)


def _error_of_all(what: str, failures: dict[int, Failure], names: RankNames) -> LlmCommError:
    """Build the error that all ranks raise after ``failures``."""
    kinds = {failure.kind for failure in failures.values()}
    kind = _RAISED_AS_THEY_ARE.get(kinds.pop()) if len(kinds) == 1 else None
    texts = {rank: text if kind or not name else f"{name}: {text}" for rank, (name, text) in failures.items()}
    if kind and len(failures) == names.size and len(set(texts.values())) == 1:
        return kind(texts[0])  # without a list of ranks, as a single process would report it
    listed = "; ".join(f"{names.full(rank)}: {text}" for rank, text in texts.items())
    where = f"{len(failures)} of {names.size} ranks of {names.of_group}"
    return (kind or RendezvousError)(f"{what} failed on {where}: {listed}")
