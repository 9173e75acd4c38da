"""Compares the machine code of the kernels in two builds: what a change that must not touch any kernel has to show.

    python tools/compare_sass.py BEFORE AFTER [--arch sm_90] [--json FILE]

BEFORE and AFTER are libraries (``libllm_comm_cuda.so``, in builds before 0.2.0 ``_core*.so``), object files or archives
of objects. Needs ``c++filt``, and ``cuobjdump`` and ``nvdisasm`` of a CUDA toolkit or of the wheels
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm. Kernels are matched by name and template arguments; namespaces,
parameter lists and the prefixes in ``RENAMED`` do not count. Instructions are compared with their encodings. Exit
status: 0 if both builds have the same kernels with the same code, 1 if not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

#: Kernels that have other names since, by the beginning of the old name.
RENAMED = {"add_rms_norm_": "all_reduce_add_rms_norm_"}
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/|^\s+/\* 0x[0-9a-f]{16} \*/")


def short_name(demangled: str) -> str:
    """``one_shot<(DataType)0, (int)2, (bool)1>`` for a demangled kernel, whatever its namespaces and parameters."""
    name = demangled.removeprefix("void ").strip()
    name = re.sub(r"(?<![\w>])(?:\w+::)+", "", name)
    end = name.find(">(")
    name = name[: end + 1] if end >= 0 else name.partition("(")[0]
    for old, new in RENAMED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def kernels(path: Path, arch: str) -> dict[str, list[str]]:
    """The instructions of each kernel, by short name."""
    command = ["cuobjdump", "-sass", "-arch", arch, str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        head = re.match(r"\s*Function : (\S+)", line)
        if head:
            lines = found.setdefault(head[1], [])
        elif _INSTRUCTION.match(line):
            lines.append(" ".join(line.split()))
    mangled = list(found)
    names = subprocess.run(["c++filt", *mangled], capture_output=True, text=True, check=True).stdout.splitlines()
    result = {short_name(name): found[symbol] for symbol, name in zip(mangled, names, strict=True)}
    if len(result) != len(found):
        raise SystemExit(f"{path}: two kernels have the same name: {sorted(names)}")
    if not result:
        raise SystemExit(f"{path}: no kernels for {arch}")
    return result


def digest(kernel: list[str]) -> str:
    return hashlib.sha256("\n".join(kernel).encode()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--arch", default="sm_90", help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="also write a digest of every kernel of both")
    arguments = parser.parse_args()
    before, after = kernels(arguments.before, arguments.arch), kernels(arguments.after, arguments.arch)
    common = sorted(set(before) & set(after))
    different = [name for name in common if before[name] != after[name]]
    gone, new = sorted(set(before) - set(after)), sorted(set(after) - set(before))
    for what, names in (("only before", gone), ("only after", new)):
        for name in names:
            print(f"{what}: {name}")
    for name in different:
        print(f"differs: {name} ({len(before[name]) // 2} and {len(after[name]) // 2} instructions)")
    print(f"{len(common) - len(different)} of {len(common)} common kernels are the same, {arguments.arch}")
    if arguments.json is not None:
        digests = {name: [digest(of[name]) for of in (before, after) if name in of] for name in {*before, *after}}
        arguments.json.write_text(json.dumps(dict(sorted(digests.items())), indent=1) + "\n", encoding="utf-8")
    return 1 if different or gone or new else 0


if __name__ == "__main__":
    sys.exit(main())
