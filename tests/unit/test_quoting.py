"""What errors show of values that others wrote: whole where they are short, never more than says which one it is."""

from __future__ import annotations

import pytest

from llm_comm.errors import MOST_OF_A_TEXT, MOST_OF_A_VALUE, quoted, shortened


def test_a_text_is_cut_where_it_is_longer_than_most() -> None:
    assert shortened("x" * MOST_OF_A_TEXT) == "x" * MOST_OF_A_TEXT
    assert shortened("x" * (MOST_OF_A_TEXT + 1)) == f"{'x' * MOST_OF_A_TEXT}... ({MOST_OF_A_TEXT + 1} characters)"
    assert shortened("abc", 2) == "ab... (3 characters)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb", "'a\\nb'"),
        ((1 << 128) - 1, str((1 << 128) - 1)),
        (1 << 128, "a number of 129 bits"),
        (-(1 << 128), "a number of 129 bits"),
        ([10**5000], "list (ValueError)"),
    ],
    ids=["word", "128 bits", "129 bits", "negative", "that has no repr"],
)
def test_values(value: object, text: str) -> None:
    assert quoted(value) == text


def test_a_long_value_is_cut() -> None:
    assert quoted("x" * 200) == f"'{'x' * (MOST_OF_A_VALUE - 1)}... (202 characters)"
