"""Values and texts of others in an error: enough of them to find them, however long they are."""

from __future__ import annotations

MOST_OF_A_VALUE = 120
MOST_OF_A_TEXT = 400


def quoted(value: object) -> str:
    """``repr`` of a value, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to write very long ones
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception as error:  # whatever its class says of itself
        return f"{type(value).__name__} ({type(error).__name__})"
    return shortened(text, MOST_OF_A_VALUE)


def shortened(text: str, most: int = MOST_OF_A_TEXT) -> str:
    """A text of at most about ``most`` characters: where it is longer, its begin and how long it was."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
