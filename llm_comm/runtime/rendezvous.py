"""How the ranks of a group find each other: votes and gathers over torch.distributed, descriptors over unix sockets.

Every step either succeeds on all ranks or raises the same error on all, and ends within a time limit. What a rank does
alone and can fail at belongs into an ``attempt`` or a ``collect``, or the others would wait for it in vain: then they
raise ``MissingRankError``, which nobody may take for an answer that all ranks have got. The process group is lost then:
gloo ends all its connections. After any other error it can be used.
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

#: All messages of a step have the same length.
MESSAGE_BYTES = 4096
_MAX_ERROR_BYTES = 1500


class Failure(NamedTuple):
    """Why a rank cannot go on: the class of the error by name, and its text."""

    kind: str
    text: str


class Message(NamedTuple):
    """What a rank says at a step: a value, or that it cannot go on."""

    step: str
    value: Any
    failure: Failure | None = None


def encode(message: Message) -> bytes:
    """A message as it travels.

    Raises:
        ValueError: It is too long, or has what JSON does not have.
    """
    failure = message.failure and [message.failure.kind, _fit(message.failure.text)]
    text = json.dumps([message.step, message.value, failure], ensure_ascii=False)
    # Names of files may have characters that are none, which JSON writes as escapes of its own.
    data = text.encode(errors="backslashreplace")
    if len(data) > MESSAGE_BYTES:
        raise ValueError(f"a rendezvous message has {len(data)} bytes, at most {MESSAGE_BYTES} fit")
    return data.ljust(MESSAGE_BYTES)


def decode(data: bytes) -> Message:
    """A message that has arrived.

    Raises:
        RendezvousError: It is none; the text shows its begin.
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
    """What of an error text fits a message. JSON writes control characters at length, so they go."""
    printable = "".join(c if c.isprintable() else " " for c in error[:_MAX_ERROR_BYTES])
    return printable.encode(errors="replace")[:_MAX_ERROR_BYTES].decode(errors="ignore")


T = TypeVar("T")

#: Errors of one rank that are raised as what they are on all of them; others become RendezvousError.
_RAISED_AS_THEY_ARE: dict[str, type[LlmCommError]] = {
    kind.__name__: kind for kind in (ConfigError, UnsupportedInputError)
}


#: torch counts in whole milliseconds, and takes 0 of them for no limit.
_SHORTEST_WAIT_S = 0.001


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
        #: Names of the ranks for errors; with processes and hosts once the ranks have compared their nodes.
        self.names = RankNames.of(group)
        self.timeout_s = timeout_s
        on_cpu = "gloo" in str(dist.get_backend_config(group)) or "gloo" in dist.get_backend(group)
        if on_cpu:
            self.device = torch.device("cpu")
        elif device is not None and device.type == "cuda":
            self.device = device
        else:
            self.device = torch.device("cuda", torch.cuda.current_device())

    @property
    def is_on_device(self) -> bool:
        """Whether its messages go by a CUDA stream, which may be captured."""
        return self.device.type == "cuda"

    def gather(self, what: str, value: Any) -> list[Any]:
        """The JSON-able ``value`` of every rank, by rank. ``what`` names the step.

        Raises:
            MissingRankError: A rank did not come within the time limit, or is at another step.
            RendezvousError: A rank has a value that does not fit a message, or sent something else.
        """
        return self._meet(what, value, None)

    def collect(self, what: str, step: Callable[[], Any], *, own_error: bool = False) -> list[Any]:
        """What ``step`` returns on every rank, by rank: JSON-able, and for a step that can fail.

        Args:
            what: Names the step.
            step: What can fail.
            own_error: Raise what ``step`` has raised here, where every rank has failed by the same text.

        Raises:
            RendezvousError: As of ``attempt``.
        """
        value, failure, error = self._try(step)
        try:
            return self._meet(what, value, failure, error if own_error else None)
        finally:
            # The traceback of an error holds the frames of the callers. An error in one of them would be a cycle, which
            # keeps a communicator alive that nobody holds.
            del error

    def attempt(self, what: str, step: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Runs ``step`` here, and returns its result once it has succeeded on every rank.

        Args:
            what: Names the step.
            step: What can fail.
            undo: Takes the result of a step that has succeeded here but not everywhere.

        Raises:
            RendezvousError: It failed somewhere; the text says on which ranks and why, and is the same on all.
            ConfigError, UnsupportedInputError: The same, where each rank at which it failed has failed by this.
        """
        result, failure = self._try(step)[:2]
        try:
            self._meet(what, None, failure)
        except BaseException:
            if undo is not None and failure is None:
                undo(result)  # type: ignore[arg-type]
            raise
        return result  # type: ignore[return-value]

    def vote(self, what: str, error: str | None) -> None:
        """Raises RendezvousError on all ranks if any rank has an error."""
        self._meet(what, None, None if error is None else Failure("", error))

    def _meet(self, what: str, value: Any, failure: Failure | None, own_error: Exception | None = None) -> list[Any]:
        """The values of all ranks, if no rank has failed. ``own_error`` is raised where all have failed alike."""
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
                    del own_error  # as in ``collect``
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
        except RendezvousError as error:  # the same on all ranks
            raise RendezvousError(f"of {self.names.in_group(rank)}: {error}") from None

    @staticmethod
    def _try(step: Callable[[], T]) -> tuple[T | None, Failure | None, Exception | None]:
        try:
            return step(), None, None
        except Exception as error:  # whatever it is, the other ranks must hear of it
            return None, _failure_of(error), error

    def exchange_descriptors(self, descriptor: int) -> dict[int, int]:
        """Sends a file descriptor to every peer; returns theirs by rank, for the caller to close.

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
        """Has every rank make a file descriptor, and use those of its peers. All of them are closed at the end.

        Args:
            made, make: Names the step that makes the descriptor of this rank, and makes it.
            used, use: The same of the step that takes the descriptors of the peers, by rank.

        Raises:
            RendezvousError: As of ``attempt`` and ``exchange_descriptors``.
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
        # Half of the time limit: a rank that failed at once already waits in the vote, for as long as that.
        return Exchange(self.rank, server, invitations, descriptor, self.timeout_s / 2, self.names).run()


def host_identity() -> dict[str, str]:
    """What tells the machine of this process from others; containers of one machine share the boot id."""
    not_there = contextlib.suppress(FileNotFoundError, PermissionError)
    with not_there, open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return {"host": socket.gethostname(), "boot_id": file.read().strip()}
    return {"host": socket.gethostname(), "boot_id": socket.gethostname()}


def _failure_of(error: Exception) -> Failure:
    try:
        text = str(error)
    except Exception:  # it is no less an error
        text = "it has no text"
    return Failure(type(error).__name__, text)


def _error_of_all(what: str, failures: dict[int, Failure], names: RankNames) -> LlmCommError:
    """What all ranks raise when some have failed."""
    kinds = {failure.kind for failure in failures.values()}
    kind = _RAISED_AS_THEY_ARE.get(kinds.pop()) if len(kinds) == 1 else None
    texts = {rank: text if kind or not name else f"{name}: {text}" for rank, (name, text) in failures.items()}
    if kind and len(failures) == names.size and len(set(texts.values())) == 1:
        return kind(texts[0])  # what a process alone would say
    listed = "; ".join(f"{names.full(rank)}: {text}" for rank, text in texts.items())
    where = f"{len(failures)} of {names.size} ranks of {names.of_group}"
    return (kind or RendezvousError)(f"{what} failed on {where}: {listed}")
