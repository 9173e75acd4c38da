"""Texts of failures: a rank's own error, the states of its peers, and the choice of the error to report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llm_comm import _core, errors
from llm_comm.errors import CommunicatorError, ConcurrentUseError, LaunchError, MismatchError, PeerTimeout
from llm_comm.runtime.rank_names import RankNames
from llm_comm.runtime.status import LIFE_S, PeerStatus, RankError

#: Data type of operations that move bytes without interpreting them.
_BYTE = "byte"
#: Operation name that the core reports for a user kernel (``Communicator.channels``).
_USER_KERNEL = "user kernel"
#: Number of rows that the core reports for larger and negative ones (``kManyRows`` of wait.cuh).
_MANY_ROWS = (1 << 32) - 1


def explain(error: _core.OperationError, waited_s: float, names: RankNames) -> RankError:
    """Convert an error of the core to a text that says what happened on this rank and what to do.

    Args:
        error: Error of the core.
        waited_s: Time limit of a wait in the kernels, in seconds.
        names: Names of the connected ranks.
    """
    this, peer, again = names.in_group(error.rank), names.full(error.peer), names.short(error.peer)
    rank, failed_peer = names.number(error.rank), names.number(error.peer)
    if error.cause == "transport":
        text = f"{this}: data could not be sent to a peer: {error.text}. This communicator can no longer be used."
        return RankError(LaunchError.__name__, text, "could not send data to a peer", rank, rank)
    # Operations are numbered from 1 in texts, as calls are. The device also counts replays of graphs, the host does
    # not.
    number = f"operation {error.sequence + 1} of this communicator, replays counted"
    phase = "comparison of calls" if error.phase < 0 else f"phase {error.phase}"
    where = f"{error.operation} of {error.bytes} bytes ({number}; {phase})"
    if error.operation == _USER_KERNEL:  # a user kernel is no operation of the communicator and has no number
        where = _USER_KERNEL
    kind: type[CommunicatorError]
    if error.cause == "mismatch":
        kind, brief = MismatchError, f"disagrees with {again}"
        text = (
            f"the ranks disagree about {number}: {_calls_in_words(error.calls, names)}. "
            "All ranks must make the same calls in the same order."
        )
    elif error.cause == "concurrent use":
        kind, brief = ConcurrentUseError, f"two operations at once: {where}"
        text = (
            f"a {where} began on this GPU while another operation of the communicator was under way. Graphs that "
            "run at once, or with eager calls, need a communicator each, or must wait for each other."
        )
    elif error.cause == "overlap":
        kind, brief = ConcurrentUseError, "operations ran at once"
        text = (
            f"operations of this communicator ran at once on this GPU and had one number, among its first "
            f"{error.sequence} (replays counted): sums may have been wrong. A CUDA graph that is replayed beside eager "
            "calls, or beside another graph, needs a communicator of its own, or must be ordered with them by an event."
        )
    elif error.cause == "order":
        kind, brief = MismatchError, f"operations in another order than on {again}"
        text = (
            f"the first {error.sequence} operations of this communicator (replays counted) had another order than on "
            f"{peer}, or were others: sums may have been wrong. All ranks must make the same calls in the same "
            "order. A CUDA graph that is replayed beside eager calls, or beside another graph, has none: give it a "
            "communicator of its own, or order it with them by an event."
        )
    elif error.cause == "not symmetric":
        kind, brief = MismatchError, f"{again} has no symmetric tensor: {where}"
        text = (
            f"a tensor of {peer} is not in symmetric memory, or not at a multiple of 16 bytes there, or is input "
            f"and output of one call, where the others were to access it: {where}. Pass tensors of Communicator.empty, "
            "or views of them, everywhere."
        )
    elif error.cause == "other symmetric offset":
        kind, brief = MismatchError, f"{again} passed a tensor with another symmetric offset: {where}"
        text = (
            f"a tensor of {peer} lies elsewhere in symmetric memory than that of {names.full(0)}: {where}, which "
            "needs it at the same place on all ranks. Pass the same tensor of Communicator.empty everywhere, or the "
            "same view of it. What the tensors of Communicator.empty hold now is not known."
        )
    elif error.cause == "sizes":
        kind, brief = MismatchError, f"sizes of parts are wrong, with {again}: {where}"
        text = f"{_sizes_in_words(error.sizes, names)}: {where}. What out holds now is not known."
    elif error.cause == "no channel":
        failed_peer = rank  # the peer may be outside of the group
        kind, brief = LaunchError, f"asked for a channel that is not there: {where}"
        text = (
            f"a {where} asked for a channel to {peer} by semaphore {error.sequence}, which is not there. "
            "Ranks and semaphores are counted from 0; Communicator.channels takes the number of semaphores."
        )
    else:
        kind, brief = PeerTimeout, f"waited for {again} in a {where}"
        text = (
            f"nothing came from {peer} for {waited_s:g} s in a {where}. "
            f"{again.capitalize()} has died, hangs, or makes other calls than this rank. "
            "LLM_COMM_TIMEOUT_S sets the limit."
        )
        if error.cause == "peer exited":
            text = f"the process of {peer} has exited, and a {where} waits for it."
    text = f"{this}: {text} This communicator can no longer be used."
    return RankError(kind.__name__, text, brief, rank, failed_peer)


def _sizes_in_words(sizes: _core.WrongSizes, names: RankNames) -> str:
    """Describe sizes of parts that differ between two ranks, or do not fit."""
    rank, peer = names.full(sizes.rank), names.number(sizes.peer)
    rows = "a negative or very large number of" if sizes.rows == _MANY_ROWS else str(sizes.rows)
    if sizes.fault == "disagree":
        return f"{rank} sends {rows} rows to {names.full(sizes.peer)}, which expects {sizes.limit}"
    if sizes.fault == "sends too many":
        return f"send_sizes[{peer}] of {rank} is {rows} rows, and max_rows is {sizes.limit}"
    if sizes.fault == "expects too many":
        return f"recv_sizes[{peer}] of {rank} is {rows} rows, and max_rows is {sizes.limit}"
    if sizes.fault == "other call":
        return (
            "max_rows, the bytes of a row or the dtype of sizes differ between ranks: noticed between "
            f"{rank} and {names.full(sizes.peer)}"
        )
    argument, tensor = ("send_sizes", "x") if sizes.fault == "input too short" else ("recv_sizes", "out")
    return f"{argument} of {rank} add up to {rows} rows, and {tensor} has {sizes.limit}"


def describe_ranks(statuses: Sequence[PeerStatus], names: RankNames) -> str:
    """Return one line for each rank, or "" without statuses. ``names``: names of the connected ranks."""
    lines = [f"\n  {names.full(i)}{_status_in_words(status)}" for i, status in enumerate(statuses)]
    return f"\nState of the ranks of {names.of_group}:" + "".join(lines) if lines else ""


def _status_in_words(status: PeerStatus) -> str:
    state = status.state
    if state is None:
        return ": nothing is known of it"
    facts = []
    # A silent rank may have made calls after its last report.
    is_late = not state.is_closed and (status.has_exited or status.age_s > LIFE_S)
    if state.is_closed:
        facts.append("has closed its communicator")
    elif status.has_exited:
        facts.append(f"its process has exited, no sign of life for {status.age_s:.1f} s")
    elif status.age_s > LIFE_S:
        facts.append(f"no sign of life for {status.age_s:.1f} s")
    else:
        facts.append("alive")
    if state.error is not None:
        facts.append(state.error.brief)
    if state.remark:
        facts.append(state.remark)
    if state.last_call:
        facts.append(f"last call{' seen' * is_late}: {state.last_call}")
    else:
        facts.append("no call seen" if is_late else "has made no call")
    if state.operations_ended is not None:
        facts.append(f"{state.operations_ended} operations ended on its device")
    return ": " + "; ".join(facts)


def _calls_in_words(calls: Sequence[_core.Call], names: RankNames) -> str:
    """ "ranks 0, 1: one-shot all-reduce of 8 bf16 (call 3); rank 2: ...", with the details in which calls differ."""
    details_of = [_details_in_words(call, len(calls)) for call in calls]
    words: dict[str, set[str]] = {}  # values by name of the detail
    for of_call in details_of:
        for name, detail in of_call.items():
            words.setdefault(name, set()).add(detail)
    differing = {name for name, said in words.items() if len(said) > 1}
    ranks: dict[str, list[int]] = {}
    for i, call in enumerate(calls):
        details = [detail for name, detail in details_of[i].items() if name in differing]
        ranks.setdefault(call_in_words(call, details), []).append(i)
    return "; ".join(f"{names.several(who)}: {what}" for what, who in ranks.items())


def _details_in_words(call: _core.Call, world: int) -> dict[str, str]:
    """Details of a call, by name. Parts of an all-gather or reduce-scatter are given in the caller's terms: rows before
    the dimension, and sizes."""
    details = dict(call.details)
    if "size_0" not in details:
        return details
    sizes = [details.pop(f"size_{rank}").split()[1] for rank in range(_core.max_world_size)]
    unit = "bytes" if call.data_type == _BYTE else "elements"
    details["rows"] = f"rows before dim: {details['rows'].split()[1]}"
    details["sizes"] = f"shards of a row: {', '.join(sizes[:world])} {unit}"
    return details


def call_in_words(call: _core.Call, details: Sequence[str] = ()) -> str:
    """Format a call of the core, with ``details`` in which it differs from other ranks' calls."""
    rows = f" in rows of {call.row}" if call.row else ""
    extra = "".join(f", {detail}" for detail in details)
    unit = "bytes" if call.data_type == _BYTE else call.data_type
    return f"{call.operation} of {call.count} {unit}{rows}{extra} (call {call.number})"


def root_cause(this: str, own: RankError | None, statuses: Sequence[PeerStatus]) -> RankError | None:
    """Return the error to report.

    The own error is reported, unless this rank has none or only timed out while a peer failed for another reason.
    Return None if the failed peer's page cannot be read, because the peer died while it wrote.

    Args:
        this: Name of this rank, in words.
        own: Error of this rank.
        statuses: States of all ranks.
    """
    others = [s.state.error for s in statuses if s.state is not None and s.state.error not in (None, own)]
    timeout = PeerTimeout.__name__
    if own is not None and own.kind != timeout:
        return own
    timed_out = own or next(iter(others), None)
    first = next((error for error in others if error is not None and error.kind != timeout), timed_out)
    if first is None:
        return None
    return first if first is own else replace(first, text=f"{this} was notified: {first.text}")


def as_exception(error: RankError) -> CommunicatorError:
    """Build the exception for an error of a rank."""
    kind: type[CommunicatorError] = getattr(errors, error.kind)
    return kind(error.text, rank=error.rank, peer=error.peer)
