"""Compare csrc/nccl/functions.def and names.txt with a published NCCL: its exported symbols and its prototypes.

Usage: python tests/nccl/newest_nccl.py [--version 2.32.3] [--wheel FILE] [--write]

The wheel has some 300 MB; it is downloaded to a temporary directory. Exit status: 0 all alike, 1 not.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
NAMES = HERE / "names.txt"
PACKAGE = "nvidia-nccl-cu13"


def exported(library: Path) -> set[str]:
    """Names of the symbols that a shared library defines, without their versions."""
    found = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in found.splitlines()}


def listed() -> set[str]:
    """Names in names.txt."""
    lines = NAMES.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def download(version: str | None, directory: Path) -> Path:
    what = PACKAGE if version is None else f"{PACKAGE}=={version}"
    pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, "--dest", str(directory), what], check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def has_prototypes(include: Path) -> bool:
    """Whether every function of functions.def has the parameters and the result of NCCL's headers."""
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")
    if not (cuda / "cuda_runtime.h").is_file():
        print(f"no {cuda / 'cuda_runtime.h'}: CUDA_HOME must name a CUDA toolkit to compare prototypes")
        return False
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wno-deprecated-declarations"]
    command += [f"-I{HERE.parents[1] / 'csrc'}", f"-I{include}", f"-I{cuda}"]
    return subprocess.run([*command, str(HERE / "prototypes.cpp")], check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", help="a release of NCCL; the newest without it")
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {PACKAGE} that is at hand, in place of a download")
    parser.add_argument("--write", action="store_true", help="write the exported symbols to names.txt")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        wheel = options.wheel or download(options.version, Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if re.match(r"nvidia/nccl/(include/|lib/libnccl\.so)", name)]
            archive.extractall(temporary, wanted)
        nccl = Path(temporary, "nvidia", "nccl")
        names = exported(nccl / "lib" / "libnccl.so.2")
        release = wheel.name.split("-")[1]
        new, gone = sorted(names - listed()), sorted(listed() - names)
        print(f"NCCL {release}: {len(names)} symbols; not in names.txt: {new or 'none'}; only in it: {gone or 'none'}")
        if options.write:
            head = f"# Symbols that libnccl.so.2 of {PACKAGE} {release} exports: written by newest_nccl.py --write.\n"
            NAMES.write_text(head + "".join(f"{name}\n" for name in sorted(names)), encoding="utf-8")
        return 0 if has_prototypes(nccl / "include") and (options.write or not new + gone) else 1


if __name__ == "__main__":
    sys.exit(main())
