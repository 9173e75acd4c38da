"""What the ranks of drill.py do from which no rank comes back: one of them is killed, or stalls for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Recording, Session
from drill_ranks import DTYPE, PACE, PACE_OF_SHARED_GPU, message, write

from llm_comm import Communicator, CommunicatorError, Config, PeerTimeout

#: In which a process has exited, and whoever waits for it is told: the driver frees its memory first.
KILLED_LIMIT_S = 3.0
#: Exit status of a rank that stalls, which its communicator's `on_error` ends.
ENDED_BY_WATCHDOG = 5
HIDDEN = 8192


@dataclass(frozen=True)
class Loss:
    """How a rank is lost while all make the same calls for ever.

    Attributes:
        sizes: bytes of the messages of one turn of the loop.
        is_killed: else it goes on to live, and calls no more.
        victim: the rank that is lost, by world size.
        norms: whether the calls are fused with an RMSNorm, over rows of ``HIDDEN``.
        one_is_away: whether the victim and another rank, where there are more than two, soon make no more calls:
            threads that wait for the one wait beside those that wait for the other.
    """

    algorithm: str
    sizes: tuple[int, ...]
    in_graph: bool
    is_killed: bool
    victim: Callable[[int], int]
    norms: bool = False
    one_is_away: bool = False

    def limit_s(self, timeout_s: float) -> float:
        """In which all others have to be told. Nobody waits for the time-out where a process has exited."""
        return KILLED_LIMIT_S if self.is_killed else timeout_s

    def timeout_s(self, timeout_s: float) -> float:
        """Of the communicator, where others have ``timeout_s``."""
        return 10 * KILLED_LIMIT_S if self.is_killed else timeout_s


LOSSES = {
    "killed, one_shot": Loss("one_shot", (1024, 16384, 4098), False, True, lambda world: world - 1),
    "killed, two_shot": Loss("two_shot", (262144, 20036, 1048576), False, True, lambda world: 0),
    "killed, graph": Loss("auto", (1024, 65536, 524288, 16384), True, True, lambda world: world // 2),
    "killed, fused": Loss("auto", (16384, 262144, 1048576), False, True, lambda world: world - 1, norms=True),
    "killed, one away": Loss("one_shot", (16384,), False, True, lambda world: world - 1, one_is_away=True),
    "killed, one away, fused": Loss("auto", (16384,), False, True, lambda world: 0, norms=True, one_is_away=True),
    "stalled for ever": Loss("auto", (1024, 65536, 524288), False, False, lambda world: 0),
    "stalled for ever, graph": Loss("auto", (16384, 524288), True, False, lambda world: world - 1),
}
#: By the NVLink switch: part of ``switch_acceptance.py``, and of no other drill.
SWITCH_LOSSES = {
    f"killed, {name}": Loss(name, (16384, 262144), False, True, lambda world: world - 1)
    for name in ("two_shot_switch", "two_shot_ld_reduce", "one_shot_ld_reduce")
}
ALL_LOSSES = {**LOSSES, **SWITCH_LOSSES}


def be_lost(ranks: Session, loss: Loss, timeout_s: float, directory: Path) -> None:
    """Writes when the fault began, and on every other rank what it got and when."""
    by_switch = {"multicast": "1", "sum": "any"} if loss in SWITCH_LOSSES.values() else {}
    config = Config.load(timeout_s=loss.timeout_s(timeout_s), algorithm=loss.algorithm, **by_switch)
    communicator = Communicator(ranks.group, ranks.device, config)
    if by_switch and not communicator.multicast.is_up:
        raise RuntimeError(f"no drill by the switch: {communicator.multicast.why}")
    turn = _turn(ranks, communicator, loss)
    victim = loss.victim(ranks.world)
    is_victim = ranks.rank == victim
    goes_away = loss.one_is_away and ranks.world > 2 and ranks.rank in (victim, (victim + 1) % ranks.world)
    told = threading.Event()
    pace = PACE_OF_SHARED_GPU if ranks.shares_gpu else PACE

    def tell(error: CommunicatorError) -> None:
        outcome = {"at": time.monotonic(), "peer": error.peer, "kind": type(error).__name__, "text": str(error)}
        write(directory / f"told.{ranks.rank}", outcome)
        told.set()
        if is_victim:
            os._exit(ENDED_BY_WATCHDOG)

    communicator.on_error(tell)
    ranks.barrier()
    begin = time.monotonic()
    if is_victim and loss.is_killed:
        # From a thread, so that death comes anywhere: within a call, between two, while the GPU works.
        threading.Timer(pace.loop_s, _die, [directory]).start()
    try:
        turns = 0
        longest_s = 3 * max(timeout_s, KILLED_LIMIT_S)
        while time.monotonic() < begin + pace.loop_s + longest_s:
            if goes_away and turns == pace.turns_before_away:
                told.wait(longest_s)
            turn()
            turns += 1
            if is_victim and not loss.is_killed and time.monotonic() > begin + pace.loop_s:
                ranks.synchronize()
                write(directory / "fault", {"at": time.monotonic()})
                time.sleep(1000)
    except PeerTimeout as error:
        write(directory / f"raised.{ranks.rank}", {"at": time.monotonic(), "text": str(error)})
    told.wait(timeout_s)
    communicator.close()


def _turn(ranks: Session, communicator: Communicator, loss: Loss) -> Callable[[], None]:
    inputs = [message(ranks.rank, size // 2, ranks.device) for size in loss.sizes]
    outputs = [torch.empty_like(x) for x in inputs]
    weight = torch.ones(HIDDEN, dtype=DTYPE, device=ranks.device)

    def calls() -> None:
        for x, out in zip(inputs, outputs, strict=True):
            if loss.norms:
                communicator.all_reduce_add_rms_norm(x.view(-1, HIDDEN), None, weight, 1e-5, out=out.view(-1, HIDDEN))
            else:
                communicator.all_reduce(x, out)

    # Calls on a shared GPU would be enqueued for many seconds ahead.
    if not loss.in_graph and not ranks.shares_gpu:
        return calls
    turn: Callable[[], Any] = calls
    if loss.in_graph:
        calls()
        turn = Recording(calls, ranks.device).replay

    def turn_and_wait() -> None:
        turn()
        ranks.synchronize()
        communicator.check()

    return turn_and_wait


def _die(directory: Path) -> None:
    write(directory / "fault", {"at": time.monotonic()})
    os.kill(os.getpid(), signal.SIGKILL)
