"""Messages of the rendezvous: all that a rank may have to say fits one, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from llm_comm.errors import RendezvousError
from llm_comm.runtime.rendezvous import MESSAGE_BYTES, Failure, Message, decode, encode


def test_a_message_may_fill_its_place() -> None:
    """And no byte more."""
    room = MESSAGE_BYTES - len('["step", "", null]')
    largest = Message("step", "x" * room)
    assert len(encode(largest)) == MESSAGE_BYTES
    assert decode(encode(largest)) == largest
    with pytest.raises(ValueError, match=f"has {MESSAGE_BYTES + 1} bytes, at most {MESSAGE_BYTES} fit"):
        encode(Message("step", "x" * (room + 1)))


@pytest.mark.parametrize("character", ["x", "\0", "\n", "é", "漢", "\U0001f600", "\udcff"])
def test_an_error_fits_whatever_characters_it_has(character: str) -> None:
    """JSON writes some of them at length, and UTF-8 others."""
    found = decode(encode(Message("step", None, Failure("OSError", f"why: {character * 10_000}"))))
    assert found.failure is not None
    assert found.failure.kind == "OSError"
    assert found.failure.text.startswith("why: ")
    assert len(found.failure.text) > 300


def test_names_that_are_no_characters_travel() -> None:
    """As Python has names of files that are not UTF-8."""
    assert decode(encode(Message("step", {"table": "\udcff.yaml"}))).value == {"table": "\udcff.yaml"}


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"[]", b'["step", 1]', b'["step", 1, null, 1]', b"[1, 1, null]", b"[null, 1, null]"]
    + [
        b'["step", 1, %b]' % failure
        for failure in (b'"ab"[:', b'"abc"', b"[1, 2]", b'["a", 2]', b'[1, "a"]', b"[[], {}]")
    ],
)
def test_what_is_no_message(data: bytes) -> None:
    with pytest.raises(RendezvousError, match="no message of this version of llm_comm"):
        decode(data.ljust(MESSAGE_BYTES))
