"""Failures in words: what a rank says of its own error, of the states of the others, and of whose error it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llm_comm import _core, errors
from llm_comm.errors import CommunicatorError, ConcurrentUseError, LaunchError, MismatchError, PeerTimeout
from llm_comm.runtime.status import LIFE_S, RankError, Sighting, fit

#: Name of the data type of what is moved whatever it stands for.
_BYTE = "byte"
#: The ranks that are connected are all of the group.
AS_CONNECTED = range(_core.max_world_size)
#: What the core calls a kernel outside of the library (``Communicator.channels``).
_USER_KERNEL = "user kernel"


def explain(error: _core.OperationError, waited_s: float, ranks: Sequence[int] = AS_CONNECTED) -> RankError:
    """What happened on this rank, and what to do about it.

    Args:
        ranks: The numbers by which the user knows the ranks that are connected.
    """
    rank, peer = ranks[error.rank], ranks[error.peer] if 0 <= error.peer < len(ranks) else error.peer
    if error.cause == "transport":
        text = (
            f"rank {rank}: data could not be sent to a peer: {error.text}. This communicator cannot be used any more."
        )
        return RankError(LaunchError.__name__, fit(text), "could not send data to a peer", rank, rank)
    # As calls are counted: from 1. The device counts the replays of graphs too, which no call of the host is.
    number = f"operation {error.sequence + 1} of this communicator, replays counted"
    phase = "comparison of calls" if error.phase < 0 else f"phase {error.phase}"
    where = f"{error.operation} of {error.bytes} bytes ({number}; {phase})"
    if error.operation == _USER_KERNEL:  # no operation of the communicator: it has no number
        where = _USER_KERNEL
    kind: type[CommunicatorError]
    culprit = peer
    if error.cause == "mismatch":
        kind, brief = MismatchError, f"disagrees with rank {peer}"
        text = (
            f"the ranks disagree about {number}: {_calls_in_words(error.calls, ranks)}. "
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
        kind, brief = MismatchError, f"operations in another order than on rank {peer}"
        text = (
            f"the first {error.sequence} operations of this communicator (replays counted) had another order than on "
            f"rank {peer}, or were others: sums may have been wrong. All ranks must make the same calls in the same "
            "order. A CUDA graph that is replayed beside eager calls, or beside another graph, has none: give it a "
            "communicator of its own, or order it with them by an event."
        )
    elif error.cause == "not symmetric":
        kind, brief = MismatchError, f"rank {peer} has no symmetric tensor: {where}"
        text = (
            f"a tensor of rank {peer} is not in symmetric memory, or not at a multiple of 16 bytes there, or is input "
            f"and output of one call, where the others were to access it: {where}. Pass tensors of Communicator.empty, "
            "or views of them, everywhere."
        )
    elif error.cause == "other place":
        kind, brief = MismatchError, f"rank {peer} passed a tensor at another place: {where}"
        text = (
            f"a tensor of rank {peer} lies elsewhere in symmetric memory than that of rank 0: {where}, which "
            "needs it at the same place on all ranks. Pass the same tensor of Communicator.empty everywhere, or the "
            "same view of it. What the tensors of Communicator.empty hold now is not known."
        )
    elif error.cause == "no channel":
        culprit = rank  # the peer may be no rank at all
        kind, brief = LaunchError, f"asked for a channel that is not there: {where}"
        text = (
            f"a {where} asked for a channel to rank {peer} by semaphore {error.sequence}, which is not there. "
            "Ranks and semaphores are counted from 0; Communicator.channels takes the number of semaphores."
        )
    else:
        kind, brief = PeerTimeout, f"waited for rank {peer} in a {where}"
        text = (
            f"nothing came from rank {peer} for {waited_s:g} s in a {where}. "
            f"Rank {peer} has died, hangs, or makes other calls than this rank. "
            "LLM_COMM_TIMEOUT_S sets the limit."
        )
        if error.cause == "peer exited":
            text = f"the process of rank {peer} has exited, and a {where} waits for it."
    text = f"rank {rank}: {text} This communicator cannot be used any more."
    return RankError(kind.__name__, fit(text), brief, rank, culprit)


def describe_ranks(sightings: Sequence[Sighting], ranks: Sequence[int] = AS_CONNECTED) -> str:
    """A line for each rank, or nothing where nothing is known; ``ranks`` as of ``explain``."""
    lines = [f"\n  rank {ranks[i]}{_sighting_in_words(sighting)}" for i, sighting in enumerate(sightings)]
    return "\nState of the ranks:" + "".join(lines) if lines else ""


def _sighting_in_words(sighting: Sighting) -> str:
    state = sighting.state
    if state is None:
        return ": nothing is known of it"
    facts = []
    # It may have gone on since.
    is_late = not state.is_closed and (sighting.has_exited or sighting.age_s > LIFE_S)
    if state.is_closed:
        facts.append("has closed its communicator")
    elif sighting.has_exited:
        facts.append(f"its process has exited, no sign of life for {sighting.age_s:.1f} s")
    elif sighting.age_s > LIFE_S:
        facts.append(f"no sign of life for {sighting.age_s:.1f} s")
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
    return f" (pid {state.pid}): " + "; ".join(facts)


def _calls_in_words(calls: Sequence[_core.Call], numbers: Sequence[int]) -> str:
    """ "ranks 0, 1: one-shot all-reduce of 8 bf16 (call 3); rank 2: ...", with the details in which calls differ."""
    details_of = [_details_in_words(call, len(calls)) for call in calls]
    words: dict[str, set[str]] = {}  # of a detail, by its name
    for of_call in details_of:
        for name, detail in of_call.items():
            words.setdefault(name, set()).add(detail)
    differing = {name for name, said in words.items() if len(said) > 1}
    ranks: dict[str, list[str]] = {}
    for i, call in enumerate(calls):
        details = [detail for name, detail in details_of[i].items() if name in differing]
        ranks.setdefault(call_in_words(call, details), []).append(str(numbers[i]))
    return "; ".join(f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {what}" for what, who in ranks.items())


def _details_in_words(call: _core.Call, world: int) -> dict[str, str]:
    """By name. Those of an operation on parts in the terms of whoever calls it: a tensor, a dimension, sizes."""
    details = dict(call.details)
    if "size_0" not in details:
        return details
    sizes = [details.pop(f"size_{rank}").split()[1] for rank in range(_core.max_world_size)]
    unit = "bytes" if call.data_type == _BYTE else "elements"
    details["rows"] = f"rows before dim: {details['rows'].split()[1]}"
    details["sizes"] = f"parts of a row: {', '.join(sizes[:world])} {unit}"
    return details


def call_in_words(call: _core.Call, details: Sequence[str] = ()) -> str:
    rows = f" in rows of {call.row}" if call.row else ""
    extra = "".join(f", {detail}" for detail in details)
    unit = "bytes" if call.data_type == _BYTE else call.data_type
    return f"{call.operation} of {call.count} {unit}{rows}{extra} (call {call.number})"


def root_cause(rank: int, own: RankError | None, sightings: Sequence[Sighting]) -> RankError | None:
    """The error to report: this rank's own, unless it has none or waited for a rank that stopped for another reason.
    None where a page that had one cannot be read now, as its rank died while it wrote."""
    others = [s.state.error for s in sightings if s.state is not None and s.state.error not in (None, own)]
    timeout = PeerTimeout.__name__
    if own is not None and own.kind != timeout:
        return own
    timed_out = own or next(iter(others), None)
    first = next((error for error in others if error is not None and error.kind != timeout), timed_out)
    if first is None:
        return None
    return first if first is own else replace(first, text=f"rank {rank} has learnt that {first.text}")


def as_exception(error: RankError) -> CommunicatorError:
    kind: type[CommunicatorError] = getattr(errors, error.kind)
    return kind(error.text, rank=error.rank, peer=error.peer)
