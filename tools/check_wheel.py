"""Checks wheels: what they hold, what they are linked with, how large they are; and whether they run.

    python tools/check_wheel.py [--no-cuda] WHEEL...
    python tools/check_wheel.py --install PYTHON [--no-cuda] WHEEL...

The first form reads the wheels, by readelf. ``--install`` makes a fresh virtual environment of an interpreter, installs
a wheel and what it needs from pip's index, and runs ``llm-comm doctor`` and ``llm-comm demo`` there, on emulated GPUs,
with nothing else on PATH: no compiler, no nvcc. Exit status: 0 if all is well, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import old_abi

REPOSITORY = Path(__file__).resolve().parents[1]
POLICY = "manylinux_2_28"
MOST_BYTES = 60_000_000
#: What every wheel has under ``llm_comm/``, beside the module.
HELD = (
    "communicator.py",
    "py.typed",
    "configs/tune_h200_4.yaml",
    "include/llm_comm/memory_channel.cuh",
    "lib/libllm_comm_deterministic.a",
    "lib/libllm_comm_emulator.a",
    "lib/libllm_comm_nccl_emulated.so",
)
HELD_WITH_CUDA = ("lib/libllm_comm_cuda.so", "lib/libllm_comm_nccl.so")
#: Libraries that every machine has, and the one that the wheel brings. Not CUDA's driver: it is looked up at run time,
#: so that the module loads without one. Not CUDA's runtime: it is linked statically.
MAY_NEED = {
    *old_abi.LOADERS.values(),
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libllm_comm_cuda.so",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
}
#: Number of a machine in the header of ELF files, by its name in tags.
MACHINES = {"x86_64": 62, "aarch64": 183}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", metavar="WHEEL", nargs="+", type=Path)
    parser.add_argument("--install", metavar="PYTHON")
    parser.add_argument("--no-cuda", action="store_true", help="wheels of emulated GPUs alone")
    args = parser.parse_args()
    if args.install:
        for wheel in args.wheels:
            try_out(wheel.absolute(), args.install, not args.no_cuda)
        return 0
    found = [f"{wheel.name}: {fault}" for wheel in args.wheels for fault in faults(wheel, not args.no_cuda)]
    print(*found, sep="\n", file=sys.stderr)
    return 1 if found else 0


def faults(wheel: Path, with_cuda: bool) -> list[str]:
    """What is wrong with a wheel, a sentence each."""
    return list(_faults(wheel, with_cuda))


def _faults(wheel: Path, with_cuda: bool) -> Iterator[str]:
    bytes_held = wheel.stat().st_size
    if bytes_held > MOST_BYTES:
        yield f"has {bytes_held / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f}"
    if POLICY not in wheel.name:
        yield f"is not tagged {POLICY}"
    if f"-{version()}-" not in wheel.name:
        yield f"is not of version {version()}, which pyproject.toml names"
    machine = wheel.stem.partition(f"{POLICY}_")[2]
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as directory:
        names = archive.namelist()
        for name in (*HELD, *(HELD_WITH_CUDA if with_cuda else ())):
            if f"llm_comm/{name}" not in names:
                yield f"lacks llm_comm/{name}"
        if not any(re.fullmatch(r"llm_comm/_core\..*\.so", name) for name in names):
            yield "lacks the module llm_comm/_core"
        if not any(name.endswith(".dist-info/entry_points.txt") for name in names):
            yield "lacks the entry points by which engines find it"
        for name in names:
            if ".libs/" in name:
                yield f"holds {name}, a library of the machine that built it"
            if re.search(r"\.so(\.\d+)*$", name):
                library = Path(archive.extract(name, directory))
                if machine and int.from_bytes(library.read_bytes()[18:20], "little") != MACHINES.get(machine):
                    yield f"{name} is not for the machine that the tag names"
                yield from _linked_wrongly(library, name)


def _linked_wrongly(library: Path, name: str) -> Iterator[str]:
    listed = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    for needed in re.findall(r"\(NEEDED\).*\[(.*)\]", listed):
        if needed not in MAY_NEED:
            yield f"{name} is linked with {needed}"
    for path in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", listed):
        if not all(part == "$ORIGIN" or part.startswith("$ORIGIN/") for part in path.split(":")):
            yield f"{name} looks for libraries in {path}, which is a directory of the machine that built it"


def version() -> str:
    """The version that is built."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    (found,) = re.findall(r'^version = "(.*)"$', text, re.MULTILINE)
    return str(found)


def kernels_of(libraries: Path) -> str:
    """What a build directory has kernels for, as CMake wrote it down."""
    text = (libraries / "llm_comm_build.cmake").read_text(encoding="utf-8")
    facts = dict(re.findall(r"set\((\w+) \[\[(.*)\]\]\)", text))
    if facts["LLM_COMM_HAS_CUDA"] != "1":
        return "none"
    archs, ptx = facts["LLM_COMM_CUDA_ARCHS"], facts["LLM_COMM_CUDA_PTX_ARCHS"]
    return f"sm {archs}, PTX {ptx}, by nvcc {facts['LLM_COMM_NVCC_VERSION']}"


def try_out(wheel: Path, python: str, with_cuda: bool) -> None:
    """Installs a wheel where nothing else is, and runs it.

    Raises:
        subprocess.CalledProcessError: A step failed.
        AssertionError: ``llm-comm doctor`` does not say what the wheel is.
    """
    with tempfile.TemporaryDirectory() as directory:
        programs = Path(directory, "bin")
        subprocess.run([python, "-m", "venv", directory], check=True)
        subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", wheel], check=True)
        alone = {name: value for name, value in os.environ.items() if not name.startswith(("LLM_COMM_", "PYTHON"))}
        alone |= {"PATH": str(programs), "CUDA_VISIBLE_DEVICES": ""}

        def say(*command: str) -> str:
            done = subprocess.run(
                [programs / command[0], *command[1:]],
                cwd=directory,
                env=alone,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            return done.stdout

        report = json.loads(say("llm-comm", "doctor", "--json"))
        build = report["build"]
        print(json.dumps(build, indent=2))
        assert report["versions"]["llm_comm"] == version(), report["versions"]
        assert str(directory) in build["device_headers"], build
        assert (build["nvcc"] is not None) == with_cuda, build
        print(say("llm-comm", "demo"))


if __name__ == "__main__":
    raise SystemExit(main())
