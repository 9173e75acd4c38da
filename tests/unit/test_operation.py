"""What operations keep of the calls so far."""

from __future__ import annotations

from llm_comm.operations.operation import MAX_PREPARED, keep


def test_what_is_kept_is_bounded() -> None:
    """Prefill brings ever new sizes."""
    cache: dict[int, int] = {}
    for size in range(3 * MAX_PREPARED):
        keep(cache, size, -size)
        assert len(cache) <= MAX_PREPARED
        assert cache[size] == -size
