"""Checks which kernels of a build hold instructions of NVLink multicast: those by SwitchChannel do, no other does.

    python tools/check_multicast.py BUILD... [--arch sm_90] [--ptx FILE...]

BUILD is a library (``libllm_comm_cuda.so``), an object file, an archive or a cubin. Which kernels are to hold which
instructions is said by ``EXPECTED``, by the names of algorithms. In machine code only the sums of a switch can be told
(``LDGMC``): a store to all GPUs is the ``STG`` that a store to one is. So the others are counted in PTX, in files or as
far as BUILD holds it. Local memory in a kernel by SwitchChannel, which spills would be, is an error too. Needs what
``compare_sass.py`` does. Exit status: 0 if all is as it should be, 1 if not.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from compare_sass import kernels, short_name

#: Kernels, by how their names begin, and whether each holds sums by the switch, and stores to all GPUs.
EXPECTED = {
    "all_reduce_two_shot_switch": (False, True),
    "all_reduce_two_shot_ld_reduce": (True, True),
    "all_reduce_one_shot_ld_reduce": (True, False),
    "reduce_scatter_ld_reduce": (True, False),
    "all_gather_push_switch": (False, True),
    "all_reduce_add_rms_norm_two_shot_switch": (False, True),
    "all_reduce_add_rms_norm_two_shot_ld_reduce": (True, True),
}
#: What each of them orders accesses by two addresses of one memory with.
FENCE = "fence.proxy.alias"
_MULTIMEM = re.compile(r"\b(multimem\.\w+|fence\.proxy\.alias)\b")
_LOCAL = re.compile(r"\b(LDL|STL)\b")


def expectation(kernel: str) -> tuple[bool, bool] | None:
    return EXPECTED.get(kernel.partition("<")[0])


def check_sass(found: Mapping[str, list[str]]) -> list[str]:
    """What is wrong with the machine code of kernels, by short name."""
    wrong = []
    for name, lines in found.items():
        expected = expectation(name)
        sums = sum("LDGMC" in line for line in lines)
        if (expected is not None and expected[0]) != (sums > 0):
            wrong.append(f"{name}: {sums} sums by the switch")
        spills = sum(bool(_LOCAL.search(line)) for line in lines)
        if expected is not None and spills:
            wrong.append(f"{name}: {spills} accesses to local memory")
    return wrong


def ptx_counts(text: str) -> dict[str, Counter[str]]:
    """Instructions of multicast in each entry of a PTX text, by symbol. Code of functions counts for the entry behind
    which, or before which, it stands as far as it is none."""
    counts: dict[str, Counter[str]] = {}
    current: Counter[str] | None = None
    for line in text.splitlines():
        head = re.search(r"\.(entry|func)\s+(?:\([^)]*\)\s*)?(\w+)", line)
        if head and not line.lstrip().startswith("//"):
            current = counts.setdefault(head[2], Counter())
        for instruction in _MULTIMEM.findall(line) if not line.lstrip().startswith("//") else ():
            if current is None:
                raise SystemExit(f"an instruction outside of all functions: {line.strip()}")
            current[instruction] += 1
    return counts


def check_ptx(counts: Mapping[str, Counter[str]]) -> list[str]:
    """What is wrong with the PTX of kernels, by short name."""
    wrong = []
    for name, found in counts.items():
        expected = expectation(name)
        sums, stores = found["multimem.ld_reduce"], found["multimem.st"]
        if expected is None:
            wrong += [f"{name}: {count} of {what}" for what, count in found.items() if count]
            continue
        if expected != (sums > 0, stores > 0) or found["multimem.red"]:
            wrong.append(f"{name}: {sums} sums, {stores} stores and {found['multimem.red']} additions by the switch")
        if not found[FENCE]:
            wrong.append(f"{name}: no fence of aliases")
    return wrong


def demangled(counts: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
    names = subprocess.run(["c++filt", *counts], capture_output=True, text=True, check=True).stdout.splitlines()
    return {short_name(name): found for name, found in zip(names, counts.values(), strict=True)}


def ptx_of(path: Path) -> str:
    """The PTX in a build; "" if it has none."""
    done = subprocess.run(["cuobjdump", "-ptx", str(path)], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 and ".entry" in done.stdout else ""


def report(what: str, wrong: Iterable[str], names: Iterable[str]) -> bool:
    wrong, names = list(wrong), list(names)
    for line in wrong:
        print(f"{what}: {line}")
    by_switch = sum(expectation(name) is not None for name in names)
    print(f"{what}: {len(names)} functions, {by_switch} of them kernels by SwitchChannel: {len(wrong)} wrong")
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, nargs="*")
    parser.add_argument("--arch", default="sm_90", help="(%(default)s)")
    parser.add_argument("--ptx", type=Path, nargs="*", default=[], help="texts of PTX")
    arguments = parser.parse_args()
    if not arguments.build and not arguments.ptx:
        parser.error("nothing to check")
    right = True
    for build in arguments.build:
        found = kernels(build, arguments.arch)
        right &= report(f"{build.name}, {arguments.arch}", check_sass(found), found)
    texts = [(path.name, path.read_text(encoding="utf-8")) for path in arguments.ptx]
    texts += [(build.name, text) for build in arguments.build if (text := ptx_of(build))]
    for name, text in texts:
        counts = demangled(ptx_counts(text))
        right &= report(f"{name}, PTX", check_ptx(counts), counts)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
