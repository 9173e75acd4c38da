"""What a negative control takes out, and the failures that explains."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from edits import Edit

LINE = "csrc/include/llm_comm/line.cuh"
SESSION = "csrc/include/llm_comm/ll_session.cuh"
OPERATION = "csrc/include/llm_comm/operation.cuh"
DIRECT = "csrc/algorithms/direct.cuh"
STEPS = "csrc/include/llm_comm/steps.cuh"
HB_SESSION = "csrc/include/llm_comm/hb_session.cuh"
SEMAPHORE = "csrc/include/llm_comm/semaphore.cuh"
FAULT_REPORTS = "csrc/include/llm_comm/fault_reports.cuh"
WAIT = "csrc/include/llm_comm/wait.cuh"
CHECK_CALL = "csrc/algorithms/check_call.cuh"
RMS_NORM = "csrc/algorithms/all_reduce_add_rms_norm/rms_norm.cuh"
MESSAGES = "tests/deterministic/message_passing.cuh"
PORT_CHANNEL = "csrc/include/llm_comm/port_channel.cuh"
PORT_SESSION = "csrc/include/llm_comm/port_session.cuh"
PORT_CHUNKS = "csrc/optional/port_chunks.cuh"
PORT_BATCH = "csrc/host/port_batch.cpp"
PORT_ACTOR = "csrc/schedules/port_actor.cpp"

# What the driver says of a failure, as regular expressions. Any other failure proves nothing: a crash, a wrong
# option, or a schedule that does not end where nobody should hang.
#: A greeting of all_to_all_v that has not arrived, or is another one, names other sizes.
OTHER_SIZES = r"^rank \d+: sizes in"
WRONG_RESULT = (
    rf"^((without an error on|(before|behind) the error of|though nobody failed,) )?rank \d+, call \d+|{OTHER_SIZES}"
)
#: A rank whose operation was cut short ends it as if it were right, or goes on with the next.
UNTOLD = r"^(without an error on|(before|behind) the error of) rank \d+, call \d+"
NOBODY_IS_MISSING = r"^rank \d+: a wait of .* expired"
#: Of the protections of lines and slots: any of these, as it happens.
WRONG = "|".join((WRONG_RESULT, NOBODY_IS_MISSING, "is not reset to the sentinel", r"counted (\d+ )?operations"))
#: Words that have not arrived may name no symmetric offset, or another one.
NOT_SYMMETRIC = r"^rank \d+: not symmetric in"
OTHER_OFFSET = r"^rank \d+: other symmetric offset in"
BLAME = "blames the wrong one"
MISMATCH = r"^rank \d+: mismatch in"
CONCURRENT = r"^rank \d+: concurrent use in"
TOO_LATE = r"ranks went on for \d+ steps after one had stopped"
#: A thread waits for deliveries, which has no bound.
HANGS = "it did not end"
AHEAD = "comes ahead of the one that runs"
LEFT_ALONE = "has ended when another one writes to its memory"

MISHAPS = ("--mishaps",)
#: Algorithms by SwitchChannel without LL lines, as a regular expression.
PLAIN_BY_SWITCH = r"(all_reduce|reduce_scatter)/.*ld_reduce|all_gather/push_switch"

#: FP8 with a scale for each row, which blocks of a cluster find together.
FP8 = "+dynamic"
FP8_SUBJECTS = tuple(f"all_reduce_add_rms_norm/{algorithm}{FP8}" for algorithm in ("one_shot", "two_shot"))


class Everywhere:
    """The same for every place of an algorithm's file that one of some regular expressions matches, each with what
    takes its place. A blank is any white space.
    """

    def __init__(self, *alternatives: tuple[str, str]) -> None:
        self.alternatives = tuple((re.compile(old.replace(" ", r"\s+")), new) for old, new in alternatives)

    def places(self, text: str) -> list[re.Match[str]]:
        found = [place for pattern, _ in self.alternatives for place in pattern.finditer(text)]
        return sorted(found, key=lambda place: place.start())

    def replacement(self, place: re.Match[str]) -> str:
        return next(place.expand(new) for pattern, new in self.alternatives if pattern is place.re)


@dataclass(frozen=True)
class Protection:
    """What is protected, the text that takes it out, and within how many schedules that must be noticed.

    ``subjects``: what it is tried with, where that does not follow from the sources. ``exempt``: algorithms (a regular
    expression) with which nobody can notice, and why. ``options``: what else to tell the driver. ``failure``: the
    failures that the missing protection explains, as a regular expression; any other is one of the test.
    ``with_others``: what calls of other algorithms leave behind shows it.
    """

    name: str
    text: str
    edits: tuple[Edit, ...] | Everywhere
    options: tuple[str, ...] = ()
    budget: int = 2000
    failure: str = WRONG
    subjects: tuple[str, ...] = ()
    exempt: Mapping[str, str] = field(default_factory=dict)
    fp8: bool = False
    with_others: bool = False
