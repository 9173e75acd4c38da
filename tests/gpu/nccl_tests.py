"""NVIDIA's nccl-tests, unmodified, with NCCL and with the library that stands in for it (LD_PRELOAD), in turn on the
same GPUs.

    python tests/gpu/nccl_tests.py --source DIR [--build DIR] [--threads 2] [--json FILE] [--only all_reduce_perf ...]

DIR holds the sources of nccl-tests. NCCL is the one that torch comes with, or ``--nccl DIR`` with ``include`` and
``lib``. The output of every program is printed. Fails where a result is wrong or a program does not end well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import llm_comm

SERVED = ("all_reduce_perf", "all_gather_perf", "reduce_scatter_perf", "broadcast_perf")
FORWARDED = ("alltoall_perf", "sendrecv_perf", "gather_perf")
TYPES = ("half", "bfloat16", "float")
LIMIT_S = 240


class Line(NamedTuple):
    """Of a program's table. Times are of a call out of place and in place, in microseconds."""

    program: str
    type: str
    graphs: int
    bytes: int
    us: float
    us_in_place: float
    wrong: int


def nccl_of_torch() -> Path:
    for package in ("nvidia.nccl", "nvidia"):
        spec = find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            for directory in (Path(place), Path(place, "nccl")):
                if (directory / "include" / "nccl.h").is_file():
                    return directory
    raise SystemExit("there is no nccl.h beside torch: name a directory with --nccl")


def build(source: Path, directory: Path, nccl: Path) -> Path:
    """Compiles the programs for the GPU of this machine; returns their directory."""
    home = directory / "nccl"
    (home / "lib").mkdir(parents=True, exist_ok=True)
    for link, target in (("include", nccl / "include"), ("lib/libnccl.so", nccl / "lib" / "libnccl.so.2")):
        if not (home / link).is_symlink():
            (home / link).symlink_to(target)
    major, minor = capability()
    gencode = f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}"
    variables = [f"BUILDDIR={directory}", f"NCCL_HOME={home}", f"NVCC_GENCODE={gencode}", "MPI=0"]
    subprocess.run(
        ["make", "-C", str(source), f"-j{os.cpu_count()}", *variables], check=True, stdout=subprocess.DEVNULL
    )
    return directory


def capability() -> tuple[int, int]:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return major, minor


def run(program: Path, arguments: list[str], environment: dict[str, str], type_: str, graphs: int) -> list[Line]:
    command = [str(program), *arguments, "-d", type_, "-G", str(graphs), "-c", "1"]
    print(f"$ {' '.join(f'{k}={v}' for k, v in environment.items())} {' '.join(command)}", flush=True)
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    print(done.stdout, done.stderr, flush=True)
    if done.returncode != 0:
        raise SystemExit(f"{program.name} ends with status {done.returncode}")
    lines = (read(program.name, type_, graphs, text) for text in done.stdout.splitlines())
    return [line for line in lines if line is not None]


def read(program: str, type_: str, graphs: int, text: str) -> Line | None:
    """A line with figures; None for any other."""
    fields = text.split()
    if len(fields) < 13 or not fields[0].isdigit():
        return None
    wrong = sum(int(field) for field in (fields[8], fields[12]) if field.isdigit())
    return Line(program, type_, graphs, int(fields[0]), float(fields[5]), float(fields[9]), wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--build", type=Path, default=Path("build/nccl-tests"))
    parser.add_argument("--nccl", type=Path)
    parser.add_argument(
        "--threads", type=int, default=2, help="ranks, each a thread with a GPU of its own (%(default)s)"
    )
    parser.add_argument("--only", nargs="+", default=[*SERVED, *FORWARDED])
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    parser.add_argument("--graphs", type=int, nargs="+", default=[0, 20])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    nccl = (options.nccl or nccl_of_torch()).resolve()
    programs = build(options.source.resolve(), options.build.resolve(), nccl)
    libraries = {"LD_LIBRARY_PATH": f"{nccl / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    arms = {"nccl": libraries, "llm_comm": {**libraries, "LD_PRELOAD": llm_comm.nccl_library()}}
    sizes = ["-b", "1K", "-e", "256M", "-f", "2", "-t", str(options.threads), "-g", "1"]
    found: dict[str, list[Line]] = {arm: [] for arm in arms}
    for name in options.only:
        for type_ in options.types if name in SERVED else options.types[:1]:
            for graphs in options.graphs:
                for arm, environment in arms.items():
                    found[arm] += run(programs / name, sizes, environment, type_, graphs)
    report(found)
    if options.json is not None:
        lines: dict[str, Any] = {arm: [line._asdict() for line in lines] for arm, lines in found.items()}
        options.json.write_text(json.dumps({"command": sys.argv, **lines}, indent=1) + "\n")
    return int(any(line.wrong for line in found["llm_comm"]))


def report(found: dict[str, list[Line]]) -> None:
    print(f"{'program':20} {'type':9} graphs {'bytes':>10} {'NCCL us':>9} {'llm_comm us':>11} {'times':>6} wrong")
    for theirs, ours in zip(found["nccl"], found["llm_comm"], strict=True):
        ratio = theirs.us / ours.us if ours.us else 0.0
        what = f"{ours.program:20} {ours.type:9} {ours.graphs:6} {ours.bytes:10}"
        print(f"{what} {theirs.us:9.2f} {ours.us:11.2f} {ratio:6.2f} {ours.wrong:5}")


if __name__ == "__main__":
    sys.exit(main())
