"""Checks the machine code of kernels for GPUs of AMD (gfx942, gfx950), in the assembly that clang writes.

    python tools/check_gcn.py FILE.s...

``RULES`` lists what is checked: what keeps the memory order of csrc/include/llm_comm/platform_hip.cuh, which a compiler
that knows nothing of stores in assembly may break without a word. Exit status: 0 if there are no findings, 1 if
there are.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: Text of a finding, by rule.
RULES = {
    "fences": "an HB kernel writes back or drops no caches (buffer_wbl2 sc0 sc1, buffer_inv sc0 sc1)",
    "release": "a write-back (buffer_wbl2) is not followed at once by a wait for all stores (vmcnt(0))",
    "barrier": "stores of the wave may be in flight at a barrier (no vmcnt(0) before s_barrier)",
    "acquire": "caches are dropped (buffer_inv) while loads may be in flight (no vmcnt(0) before it)",
    "poll": "a poll does not go to memory (no load with sc0 sc1 in the loop)",
    "line": "an LL kernel has no store of a line that goes to memory (global_store_dwordx4 with sc0 sc1)",
    "hazard": "an instruction overwrites the data of the store before it, which may not have read them yet",
    "scratch": "an LL kernel uses scratch memory for more than spilled registers, or a poll uses it",
    "call": "a function is called, and its arguments lie in scratch memory",
    "flat": "an access of an LL kernel looks up the address space of its address (flat_)",
}
_KERNEL = re.compile(r"^(_Z\w+):")
_LABEL = re.compile(r"^\.LBB\w+:")
_STORE = re.compile(r"(global|buffer|flat|scratch)_(store|atomic)_")
_WAITS_FOR_ALL = re.compile(r"s_waitcnt .*vmcnt\(0\)")
_LOAD = re.compile(r"(global|flat)_load_")
_PAST_CACHES = re.compile(r"\bsc0 sc1\b")
_BRANCH = re.compile(r"s_c?branch\w* (\.LBB\w+)")
_REGISTERS = re.compile(r"\bv(?:(\d+)|\[(\d+):(\d+)\])")
#: Kernels whose ranks exchange lines (line.cuh), by the names of algorithms.
_LL = re.compile(
    r"\d(all_reduce|all_gather|reduce_scatter|all_to_all(?:_v)?|all_reduce_add_rms_norm|moe_dispatch|moe_combine)"
    r"_(one|two)_shot(_pair|_by_lines)?I"
)
#: Kernels whose ranks exchange signals (hb_session.cuh).
_HB = re.compile(r"\d\w+_hbI")


@dataclass
class Kernel:
    name: str
    #: Line of the file and instruction; labels stand among them, with their colon.
    lines: list[tuple[int, str]] = field(default_factory=list)
    #: Bytes of scratch memory of a thread, and registers of a thread that are spilled to it.
    scratch: int = 0
    spilled: int = 0


def kernels_of(text: str) -> list[Kernel]:
    """Return the kernels of an assembly file, without comments and directives."""
    kernels: dict[str, Kernel] = {}
    kernel, described, scratch = None, "", 0
    for number, written in enumerate(text.splitlines(), 1):
        line = written.partition(";")[0].strip()
        if found := _KERNEL.match(line):
            kernel = kernels.setdefault(found[1], Kernel(found[1]))
        elif line.startswith(".section"):
            kernel = None
        elif kernel is not None and line and (_LABEL.match(line) or not line.startswith(".")):
            kernel.lines.append((number, re.sub(r"\s+", " ", line)))
        key, _, value = line.partition(":")
        if key == ".private_segment_fixed_size":
            scratch = int(value)
        elif key == ".symbol":
            described = value.strip().removesuffix(".kd")
            kernels[described].scratch = scratch
        elif key == ".vgpr_spill_count":
            kernels[described].spilled = int(value)
    return list(kernels.values())


def _poll_loops(kernel: Kernel) -> Iterator[list[tuple[int, str]]]:
    """Yield the innermost loops around each s_sleep, which follows a failed poll."""
    at = {line.rstrip(":"): i for i, (_, line) in enumerate(kernel.lines) if line.endswith(":")}
    loops = [
        (at[found[1]], i)
        for i, (_, line) in enumerate(kernel.lines)
        if (found := _BRANCH.match(line)) and at.get(found[1], i) < i
    ]
    for i, (_, line) in enumerate(kernel.lines):
        around = [(end - begin, begin, end) for begin, end in loops if begin < i < end]
        if line.startswith("s_sleep") and around:
            _, begin, end = min(around)
            yield kernel.lines[begin : end + 1]


def _vector_registers(operands: str) -> set[int]:
    found = (match.groups() for match in _REGISTERS.finditer(operands))
    return {i for one, first, last in found for i in range(int(one or first), int(one or last) + 1)}


def findings(kernel: Kernel) -> Iterator[tuple[int, str]]:
    """Yield the line and the rule of each finding."""
    is_ll = _LL.search(kernel.name) is not None
    waited = False
    for i, (number, line) in enumerate(kernel.lines):
        following = kernel.lines[i + 1][1] if i + 1 < len(kernel.lines) else ""
        if line.startswith("buffer_wbl2") and not _WAITS_FOR_ALL.match(following):
            yield number, "release"
        if line == "s_barrier" and not waited:
            yield number, "barrier"
        if line.startswith("buffer_inv") and not waited:
            yield number, "acquire"
        if line.startswith("s_swappc"):
            yield number, "call"
        if is_ll and line.startswith("flat_"):
            yield number, "flat"
        if re.match(r"global_store_dwordx[34] ", line) and following.startswith("v_"):
            data = _vector_registers(line.split(",")[1])
            if data & _vector_registers(following.partition(" ")[2].split(",")[0]):
                yield number, "hazard"
        # Other code may lead to a label, with accesses in flight.
        in_flight = _STORE.match(line) or _LOAD.match(line)
        waited = bool(_WAITS_FOR_ALL.match(line)) or (waited and not in_flight and not line.endswith(":"))
    for loop in _poll_loops(kernel):
        # Kernels of ports look up the memory of a peer in their loops, too.
        polls = [_PAST_CACHES.search(line) is not None for _, line in loop if _LOAD.match(line)]
        if not any(polls) or (is_ll and not all(polls)):
            yield loop[0][0], "poll"
        if any(line.startswith("scratch_") for _, line in loop):
            yield loop[0][0], "scratch"
    if _HB.search(kernel.name):
        instructions = {line for _, line in kernel.lines}
        if not instructions >= {"buffer_wbl2 sc0 sc1", "buffer_inv sc0 sc1"}:
            yield kernel.lines[0][0], "fences"
    if is_ll:
        stores = [line for _, line in kernel.lines if line.startswith("global_store_dwordx4")]
        if not any(_PAST_CACHES.search(line) for line in stores):
            yield kernel.lines[0][0], "line"
        if kernel.scratch > 4 * (kernel.spilled + 1):
            yield kernel.lines[0][0], "scratch"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.s")
    count = found = 0
    for file in parser.parse_args().files:
        for kernel in kernels_of(file.read_text(encoding="utf-8")):
            count += 1
            for number, rule in findings(kernel):
                found += 1
                print(f"{file}:{number}: {rule}: {RULES[rule]}, in {kernel.name}")
    print(f"{count} kernels, {found} findings")
    return int(found > 0 or count == 0)


if __name__ == "__main__":
    sys.exit(main())
