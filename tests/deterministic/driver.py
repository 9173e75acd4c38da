"""Builds the deterministic driver of the emulator and runs schedules on all CPUs.

``python tests/deterministic/driver.py --seconds 600`` is ``make soak``; what it does not know goes to the program.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build" / "deterministic"
PROGRAM = "deterministic"
#: Between the first seeds of two processes: more than any runs through.
SEEDS_OF_A_PROCESS = 1 << 32


def build(directory: Path = BUILD, root: Path = REPOSITORY, options: Sequence[str] = ()) -> Path:
    """Builds the driver from the sources below ``root``, with ``options`` of CMake. Returns the directory with
    ``PROGRAM``."""
    always = ["-DLLM_COMM_SANITIZE=", "-DLLM_COMM_WERROR=ON"]  # whatever a build by hand has left there
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    source = str(root / "tests" / "deterministic")
    for command in (
        ["cmake", "-S", source, "-B", str(directory), *generator, *always, *options],
        ["cmake", "--build", str(directory), "--parallel", str(os.cpu_count())],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return directory


def run(program: Path, *arguments: object, timeout: float = 1500) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes, each with seeds of its own")
    parser.add_argument("--seed", type=int, default=1, help="the first seed of the first process")
    arguments, others = parser.parse_known_args()
    program = build() / PROGRAM
    if "--replay" in others:
        return subprocess.run([program, *others], check=False).returncode
    running = [
        subprocess.Popen([program, *others, "--seed", str(arguments.seed + job * SEEDS_OF_A_PROCESS)])
        for job in range(arguments.jobs)
    ]
    statuses = [process.wait() for process in running]  # of all; of one that crashed, a negative one
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
