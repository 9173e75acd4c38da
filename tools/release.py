"""Build what a release consists of, check it, and list it with hashes: the command behind ``make release``.

    python tools/release.py [--no-cuda] [--out DIRECTORY] [--jobs N] [PYTHON...]
    python tools/release.py --tag v1.2.3            # may this tag be released?
    python tools/release.py --built [--out DIRECTORY]

The first form builds the wheels (``build_wheels.py``), installs and runs each without a compiler (``check_wheel.py``),
adds the sdist, and writes ``SHA256SUMS``. ``--built`` takes the wheels that are in DIRECTORY and does the rest without
installing them. Exit status: 0 if all is well, else 1.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path

import build_wheels
import check_wheel

REPOSITORY = Path(__file__).resolve().parents[1]
SUMS = "SHA256SUMS"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", metavar="PYTHON", nargs="*", help="default: those that build_wheels.py finds")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "wheelhouse", help="default: wheelhouse")
    parser.add_argument("--no-cuda", action="store_true", help="emulated GPUs alone, for a rehearsal")
    parser.add_argument("--jobs", type=int, help="default: as many as there are CPUs")
    parser.add_argument("--built", action="store_true", help="check and list the wheels that are in --out")
    parser.add_argument("--tag", help="check that version and CHANGELOG.md are those of this tag, and do nothing else")
    args = parser.parse_args()
    if args.tag:
        found = why_not(args.tag, check_wheel.version(), (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"))
        print(found or f"{args.tag} may be released", file=sys.stderr if found else sys.stdout)
        return 1 if found else 0
    out = args.out.absolute()
    if not args.built:
        build(out, args.pythons, args.no_cuda, args.jobs)
    wheels = sorted(out.glob("*.whl"))
    faults = [f"{wheel.name}: {fault}" for wheel in wheels for fault in check_wheel.faults(wheel, not args.no_cuda)]
    print(*faults, sep="\n", file=sys.stderr)
    if faults or not wheels:
        return 1
    add_sdist(out)
    (out / SUMS).write_text(sums(out), encoding="utf-8")
    print((out / SUMS).read_text(encoding="utf-8"), end="")
    tags = {version: build_wheels.tag_of(version) for version in build_wheels.VERSIONS}
    missing = [version for version, tag in tags.items() if not any(out.glob(f"*-{tag}-*.whl"))]
    without = f", without Python {', '.join(missing)}" if missing else ""
    print(f"llm_comm {check_wheel.version()} is in {out}{without}")
    return 0


def why_not(tag: str, version: str, changelog: str) -> str:
    """Return why a tag must not be released, or ""."""
    if tag != f"v{version}":
        return f"the tag is {tag}, and pyproject.toml has version {version}"
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        return f"CHANGELOG.md has no line '## [{version}] - ' with a date"
    return ""


def build(out: Path, pythons: list[str], no_cuda: bool, jobs: int | None) -> None:
    """Build the wheels into ``out``, which is emptied of earlier ones, and try each in a fresh environment."""
    for path in [*out.glob("*.whl"), *out.glob("*.tar.gz"), out / SUMS]:
        path.unlink(missing_ok=True)
    options = ["--no-cuda"] * no_cuda + (["--jobs", str(jobs)] if jobs else [])
    build_wheels.run([sys.executable, REPOSITORY / "tools" / "build_wheels.py", "--out", out, *options, *pythons])
    found = {build_wheels.version_of(python): python for python in pythons} or build_wheels.find_pythons()
    for version, python in found.items():
        tag = build_wheels.tag_of(version)
        for wheel in out.glob(f"*-{tag}-{tag}-*.whl"):
            print(f"== {wheel.name} in a fresh environment", flush=True)
            check_wheel.try_out(wheel, python, not no_cuda)


def add_sdist(out: Path) -> None:
    """Write the source archive into ``out``."""
    programs = build_wheels.make_environment(REPOSITORY / "build" / "wheels" / "sdist", Path(sys.executable), ["build"])
    build_wheels.run([programs / "python", "-m", "build", "--sdist", "--outdir", out, REPOSITORY])


def sums(out: Path) -> str:
    """Return the lines of ``SHA256SUMS`` for the wheels and the sdist in ``out``, as ``sha256sum --check`` reads them.

    Raises:
        ValueError: A file is of another version.
    """
    paths = sorted([*out.glob("*.whl"), *out.glob("*.tar.gz")])
    others = [
        path.name for path in paths if not re.match(rf"llm_comm-{re.escape(check_wheel.version())}[-.]", path.name)
    ]
    if others:
        raise ValueError(f"{out} has files of another version: {', '.join(others)}")
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths)


if __name__ == "__main__":
    raise SystemExit(main())
