"""What ranks say to each other while they set up a communicator, as bytes: nothing else is taken for it."""

from __future__ import annotations

import hmac
import json
import re
from typing import Any, NamedTuple

from llm_comm.errors import RendezvousError
from llm_comm.quoting import quoted

#: All messages of a step have the same length.
MESSAGE_BYTES = 4096
#: More than the greeting on a socket has.
MAX_HELLO_BYTES = 256
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


def hello(secret: str, rank: int) -> bytes:
    """What a rank says first on the socket of a peer; ``secret`` is what that one has told the group."""
    return f"{secret} {rank}".encode()


def sender_of(data: bytes, own_secret: str) -> int | None:
    """The rank that said ``hello`` with this rank's secret; None if nobody did."""
    secret, _, rank = data[:MAX_HELLO_BYTES].partition(b" ")
    is_ours = hmac.compare_digest(secret, own_secret.encode())
    # Digits in one spelling only: 1 and not 01, which int takes too.
    return int(rank) if is_ours and re.fullmatch(rb"0|[1-9][0-9]{0,2}", rank) else None


def _fit(error: str) -> str:
    """What of an error text fits a message. JSON writes control characters at length, so they go."""
    printable = "".join(c if c.isprintable() else " " for c in error[:_MAX_ERROR_BYTES])
    return printable.encode(errors="replace")[:_MAX_ERROR_BYTES].decode(errors="ignore")
