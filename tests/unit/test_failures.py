"""Failures in words, and whose error it was: of all that a rank can see of the others."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from harness import unnamed

from llm_comm import _core
from llm_comm.errors import PeerTimeout, UnsupportedInputError
from llm_comm.runtime.failures import call_in_words, describe_ranks, explain, root_cause
from llm_comm.runtime.rank_names import RankName, RankNames
from llm_comm.runtime.status import LIFE_S, PeerStatus, RankError, RankState

#: Ranks 4, 5 and 6 of all are a group.
NAMES = RankNames("tp:1", tuple(RankName(i, 4 + i, f"pid {70 + i} on a") for i in range(3)), 3)


def error_of(kind: str, rank: int, peer: int) -> RankError:
    return RankError(kind, f"rank {rank}: {kind}", f"{kind} in brief", rank, peer)


def state_of(error: RankError | None = None, **facts: Any) -> RankState:
    return RankState(**{"last_call": "one-shot all-reduce of 8 bf16 (call 3)", "error": error, **facts})


def seen(error: RankError | None) -> PeerStatus:
    return PeerStatus(state_of(error), 0.1)


TIMEOUT, LAUNCH, MISMATCH = "PeerTimeout", "LaunchError", "MismatchError"
KINDS = (None, TIMEOUT, LAUNCH, MISMATCH)


def test_errors_are_those_of_python_too() -> None:
    with pytest.raises(TimeoutError, match="rank 1 is gone"):
        raise PeerTimeout("rank 1 is gone", rank=0, peer=1)
    with pytest.raises(ValueError, match="too wide"):
        raise UnsupportedInputError("too wide")


@pytest.mark.parametrize(("own", "other", "third"), list(itertools.product(KINDS, repeat=3)))
def test_whose_error_is_told(own: str | None, other: str | None, third: str | None) -> None:
    """An error that is no time-out is the cause of those that are: this rank's own before all, then another's. Of
    time-outs, this rank's own."""
    kinds = (own, other, third)
    errors = [None if kind is None else error_of(kind, rank, 3) for rank, kind in enumerate(kinds)]
    told = root_cause("group tp:1, rank 0", errors[0], [seen(error) for error in errors])
    causes = [error for error in errors if error is not None and error.kind != TIMEOUT]
    expected = next(iter(causes), next((error for error in errors if error is not None), None))
    if expected is None:
        assert told is None
        return
    assert told is not None
    assert (told.kind, told.rank, told.peer) == (expected.kind, expected.rank, expected.peer)
    learnt = "" if expected is errors[0] else "group tp:1, rank 0 was notified: "
    assert told.text == f"{learnt}{expected.text}"


def test_a_rank_without_a_page_hides_nobody() -> None:
    error = error_of(LAUNCH, 2, 2)
    told = root_cause("group tp:1, rank 0", error_of(TIMEOUT, 0, 2), [seen(None), PeerStatus(None, 0.0), seen(error)])
    assert told is not None
    assert told.kind == LAUNCH


LAST = "last call: one-shot all-reduce of 8 bf16 (call 3)"
LAST_SEEN = "last call seen: one-shot all-reduce of 8 bf16 (call 3)"


@pytest.mark.parametrize("has_exited", [None, False])
@pytest.mark.parametrize(
    ("age_s", "facts", "words"),
    [
        (0.0, {}, f"alive; {LAST}"),
        (LIFE_S, {}, f"alive; {LAST}"),
        (LIFE_S + 0.1, {}, f"no sign of life for 1.1 s; {LAST_SEEN}"),
        (25.6, {}, f"no sign of life for 25.6 s; {LAST_SEEN}"),
        (25.6, {"last_call": ""}, "no sign of life for 25.6 s; no call seen"),
        (0.0, {"last_call": ""}, "alive; has made no call"),
        (25.6, {"is_closed": True}, f"has closed its communicator; {LAST}"),
        (0.0, {"operations_ended": 0}, f"alive; {LAST}; 0 operations ended on its device"),
        (0.0, {"error": error_of(TIMEOUT, 0, 1)}, f"alive; PeerTimeout in brief; {LAST}"),
    ],
)
def test_what_is_said_of_a_rank(age_s: float, facts: dict[str, Any], words: str, has_exited: bool | None) -> None:
    """The same where it cannot be told whether its process lives: without pidfds, silence is all there is to see."""
    said = describe_ranks([PeerStatus(None, 0.0), PeerStatus(state_of(**facts), age_s, has_exited)], NAMES).splitlines()
    assert said == [
        "",
        "State of the ranks of group tp:1:",
        "  rank 0 (global rank 4, pid 70 on a): nothing is known of it",
        f"  rank 1 (global rank 5, pid 71 on a): {words}",
    ]


@pytest.mark.parametrize("age_s", [0.0, 25.6])
def test_what_is_said_of_a_rank_that_has_exited(age_s: float) -> None:
    words = f"its process has exited, no sign of life for {age_s:.1f} s; {LAST_SEEN}"
    assert unnamed(describe_ranks([PeerStatus(state_of(), age_s, True)], NAMES)).endswith(f"  rank 0: {words}")
    closed = f"has closed its communicator; {LAST}"
    said = describe_ranks([PeerStatus(state_of(is_closed=True), age_s, True)], NAMES)
    assert unnamed(said).endswith(f"  rank 0: {closed}")


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert describe_ranks([], NAMES) == ""


def operation_error(cause: str, **fields: Any) -> Any:
    usual = {"rank": 1, "peer": 2, "operation": "one-shot all-reduce", "phase": 0, "sequence": 812, "bytes": 80}
    return SimpleNamespace(**{"cause": cause, "calls": [], **usual, **fields})


def call(count: int, number: int, row: int = 0) -> Any:
    return SimpleNamespace(
        operation="two-shot all-reduce", data_type="fp16", row=row, count=count, number=number, details=[]
    )


@pytest.mark.parametrize(
    ("error", "kind", "brief", "words"),
    [
        (
            operation_error("timeout"),
            TIMEOUT,
            "waited for rank 2 in a one-shot all-reduce of 80 bytes (operation 813 of ",
            "nothing came from rank 2 for 24 s in a one-shot all-reduce of 80 bytes (operation 813 of this "
            "communicator, replays counted; phase 0). Rank 2 has died, hangs, or ",
        ),
        (operation_error("timeout", phase=1), TIMEOUT, "waited for rank 2", "replays counted; phase 1). Rank 2 "),
        (operation_error("timeout", phase=-1), TIMEOUT, "waited for rank 2", "counted; comparison of calls). Rank 2 "),
        (
            operation_error("peer exited"),
            TIMEOUT,
            "waited for rank 2 in a one-shot",
            "the process of rank 2 has exited, and a one-shot all-reduce of 80 bytes (operation 813 of this "
            "communicator, replays counted; phase 0) waits for it. This communicator can no longer be used.",
        ),
        (
            operation_error("concurrent use", phase=-1),
            "ConcurrentUseError",
            "two operations at once: one-shot all-reduce of 80 bytes (operation 813 of ",
            "a one-shot all-reduce of 80 bytes (operation 813 of this communicator, replays counted; comparison of "
            "calls) began on this GPU while another operation of the communicator was under way.",
        ),
        (
            operation_error("overlap"),
            "ConcurrentUseError",
            "operations ran at once",
            "operations of this communicator ran at once on this GPU and had one number, among its first 812 (replays "
            "counted): sums may have been wrong. A CUDA graph ",
        ),
        (
            operation_error("order"),
            MISMATCH,
            "operations in another order than on rank 2",
            "the first 812 operations of this communicator (replays counted) had another order than on rank 2, or ",
        ),
        (
            operation_error("mismatch", calls=[call(8, 3), call(9, 3), call(8, 3)]),
            MISMATCH,
            "disagrees with rank 2",
            "the ranks disagree about operation 813 of this communicator, replays counted: ranks 0, 2: two-shot "
            "all-reduce of 8 fp16 (call 3); rank 1: two-shot all-reduce of 9 fp16 (call 3). ",
        ),
    ],
    ids=["timeout", "phase 1", "comparison", "exit", "concurrent", "overlap", "order", "mismatch"],
)
def test_a_rank_s_own_error(error: Any, kind: str, brief: str, words: str) -> None:
    told = explain(error, 24.0, NAMES)
    assert (told.kind, told.rank, told.peer) == (kind, 1, 2)
    assert told.brief.startswith(brief)
    assert told.text.startswith("group tp:1, rank 1 (global rank 5, pid 71 on a): ")
    assert ("rank 2 (global rank 6, pid 72 on a)" in told.text) == (
        error.cause not in ("concurrent use", "overlap", "mismatch")
    )
    assert words in unnamed(told.text)
    assert told.text.endswith("This communicator can no longer be used.")


def test_rows_of_a_call_are_told() -> None:
    assert call_in_words(call(512, 1)) == "two-shot all-reduce of 512 fp16 (call 1)"
    assert call_in_words(call(512, 1, row=64)) == "two-shot all-reduce of 512 fp16 in rows of 64 (call 1)"


def call_on_parts(data_type: str, *sizes: int, rows: int = 1) -> Any:
    of_all = [*sizes, *[0] * (_core.max_world_size - len(sizes))]
    details = [("rows", f"rows {rows}"), *((f"size_{rank}", f"size_{rank} {size}") for rank, size in enumerate(of_all))]
    return SimpleNamespace(
        operation="one-shot all-gather", data_type=data_type, row=0, count=max(sizes), number=1, details=details
    )


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (
            [call_on_parts("byte", 4, 5), call_on_parts("byte", 4, 3)],
            "rank 0: one-shot all-gather of 5 bytes, shards of a row: 4, 5 bytes (call 1); "
            "rank 1: one-shot all-gather of 4 bytes, shards of a row: 4, 3 bytes (call 1). ",
        ),
        (
            [call_on_parts("fp32", 6, 6), call_on_parts("fp32", 2, 2, rows=3)],
            "rank 0: one-shot all-gather of 6 fp32, rows before dim: 1, shards of a row: 6, 6 elements (call 1); "
            "rank 1: one-shot all-gather of 2 fp32, rows before dim: 3, shards of a row: 2, 2 elements (call 1). ",
        ),
        (
            [call_on_parts("byte", 4, 4), call(8, 1)],
            "rank 0: one-shot all-gather of 4 bytes (call 1); rank 1: two-shot all-reduce of 8 fp16 (call 1). ",
        ),
    ],
    ids=["sizes", "rows", "operation"],
)
def test_sizes_of_parts_are_told_as_a_caller_gives_them(calls: list[Any], words: str) -> None:
    assert words in unnamed(explain(operation_error("mismatch", calls=calls), 1.0, NAMES).text)
